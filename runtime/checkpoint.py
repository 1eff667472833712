"""Keeps a run's weights, optimiser and counters.

Whatever kills the program, the checkpoint named last is whole: TensorFlow
writes a new one next to the old, and only then it is named, by renaming a file.
Names are relative, so the run folder can be moved.
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
# The file that names the checkpoints, in TensorFlow's form.
_STATE = 'checkpoint'
_NAMED = re.compile(r'^all_model_checkpoint_paths: "(frames-\d+)"$', re.M)
# Not a copy that a user keeps next to them.
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
      logdir: the run folder.
      variables: all that has to be kept; for a test, the weights are enough.
    """
    self._directory = pathlib.Path(logdir) / 'checkpoints'
    self._saver = tf1.train.Saver(variables)
    self._shapes = {v.op.name: v.shape.as_list() for v in variables}
    self._names = self._find_names()  # Oldest first.
    self._last_whole = None

  def __bool__(self) -> bool:
    """Whether there are any."""
    return bool(self._names)

  def restore(self, session: tf1.Session) -> str | None:
    """Restores the newest checkpoint that is whole.

    Returns:
      Its path, or None if there is no checkpoint.

    Raises:
      CheckpointError: none of those there can be read, or they belong to
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
        ' or of another agent. Use another --logdir.'
      )
    return None

  def _restore(self, session, path):
    # The saver would give the variables the shapes that it finds.
    shapes = tf.train.load_checkpoint(path).get_variable_to_shape_map()
    for name, shape in self._shapes.items():
      if name in shapes and shapes[name] != shape:
        raise ValueError(f'{name} is {shapes[name]}, expected {shape}')
    # The saver looks for the graph of the calling thread.
    with session.graph.as_default():
      self._saver.restore(session, path)

  def save(self, session: tf1.Session, num_environment_frames: int) -> bool:
    """Saves; a disk that refuses costs a warning, never the run.

    Args:
      session: holds the variables.
      num_environment_frames: names the checkpoint.

    Returns:
      Whether it was saved. If not, the last one is still whole.
    """
    name = f'frames-{num_environment_frames}'
    if name == self._last_whole:
      return True  # To write it again would put it at risk.
    try:
      self._directory.mkdir(parents=True, exist_ok=True)
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
        'checkpoint before it is kept; trying again later.'
      )
      return False
    finally:
      self._remove_others()
    return True

  def _remove_others(self):
    # Older ones, and what is left of a save that has failed or was cut: it may
    # be what fills the disk.
    for path in self._directory.glob('frames-*'):
      match = _OWN_FILES.fullmatch(path.name)
      # A cut save may have had the name of one that is whole by now.
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
    # The list is damaged, or the very first save was cut just before it.
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
