"""Keeps a run's weights, optimiser and counters, and its settings.

A run folder holds `checkpoints/` and `config.json`. Whatever kills the program,
the checkpoint named last is whole: TensorFlow writes a new one beside the old,
and only then names it, by renaming a file. Paths are relative, so the folder
can be moved.
"""

from collections.abc import Mapping, Sequence
import contextlib
import fcntl
import json
import os
import pathlib
import re
import tempfile
from typing import Any, BinaryIO

import tensorflow as tf

from runtime import console

tf1 = tf.compat.v1

# These may change from one start of a run to the next: they do not alter what
# is learnt, or, like the budget, are meant to be changed.
FREE_SETTINGS = frozenset(
  {
    'allow_changed_settings',
    'connect_timeout_secs',
    'job_name',
    'learner_hosts',
    'level_cache_dir',
    'log_every_secs',
    'logdir',
    'mode',
    'queue_capacity',
    'renderer',
    'save_checkpoint_secs',
    'task',
    'test_num_episodes',
    'total_environment_frames',
    'video',
  }
)


# Not a copy that a user keeps beside them.
_OWN_FILES = re.compile(
  r'frames-(\d+)\.(index|data-\d+-of-\d+)(\.tempstate\d+)?'
)


class CheckpointError(Exception):
  """A checkpoint or its folder cannot be used; the message says why."""


class Checkpoints:
  """The checkpoints of one run."""

  def __init__(self, logdir: str, variables: Sequence[tf.Variable]):
    """Builds the ops in the current graph.

    Args:
      logdir: the run folder.
      variables: all that has to be kept; for a test, the weights are enough.
    """
    self._directory = pathlib.Path(logdir) / 'checkpoints'
    self._saver = tf1.train.Saver(
      variables, max_to_keep=3, save_relative_paths=True
    )
    self._shapes = {v.op.name: v.shape.as_list() for v in variables}
    self._last_whole = None

  def restore(self, session: tf1.Session) -> str | None:
    """Restores the newest checkpoint that is whole.

    Returns:
      Its path, or None if there is no checkpoint.

    Raises:
      CheckpointError: none of those there can be read, or they belong to
        another agent.
    """
    paths = _find_checkpoints(self._directory)
    for path in reversed(paths):
      try:
        self._check_shapes(path)
        # The saver looks for the graph of the calling thread.
        with session.graph.as_default():
          self._saver.restore(session, path)
      except (tf.errors.OpError, ValueError) as error:
        console.warn(f'cannot restore {path}: {_reason(error)}')
      else:
        self._saver.recover_last_checkpoints(paths)
        self._last_whole = path
        return path
    if paths:
      raise CheckpointError(
        f'no checkpoint in {self._directory} can be restored: they are damaged,'
        ' or of another agent. Use another --logdir.'
      )
    return None

  def _check_shapes(self, path):
    # The saver would give the variables the shapes that it finds.
    shapes = tf.train.load_checkpoint(path).get_variable_to_shape_map()
    for name, shape in self._shapes.items():
      if name in shapes and shapes[name] != shape:
        raise ValueError(f'{name} is {shapes[name]}, expected {shape}')

  def save(self, session: tf1.Session, num_environment_frames: int) -> bool:
    """Saves; a disk that refuses costs a warning, never the run.

    Args:
      session: holds the variables.
      num_environment_frames: names the checkpoint.

    Returns:
      Whether it was saved. If not, the last one is still whole.
    """
    prefix = self._directory / f'frames-{num_environment_frames}'
    if str(prefix) == self._last_whole:
      return True  # To write it again would put it at risk.
    try:
      self._directory.mkdir(parents=True, exist_ok=True)
      with session.graph.as_default():
        self._saver.save(session, str(prefix), write_meta_graph=False)
    except (OSError, tf.errors.OpError) as error:
      console.warn(
        f'cannot save {prefix} ({_reason(error)}). The checkpoint before it is '
        'kept; trying again later.'
      )
      return False
    finally:
      self._remove_leftovers()
    self._last_whole = str(prefix)
    return True

  def _remove_leftovers(self):
    # Of a save that has failed or was cut; they may be what fills the disk.
    names = {pathlib.Path(path).name for path in self._saver.last_checkpoints}
    for path in self._directory.glob('frames-*'):
      # A cut save may have had the name of one that is whole by now.
      is_whole = '.tempstate' not in path.name
      is_kept = is_whole and path.name.partition('.')[0] in names
      if _OWN_FILES.fullmatch(path.name) and not is_kept:
        with contextlib.suppress(OSError):
          path.unlink()


