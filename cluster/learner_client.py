"""An actor's connection to its learner, which may go and come back."""

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

# An answer to anything but an enqueue takes no longer.
_ANSWER_SECS = 10.0
# A full queue makes an actor wait as long as the learner pleases.
_NO_LIMIT = tf1.RunOptions(timeout_in_ms=24 * 60 * 60 * 1000)
# How long another process may have the slot: longer than one that has died.
_SLOT_SECS = registry.HEARTBEAT_TIMEOUT_SECS + 5.0
# Said again so often.
_NOTICE_SECS = 10.0
# From giving up to the end, at most: a call without an answer, a thread, the
# rest. A limit that leaves no room for it is exceeded by so much.
_LEAVE_SECS = 20.0
# Of glibc's `mallopt`, and values for them in bytes: the first is the highest
# that it takes.
_M_MMAP_THRESHOLD, _LARGE = -3, 32 << 20
_M_TRIM_THRESHOLD, _NEVER = -1, 1 << 30

# What happens to calls when a learner dies, restarts, closes its queue before
# it ends, or cannot be reached.
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
  """What a session with the learner can be asked."""

  session: tf1.Session
  settings: Callable
  heartbeat: Callable
  sign_off: Callable
  weights: Callable
  enqueue: Callable


class LearnerClient:
  """An actor's connection to its learner, which outlives restarts of it.

  One thread calls `poll` all the while. Only what it finds out counts: whether
  the learner is there, whether this actor may play, whether the run is over.
  The other thread, which plays, calls `read_weights` and `enqueue`, and waits
  in them while the learner is away.
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
      specs: `actor.unroll_specs`.
      queue_capacity: in unrolls; the learner's.
      weights: the policy's own, named as the learner's are.
      settings: what learner and actor have to agree on, by name.
      timeout_secs: when to have ended without the learner.
      should_stop: whether to give up waiting.
    """
    self._cluster = cluster
    self._settings = json.loads(json.dumps(settings))
    self._patience_secs = timeout_secs
    if timeout_secs >= 3 * _LEAVE_SECS:
      self._patience_secs -= _LEAVE_SECS
    self._should_stop = should_stop
    self._session_id = secrets.randbits(62) + 1
    self._candidate: _Calls | None = None  # Not yet, or no longer, used.
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
      membership.LearnerLost: nothing was heard of it for too long.
      errors.SettingError: the learner has other settings, or another process
        plays in this actor's slot.
    """
    try:
      problem, is_over = self._poll()
    except tf.errors.DeadlineExceededError:
      # The session may still be good, and to close it could take for ever.
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
      # A call would try a closed port again and again, until its time is up.
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
    return f'actor {task} has been heard of just now; does it still play?'

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
      The policy version, how many updates made them, at least; and the weights,
      in the order of `weights`.

    Raises:
      Stopped: see the class.
    """
    *weights, policy_version = self._ask(lambda calls: calls.weights())
    return policy_version, weights

  def enqueue(self, *unrolls: np.ndarray) -> None:
    """Sends n unrolls, a flat `actor.ActorOutput` of arrays [n, ...].

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
          pass  # `poll` finds out what it means.
      time.sleep(0.2)
    raise Stopped

  def leave(self) -> None:
    """Signs off, and ends an `enqueue` that waits."""
    calls, self._calls = self._calls, None
    if calls is None:
      return
    try:
      calls.sign_off()
      calls.session.close()
    except _LOST:
      pass  # Then the learner will miss it.


def hide_gpus() -> None:
  """Leaves all GPUs to the learner; before TensorFlow looks for them."""
  os.environ['CUDA_VISIBLE_DEVICES'] = '-1'


def keep_memory() -> None:
  """Has the C library keep what a message took, for the next one.

  It would give it back and get it anew, zeroed and page by page: more work than
  all the rest of sending an unroll of DeepMind Lab. Other libraries than glibc
  are left as they are.
  """
  with contextlib.suppress(AttributeError):
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_M_MMAP_THRESHOLD, _LARGE)
    mallopt(_M_TRIM_THRESHOLD, _NEVER)
