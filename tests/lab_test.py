"""Tests of envs/lab.py, with a stand-in for DeepMind Lab."""

import contextlib
import importlib.util
import os
import pathlib
import signal
import sys
import tempfile
import time
import zipfile

import numpy as np
import pytest

import environments
from envs import instructions
from envs import lab
from envs import make as make_lib
import py_process
from runtime import errors
from tests import contract

_FAKE_LAB = str(pathlib.Path(__file__).parent / 'fake_lab')
_DMLAB30 = 'lab:contributed/dmlab30/'
_ROOM = f'{_DMLAB30}rooms_watermaze'
_MAZE = f'{_DMLAB30}explore_goal_locations_small'
_LANGUAGE = f'{_DMLAB30}language_select_described_object'
_PICTURES = f'{_DMLAB30}psychlab_continuous_recognition'
_HOLD_OUT = f'{_DMLAB30}rooms_collect_good_objects_test'

_WITH_FAKE_LAB = pytest.mark.usefixtures('fake_lab')
_HAS_REAL_LAB = importlib.util.find_spec('deepmind_lab') is not None


@pytest.fixture(autouse=True)
def scratch(monkeypatch, tmp_path):
  """Redirects temporary files to a folder of the test."""
  path = tmp_path / 'scratch'
  path.mkdir()
  monkeypatch.setenv('TMPDIR', str(path))
  monkeypatch.setattr(tempfile, 'tempdir', str(path))
  return path


@pytest.fixture
def fake_lab(monkeypatch):
  """Puts the stand-in on the path of this process and its environments'."""
  monkeypatch.syspath_prepend(_FAKE_LAB)
  monkeypatch.setenv('PATH', _FAKE_LAB, prepend=os.pathsep)
  for name in ('tensorflow', 'deepmind_lab'):
    monkeypatch.delitem(sys.modules, name, raising=False)
  yield importlib.import_module('deepmind_lab')
  sys.modules.pop('deepmind_lab', None)


@pytest.fixture
def make_one(fake_lab, scratch):
  """Makes environments in this process."""
  made = []

  def make(level_name=_ROOM, seed=1, num_restarts=0, training=True, **settings):
    made.append(
      lab.LabEnvironment(
        level_name,
        seed,
        num_restarts,
        training=training,
        settings=lab.LabSettings(**settings),
      )
    )
    return made[-1]

  yield make
  for env in made:
    env.close()


def make(*level_names, num_envs=1, training=True, **settings):
  return contract.make(
    *level_names,
    num_envs=num_envs,
    training=training,
    lab_settings=lab.LabSettings(**settings),
  )


@_WITH_FAKE_LAB
class TestLab(contract.EnvironmentsContract):
  level_name = _ROOM

  def test_spec(self):
    envs = make(_ROOM)
    envs.close()
    assert envs.spec == environments.EnvironmentSpec(
      (72, 96, 3), np.dtype(np.uint8), 9, 4, 1, envs.spec.action_meanings, True
    )
    assert len(envs.spec.action_meanings) == 9


@pytest.mark.dmlab
@pytest.mark.skipif(not _HAS_REAL_LAB, reason='needs DeepMind Lab')
class TestRealLab(contract.EnvironmentsContract):
  level_name = _ROOM


@_WITH_FAKE_LAB
def test_ten_episodes(monkeypatch):
  monkeypatch.setenv('FAKE_LAB_EPISODE_FRAMES', '20')
  # As in the main process; the environment's process has no TensorFlow.
  monkeypatch.setitem(sys.modules, 'tensorflow', sys)
  envs = make(_ROOM)
  rows = [row for _, row in contract.step_all(envs, 51, action=0)]
  envs.close()
  assert contract.finished(enumerate(rows)) == [(5.0, 5)] * 10
  assert [row.done for row in rows] == [True] + [
    False,
    False,
    False,
    False,
    True,
  ] * 10
  # At an end, the frame is the next episode's first: it shows no action.
  for row in rows:
    assert row.observation.frame.reshape(-1)[3] == (not row.done)


# Table D.2 of the paper.
@pytest.mark.parametrize(
  ('action', 'expected'),
  [
    (0, [0, 0, 0, 1, 0, 0, 0]),
    (1, [0, 0, 0, -1, 0, 0, 0]),
    (2, [0, 0, -1, 0, 0, 0, 0]),
    (3, [0, 0, 1, 0, 0, 0, 0]),
    (4, [-20, 0, 0, 0, 0, 0, 0]),
    (5, [20, 0, 0, 0, 0, 0, 0]),
    (6, [-20, 0, 0, 1, 0, 0, 0]),
    (7, [20, 0, 0, 1, 0, 0, 0]),
    (8, [0, 0, 0, 0, 1, 0, 0]),
  ],
)
def test_actions_arrive(make_one, action, expected):
  env = make_one()
  env.reset()
  observation, reward, done, _ = env.step(action)
  shown = observation[0].reshape(-1)[:7].astype(np.int8)
  np.testing.assert_array_equal(shown, expected)
  assert reward == expected[3]
  assert not done


