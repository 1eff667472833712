"""What a learner and its actors tell each other besides unrolls and weights."""

from collections.abc import Mapping
import json
import time
from typing import Any

import numpy as np
import tensorflow as tf

tf1 = tf.compat.v1

# A place whose actor was silent for so long may be taken by another.
SILENCE_SECS = 10.0
_LINGER_SECS = 15.0


class Board:
  """What a learner and its actors tell each other, on the learner.

  Both build it in their graphs; its variables are the same by name. Until the
  learner has opened it, all reads fail with `FailedPreconditionError`.

  Attributes:
    settings: string [], JSON, what actors have to agree with.
    num_playing: int64 [], how many of the places are taken.
  """

  def __init__(self, num_actors: int):
    """Builds the variables in the current graph, on the current device."""
    # For each place: the token of the process that plays there, 0 if none, and
    # when it was last heard of. The time is the learner's.
    self._tokens = _make_variable('tokens', np.zeros([num_actors], np.int64))
    self._heard = _make_variable('heard', np.zeros([num_actors], np.float64))
    self._is_over = _make_variable('is_over', np.bool_(False))
    self._settings = _make_variable('settings', '')
    self._text = tf1.placeholder(tf.string, [])

    self.settings = self._settings.read_value()
    with tf.control_dependencies(
      [v.initializer for v in (self._tokens, self._heard, self._is_over)]
    ):
      # Last: who can read them can read all.
      self._open = self._settings.assign(self._text).op
    self._end = self._is_over.assign(True).op
    # In a graph, == and != compare Python objects.
    is_playing = tf.not_equal(self._tokens, 0) & self._is_fresh(self._heard)
    self.num_playing = tf.math.count_nonzero(is_playing)

  def _is_fresh(self, heard):
    return heard > tf.timestamp() - SILENCE_SECS

  def make_ping(self, task: int, token: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Makes the ops by which an actor takes its place and keeps it.

    Args:
      task: the place.
      token: int64, not 0: the actor's own.

    Returns:
      int64 [], the token of whoever has the place now; and bool [], whether the
      run is over.
    """
    holder = self._tokens.read_value()[task]
    heard = self._heard.read_value()[task]
    is_free = tf.equal(holder, 0) | ~self._is_fresh(heard)
    is_mine = tf.equal(holder, token) | is_free
    holder = tf.where(is_mine, tf.constant(token, tf.int64), holder)
    heard = tf.where(is_mine, tf.timestamp(), heard)
    with tf.control_dependencies(
      [self._tokens[task].assign(holder), self._heard[task].assign(heard)]
    ):
      return tf.identity(holder), self._is_over.read_value()

  def make_leave(self, task: int) -> tf.Operation:
    """Makes the op by which the actor that has a place leaves it."""
    return self._tokens[task].assign(tf.constant(0, tf.int64)).op

  def open(self, session: tf1.Session, settings: Mapping[str, Any]) -> None:
    """Lets actors join; `settings` is what they have to agree with."""
    session.run(self._open, {self._text: json.dumps(settings)})

  def end(self, session: tf1.Session) -> None:
    """Tells actors that the run is over."""
    session.run(self._end)

  def linger(self, session: tf1.Session) -> None:
    """Waits until all actors have left, or for 15 s."""
    deadline = time.monotonic() + _LINGER_SECS
    while session.run(self.num_playing) and time.monotonic() < deadline:
      time.sleep(0.1)


def _make_variable(name, value):
  # In no collection: neither a checkpoint's nor initialised with the others.
  return tf1.get_variable(
    f'board/{name}',
    initializer=value,
    trainable=False,
    collections=[],
    use_resource=True,
  )
