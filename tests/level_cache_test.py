"""Tests of level_cache.py."""

import errno
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import zipfile

import pytest

from envs import level_cache

_ROOT = pathlib.Path(__file__).parent.parent
_KEY = 'explore_maze_noaas_0123456789abcdef'


def make_pk3(path, text='walls'):
  # Uncompressed, so that each byte of it can be damaged on its own.
  with zipfile.ZipFile(path, 'w') as pk3:
    pk3.writestr('maps/level.bsp', text * 1000)
  return str(path)


def read_pk3(path):
  with zipfile.ZipFile(path) as pk3:
    return pk3.read('maps/level.bsp').decode()[:5]


@pytest.fixture
def cache(tmp_path):
  return level_cache.LevelCache(tmp_path / 'maps' / 'lab')


@pytest.fixture
def pk3(tmp_path):
  return make_pk3(tmp_path / 'compiled.pk3')


@pytest.fixture
def entry(tmp_path, cache, pk3):
  """The file of a map that the cache has."""
  cache.write(_KEY, pk3)
  return tmp_path / 'maps' / 'lab' / _KEY


def test_returns_what_it_was_given(tmp_path, cache, pk3, capfd):
  wanted = str(tmp_path / 'wanted.pk3')
  assert cache.fetch(_KEY, wanted) is False
  cache.write(_KEY, pk3)  # Makes the folder.
  assert cache.fetch(_KEY, wanted) is True
  assert read_pk3(wanted) == 'walls'
  assert not cache.fetch('another', str(tmp_path / 'another.pk3'))
  assert [path.name for path in (tmp_path / 'maps/lab').iterdir()] == [_KEY]
  assert capfd.readouterr() == ('', '')


def test_others_can_read_it(entry):
  mask = os.umask(0)
  os.umask(mask)
  assert entry.stat().st_mode & 0o777 == 0o666 & ~mask


def truncate(path):
  os.truncate(path, 200)


def empty(path):
  os.truncate(path, 0)


def flip_a_bit(path):
  data = bytearray(path.read_bytes())
  data[100] ^= 1
  path.write_bytes(data)


def spoil_the_directory(path):
  data = bytearray(path.read_bytes())
  data[-40] ^= 255
  path.write_bytes(data)


def make_unreadable(path):
  path.unlink()
  path.mkdir()


@pytest.mark.parametrize(
  'damage',
  [truncate, empty, flip_a_bit, spoil_the_directory, make_unreadable],
)
def test_broken_entries_are_ignored(tmp_path, cache, entry, capfd, damage):
  damage(entry)
  wanted = tmp_path / 'wanted.pk3'
  assert cache.fetch(_KEY, str(wanted)) is False
  assert not wanted.exists()
  warning = capfd.readouterr().err
  assert warning.startswith(f'Warning: ignored the map {entry} (')
  assert warning.count('\n') == 1


def test_broken_entries_are_replaced(tmp_path, cache, entry):
  truncate(entry)
  cache.write(_KEY, make_pk3(tmp_path / 'compiled.pk3', 'doors'))
  assert cache.fetch(_KEY, str(tmp_path / 'wanted.pk3'))
  assert read_pk3(tmp_path / 'wanted.pk3') == 'doors'


_KILLED_WRITER = """
import os, shutil, signal, sys
from envs import level_cache

def copy_half(source, target):
  with open(source, 'rb') as file, open(target, 'wb') as copy:
    copy.write(file.read()[:500])
  os.kill(os.getpid(), signal.SIGKILL)

shutil.copyfile = copy_half
level_cache.LevelCache(sys.argv[1]).write(*sys.argv[2:])
"""


def test_killed_writer(tmp_path, cache, pk3, capfd):
  folder = str(tmp_path / 'maps' / 'lab')
  writer = subprocess.run(
    [sys.executable, '-c', _KILLED_WRITER, folder, _KEY, pk3], cwd=_ROOT
  )
  assert writer.returncode == -signal.SIGKILL
  assert len(os.listdir(folder)) == 1  # Its half.
  assert not cache.fetch(_KEY, str(tmp_path / 'wanted.pk3'))
  cache.write(_KEY, pk3)
  assert cache.fetch(_KEY, str(tmp_path / 'wanted.pk3'))
  assert capfd.readouterr().err == ''


def test_two_writers_of_one_entry(tmp_path, cache, pk3, monkeypatch):
  copy = shutil.copyfile
  doors = make_pk3(tmp_path / 'other.pk3', 'doors')

  def write_in_between(source, target):
    copy(source, target)
    os.truncate(target, 500)
    monkeypatch.setattr(shutil, 'copyfile', copy)
    level_cache.LevelCache(tmp_path / 'maps' / 'lab').write(_KEY, doors)
    assert cache.fetch(_KEY, str(tmp_path / 'early.pk3'))
    assert os.path.getsize(target) == 500  # Nobody else's.
    copy(source, target)

  monkeypatch.setattr(shutil, 'copyfile', write_in_between)
  cache.write(_KEY, pk3)
  assert cache.fetch(_KEY, str(tmp_path / 'late.pk3'))
  assert read_pk3(tmp_path / 'early.pk3') == 'doors'
  assert read_pk3(tmp_path / 'late.pk3') == 'walls'
  assert os.listdir(tmp_path / 'maps' / 'lab') == [_KEY]


def test_folder_that_cannot_be_made(tmp_path, pk3, capfd):
  (tmp_path / 'file').touch()
  cache = level_cache.LevelCache(tmp_path / 'file' / 'lab')
  cache.write(_KEY, pk3)
  cache.write(_KEY, pk3)
  warning = capfd.readouterr().err
  assert warning.startswith('Warning: cannot keep maps (')
  assert warning.count('\n') == 1


def test_full_disk(tmp_path, cache, pk3, capfd, monkeypatch):
  copy = shutil.copyfile

  def fail(source, target):
    copy(source, target)
    os.truncate(target, 500)
    raise OSError(errno.ENOSPC, 'No space left on device')

  monkeypatch.setattr(shutil, 'copyfile', fail)
  cache.write(_KEY, pk3)
  cache.write(_KEY, pk3)
  assert not os.listdir(tmp_path / 'maps' / 'lab')
  assert capfd.readouterr().err.count('No space left') == 1
  monkeypatch.undo()
  cache.write(_KEY, pk3)
  assert cache.fetch(_KEY, str(tmp_path / 'wanted.pk3'))
  monkeypatch.setattr(shutil, 'copyfile', fail)
  assert not cache.fetch(_KEY, str(tmp_path / 'wanted.pk3'))
