"""Tests of the stand-in for DeepMind Lab: one for each of its traps."""

import importlib
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import zipfile

import numpy as np
import pytest

_FOLDER = str(pathlib.Path(__file__).parent / 'fake_lab')
_MAZE = 'contributed/dmlab30/explore_goal_locations_small'
_ROOM = 'contributed/dmlab30/rooms_watermaze'
_LANGUAGE = 'contributed/dmlab30/language_select_described_object'
_PICTURES = 'contributed/dmlab30/psychlab_continuous_recognition'
_HOLD_OUT = 'contributed/dmlab30/rooms_collect_good_objects_test'
_FORWARD = np.array([0, 0, 0, 1, 0, 0, 0], np.intc)


@pytest.fixture(autouse=True)
def scratch(monkeypatch, tmp_path):
  """Takes what Labs leave behind."""
  monkeypatch.setenv('TMPDIR', str(tmp_path))


@pytest.fixture
def lab(monkeypatch):
  """Makes Labs, in a process that seems to have no TensorFlow."""
  monkeypatch.syspath_prepend(_FOLDER)
  monkeypatch.delitem(sys.modules, 'tensorflow', raising=False)
  monkeypatch.delitem(sys.modules, 'deepmind_lab', raising=False)
  module = importlib.import_module('deepmind_lab')

  def make(level=_ROOM, observations=('RGB_INTERLEAVED', 'INSTR'), **kwargs):
    kwargs.setdefault('config', {'width': '96', 'height': '72'})
    return module.Lab(level, list(observations), **kwargs)

  make.module = module
  yield make
  sys.modules.pop('deepmind_lab', None)


class Cache:
  """A level cache that notes its calls and does what it is told."""

  def __init__(self, fetch=lambda key, path: False, write=lambda key, path: 0):
    self.calls = []
    self._fetch, self._write = fetch, write

  def fetch(self, key, path):
    self.calls.append(('fetch', key))
    return self._fetch(key, path)

  def write(self, key, path):
    self.calls.append(('write', key))
    self._write(key, path)


def end_of(code, before=''):
  """Returns how a process ends that does this before and after making a Lab."""
  code = f"""
import sys, deepmind_lab
{before}
lab = deepmind_lab.Lab({_MAZE!r}, ['INSTR'])
{code}
"""
  return subprocess.run(
    [sys.executable, '-c', code], env=os.environ | {'PYTHONPATH': _FOLDER}
  ).returncode


def play(lab, num_steps, action=_FORWARD):
  """Resets and returns a frame before each step."""
  lab.reset(seed=1)
  frames = []
  for _ in range(num_steps):
    frames.append(lab.observations()['RGB_INTERLEAVED'])
    lab.step(action, num_steps=4)
  return np.stack(frames)


def test_observations_and_rewards(lab):
  env = lab()
  env.reset(seed=1)
  observations = env.observations()
  frame = observations['RGB_INTERLEAVED']
  assert (frame.shape, frame.dtype) == ((72, 96, 3), np.uint8)
  assert observations['INSTR'] == ''
  frame[:] = 0  # The caller's own.
  assert env.observations()['RGB_INTERLEAVED'].any()
  reward = env.step(_FORWARD, num_steps=4)
  assert (reward, type(reward)) == (1.0, float)
  assert env.step(-_FORWARD, num_steps=4) == -1.0
  shown = env.observations()['RGB_INTERLEAVED'].reshape(-1)[:7]
  np.testing.assert_array_equal(shown, [0, 0, 0, 255, 0, 0, 0])
  env.close()


@pytest.mark.parametrize(
  'kwargs',
  [
    {'config': None},
    {'renderer': None},
    {'config': {'width': 96}},
  ],
)
def test_wrong_types(lab, kwargs):
  with pytest.raises(TypeError):
    lab(**kwargs)


def test_observations_must_be_a_known_list(lab):
  with pytest.raises(TypeError):
    lab.module.Lab(_ROOM, ('INSTR',))
  with pytest.raises(ValueError, match='DEPTH'):
    lab(observations=['DEPTH'])


@pytest.mark.parametrize('size', ['0', '-4', '70'])
def test_size_must_be_a_positive_multiple_of_4(lab, size):
  with pytest.raises(RuntimeError, match='multiples of 4'):
    lab(config={'width': size, 'height': '72'})


