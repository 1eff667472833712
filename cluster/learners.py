"""Several learners in step: equal settings, and a bounded wait for others."""

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

# What a collective ends with if a learner has died, or has been started anew.
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
    settings: what they have to have in common.

  Returns:
    By name, int32 [n]: a fingerprint of the setting's value at each learner.
  """
  own = [
    tf.constant([zlib.crc32(repr(value).encode()) >> 1], tf.int32)
    for value in settings.values()
  ]
  with group.apart():
    return dict(zip(settings, group.all_gather(own), strict=True))


def check_fingerprints(fingerprints: Mapping[str, np.ndarray]) -> None:
  """Checks what the tensors of `make_fingerprints` have brought.

  Raises:
    errors.SettingError: learners differ in a setting; it names which.
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
  """Ends the process if the learners' first collective takes longer.

  Before it, TensorFlow asks the first learner for a number. That call has no
  limit, nothing ends it, and while it runs no session can be closed.
  """
  is_done = threading.Event()

  def watch():
    if is_done.wait(_NOTICE_SECS):
      return
    console.say(f'Waiting for {", ".join(_other_hosts(cluster))}.')
    # The collective itself ends earlier, and then in good order.
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

  A learner that is cut off from its actors too waits for them, not in a
  collective, and the others may have ended long ago.

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
    # Later than a collective ends.
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
  """Returns what to raise where a learner's thread has ended with `failure`.

  Args:
    failure: what it ended with.
    cluster: says which learner this is.
    timeout_secs: how long it has waited in a collective.

  Returns:
    A `membership.LearnerLost`, if a collective has failed; else the failure.
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
  """Says which learners did not join a collective, and why, if it is seen."""
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