def test_frames_per_step(make_one):
  env = make_one(frames_per_step=8, width=4, height=8)
  assert env.reset()[0].shape == env.spec.frame_shape == (8, 4, 3)
  steps = 1
  while not env.step(0)[2]:
    steps += 1
  assert steps == 400 / 8
  assert env.spec.frames_per_step == 8


@_WITH_FAKE_LAB
def test_instructions(fake_lab):
  envs = make(_LANGUAGE, _ROOM, num_envs=2)
  known = {
    instructions.hash_words(text).tobytes() for text in fake_lab._INSTRUCTIONS
  }
  seen = [set(), set()]
  for env_id, row in contract.step_all(envs, 10_000):
    seen[env_id].add(row.observation.instruction.tobytes())
    if len(seen[0]) > 1 and seen[1]:  # The level changed it.
      break
  envs.close()
  assert len(seen[0]) > 1
  assert seen[0] <= known
  assert seen[1] == {instructions.hash_words('').tobytes()}


@_WITH_FAKE_LAB
@pytest.mark.parametrize('kind', ['none', 'empty', 'missing folder', 'folder'])
def test_missing_pictures(tmp_path, kind):
  (tmp_path / 'folder').mkdir()
  path = {'none': None, 'empty': ''}.get(kind, str(tmp_path / kind))
  with pytest.raises(ValueError, match='--dataset_path') as caught:
    make(_ROOM, _PICTURES, num_envs=2, dataset_path=path)
  assert _PICTURES in str(caught.value)
  assert _ROOM not in str(caught.value)
  assert '\n' not in str(caught.value)


@_WITH_FAKE_LAB
@pytest.mark.parametrize('kind', ['dummy', 'folder'])
def test_pictures(tmp_path, kind):
  (tmp_path / '0001.png').touch()
  path = {'folder': str(tmp_path)}.get(kind, kind)
  envs = make(_PICTURES, dataset_path=path)
  assert envs.settings()['datasetPath'] == path
  assert len(list(contract.step_all(envs, 10))) == 10
  envs.close()


@_WITH_FAKE_LAB
def test_held_out_levels():
  envs = make(_HOLD_OUT, training=False)
  assert len(list(contract.step_all(envs, 5))) == 5
  envs.close()
  with pytest.raises(py_process.EnvironmentFailed, match='held out'):
    make(_HOLD_OUT, training=True)


def test_evaluation_has_other_mazes(make_one, monkeypatch, fake_lab):
  configs = []
  real = fake_lab.Lab

  def record(*args, config, **kwargs):
    configs.append(config)
    return real(*args, config=config, **kwargs)

  monkeypatch.setattr(fake_lab, 'Lab', record)
  frames = [make_one(training=t).reset()[0] for t in (True, False, True)]
  assert (frames[0] != frames[1]).any()
  np.testing.assert_array_equal(frames[0], frames[2])
  size = {'width': '96', 'height': '72', 'logLevel': 'WARN'}
  test = {'allowHoldOutLevels': 'true', 'mixerSeed': '1611489005'}
  assert configs == [size, size | test, size]


@_WITH_FAKE_LAB
@pytest.mark.parametrize(
  ('when', 'step', 'details'),
  [
    ('constructor', 0, 'The level is broken'),
    ('step', 5, 'the level is broken'),
    ('kill', 5, 'SIGKILL'),
  ],
)
def test_failing_levels(monkeypatch, scratch, capfd, when, step, details):
  monkeypatch.setenv('FAKE_LAB_EPISODE_FRAMES', '40')
  monkeypatch.setenv('FAKE_LAB_FAIL', f'{when}:rooms_watermaze')
  envs = None
  with pytest.raises(py_process.EnvironmentFailed, match=details) as caught:
    envs = make(_MAZE, _ROOM, num_envs=2)
    list(contract.step_all(envs, 10_000))
  if envs:
    assert capfd.readouterr().err.count('It starts anew') == 1
    assert list(scratch.iterdir())
    envs.close()
  assert str(caught.value).startswith(
    f'{_ROOM}: environment 1 failed at step {step}\n'
  )
  # That of a step was shown before the first restart.
  assert ('Traceback' in str(caught.value)) == (when == 'constructor')
  # Nor does what a killed Lab leaves remain.
  assert not list(scratch.iterdir())


