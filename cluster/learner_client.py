"""An actor's connection to its learner, which may restart."""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import ctypes
import json
import os
import secrets
import time
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from cluster import membership
from cluster import registry
from runtime import console
from runtime import errors
import unrolls

tf1 = tf.compat.v1

# The timeout of all calls to the learner except enqueues.
_ANSWER_SECS = 10.0
# An enqueue into a full queue may wait for as long as the learner takes.
_NO_LIMIT = tf1.RunOptions(timeout_in_ms=24 * 60 * 60 * 1000)
# How long to wait while another process holds the slot: longer than a dead
# process can hold it.
_SLOT_SECS = registry.HEARTBEAT_TIMEOUT_SECS + 5.0
# The interval at which a notice is repeated.
_NOTICE_SECS = 10.0
# The most time from giving up to the end of the process: an unanswered call, a
# thread that does not end, and the rest. It is reserved within the timeout; a
# timeout that is too short for this is exceeded by this much.
_LEAVE_SECS = 20.0
# Parameters of glibc's `mallopt`, and their values in bytes. The first value is
# the highest that glibc accepts.
_M_MMAP_THRESHOLD, _LARGE = -3, 32 << 20
_M_TRIM_THRESHOLD, _NEVER = -1, 1 << 30

# The errors of calls when a learner dies, restarts, closes its queue before it
# ends, or cannot be reached.
_LOST = (
  tf.errors.AbortedError,
  tf.errors.CancelledError,
  tf.errors.DeadlineExceededError,
  tf.errors.FailedPreconditionError,
  tf.errors.NotFoundError,
  tf.errors.UnavailableError,
)


class Stopped(Exception):  # noqa: N818 (says it better)
  """The actor was told to stop while it waited for the learner."""


class _Calls(NamedTuple):
  """The calls of a session with the learner."""

  session: tf1.Session
  settings: Callable
  heartbeat: Callable
  sign_off: Callable
  weights: Callable
  enqueue: Callable


