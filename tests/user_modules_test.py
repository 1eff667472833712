"""A user's environment imports the user's modules, not ours of the same names.

The environments run from a folder as a user may have it: its modules have names
of ours, and the environment imports them.
"""

import contextlib
import os
import subprocess
import sys

import pytest

from evaluation import films
import py_process_worker
from tests import contract
from tests import program

_LEVEL = 'gym:user_env:{}-v0'
_NAMES = ('actor', 'config', 'environments', 'levels', 'settings')

_USER_ENV = """
import importlib

import gymnasium
import numpy as np

import actor
import config
import environments
import levels
import runtime
import runtime.parts
import settings

for module in (actor, config, environments, levels, runtime, settings):
  assert module.OWNER == 'user', module

# Only ours have these names, so nothing is found.
for name in ('experiment', 'envs', 'envs.gym', 'learner', 'py_process',
             'py_process_worker', 'suites', 'kubernetes'):
  try:
    importlib.import_module(name)
  except ModuleNotFoundError as error:
    assert error.name == name.split('.')[0]
  else:
    raise AssertionError(name)

from tests import count_env
from tests import film_env
import examples.user_task
assert importlib.util.find_spec('examples.minigrid_tasks')


class UserEnv(count_env.SecondEpisodeRaisesEnv):
  def step(self, action):
    import config
    import runtime.parts
    assert config.OWNER == 'user'
    return super().step(action)


class UserFilmEnv(film_env.FilmEnv):
  def render(self):
    import config
    return np.full([4, 6, 3], config.GREY, np.uint8)


gymnasium.register('User-v0', UserEnv)
gymnasium.register('UserFilm-v0', UserFilmEnv)
"""

_MAIN = f"""
import sys
sys.path.insert(0, {str(program.ROOT)!r})  # As it is in experiment.py.
from tests import contract
envs = contract.make({_LEVEL.format('User')!r}, num_envs=2)
rows = list(contract.step_all(envs, 60))
envs.close()
assert contract.finished(rows)
"""


@pytest.fixture
def folder(tmp_path):
  """A user's folder, with modules named as ours."""
  folder = tmp_path / 'user'
  (folder / 'runtime').mkdir(parents=True)
  (folder / 'examples').mkdir()
  for name in (*_NAMES, 'runtime/__init__', 'runtime/parts'):
    (folder / f'{name}.py').write_text("OWNER = 'user'\nGREY = 200\n")
  (folder / 'examples' / 'user_task.py').write_text('')
  (folder / 'user_env.py').write_text(_USER_ENV)
  return folder


def test_all_our_modules_are_listed():
  root = program.ROOT
  ours = {path.stem for path in root.glob('*.py')}
  ours |= {path.parent.name for path in root.glob('*/__init__.py')}
  assert ours - {'examples'} <= py_process_worker.OWN_NAMES
  assert not {'examples', 'tests', 'benchmarks'} & py_process_worker.OWN_NAMES


@pytest.mark.parametrize('where', ['cwd', 'path', 'path from our folder'])
def test_environment_imports_the_users_modules(folder, tmp_path, where):
  script = tmp_path / 'main.py'
  script.write_text(_MAIN)
  cwd = {'cwd': folder, 'path': tmp_path}.get(where, program.ROOT)
  variables = {} if where == 'cwd' else {'PYTHONPATH': str(folder)}
  done = subprocess.run(
    [sys.executable, str(script)],
    cwd=cwd,
    env=os.environ | variables,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  # It was restarted, and the imports of its next process succeeded too.
  assert done.stderr.count('The level is broken') >= 2
  assert 'AssertionError' not in done.stderr


def test_restarts_in_a_row(folder, monkeypatch, capfd):
  monkeypatch.chdir(folder)
  with contextlib.closing(contract.make(_LEVEL.format('User'))) as envs:
    rows = list(contract.step_all(envs, 80))
  # It fails in each second episode, more often than it may in a row.
  assert contract.finished(rows)[:5] == [(4.0, 4)] * 5
  assert capfd.readouterr().err.count('It starts anew (1 of 3') == 1


def test_missing_module_is_not_found(folder, monkeypatch):
  (folder / 'levels.py').unlink()
  for cwd in (folder, program.ROOT):
    monkeypatch.chdir(cwd)
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(ValueError, match="No module named 'levels'"):
      contract.make(_LEVEL.format('User'))


def test_safe_path_leaves_the_working_folder_out(folder, monkeypatch):
  monkeypatch.chdir(folder)
  monkeypatch.setenv('PYTHONSAFEPATH', '1')
  with pytest.raises(ValueError, match="No module named 'user_env'"):
    contract.make(_LEVEL.format('User'))


def test_our_folder_comes_last(tmp_path, monkeypatch):
  paths = py_process_worker._order_for_users
  root = str(program.ROOT)
  monkeypatch.chdir(tmp_path)
  assert paths([root, '/a', '/b']) == [str(tmp_path), '/a', '/b', root]
  link = tmp_path / 'link'
  link.symlink_to(root)
  assert paths([str(link), '/a']) == [str(tmp_path), '/a', root]
  monkeypatch.chdir(root)
  assert paths(['', '/a', root]) == ['/a', root]


def test_film_imports_the_users_modules(folder, monkeypatch):
  monkeypatch.chdir(folder)
  path = folder / 'film.mp4'
  films.film(_LEVEL.format('UserFilm'), 1, [0] * 6, path, 33.0)
  assert path.stat().st_size
  assert 'user_env' not in sys.modules


def test_program_trains_on_the_users_environment(folder, tmp_path):
  with program.Program(
    tmp_path / 'output',
    cwd=folder,
    level_name=_LEVEL.format('User'),
    logdir=tmp_path / 'logdir',
    total_environment_frames=200,
  ) as run:
    assert run.finish() == 0, run.err
  assert 'AssertionError' not in run.err
