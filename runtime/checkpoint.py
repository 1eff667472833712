"""Saves and restores a run's weights, optimiser state and counters.

Whatever kills the program, the checkpoint that is listed last is complete:
TensorFlow writes a new one next to the old, and only then is it listed, by
atomically replacing the list. Names are relative, so the run folder can be
moved.
"""

from collections.abc import Iterator, Sequence
import contextlib
import pathlib
import re
import tempfile

import tensorflow as tf

from runtime import console
from runtime import run_folder

tf1 = tf.compat.v1

_MAX_TO_KEEP = 3
# The file that lists the checkpoints, in TensorFlow's format.
_STATE = 'checkpoint'
_NAMED = re.compile(r'^all_model_checkpoint_paths: "(frames-\d+)"$', re.M)
# Does not match copies that a user keeps next to them.
_OWN_FILES = re.compile(
  r'(frames-(\d+))\.(index|data-\d+-of-\d+)(\.tempstate\d+)?'
)
# TensorFlow takes a path with one of these for a pattern, or, if it is not
# UTF-8 (Python has surrogates there), does not take it at all.
_MISREAD_CHARACTERS = re.compile(r'[\[\]*?\\\ud800-\udfff]')


class CheckpointError(run_folder.RunFolderError):
  """A checkpoint cannot be used; the message says why."""


class Checkpoints:
  """The checkpoints of one run."""

  def __init__(self, logdir: str, variables: Sequence[tf.Variable]):
    """Builds the ops in the current graph.

    Args:
      logdir: the run folder, see `run_folder.claim_folder`.
      variables: what to save or restore; the test mode needs only the weights.
    """
    self._directory = pathlib.Path(logdir) / 'checkpoints'
    self._saver = tf1.train.Saver(variables)
    self._shapes = {v.op.name: v.shape.as_list() for v in variables}
    self._names = self._find_names()  # Oldest first.
    self._last_whole = None

  def has_trained(self) -> bool:
    """Returns whether a checkpoint holds more than the initial weights."""
    return any(name != 'frames-0' for name in self._names)

  def restore(self, session: tf1.Session) -> str | None:
    """Restores the newest checkpoint that is complete.

    Returns:
      Its path, or None if there are no checkpoints.

    Raises:
      CheckpointError: none of the checkpoints can be read, or they belong to
        another agent.
    """
    for name in reversed(self._names):
      path = str(self._directory / name)
      try:
        with _literal(self._directory) as directory:
          self._restore(session, str(directory / name))
      except (tf.errors.OpError, ValueError) as error:
        console.warn(f'cannot restore {path}: {_reason(error)}')
      else:
        self._last_whole = name
        return path
    if self._names:
      raise CheckpointError(
        f'no checkpoint in {self._directory} can be restored: they are damaged,'
        ' or belong to another agent. Use another --logdir.'
      )
    return None

  def _restore(self, session, path):
    # Checked here, since the saver would change the variables' shapes to those
    # in the checkpoint.
    shapes = tf.train.load_checkpoint(path).get_variable_to_shape_map()
    for name, shape in self._shapes.items():
      if name in shapes and shapes[name] != shape:
        raise ValueError(f'{name} is {shapes[name]}, expected {shape}')
    # The saver uses the calling thread's default graph.
    with session.graph.as_default():
      self._saver.restore(session, path)

  def save(self, session: tf1.Session, num_environment_frames: int) -> bool:
    """Saves a checkpoint; warns, but does not raise, if the disk fails.

    Args:
      session: holds the variables.
      num_environment_frames: names the checkpoint.

    Returns:
      Whether it was saved. If not, the previous checkpoint is still complete.

    Raises:
      CheckpointError: the folder of the checkpoints is gone.
    """
    name = f'frames-{num_environment_frames}'
    # Not made anew: what the run wrote before is gone, and a resumed run would
    # miss it.
    if not self._directory.is_dir():
      raise CheckpointError(
        f'cannot save: {self._directory} was deleted or moved while the run '
        'trained. Leave the run folder in its place until the run has ended.'
      )
    if name == self._last_whole:
      return True  # Already saved; writing it again would put it at risk.
    try:
      with _literal(self._directory) as directory, session.graph.as_default():
        self._saver.save(
          session,
          str(directory / name),
          write_meta_graph=False,
          write_state=False,
        )
      names = [*(n for n in self._names if n != name), name][-_MAX_TO_KEEP:]
      self._write_names(names)
      self._names, self._last_whole = names, name
    except (OSError, tf.errors.OpError) as error:
      console.warn(
        f'cannot save {self._directory / name} ({_reason(error)}). The '
        'previous checkpoint is kept; trying again later.'
      )
      return False
    finally:
      self._remove_others()
    return True

  def _remove_others(self):
    # Removes older checkpoints, and what is left of a save that failed or was
    # interrupted: it may be what fills the disk.
    for path in self._directory.glob('frames-*'):
      match = _OWN_FILES.fullmatch(path.name)
      # Temporary files of an interrupted save may have the name of a checkpoint
      # that has since been completed.
      if match and (match[4] or match[1] not in self._names):
        with contextlib.suppress(OSError):
          path.unlink()

  def _write_names(self, names):
    lines = [f'model_checkpoint_path: "{names[-1]}"']
    lines += [f'all_model_checkpoint_paths: "{name}"' for name in names]
    with run_folder.replacing(self._directory / _STATE) as file:
      file.write(('\n'.join(lines) + '\n').encode())

  def _find_names(self):
    """Returns the names of the checkpoints, oldest first."""
    with contextlib.suppress(OSError, ValueError):
      names = _NAMED.findall((self._directory / _STATE).read_text())
      if names:
        return names
    # The list is damaged, or the very first save was interrupted before it was
    # written.
    matches = [
      match
      for path in self._directory.glob('frames-*.index')
      if (match := _OWN_FILES.fullmatch(path.name))
    ]
    return [m[1] for m in sorted(matches, key=lambda match: int(match[2]))]


@contextlib.contextmanager
def _literal(directory: pathlib.Path) -> Iterator[pathlib.Path]:
  """Gives a path to a folder that TensorFlow does not misread."""
  if not _MISREAD_CHARACTERS.search(str(directory)):
    yield directory
    return
  # The place that TMPDIR names may be misread as well.
  is_misread = _MISREAD_CHARACTERS.search(tempfile.gettempdir())
  with tempfile.TemporaryDirectory(
    dir='/tmp' if is_misread else None
  ) as scratch:
    alias = pathlib.Path(scratch) / 'checkpoints'
    alias.symlink_to(directory.absolute())
    yield alias


def _reason(error: Exception) -> str:
  """Returns the line that says why, out of a message of many."""
  text = str(error).removeprefix('Graph execution error:').strip()
  lines = re.search(r'^Node: .*\n(.+)', text, re.MULTILINE)
  return lines[1] if lines else text.partition('\n')[0]