def test_unknown_levels_and_settings(lab):
  with pytest.raises(RuntimeError, match='Failed to init .* "Level not found'):
    lab('rooms_watermaze')
  with pytest.raises(RuntimeError, match='colour'):
    lab(config={'colour': 'blue'})
  lab('demos/extra_entities', config={'colour': 'blue'}).close()
  with pytest.raises(RuntimeError, match='Invalid setting'):
    lab('seekavoid_arena_01', config={'colour': 'blue'})


def test_wrong_status(lab, monkeypatch):
  monkeypatch.setenv('FAKE_LAB_EPISODE_FRAMES', '8')
  env = lab()

  def check_refuses():
    assert not env.is_running()
    with pytest.raises(RuntimeError, match='wrong status'):
      env.observations()
    with pytest.raises(RuntimeError, match='wrong status'):
      env.step(_FORWARD, num_steps=4)

  check_refuses()
  env.reset(seed=1)
  env.step(_FORWARD, num_steps=4)
  assert env.is_running()
  env.observations()
  env.step(_FORWARD, num_steps=4)
  check_refuses()
  env.reset(seed=1)
  assert env.is_running()
  env.close()
  check_refuses()


@pytest.mark.parametrize(
  'action', [_FORWARD.astype(np.int64), _FORWARD[:6], _FORWARD[None], [0] * 7]
)
def test_wrong_actions(lab, action):
  env = lab()
  env.reset(seed=1)
  with pytest.raises(ValueError, match='action'):
    env.step(action, num_steps=4)
  env.close()


def test_strided_actions_are_misread(lab):
  columns = np.zeros([7, 9], np.intc)
  columns[3, 0] = 1
  env = lab()
  env.reset(seed=1)
  assert env.step(columns[:, 0], num_steps=4) == 0
  assert env.step(columns[:, 0].copy(), num_steps=4) == 1
  env.close()


def test_no_steps_are_accepted(lab):
  env = lab()
  env.reset(seed=1)
  env.step(_FORWARD * 1000, num_steps=0)
  env.step(_FORWARD, num_steps=-1)
  env.close()


def test_seeds(lab):
  env, other = lab(), lab()
  with pytest.raises(ValueError, match='seed'):
    env.reset(seed=np.int64(1))
  with pytest.raises(OverflowError):
    env.reset(seed=2**63)
  first = play(env, 5)
  np.testing.assert_array_equal(play(other, 5), first)
  # As a later episode, it is another one.
  assert (play(other, 5) != first).any()
  env.close()
  other.close()
  wrapped = lab()
  wrapped.reset(seed=1 + 2**32)
  np.testing.assert_array_equal(
    wrapped.observations()['RGB_INTERLEAVED'], first[0]
  )
  wrapped.close()
  mixed = lab(config={'width': '96', 'height': '72', 'mixerSeed': '7'})
  assert (play(mixed, 5) != first).any()
  mixed.close()


def test_no_python_object_as_others(lab):
  env = lab()
  with pytest.raises(TypeError, match='pickle'):
    pickle.dumps(env)
  with pytest.raises(AttributeError):
    env.name = 'x'
  assert not hasattr(env, '__exit__')
  with pytest.raises(TypeError, match='base type'):
    type('Mine', (lab.module.Lab,), {})
  env.close()


@pytest.mark.parametrize(
  ('code', 'end'),
  [
    ('lab.reset(seed=1)', 0),
    ('lab.close(); lab.reset(seed=1)', -signal.SIGSEGV),
    ('lab.close(); lab.action_spec()', -signal.SIGSEGV),
    ('lab.close(); lab.observation_spec()', -signal.SIGSEGV),
    # This is deadly only before the first Lab.
    ('sys.modules["tensorflow"] = sys; lab.reset(seed=1)', 0),
  ],
)
def test_deadly_calls(code, end):
  assert end_of(code) == end


def test_dies_beside_tensorflow():
  end = end_of('lab.reset(seed=1)', before='sys.modules["tensorflow"] = sys')
  assert end == -signal.SIGSEGV


def test_folder_stays_until_close(lab, tmp_path):
  env = lab()
  assert len(list(tmp_path.glob('dmlab_temp_folder_*'))) == 1
  env.close()
  env.close()
  assert not list(tmp_path.iterdir())


def test_pictures(lab, tmp_path):
  env = lab(_PICTURES)
  with pytest.raises(RuntimeError, match='download'):
    env.reset(seed=1)
  env.close()
  (tmp_path / '0001.png').touch()
  for path in ('dummy', str(tmp_path)):
    env = lab(_PICTURES, config={'datasetPath': path})
    env.reset(seed=1)
    env.close()


