"""The folder of a run: its lock, its settings, and atomic writes.

It holds `config.json` (the settings), `checkpoints/`, the curves, and `.lock`.
"""

from collections.abc import Iterator, Mapping, Set
import contextlib
import fcntl
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import tempfile
from typing import Any, BinaryIO

import numpy as np

from runtime import console
from runtime import errors

# Packages whose versions may affect results; those not installed are left out.
_PACKAGES = (
  'tensorflow',
  'tensorflow-cpu',
  'dm-sonnet',
  'numpy',
  'tensorboard',
  'ale-py',
  'gymnasium',
  'deepmind-lab',
)


class RunFolderError(errors.UserError):
  """A run folder cannot be used; the message says why."""


def parse_path(path: str, flag: str) -> str:
  """Returns the path of a folder of this machine, with `~` expanded.

  Args:
    path: as the user gives it.
    flag: the flag that names it, for the error message.

  Raises:
    errors.SettingError: it is empty, belongs to a store such as gs://, or
      begins with the name of a user that does not exist.
  """
  problem = None
  expanded = os.path.expanduser(path)
  if not path:
    problem = 'must name a folder'
  elif re.match(r'[A-Za-z][A-Za-z0-9+.-]*://', path):
    problem = (
      'must be a folder of this machine: mount the store, for example with '
      'gcsfuse, s3fs or a volume, and give the folder where it is mounted'
    )
  elif expanded.startswith('~'):
    problem = 'begins with ~, but there is no such home folder'
  if problem:
    raise errors.SettingError(f'--{flag}={path} {problem}.')
  return expanded


def make_folder(path: str, flag: str) -> None:
  """Makes a folder if it does not exist, and checks that it can be written to.

  Args:
    path: the folder.
    flag: the flag that names the folder, for the error message.

  Raises:
    RunFolderError: the folder cannot be written to.
  """
  try:
    pathlib.Path(path).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path) as file:
      file.write(b'0')
  except OSError as error:
    raise RunFolderError(
      f'cannot write to {path} (--{flag}): {error.strerror}'
    ) from error


def claim_folder(logdir: str) -> BinaryIO:
  """Makes the run folder, and keeps other trainings out of it.

  Args:
    logdir: the run folder.

  Returns:
    A lock file, which keeps others out until it is closed or the process ends.

  Raises:
    RunFolderError: the folder cannot be written to, or another training uses
      it.
  """
  make_folder(logdir, 'logdir')
  make_folder(os.path.join(logdir, 'checkpoints'), 'logdir')
  lock = open(pathlib.Path(logdir) / '.lock', 'wb')
  try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError as error:
    lock.close()
    raise RunFolderError(
      f'another training writes to --logdir={logdir}: choose another folder, '
      'or end that training first.'
    ) from error
  except OSError:
    pass  # Some network file systems have no locks.
  return lock


def write_settings(logdir: str, settings: Mapping[str, Any]) -> None:
  """Writes `config.json`: the settings of a run, and the packages' versions.

  Args:
    logdir: the run folder, which must exist.
    settings: value by name. Values that JSON cannot represent (infinity, a
      path) become strings.

  Raises:
    OSError: the file cannot be written; an existing file is then unchanged.
  """
  write_json(
    config_path(logdir),
    {
      'settings': {name: _to_json(value) for name, value in settings.items()},
      'versions': _find_versions(),
    },
  )


def read_settings(logdir: str) -> dict[str, Any]:
  """Returns the settings that the run in `logdir` was started with.

  Raises:
    RunFolderError: there are no settings, or they cannot be read.
  """
  path = config_path(logdir)
  try:
    settings = json.loads(path.read_text(encoding='utf-8'))['settings']
    return dict(settings.items())
  except OSError as error:
    raise RunFolderError(
      f'no run in {logdir}: cannot read {path}: {error.strerror}'
    ) from error
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise RunFolderError(
      f'{path} is damaged: it must hold {{"settings": {{...}}}}. Restore it '
      'from a copy, or use another --logdir.'
    ) from error


def check_settings(
  logdir: str,
  settings: Mapping[str, Any],
  may_change: Set[str],
  allow_changes: bool,
) -> None:
  """Refuses to resume a run with settings other than those it started with.

  Args:
    logdir: the folder of the run.
    settings: the settings to resume with.
    may_change: names of settings that may have another value.
    allow_changes: whether to warn instead of raising.

  Raises:
    RunFolderError: settings differ; the message names them.
  """
  before = read_settings(logdir)
  changes = [
    f'{name} was {before[name]!r} and is now {settings[name]!r}'
    for name in sorted(settings.keys() & before.keys() - may_change)
    if before[name] != _to_json(settings[name])
  ]
  if not changes:
    return
  message = f'the run in {logdir} has other settings: {"; ".join(changes)}.'
  if not allow_changes:
    raise RunFolderError(
      message + ' Use another --logdir, or --allow_changed_settings.'
    )
  console.warn(message)


def write_json(path: str | os.PathLike, value: Mapping[str, Any]) -> None:
  """Writes strict JSON, atomically.

  Args:
    path: the file, replaced if it exists; its directory must exist.
    value: what to write. NumPy numbers become numbers; other types that JSON
      does not have become strings.

  Raises:
    OSError: the file cannot be written; an existing file is then unchanged.
    ValueError: a number is infinite or NaN.
  """
  text = json.dumps(
    value,
    indent=2,
    allow_nan=False,
    default=lambda v: v.item() if isinstance(v, np.generic) else str(v),
  )
  with replacing(path) as file:
    file.write((text + '\n').encode())


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[BinaryIO]:
  """Opens a file that replaces `path` once it is complete.

  Args:
    path: the file to replace. If anything fails, it stays unchanged.

  Raises:
    OSError: the file cannot be written.
  """
  path = pathlib.Path(path)
  new_path = path.with_name(path.name + '.new')
  try:
    with open(new_path, 'wb') as file:
      yield file
      file.flush()
      os.fsync(file.fileno())
    os.replace(new_path, path)
  except BaseException:
    with contextlib.suppress(OSError):
      new_path.unlink(missing_ok=True)
    raise


def config_path(logdir: str) -> pathlib.Path:
  """Returns the path of `config.json`."""
  return pathlib.Path(logdir) / 'config.json'


def _to_json(value: Any) -> Any:
  """Returns the value as read back from strict JSON, or else as a string."""
  try:
    return json.loads(json.dumps(value, allow_nan=False))
  except (TypeError, ValueError):
    return str(value)


def _find_versions() -> dict[str, str]:
  """Returns the versions of Python and of the installed packages."""
  versions = {'python': platform.python_version()}
  for package in _PACKAGES:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      versions[package] = importlib.metadata.version(package)
  return versions