class LearnerClient:
  """An actor's connection to its learner, which survives its restarts.

  One thread calls `poll` regularly. Only `poll` decides whether the learner is
  there, whether this actor may play, and whether the run is over. Another
  thread, which plays, calls `read_weights` and `enqueue`. These wait while the
  learner is away.
  """

  def __init__(
    self,
    cluster: membership.Cluster,
    specs: unrolls.ActorOutput,
    queue_capacity: int,
    weights: Sequence[tf.Variable],
    settings: Mapping[str, Any],
    timeout_secs: float,
    should_stop: Callable[[], bool],
  ):
    """Builds the graph; does not connect yet.

    Args:
      cluster: says which actor this is.
      specs: the result of `unrolls.unroll_specs`.
      queue_capacity: the capacity of the learner's queue, in unrolls.
      weights: the policy's variables, which have the names of the learner's.
      settings: the settings that learner and actor must agree on, by name.
      timeout_secs: the time without the learner after which the actor ends.
      should_stop: returns whether to give up waiting.
    """
    self._cluster = cluster
    self._settings = json.loads(json.dumps(settings))
    self._patience_secs = timeout_secs
    if timeout_secs >= 3 * _LEAVE_SECS:
      self._patience_secs -= _LEAVE_SECS
    self._should_stop = should_stop
    self._session_id = secrets.randbits(62) + 1
    self._candidate: _Calls | None = None  # Not in use yet, or no longer.
    self._calls: _Calls | None = None
    self._heard = time.monotonic()
    self._next_notice = self._heard
    self._refused_since: float | None = None

    self._graph = tf.Graph()
    with self._graph.as_default(), tf1.device(cluster.learner_device):
      actors = registry.ActorRegistry(cluster.num_actors)
      self._read_settings = actors.settings
      self._heartbeat = actors.make_heartbeat(cluster.task, self._session_id)
      self._sign_off = actors.make_sign_off(cluster.task)
      queue = unrolls.make_queue(specs, queue_capacity)
      self._enqueue = unrolls.make_enqueue(queue, specs)
      policy_version = tf1.get_variable(
        'num_updates', [], tf.int64, use_resource=True
      ).read_value()
      with tf.control_dependencies([policy_version]):
        self._weights = [
          tf1.get_variable(
            weight.op.name, weight.shape, weight.dtype, use_resource=True
          ).read_value()
          for weight in weights
        ]
      self._weights.append(policy_version)
    self._graph.finalize()

  def poll(self) -> bool:
    """Checks the connection, and makes a new one if it is lost.

    Returns:
      Whether the run is over.

    Raises:
      membership.LearnerLost: the learner has not answered for too long.
      errors.SettingError: the learner has other settings, or another process
        plays in this actor's slot.
    """
    try:
      problem, is_over = self._poll()
    except tf.errors.DeadlineExceededError:
      # The session may still work, and closing it could take forever.
      self._calls = None
      problem, is_over = 'it does not answer', False
    except _LOST as error:
      self._calls = self._candidate = None
      problem, is_over = f'not ready ({type(error).__name__})', False
    if problem:
      self._wait_on(problem)
    return is_over

  def _poll(self):
    if self._calls is None:
      # Tested first, since a call would retry a closed port until its timeout.
      problem = membership.can_connect(self._address)
      if problem:
        return problem, False
    self._candidate = self._candidate or self._connect()
    calls = self._candidate
    if self._calls is None:
      self._compare(calls.settings())
    holder, is_over = calls.heartbeat()
    self._heard = time.monotonic()
    if holder != self._session_id:
      self._calls = None
      return self._wait_for_slot(), False
    self._refused_since = None
    if self._calls is None:
      console.say(f'Playing for the learner at {self._address}.')
    self._calls = calls
    return None, bool(is_over)

  @property
  def _address(self):
    return self._cluster.learner_host

  def _connect(self):
    config = tf1.ConfigProto(
      device_filters=[f'/job:learner/task:{self._cluster.learner_task}'],
      operation_timeout_in_ms=int(_ANSWER_SECS * 1000),
    )
    session = tf1.Session(f'grpc://{self._address}', self._graph, config)
    enqueue, feeds = self._enqueue
    return _Calls(
      session=session,
      settings=session.make_callable(self._read_settings),
      heartbeat=session.make_callable(self._heartbeat),
      sign_off=session.make_callable(self._sign_off),
      weights=session.make_callable(self._weights),
      enqueue=session.make_callable(enqueue, feeds, accept_options=True),
    )

  def _compare(self, text):
    theirs = json.loads(text)
    task, num_actors = self._cluster.task, theirs['num_actors']
    if task >= num_actors:
      raise errors.SettingError(
        f'task {task} is outside 0..{num_actors - 1}: the learner at '
        f'{self._address} has --num_actors={num_actors}.'
      )
    differences = [
      f'{name} is {mine!r} here and {theirs.get(name)!r} there'
      for name, mine in self._settings.items()
      if mine != theirs.get(name)
    ]
    if differences:
      raise errors.SettingError(
        f'the learner at {self._address} has other settings: '
        f'{"; ".join(differences)}.'
      )

  def _wait_for_slot(self):
    now = time.monotonic()
    self._refused_since = self._refused_since or now
    task = self._cluster.task
    if now - self._refused_since > _SLOT_SECS:
      raise errors.SettingError(
        f'another process plays as actor {task}: give each its own --task.'
      )
    return f'actor {task} has just sent a heartbeat; is it still playing?'

  def _wait_on(self, problem):
    now = time.monotonic()
    if now - self._heard >= self._patience_secs:
      raise membership.LearnerLost(
        f'no learner at {self._address} for {self._patience_secs:g} s '
        f'(--connect_timeout_secs): {problem}'
      )
    if now >= self._next_notice:
      console.say(f'Waiting for the learner at {self._address}: {problem}')
      self._next_notice = now + _NOTICE_SECS

  def read_weights(self) -> tuple[int, list[np.ndarray]]:
    """Reads the learner's weights.

    Returns:
      The policy version, and the weights in the order of `weights`. The version
      is a lower bound: the weights may already include a later update.

    Raises:
      Stopped: see the class.
    """
    *weights, policy_version = self._ask(lambda calls: calls.weights())
    return policy_version, weights

  def enqueue(self, *unrolls: np.ndarray) -> None:
    """Sends n unrolls, a flat `unrolls.ActorOutput` of arrays [n, ...].

    Raises:
      Stopped: see the class.
    """
    self._ask(lambda calls: calls.enqueue(*unrolls, options=_NO_LIMIT))

  def _ask(self, ask):
    while not self._should_stop():
      calls = self._calls
      if calls is not None:
        try:
          return ask(calls)
        except _LOST:
          pass  # `poll` deals with it.
      time.sleep(0.2)
    raise Stopped

  def leave(self) -> None:
    """Signs off, and cancels a waiting `enqueue`."""
    calls, self._calls = self._calls, None
    if calls is None:
      return
    try:
      calls.sign_off()
      calls.session.close()
    except _LOST:
      pass  # The slot then becomes free at the heartbeat timeout.


def hide_gpus() -> None:
  """Leaves all GPUs to the learner; call before TensorFlow looks for them."""
  os.environ['CUDA_VISIBLE_DEVICES'] = '-1'


def keep_memory() -> None:
  """Makes the C library keep the memory of a message for the next one.

  By default it returns the memory to the system and gets it again, zeroed and
  page by page. This costs more than all the rest of sending an unroll of
  DeepMind Lab. C libraries other than glibc are left unchanged.
  """
  with contextlib.suppress(AttributeError):
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_M_MMAP_THRESHOLD, _LARGE)
    mallopt(_M_TRIM_THRESHOLD, _NEVER)
