"""Several learners in step: equal settings, and bounded waits for others."""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import math
import os
import sys
import threading
import time
from typing import Any
import zlib

import numpy as np
import tensorflow as tf

from cluster import collectives
from cluster import membership
from runtime import console
from runtime import errors

_NOTICE_SECS = 10.0
_REMEDY = 'Start all learners again: they go on from the checkpoint.'

# The errors of a collective if a learner has died or has been restarted.
_LOST = (
  tf.errors.AbortedError,
  tf.errors.FailedPreconditionError,
  tf.errors.UnavailableError,
)


def make_fingerprints(
  group: collectives.Group, settings: Mapping[str, Any]
) -> dict[str, tf.Tensor]:
  """Makes the collective by which learners compare their settings.

  Args:
    group: the learners.
    settings: the settings that must be equal, by name.

  Returns:
    By name, int32 [n]: the fingerprint of the setting's value on each learner.
  """
  own = [
    tf.constant([zlib.crc32(repr(value).encode()) >> 1], tf.int32)
    for value in settings.values()
  ]
  with group.apart():
    return dict(zip(settings, group.all_gather(own), strict=True))


def check_fingerprints(fingerprints: Mapping[str, np.ndarray]) -> None:
  """Checks the values of the tensors of `make_fingerprints`.

  Raises:
    errors.SettingError: learners differ in a setting; the message names it.
  """
  names = [
    name for name, values in fingerprints.items() if len(set(values)) > 1
  ]
  if names:
    raise errors.SettingError(
      f'the learners differ in {", ".join(names)}: start all of them with the '
      'same flags.'
    )


@contextlib.contextmanager
def limit_first_collective(
  cluster: membership.Cluster, timeout_secs: float
) -> Iterator[None]:
  """Ends the process if the learners' first collective takes too long.

  Before that collective, TensorFlow asks the first learner for a number. That
  call has no timeout and cannot be cancelled, and no session can be closed
  while it runs.
  """
  is_done = threading.Event()

  def watch():
    if is_done.wait(_NOTICE_SECS):
      return
    console.say(f'Waiting for {", ".join(_other_hosts(cluster))}.')
    # The collective's own timeout is earlier, and allows a clean shutdown.
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
  """Limits the time between the updates of one of several learners.

  A learner that is cut off from its actors as well as from the other learners
  waits at its queue, not in a collective, which would time out. The other
  learners may have ended long ago.

  Args:
    cluster: says which learner this is.
    timeout_secs: the longest time between updates; the first update has no
      limit, since actors may be late.
    close_queue: ends a wait for actors.

  Yields:
    A function to call after each update.

  Raises:
    tf.errors.DeadlineExceededError: there was no update for too long.
  """
  is_done, is_late = threading.Event(), threading.Event()
  deadline = math.inf

  def note():
    nonlocal deadline
    # Later than a collective's own timeout.
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


def explain_failure(
  failure: Exception, cluster: membership.Cluster, timeout_secs: float
) -> Exception:
  """Returns the error to raise after a learner's thread ended with `failure`.

  Args:
    failure: the error that ended the thread.
    cluster: says which learner this is.
    timeout_secs: the timeout of collectives.

  Returns:
    A `membership.LearnerLost` if a collective has failed, else the failure.
  """
  if isinstance(failure, tf.errors.DeadlineExceededError):
    problem = _describe_silence(cluster, timeout_secs)
  elif isinstance(failure, _LOST):
    problem = 'another learner has ended'
  else:
    return failure
  lost = membership.LearnerLost(f'{problem}. {_REMEDY}')
  lost.__cause__ = failure
  return lost


def _describe_silence(cluster, timeout_secs):
  """Says which learners a collective waited for, and why, if that is known."""
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
