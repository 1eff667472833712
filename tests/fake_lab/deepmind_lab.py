"""A stand-in for the package of DeepMind Lab: its calls and traps, no game.

DeepMind Lab has to be built, so the tests do without it: those that want a Lab
put this folder on the path. What the stand-in does was seen on the real one.

Every frame shows a colour that depends on level, seed and frame, and in its
first 7 numbers the last action. A move forward earns 1 and one backward -1.

Environment variables:
  FAKE_LAB_EPISODE_FRAMES: how long an episode is, 400 frames if not set.
  FAKE_LAB_RESET_SECS: how long a map compiles, such as 3, or 0:5 for a uniform
    draw; an eighth of it if the map comes from a cache. 0 if not set. A
    compiler is a process of its own, and outlives the Lab.
  FAKE_LAB_FAIL: <when>:<level>, with the last part of the level's name. The
    level raises in its 'constructor', or in mid-episode raises in a 'step' or
    is killed ('kill'). 'library' means that a library is missing.
"""

import ctypes
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile

import numpy as np

_PICTURE_LEVELS = {
  'psychlab_arbitrary_visuomotor_mapping',
  'psychlab_continuous_recognition',
}
_HOLD_OUT_LEVELS = {
  'rooms_collect_good_objects_test',
  'rooms_exploit_deferred_effects_test',
}
_DMLAB30 = _PICTURE_LEVELS | _HOLD_OUT_LEVELS
_DMLAB30 |= set(
  """
  explore_goal_locations_large explore_goal_locations_small
  explore_object_locations_large explore_object_locations_small
  explore_object_rewards_few explore_object_rewards_many
  explore_obstructed_goals_large explore_obstructed_goals_small
  language_answer_quantitative_question language_execute_random_task
  language_select_described_object language_select_located_object
  lasertag_one_opponent_large lasertag_one_opponent_small
  lasertag_three_opponents_large lasertag_three_opponents_small
  natlab_fixed_large_map natlab_varying_map_randomized
  natlab_varying_map_regrowth psychlab_sequential_comparison
  psychlab_visual_search rooms_collect_good_objects_train
  rooms_exploit_deferred_effects_train rooms_keys_doors_puzzle
  rooms_select_nonmatching_object rooms_watermaze
  skymaze_irreversible_path_hard skymaze_irreversible_path_varied
  """.split()
)
_LEVELS = {f'contributed/dmlab30/{name}' for name in _DMLAB30}
_LEVELS |= {'seekavoid_arena_01'}
_DEMOS = {'demos/extra_entities'}  # Only these take any setting.
_SETTINGS = {
  'width',
  'height',
  'datasetPath',
  'allowHoldOutLevels',
  'mixerSeed',
  'logLevel',
}
_NO_SETTINGS = {}
_INSTRUCTIONS = ['Go to the red ball.', 'Pick the green hat!', 'How many cars?']
_MOVE_BACK_FORWARD = 3


_CACHED = ('explore_', 'language_', 'lasertag_', 'rooms_keys_doors', 'skymaze_')


def _is_talkative(name):
  return name.startswith(('explore_', 'psychlab_', 'rooms_', 'skymaze_'))


def _run_compiler(secs):
  # It outlives whoever started it.
  subprocess.Popen(['sleep', str(secs + 30)], stdin=subprocess.DEVNULL)
  end = time.monotonic() + secs
  while (left := end - time.monotonic()) > 0:
    # A call that a signal with a handler interrupts, unlike time.sleep.
    if ctypes.CDLL(None, use_errno=True).usleep(int(min(left, 0.9) * 1e6)):
      raise RuntimeError('Failed to compile map')


def _die_of_segmentation_fault():
  os.kill(os.getpid(), signal.SIGSEGV)
  time.sleep(60)  # Until the signal has arrived.