@_WITH_FAKE_LAB
def test_failure_ends_an_evaluation(monkeypatch, capfd):
  monkeypatch.setenv('FAKE_LAB_FAIL', 'step:rooms_watermaze')
  envs = make(_ROOM, training=False)
  with pytest.raises(py_process.EnvironmentFailed, match='at step 50\n'):
    list(contract.step_all(envs, 100))
  envs.close()
  assert capfd.readouterr().err == ''


@_WITH_FAKE_LAB
def test_different_levels_share_a_run():
  envs = make('rooms_watermaze', _MAZE, 'lab:seekavoid_arena_01', num_envs=3)
  envs.close()
  with pytest.raises(ValueError, match='cannot share'):
    make('rooms_watermaze', 'pong', num_envs=2)


@_WITH_FAKE_LAB
def test_unknown_level():
  with pytest.raises(ValueError, match='no level lab:watermaze') as caught:
    make('lab:watermaze')
  assert '\n' not in str(caught.value)


@pytest.mark.skipif(_HAS_REAL_LAB, reason='DeepMind Lab is installed')
def test_missing_package():
  # Not of the pictures, which are missing too: first things first.
  with pytest.raises(ValueError) as caught:
    make(_ROOM, _PICTURES, num_envs=2)
  assert str(caught.value) == (
    f'{_ROOM} needs the Python package of DeepMind Lab, which is not '
    f'installed: docs/dmlab30.md says how to get it.'
  )


def test_package_without_its_libraries(monkeypatch, tmp_path):
  (tmp_path / 'deepmind_lab.py').write_text(
    'raise ImportError("libOSMesa.so.8: no such file")'
  )
  monkeypatch.syspath_prepend(tmp_path)
  with pytest.raises(py_process.EnvironmentFailed, match='libOSMesa'):
    make(_ROOM, num_envs=2)


def test_all_episodes_are_seeded(make_one, monkeypatch, fake_lab):
  seeds = []
  real = fake_lab.Lab

  class Recorder:
    def __init__(self, *args, **kwargs):
      self._lab = real(*args, **kwargs)

    def __getattr__(self, name):
      return getattr(self._lab, name)

    def reset(self, seed):
      seeds.append(seed)
      self._lab.reset(seed=seed)

  monkeypatch.setattr(fake_lab, 'Lab', Recorder)

  def episode_seeds(seed, num_restarts=0):
    seeds.clear()
    env = make_one(seed=seed, num_restarts=num_restarts)
    for _ in range(5):
      env.reset()
    return list(seeds)

  first = episode_seeds(1)
  assert all(type(seed) is int and 0 <= seed < 2**31 for seed in first)
  assert len(set(first)) == 5
  assert episode_seeds(1) == first
  assert not set(episode_seeds(2)) & set(first)
  assert not set(episode_seeds(1, num_restarts=1)) & set(first)


@_WITH_FAKE_LAB
def test_level_cache(tmp_path, capfd):
  folder = tmp_path / 'maps'

  def play():
    envs = make(_MAZE, _LANGUAGE, num_envs=2, level_cache_dir=str(folder))
    assert envs.settings()['level_cache'] == str(folder)
    frames = [[], []]
    for env_id, row in contract.step_all(envs, 10_000, action=0):
      frames[env_id].append(row.observation.frame)
      if min(map(len, frames)) >= 5:
        break
    envs.close()
    return [np.stack(f[:5]) for f in frames]

  first = play()
  maps = list(folder.iterdir())
  assert len(maps) >= 2
  assert capfd.readouterr().err == ''
  np.testing.assert_array_equal(play(), first)  # From the cache.
  for path in maps:
    os.truncate(path, 20)
  np.testing.assert_array_equal(play(), first)
  assert 'Warning: ignored the map' in capfd.readouterr().err
  assert sum(map(zipfile.is_zipfile, maps)) >= 2  # Those of the first episodes.


@_WITH_FAKE_LAB
def test_spec_without_a_process(monkeypatch, tmp_path):
  settings = lab.LabSettings(
    width=32, height=24, dataset_path='dummy', level_cache_dir=str(tmp_path)
  )
  level_names = ['rooms_watermaze', _PICTURES]
  envs = contract.make(*level_names, num_envs=2, lab_settings=settings)
  envs.close()
  monkeypatch.setattr(py_process, 'EnvironmentProcesses', None)
  found = make_lib.find_spec(level_names, lab_settings=settings)
  assert found == (envs.spec, envs.settings())
  assert found[1]['width'] == '32'
  assert 'mixerSeed' not in found[1]
  # What needs no process to be noticed is.
  with pytest.raises(errors.SettingError, match='--dataset_path'):
    make_lib.find_spec(level_names)
  with pytest.raises(errors.SettingError, match='cannot share'):
    make_lib.find_spec(['rooms_watermaze', 'pong'])


