"""Caches DeepMind Lab's compiled maps for all actors that share a folder.

A map can take a minute to compile, and many episodes use the same ones.
`deepmind_lab.Lab` asks a cache for them. Nothing here may import TensorFlow:
environments run in processes without it.
"""

import contextlib
import os
import pathlib
import shutil
import uuid
import zipfile

from runtime import console


class LevelCache:
  """A folder of compiled maps, one file each.

  Any number of processes may use a folder, on one machine or mounted on many.
  It grows without limit, and any file in it may be removed at any time.

  No call raises: an exception in `fetch` or `write` would end the episode, and
  a broken map would end the whole process without a message.
  """

  def __init__(self, directory: str | os.PathLike, keeps_new_maps: bool = True):
    """Takes the folder, which is created by the first write.

    Args:
      directory: the folder.
      keeps_new_maps: whether `write` does anything.
    """
    self._keeps_new_maps = keeps_new_maps
    self._directory = pathlib.Path(directory)
    self._warned = False

  def fetch(self, key: str, pk3_path: str) -> bool:
    """Copies a map to where Lab looks for it.

    Args:
      key: the map's name, unique to its contents.
      pk3_path: the copy's path.

    Returns:
      Whether the copy exists and is intact; if not, Lab compiles the map.
    """
    entry = self._directory / key
    try:
      shutil.copyfile(entry, pk3_path)
      _check(pk3_path)
      return True
    except (FileNotFoundError, NotADirectoryError):
      return False
    except Exception as error:  # zipfile may raise anything here.
      console.warn(f'ignored the map {entry} ({error}). It is compiled anew.')
      with contextlib.suppress(OSError):
        os.remove(pk3_path)
      return False

  def write(self, key: str, pk3_path: str) -> None:
    """Keeps a copy of a map that Lab has compiled, in place of any older one.

    Warns on stderr, once, if that is impossible. A writer that is killed leaves
    a file whose name begins with a dot, which is never read.

    Args:
      key: the map's name, unique to its contents.
      pk3_path: the map's path.
    """
    if not self._keeps_new_maps:
      return
    # Renamed once complete: others see all of an entry or nothing.
    new = self._directory / f'.{key}.{uuid.uuid4().hex}'
    try:
      self._directory.mkdir(parents=True, exist_ok=True)
      try:
        shutil.copyfile(pk3_path, new)
        os.replace(new, self._directory / key)
      finally:
        new.unlink(missing_ok=True)
    except OSError as error:
      if not self._warned:
        console.warn(
          f'cannot keep maps ({error}). They are compiled each time.'
        )
      self._warned = True


def _check(path: str) -> None:
  """Raises if a pk3, which is a zip file, is not whole."""
  with zipfile.ZipFile(path) as pk3:
    damaged = pk3.testzip()
  if damaged:
    raise zipfile.BadZipFile(f'{damaged} in it is damaged')