class Lab:
  """One environment."""

  __slots__ = (
    *('_name', '_renders', '_config', '_cache', '_folder', '_status'),
    *(
      '_episode',
      '_seed',
      '_random',
      '_colour',
      '_instruction',
      '_frame',
      '_action',
    ),
  )
  _tensorflow_was_first = None

  def __init_subclass__(cls):
    raise TypeError("type 'deepmind_lab.Lab' is not an acceptable base type")

  def __reduce_ex__(self, protocol):
    raise TypeError("cannot pickle 'deepmind_lab.Lab' object")

  def __init__(
    self,
    level,
    observations,
    config=_NO_SETTINGS,
    renderer='software',
    level_cache=None,
  ):
    if type(self)._tensorflow_was_first is None:
      type(self)._tensorflow_was_first = 'tensorflow' in sys.modules
    _check_types(observations, config, renderer)
    self._name = level.rsplit('/', 1)[-1]
    _check_level(level, self._name, config)
    if _fails('library', self._name):
      raise RuntimeError('Failed to load libSDL2-2.0.so.0')
    if _fails('constructor', self._name):
      raise RuntimeError('Failed to init environment - "The level is broken."')
    self._renders = list(observations)
    self._config = {'width': '320', 'height': '240'} | config
    self._cache = level_cache
    # The real one looks for the variable by itself too.
    self._folder = tempfile.mkdtemp(
      prefix='dmlab_temp_folder_', dir=os.environ.get('TMPDIR', '/tmp')
    )
    self._status = 'new'
    self._episode = 0

  def reset(self, seed=None):
    if self._status == 'closed' or self._tensorflow_was_first:
      _die_of_segmentation_fault()
    seed = random.getrandbits(32) if seed is None else _wrap_seed(seed)
    if self._name in _PICTURE_LEVELS and not _has_pictures(self._config):
      raise RuntimeError('Failed to start: follow instructions to download.')
    self._random = random.Random(
      f'{self._name} {seed} {self._episode} {self._config.get("mixerSeed")}'
    )
    self._seed = seed
    self._episode += 1
    self._colour = np.array(list(self._random.randbytes(3)))
    self._make_map()
    self._frame = 0
    self._action = np.zeros([7], np.intc)
    self._status = 'running'

  def _make_map(self):
    self._instruction = ''
    if self._name.startswith('language_'):
      self._instruction = self._random.choice(_INSTRUCTIONS)
    # A map depends on the seed alone.
    text = f'{self._seed} {self._config.get("mixerSeed")}'.encode()
    secs = _draw_reset_secs()
    if self._config.get('logLevel') != 'WARN' and _is_talkative(self._name):
      os.write(1, b'...a page about the map...\n')
    # Others have one map for ever, and do not ask the cache.
    if self._name.startswith(_CACHED):
      self._compile(f'{self._name}_{hashlib.md5(text).hexdigest()}', text, secs)
    elif secs:
      _run_compiler(secs)

  def _compile(self, key, text, secs):
    path = os.path.join(self._folder, f'{key}.pk3')
    found, error = False, None
    if self._cache is not None:
      try:
        found = self._cache.fetch(key, path)
      except Exception as raised:
        error = raised
    if found and not _is_pk3(path):
      os._exit(1)
    if secs:
      _run_compiler(secs / 8 if found else secs)
    if error is not None:
      raise error
    if not found:
      with zipfile.ZipFile(path, 'w') as pk3:
        pk3.writestr('maps/level.bsp', text)
      if self._cache is not None:
        self._cache.write(key, path)

  def step(self, action, num_steps=1):
    self._check_running('step')
    if not isinstance(action, np.ndarray) or action.dtype != np.intc:
      raise ValueError('action must have dtype np.intc')
    if action.shape != (7,):
      raise ValueError('action must have shape (7,)')
    # Reads on from the first number, whatever the strides.
    self._action = np.lib.stride_tricks.as_strided(
      action, strides=(action.itemsize,)
    ).copy()
    length = int(os.environ.get('FAKE_LAB_EPISODE_FRAMES', 400))
    before, self._frame = self._frame, self._frame + max(0, num_steps)
    if before < length // 2 <= self._frame:
      self._live_through_mid_episode()
    if self._frame >= length:
      self._status = 'over'
    return float(self._action[_MOVE_BACK_FORWARD])

  def _live_through_mid_episode(self):
    if _fails('step', self._name):
      raise RuntimeError('Failed to advance environment: the level is broken.')
    if _fails('kill', self._name):
      os.kill(os.getpid(), signal.SIGKILL)
    if self._name.startswith('language_'):
      self._make_map()

  def observations(self):
    self._check_running('observations')
    width, height = int(self._config['width']), int(self._config['height'])
    frame = np.empty([height, width, 3], np.uint8)
    frame[...] = self._colour + self._frame
    frame.reshape(-1)[:7] = self._action
    values = {'RGB_INTERLEAVED': frame, 'INSTR': self._instruction}
    return {name: values[name] for name in self._renders}

  def is_running(self):
    return self._status == 'running'

  def _check_running(self, call):
    if not self.is_running():
      raise RuntimeError(f'Environment in wrong status for call to {call}()')

  def action_spec(self):
    if self._status == 'closed':
      _die_of_segmentation_fault()
    return [{'name': 'MOVE_BACK_FORWARD', 'min': -1, 'max': 1}]

  def observation_spec(self):
    if self._status == 'closed':
      _die_of_segmentation_fault()
    return [{'name': 'INSTR', 'shape': (), 'dtype': str}]

  def close(self):
    self._status = 'closed'
    shutil.rmtree(self._folder, ignore_errors=True)


def _check_types(observations, config, renderer):
  if not isinstance(observations, list):
    raise TypeError('argument 2 must be list')
  if not isinstance(config, dict) or not isinstance(renderer, str):
    raise TypeError('config must be dict and renderer str')
  if not all(isinstance(value, str) for value in config.values()):
    raise TypeError('bad argument type for built-in operation')
  for name in observations:
    if name not in ('RGB_INTERLEAVED', 'INSTR'):
      raise ValueError(f"Unknown observation '{name}'.")


def _check_level(level, name, config):
  problem = None
  if level not in _LEVELS | _DEMOS:
    problem = f"Level not found: '{level}'"
  elif level not in _DEMOS and set(config) - _SETTINGS:
    problem = f'Invalid setting: {sorted(set(config) - _SETTINGS)}'
  elif name in _HOLD_OUT_LEVELS and config.get('allowHoldOutLevels') != 'true':
    problem = 'This level is held out.'
  elif not all(_is_size(config.get(key, '4')) for key in ('width', 'height')):
    problem = 'width and height must be positive multiples of 4'
  if problem:
    raise RuntimeError(f'Failed to init environment - "{problem}"')


def _is_size(text):
  return int(text) > 0 and int(text) % 4 == 0


def _wrap_seed(seed):
  if type(seed) is not int:
    raise ValueError("'seed' must be int or long")
  if seed >= 2**63:
    raise OverflowError('Python int too large to convert to C long')
  return seed % 2**32


def _has_pictures(config):
  path = config.get('datasetPath', '')
  return path == 'dummy' or os.path.exists(os.path.join(path, '0001.png'))


def _is_pk3(path):
  try:
    with zipfile.ZipFile(path) as pk3:
      return pk3.testzip() is None
  except (OSError, zipfile.BadZipFile):
    return False


def _draw_reset_secs():
  low, _, high = os.environ.get('FAKE_LAB_RESET_SECS', '0').partition(':')
  return random.uniform(float(low), float(high or low))


def _fails(when, name):
  return os.environ.get('FAKE_LAB_FAIL') == f'{when}:{name}'
