"""Records which process plays as which actor, and whether the run is over.

A learner and its actors exchange everything but unrolls and weights through it.
"""

from collections.abc import Callable, Mapping
import json
import time
from typing import Any

import numpy as np
import tensorflow as tf

tf1 = tf.compat.v1

# A slot without a heartbeat for this long may be taken by another process.
HEARTBEAT_TIMEOUT_SECS = 10.0
_LINGER_SECS = 15.0
# The interval at which the learner sets the registry's clock.
_TICK_SECS = 0.5


class ActorRegistry:
  """The slots of the actors, and the processes in them; kept on the learner.

  The learner and its actors each build it in their graphs, and share its
  variables by name. Until the learner has opened it, all reads fail with
  `FailedPreconditionError`.

  Attributes:
    settings: string [], JSON, the settings that actors must agree with.
    num_playing: int64 [], the number of slots with a recent heartbeat.
  """

  def __init__(self, num_actors: int):
    """Builds the variables in the current graph, on the current device."""
    # For each slot, the session id of the process that plays in it (0 if none),
    # and the time of its last heartbeat by the registry's clock. That is the
    # learner's monotonic clock: a clock that can be set back would make old
    # heartbeats look recent.
    self._sessions = _make_variable(
      'sessions', np.zeros([num_actors], np.int64)
    )
    self._heartbeats = _make_variable(
      'heartbeats', np.zeros([num_actors], np.float64)
    )
    self._clock = _make_variable('clock', np.float64(0.0))
    self._is_over = _make_variable('is_over', np.bool_(False))
    self._settings = _make_variable('settings', '')
    self._text = tf1.placeholder(tf.string, [])
    self._now = tf1.placeholder(tf.float64, [])

    self.settings = self._settings.read_value()
    self._tick = self._clock.assign(self._now).op
    with tf.control_dependencies(
      [
        self._tick,
        *(
          variable.initializer
          for variable in (self._sessions, self._heartbeats, self._is_over)
        ),
      ]
    ):
      # Set last: an actor that can read the settings can read everything else.
      self._open = self._settings.assign(self._text).op
    self._end = self._is_over.assign(True).op
    # In a graph, == and != compare Python objects.
    is_taken = tf.not_equal(self._sessions, 0)
    is_playing = is_taken & self._is_fresh(self._heartbeats)
    self.num_playing = tf.math.count_nonzero(is_playing)

  def _is_fresh(self, heartbeat):
    return heartbeat > self._clock.read_value() - HEARTBEAT_TIMEOUT_SECS

  def make_heartbeat(
    self, task: int, session_id: int
  ) -> tuple[tf.Tensor, tf.Tensor]:
    """Makes the ops by which an actor takes its slot and keeps it.

    Args:
      task: the slot.
      session_id: int64, not 0: the session id of the actor's process.

    Returns:
      int64 [], the session id of the process that holds the slot now; and
      bool [], whether the run is over.
    """
    holder = self._sessions.read_value()[task]
    heartbeat = self._heartbeats.read_value()[task]
    is_free = tf.equal(holder, 0) | ~self._is_fresh(heartbeat)
    is_mine = tf.equal(holder, session_id) | is_free
    holder = tf.where(is_mine, tf.constant(session_id, tf.int64), holder)
    heartbeat = tf.where(is_mine, self._clock.read_value(), heartbeat)
    with tf.control_dependencies(
      [
        self._sessions[task].assign(holder),
        self._heartbeats[task].assign(heartbeat),
      ]
    ):
      return tf.identity(holder), self._is_over.read_value()

  def make_sign_off(self, task: int) -> tf.Operation:
    """Makes the op by which the actor that holds a slot leaves it."""
    return self._sessions[task].assign(tf.constant(0, tf.int64)).op

  def open(self, session: tf1.Session, settings: Mapping[str, Any]) -> None:
    """Lets actors join; their settings must agree with `settings`."""
    session.run(
      self._open,
      {self._text: json.dumps(settings), self._now: time.monotonic()},
    )

  def keep_time(
    self, session: tf1.Session, should_stop: Callable[[], bool]
  ) -> None:
    """Keeps the clock going until `should_stop()` is true."""
    while not should_stop():
      self.tick(session)
      time.sleep(_TICK_SECS)

  def tick(self, session: tf1.Session) -> None:
    """Sets the clock by which heartbeats are timed."""
    session.run(self._tick, {self._now: time.monotonic()})

  def end(self, session: tf1.Session) -> None:
    """Tells actors that the run is over."""
    session.run(self._end)

  def linger(self, session: tf1.Session) -> None:
    """Waits until all actors have left, for at most 15 s."""
    deadline = time.monotonic() + _LINGER_SECS
    while session.run(self.num_playing) and time.monotonic() < deadline:
      self.tick(session)
      time.sleep(0.1)


def _make_variable(name, value):
  # In no collection: it is not part of a checkpoint, nor initialised with the
  # other variables.
  return tf1.get_variable(
    f'registry/{name}',
    initializer=value,
    trainable=False,
    collections=[],
    use_resource=True,
  )