def test_hold_out_levels(lab):
  with pytest.raises(RuntimeError, match='held out'):
    lab(_HOLD_OUT)
  lab(_HOLD_OUT, config={'allowHoldOutLevels': 'true'}).close()


def test_cache_calls(lab):
  cache = Cache()
  env = lab(_MAZE, level_cache=cache)
  assert not cache.calls
  play(env, 99)
  (fetch, key), (write, same_key) = cache.calls
  assert (fetch, write, key) == ('fetch', 'write', same_key)
  assert key.startswith('explore_goal_locations_small_')
  env.close()
  # A map that never changes is not compiled.
  cache = Cache()
  env = lab(_ROOM, level_cache=cache)
  play(env, 5)
  assert not cache.calls
  env.close()


def test_language_levels_change_in_mid_episode(lab):
  cache = Cache()
  env = lab(_LANGUAGE, level_cache=cache)
  env.reset(seed=1)
  assert len(cache.calls) == 2
  texts = {env.observations()['INSTR']}
  for _ in range(99):
    env.step(_FORWARD, num_steps=4)
    texts.add(env.observations()['INSTR'])
  assert len(cache.calls) == 4
  assert '' not in texts
  env.close()


def test_maps_take_time_and_a_cache_saves_it(lab, monkeypatch):
  slept = []
  monkeypatch.setattr(lab.module, '_run_compiler', slept.append)
  monkeypatch.setenv('FAKE_LAB_RESET_SECS', '8')

  def fetch(_, path):
    with zipfile.ZipFile(path, 'w') as pk3:
      pk3.writestr('maps/level.bsp', 'walls')
    return True

  cache = Cache(fetch=fetch)
  for level_cache in (None, cache):
    env = lab(_MAZE, level_cache=level_cache)
    env.reset(seed=1)
    env.close()
  assert slept == [8, 1]
  assert [call for call, _ in cache.calls] == ['fetch']
  monkeypatch.setenv('FAKE_LAB_RESET_SECS', '2:5')
  env = lab()
  env.reset(seed=1)
  env.close()
  assert 2 <= slept[2] <= 5


def test_cache_without_a_valid_pk3():
  for body in ('pass', 'open(path, "w").write("no zip")'):
    code = f"""
class Cache:
  def fetch(self, key, path):
    {body}
    return True
lab = deepmind_lab.Lab({_MAZE!r}, ['INSTR'], level_cache=Cache())
try:
  lab.reset(seed=1)
finally:
  sys.exit(3)
"""
    assert end_of(code) == 1


def test_raising_cache(lab):
  def raise_error(key, path):
    raise OSError('The disk is full.')

  for cache, calls in (
    (Cache(fetch=raise_error), ['fetch']),
    (Cache(write=raise_error), ['fetch', 'write']),
  ):
    env = lab(_MAZE, level_cache=cache)
    with pytest.raises(OSError, match='The disk'):
      env.reset(seed=1)
    assert [call for call, _ in cache.calls] == calls
    env.close()


def test_faults_on_demand(lab, monkeypatch):
  monkeypatch.setenv('FAKE_LAB_FAIL', 'constructor:rooms_watermaze')
  with pytest.raises(RuntimeError, match='broken'):
    lab()
  lab(_MAZE).close()
  monkeypatch.setenv('FAKE_LAB_FAIL', 'step:rooms_watermaze')
  env = lab()
  with pytest.raises(RuntimeError, match='broken'):
    play(env, 100)
  env.close()
  monkeypatch.setenv('FAKE_LAB_FAIL', 'kill:explore_goal_locations_small')
  code = """
import numpy as np
lab.reset(seed=1)
while lab.is_running():
  lab.step(np.zeros([7], np.intc), num_steps=4)
"""
  assert end_of(code) == -signal.SIGKILL


def test_a_signal_with_a_handler_breaks_a_compile(lab, monkeypatch):
  monkeypatch.setenv('FAKE_LAB_RESET_SECS', '2')
  monkeypatch.setattr(lab.module.subprocess, 'Popen', lambda *_, **__: None)
  before = signal.signal(signal.SIGALRM, lambda *_: None)
  try:
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(RuntimeError, match='Failed to compile map'):
      lab(_MAZE).reset(seed=1)
  finally:
    signal.signal(signal.SIGALRM, before)


def test_maps_are_described_on_stdout(lab, capfd):
  lab(_MAZE).reset(seed=1)
  assert 'about the map' in capfd.readouterr().out
  config = {'width': '96', 'height': '72', 'logLevel': 'WARN'}
  lab(_MAZE, config=config).reset(seed=1)
  assert capfd.readouterr().out == ''