@pytest.mark.skipif(_HAS_REAL_LAB, reason='DeepMind Lab is installed')
def test_spec_needs_the_package():
  with pytest.raises(errors.SettingError, match='which is not installed'):
    make_lib.find_spec(['lab:seekavoid_arena_01'])


@pytest.mark.parametrize(
  ('name', 'value'),
  [
    ('width', 70),
    ('height', 0),
    ('frames_per_step', 0),
    ('renderer', 'opengl'),
  ],
)
def test_refuses_settings(name, value):
  with pytest.raises(ValueError, match=name) as caught:
    lab.LabSettings(**{name: value})
  assert str(value) in str(caught.value)
  assert '\n' not in str(caught.value)


@_WITH_FAKE_LAB
@pytest.mark.parametrize('level_name', [_MAZE, _PICTURES])
def test_maps_are_not_described_on_stdout(level_name, capfd):
  envs = make(level_name, dataset_path='dummy')
  list(contract.step_all(envs, 5))
  envs.close()
  assert capfd.readouterr() == ('', '')


@_WITH_FAKE_LAB
def test_a_missing_zip_is_named_before_the_start(monkeypatch, capfd):
  monkeypatch.setenv('PATH', '')
  lab.check_levels([_MAZE, _ROOM], None)
  (line,) = capfd.readouterr().err.splitlines()
  assert line.startswith('Warning: the program zip is missing')


@_WITH_FAKE_LAB
def test_episodes_share_maps_where_there_is_a_cache(monkeypatch, tmp_path):
  monkeypatch.setenv('FAKE_LAB_EPISODE_FRAMES', '8')

  def count_maps(**settings):
    envs = make(
      _MAZE, 'skymaze_irreversible_path_hard', num_envs=4,
      level_cache_dir=str(tmp_path / 'cache'), **settings,
    )  # fmt: skip
    assert len(contract.finished(contract.step_all(envs, 200))) > 60
    envs.close()
    return len(list((tmp_path / 'cache').iterdir()))

  # Of two levels, over all environments.
  assert count_maps(num_maps_per_level=2) == 4
  assert count_maps() > 60


@_WITH_FAKE_LAB
def test_a_cache_that_cannot_be_written_is_told_once(
  monkeypatch, tmp_path, capfd
):
  monkeypatch.setenv('FAKE_LAB_EPISODE_FRAMES', '8')
  (tmp_path / 'file').touch()
  envs = make(
    _MAZE, num_envs=3, level_cache_dir=str(tmp_path / 'file' / 'cache')
  )
  list(contract.step_all(envs, 60))
  envs.close()
  (line,) = capfd.readouterr().err.splitlines()
  assert '--level_cache_dir' in line and 'new maps are not kept' in line


@_WITH_FAKE_LAB
def test_compilers_end_with_their_levels(monkeypatch):
  monkeypatch.setenv('FAKE_LAB_RESET_SECS', '0.4321')

  def compilers():
    paths = pathlib.Path('/proc').glob('[0-9]*/cmdline')
    return [p for p in paths if b'sleep\x0030.4321' in _read(p)]

  def _read(path):
    with contextlib.suppress(OSError):
      return path.read_bytes()
    return b''

  envs = make(_MAZE, num_envs=2)
  list(contract.step_all(envs, 4))
  assert compilers()
  envs.close()
  assert not compilers()


@_WITH_FAKE_LAB
def test_signals_do_not_break_a_compile(monkeypatch):
  """Of those that the caller handles, none has a handler in the processes."""
  monkeypatch.setenv('FAKE_LAB_RESET_SECS', '2')
  envs = make(_MAZE)
  time.sleep(1)
  supervisor = envs._processes._supervisor.pid
  children = f'/proc/{supervisor}/task/{supervisor}/children'
  (process_id,) = map(int, pathlib.Path(children).read_text().split())
  for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD):
    os.kill(process_id, number)
  assert len(list(contract.step_all(envs, 3))) == 3
  envs.close()


@_WITH_FAKE_LAB
def test_a_missing_library_is_named(monkeypatch):
  monkeypatch.setenv('FAKE_LAB_FAIL', 'library:rooms_watermaze')
  with pytest.raises(py_process.EnvironmentFailed, match='libSDL2') as caught:
    make(_ROOM, num_envs=2)
  assert str(caught.value).splitlines()[-1].startswith('RuntimeError: ')
