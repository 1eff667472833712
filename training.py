"""A learner and its actors, wired: in one process, or across several."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import math
import os
import sys
import threading
import time
from typing import Any, NamedTuple
import zlib

import numpy as np
import tensorflow as tf

import actor as actor_lib
from cluster import collectives
from cluster import membership
from cluster import registry
import environments
import learner as learner_lib
import networks
from runtime import console
from runtime import threads as threads_lib

tf1 = tf.compat.v1

_NOTICE_SECS = 10.0
_REMEDY = 'Start all learners again: they go on from the checkpoint.'

# What an exchange ends with if a learner has died, or has been started anew.
_LOST = (
  tf.errors.AbortedError,
  tf.errors.FailedPreconditionError,
  tf.errors.UnavailableError,
)


class Training(NamedTuple):
  """A learner and its actors, ready to go; see `build_local`.

  Attributes:
    session: holds the learner's weights, initialised, and the queue.
    learner: what `run` runs.
    run: trains; takes `on_update` and `should_stop` of `learner.Learner.run`.
    start_actors: starts them among the threads, or lets those elsewhere begin.
    queue_size: returns how many unrolls wait.
    describe_actors: says how many of those elsewhere play; '' locally.
    close_queue: wakes whoever waits at the queue, and says whether the run is
      over.
    linger: lets actors elsewhere leave, if the run is over.
    raise_failure: raises what ended the threads, if anything did.
  """

  session: tf1.Session
  learner: learner_lib.Learner
  run: Callable[..., None]
  start_actors: Callable[[threads_lib.Threads], None]
  queue_size: Callable[[], int]
  describe_actors: Callable[[], str]
  close_queue: Callable[[], None]
  linger: Callable[[], None]
  raise_failure: Callable[[Exception | None], None]


def build_local(
  envs: environments.Environments,
  level_names: Sequence[str],
  make_agent: Callable[[str], networks.Agent],
  hyperparameters: learner_lib.Hyperparameters,
  queue_capacity: int,
  seed: int,
) -> Training:
  """Wires one actor and the learner, in one process, in the current graph.

  Args:
    envs: what the actor plays.
    level_names: of the run, by level index.
    make_agent: makes a new agent from the name of its scope.
    hyperparameters: of the update.
    queue_capacity: in unrolls.
    seed: of weights and actions.
  """
  tf1.set_random_seed(seed)
  unroll_length = hyperparameters.unroll_length
  learner, queue, specs = build_learner(
    envs.spec, make_agent, hyperparameters, queue_capacity
  )
  policy = actor_lib.Policy(make_agent('actor'), envs.spec)
  actor = actor_lib.Actor(
    envs,
    np.array([level_names.index(name) for name in envs.level_names], np.int32),
    policy,
    specs,
    unroll_length,
  )
  copy = actor_lib.copy_weights(
    policy.agent, learner.agent, learner.num_updates
  )
  enqueue = actor_lib.make_enqueue(queue, specs)
  queue_size = queue.size()
  close_queue = queue.close(cancel_pending_enqueues=True)
  session = tf1.Session()
  session.run(tf1.global_variables_initializer())
  play = functools.partial(
    actor.run,
    session,
    session.make_callable(copy),
    session.make_callable(*enqueue),
  )
  return Training(
    session,
    learner,
    functools.partial(learner.run, session),
    lambda threads: threads.start(lambda: play(threads.should_stop)),
    session.make_callable(queue_size),
    lambda: '',
    session.make_callable(close_queue),
    linger=lambda: None,
    raise_failure=_raise_failure,
  )


def build_distributed(
  cluster: membership.Cluster,
  server: tf.distribute.Server,
  spec: environments.EnvironmentSpec,
  make_agent: Callable[[str], networks.Agent],
  hyperparameters: learner_lib.Hyperparameters,
  queue_capacity: int,
  seed: int,
  settings: Mapping[str, Any],
  timeout_secs: float,
) -> Training:
  """Wires a learner whose actors are in other processes.

  Args:
    cluster: says which learner this is.
    server: holds its variables and its queue.
    spec: of the actors' environments.
    make_agent: see `build_local`.
    hyperparameters: of the update.
    queue_capacity: in unrolls.
    seed: of weights.
    settings: what actors have to agree with; see `registry.Board`.
    timeout_secs: how long it waits for other learners in an update.
  """
  tf1.set_random_seed(seed)
  num_learners = len(cluster.learner_hosts)
  shared = {**settings, **dataclasses.asdict(hyperparameters)}
  group = collectives.Group(
    num_learners, cluster.task, cluster.learner_device, timeout_secs
  )
  with membership.on_learner(cluster):
    learner, queue, _ = build_learner(
      spec, make_agent, hyperparameters, queue_capacity, group
    )
    codes = exchange_codes(group, shared)
    queue_size = queue.size()
    close_queue = queue.close(cancel_pending_enqueues=True)
    with tf1.device(cluster.learner_device):
      board = registry.Board(cluster.num_actors)
  session = tf1.Session(server.target, config=membership.config(cluster))
  session.run(tf1.global_variables_initializer())

  def run(on_update, should_stop):
    if num_learners > 1:
      with limit_first_exchange(cluster, timeout_secs):
        check_codes(session.run(codes))
      session.run(learner.begin)
    with limit_updates(cluster, timeout_secs, close) as note:
      learner.run(
        session, lambda result: (note(), on_update(result)), should_stop
      )

  def is_over():
    frames = session.run(learner.num_environment_frames)
    return frames >= hyperparameters.total_environment_frames

  def describe_actors():
    own = range(cluster.task, cluster.num_actors, num_learners)
    return f'{session.run(board.num_playing)} of {len(own)} actors play'

  def close():
    if is_over():
      board.end(session)
    session.run(close_queue)

  return Training(
    session,
    learner,
    run,
    lambda threads: board.open(session, settings),
    session.make_callable(queue_size),
    describe_actors,
    close,
    linger=lambda: is_over() and board.linger(session),
    raise_failure=functools.partial(
      raise_failure, cluster=cluster, timeout_secs=timeout_secs
    ),
  )


def build_learner(
  spec: environments.EnvironmentSpec,
  make_agent: Callable[[str], networks.Agent],
  hyperparameters: learner_lib.Hyperparameters,
  queue_capacity: int,
  group: collectives.Group = collectives.ALONE,
) -> tuple[learner_lib.Learner, tf.queue.FIFOQueue, actor_lib.ActorOutput]:
  """Builds the learner with its queue; see `build_local`.

  Returns:
    The learner, the queue, and `actor.unroll_specs`.
  """
  agent = make_agent('agent')
  specs = actor_lib.unroll_specs(agent, spec, hyperparameters.unroll_length)
  queue = actor_lib.make_queue(specs, queue_capacity)
  learner = learner_lib.Learner(
    agent, queue, specs, spec.frames_per_step, hyperparameters, group
  )
  return learner, queue, specs


def _raise_failure(failure):
  if failure:
    raise failure


def exchange_codes(
  group: collectives.Group, settings: Mapping[str, Any]
) -> dict[str, tf.Tensor]:
  """Makes the exchange by which learners compare their settings.

  Args:
    group: the learners.
    settings: what they have to have in common.

  Returns:
    By name, int32 [n]: a number for the setting's value at each learner.
  """
  numbers = [
    tf.constant([zlib.crc32(repr(value).encode()) >> 1], tf.int32)
    for value in settings.values()
  ]
  with group.apart():
    return dict(zip(settings, group.gather(numbers), strict=True))


def check_codes(codes: Mapping[str, np.ndarray]) -> None:
  """Checks what `exchange_codes` has brought.

  Raises:
    ValueError: learners differ in a setting.
  """
  names = [name for name, numbers in codes.items() if len(set(numbers)) > 1]
  if names:
    raise ValueError(
      f'the learners differ in {", ".join(names)}: start all of them with the '
      'same flags.'
    )


@contextlib.contextmanager
def limit_first_exchange(
  cluster: membership.Cluster, timeout_secs: float
) -> Iterator[None]:
  """Ends the process if the learners' first exchange takes longer.

  Before it, TensorFlow asks the first learner for a number. That call has no
  limit, nothing ends it, and while it runs no session can be closed.
  """
  is_done = threading.Event()

  def watch():
    if is_done.wait(_NOTICE_SECS):
      return
    console.say(f'Waiting for {", ".join(_other_hosts(cluster))}.')
    # The exchange itself ends earlier, and then in good order.
    if not is_done.wait(timeout_secs):
      _end_at_once(cluster, timeout_secs)

  threading.Thread(target=watch, daemon=True).start()
  try:
    yield
  finally:
    is_done.set()


@contextlib.contextmanager
def limit_updates(
  cluster: membership.Cluster,
  timeout_secs: float,
  close_queue: Callable[[], None],
) -> Iterator[Callable[[], None]]:
  """Ends the updates of one of several learners if there are no more.

  Where it is cut off from its actors too, it waits for them and is in no
  exchange, and the others may have ended long ago.

  Args:
    cluster: says which learner this is.
    timeout_secs: from one update to the next; before the first, actors may be
      late.
    close_queue: ends a wait for actors.

  Yields:
    What has to be called after each update.

  Raises:
    tf.errors.DeadlineExceededError: there was none for so long.
  """
  is_done, is_late = threading.Event(), threading.Event()
  deadline = math.inf

  def note():
    nonlocal deadline
    # Later than an exchange ends.
    deadline = time.monotonic() + timeout_secs + _NOTICE_SECS

  def watch():
    while time.monotonic() < deadline:
      if is_done.wait(1.0):
        return
    is_late.set()
    close_queue()
    if not is_done.wait(_NOTICE_SECS):
      _end_at_once(cluster, timeout_secs)

  if len(cluster.learner_hosts) > 1:
    threading.Thread(target=watch, daemon=True).start()
  try:
    yield note
  except tf.errors.OpError as error:
    if not is_late.is_set():
      raise
    raise tf.errors.DeadlineExceededError(None, None, 'no update') from error
  finally:
    is_done.set()


def _end_at_once(cluster, timeout_secs):
  problem = _describe_silence(cluster, timeout_secs)
  console.say(f'Error: {problem}. {_REMEDY}', sys.stderr)
  os._exit(1)


def raise_failure(
  failure: Exception | None, cluster: membership.Cluster, timeout_secs: float
) -> None:
  """Raises what ended the threads of one of several learners, if anything did.

  Args:
    failure: what the learner's thread ended with.
    cluster: says which learner this is.
    timeout_secs: how long it has waited in an exchange.

  Raises:
    membership.LearnerLost: the failure is that of an exchange.
  """
  if isinstance(failure, tf.errors.DeadlineExceededError):
    problem = _describe_silence(cluster, timeout_secs)
  elif isinstance(failure, _LOST):
    problem = 'another learner has ended'
  else:
    return _raise_failure(failure)
  raise membership.LearnerLost(f'{problem}. {_REMEDY}') from failure


def _describe_silence(cluster, timeout_secs):
  """Says which learners did not come to an exchange, and why, if it is seen."""
  others = _other_hosts(cluster)
  problems = [
    f'{host} cannot be reached, {problem}'
    for host in others
    if (problem := membership.can_connect(host))
  ]
  reason = '; '.join(problems) or (
    'one has stopped, or gets no unrolls from its actors'
  )
  return (
    f'waited {timeout_secs:g} s (--connect_timeout_secs) to update together '
    f'with {", ".join(others)}: {reason}'
  )


def _other_hosts(cluster):
  return [h for h in cluster.learner_hosts if h != cluster.learner_host]