def make_folder(path: str, flag: str) -> None:
  """Makes a folder, unless it is there, and sees that it can be written.

  Raises:
    CheckpointError: it cannot.
  """
  try:
    pathlib.Path(path).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path) as file:
      file.write(b'0')
  except OSError as error:
    raise CheckpointError(
      f'cannot write to {path} (--{flag}): {error.strerror}'
    ) from error


def claim_folder(logdir: str) -> BinaryIO:
  """Makes the run folder, sees that it can be written, and by nobody else.

  Returns:
    What keeps others out until it is closed, or the process has ended.

  Raises:
    CheckpointError: it cannot be written, or another training has it.
  """
  make_folder(logdir, 'logdir')
  make_folder(os.path.join(logdir, 'checkpoints'), 'logdir')
  lock = open(pathlib.Path(logdir) / '.lock', 'wb')
  try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError as error:
    raise CheckpointError(
      f'another training writes to --logdir={logdir}: choose another folder, '
      'or end it first.'
    ) from error
  except OSError:
    pass  # Some network file systems have no locks.
  return lock


def read_settings(logdir: str) -> dict[str, Any]:
  """Returns the settings that the run in `logdir` was started with.

  Raises:
    CheckpointError: there are none to be read.
  """
  path = pathlib.Path(logdir) / 'config.json'
  try:
    return json.loads(path.read_text())['settings']
  except (OSError, ValueError, KeyError) as error:
    raise CheckpointError(f'no run in {logdir}: cannot read {path}') from error


def check_settings(
  logdir: str, settings: Mapping[str, Any], allow_changes: bool
) -> None:
  """Refuses to go on with a run under other settings than it was started with.

  Args:
    logdir: the run folder; nothing is checked if it holds no checkpoint.
    settings: of this start.
    allow_changes: warn only.

  Raises:
    CheckpointError: it names what differs.
  """
  if not _find_checkpoints(pathlib.Path(logdir) / 'checkpoints'):
    return
  before = read_settings(logdir)
  changes = [
    f'{name} was {before[name]!r} and is now {settings[name]!r}'
    for name in sorted(settings.keys() & before.keys() - FREE_SETTINGS)
    if before[name] != settings[name]
  ]
  if not changes:
    return
  message = f'the run in {logdir} has other settings: {"; ".join(changes)}.'
  if not allow_changes:
    raise CheckpointError(
      message + ' Use another --logdir, or --allow_changed_settings.'
    )
  console.warn(message)


def _find_checkpoints(directory: pathlib.Path) -> list[str]:
  """Returns the checkpoints of a run, oldest first."""
  try:
    state = tf.train.get_checkpoint_state(directory)
  except ValueError:
    state = None
  if state and state.all_model_checkpoint_paths:
    return list(state.all_model_checkpoint_paths)
  # The list is damaged, or the very first save was cut just before it.
  paths = {
    int(match[1]): path.with_suffix('')
    for path in directory.glob('frames-*.index')
    if (match := _OWN_FILES.fullmatch(path.name))
  }
  return [str(paths[frames]) for frames in sorted(paths)]


def _reason(error: Exception) -> str:
  """Returns the line that says why, out of a message of many."""
  lines = re.search(r'^Node: .*\n(.+)', str(error), re.MULTILINE)
  return lines[1] if lines else str(error).partition('\n')[0]
