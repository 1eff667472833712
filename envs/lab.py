"""Levels of DeepMind Lab, each in its own process.

Lab's renderer crashes in a process that has loaded TensorFlow: nothing here,
nor what is imported from here, may import it.
"""

from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import functools
import importlib.util
import os
import random
import shutil
from typing import Any

import numpy as np

import environments
from envs import in_processes
from envs import instructions
from envs import level_cache
import levels
import py_process
import py_process_worker
from runtime import console
from runtime import errors
from runtime import run_folder

# The paper's actions (table D.2), as Lab's numbers: look right and look up in
# pixels per frame, strafe right, move forward, fire, jump, crouch.
ACTIONS = {
  'forward': (0, 0, 0, 1, 0, 0, 0),
  'backward': (0, 0, 0, -1, 0, 0, 0),
  'strafe left': (0, 0, -1, 0, 0, 0, 0),
  'strafe right': (0, 0, 1, 0, 0, 0, 0),
  'look left': (-20, 0, 0, 0, 0, 0, 0),
  'look right': (20, 0, 0, 0, 0, 0, 0),
  'forward and look left': (-20, 0, 0, 1, 0, 0, 0),
  'forward and look right': (20, 0, 0, 1, 0, 0, 0),
  'fire': (0, 0, 0, 0, 1, 0, 0),
}
# One array each: Lab silently misreads an array that is not contiguous.
_ACTIONS = [np.array(action, np.intc) for action in ACTIONS.values()]

# Mixed into the seeds in evaluation, as in the released code: mazes and objects
# are not those of training.
_TEST_MIXER_SEED = 0x600D5EED

_PICTURE_LEVELS = (
  'psychlab_arbitrary_visuomotor_mapping',
  'psychlab_continuous_recognition',
)
# What Lab takes in place of a folder, to show plain colours.
_NO_PICTURES = 'dummy'
_FIRST_PICTURE = '0001.png'
_NUM_SEEDS = 2**31


@dataclasses.dataclass(frozen=True)
class LabSettings:
  """How levels are played; the defaults are the paper's (table D.3).

  Attributes:
    width: of a frame, pixels.
    height: of a frame, pixels.
    frames_per_step: frames for which an action is repeated.
    renderer: 'software', or 'hardware' for a GPU and what it needs.
    dataset_path: the folder of the pictures that some levels show, or 'dummy'
      for plain colours instead.
    level_cache_dir: the folder of a cache of compiled maps, see level_cache;
      None for no cache.
    num_maps_per_level: with a cache, how many maps a level has: each episode
      takes one of them. Without, each episode has a map of its own.
    keeps_new_maps: whether new maps are written to the cache.
  """

  width: int = 96
  height: int = 72
  frames_per_step: int = 4
  renderer: str = 'software'
  dataset_path: str | None = None
  level_cache_dir: str | None = None
  num_maps_per_level: int = 1000
  keeps_new_maps: bool = True

  def __post_init__(self):
    for name in ('width', 'height'):
      size = getattr(self, name)
      if size < 4 or size % 4:
        raise errors.SettingError(
          f'{name} must be a positive multiple of 4 in DeepMind Lab, got '
          f'{size}.'
        )
    if self.frames_per_step < 1:
      raise errors.SettingError(
        f'frames_per_step must be at least 1, got {self.frames_per_step}.'
      )
    if self.num_maps_per_level < 1:
      raise errors.SettingError(
        f'num_maps_per_level must be at least 1, got {self.num_maps_per_level}.'
      )
    if self.renderer not in ('software', 'hardware'):
      raise errors.SettingError(
        f'renderer must be software or hardware, got {self.renderer!r}.'
      )


class LabEnvironments(in_processes.ProcessEnvironments):
  """Levels of DeepMind Lab; none waits for another's reset or new map."""

  def __init__(
    self,
    level_names: Sequence[str],
    num_envs: int,
    seed: int | Sequence[int],
    *,
    training: bool,
    max_batch: int | None = None,
    max_restarts: int = 0,
    settings: LabSettings | None = None,
  ):
    """Makes all environments at once; does not wait for their first resets.

    Args:
      level_names: 'lab:<path>', such as 'lab:seekavoid_arena_01', or the bare
        name of a level of DMLab-30.
      num_envs: see Environments.
      seed: see Environments.
      training: whether the agent learns from them. If not, held-out levels can
        be played, and seeds are mixed with that of evaluation.
      max_batch: see Environments.
      max_restarts: see py_process.EnvironmentProcesses.
      settings: how levels are played; None for the paper's.

    Raises:
      errors.SettingError: a level is unknown or cannot be played with these
        settings, or DeepMind Lab is not installed.
      py_process.EnvironmentFailed: an environment could not be made.
    """
    self._settings = settings or LabSettings()
    self._training = training
    check_levels(level_names, self._settings.dataset_path)
    make_environment = functools.partial(
      LabEnvironment,
      training=training,
      settings=_check_cache(_with_absolute_paths(self._settings)),
    )
    super().__init__(
      make_environment, level_names, num_envs, seed, max_batch, max_restarts
    )

  def settings(self) -> dict[str, Any]:
    """Returns the settings of Lab; see Environments."""
    return _describe_settings(self._training, self._settings)


class LabEnvironment:
  """One level as `py_process` runs it, in its own process."""

  def __init__(
    self,
    level_name: str,
    seed: int,
    num_restarts: int = 0,
    *,
    training: bool,
    settings: LabSettings,
  ):
    """Makes the environment.

    Args:
      level_name: see LabEnvironments.
      seed: what the seeds of all its episodes are drawn from.
      num_restarts: added to the seed, so that what failed is not repeated.
      training: see LabEnvironments.
      settings: how it is played.

    Raises:
      py_process_worker.UnusableLevelError: the level does not exist.
    """
    self.spec = _make_spec(settings)
    self._random = random.Random(seed + num_restarts)
    self._num_maps = settings.num_maps_per_level
    if not settings.level_cache_dir:
      self._num_maps = _NUM_SEEDS
    self._observation = None
    self._lab = _make_lab(level_name, training, settings)

  def reset(self) -> Sequence[np.ndarray]:
    """Starts an episode, which can take a minute; see level_cache.

    Returns:
      The frame, uint8 [H, W, 3], and the instruction, int16
      [instructions.MAX_WORDS].
    """
    # Each seed is another map. Lab takes no NumPy int.
    self._lab.reset(seed=self._random.randrange(self._num_maps))
    self._observation = self._observe()
    return self._observation

  def step(self, action: int) -> tuple[Sequence[np.ndarray], float, bool, bool]:
    """Repeats an action; an episode's end repeats the observation before it.

    Lab's time limits count as ends: it shows nothing after them.
    """
    reward = self._lab.step(
      _ACTIONS[action], num_steps=self.spec.frames_per_step
    )
    running = self._lab.is_running()
    if running:  # Lab has no observation after the end.
      self._observation = self._observe()
    return self._observation, reward, not running, False

  def _observe(self) -> Sequence[np.ndarray]:
    values = self._lab.observations()
    return (
      values['RGB_INTERLEAVED'],
      instructions.hash_words(values['INSTR']),
    )

  def close(self) -> None:
    """Closes the level; no method may be called after it."""
    self._lab.close()


def replay(
  level_name: str,
  seed: int,
  actions: Sequence[int],
  settings: LabSettings | None = None,
) -> Iterator[tuple[np.ndarray, float, bool]]:
  """Plays the first episode of an evaluation's environment again.

  Args:
    level_name: see LabEnvironments.
    seed: the environment's own, see Environments.seeds.
    actions: of the episode, from its first on.
    settings: how it was played; None for the paper's.

  Yields:
    For each action, the frame before it, uint8 [H, W, 3]; its reward; and
    whether it ended the episode.
  """
  make_environment = functools.partial(
    LabEnvironment,
    level_name,
    seed,
    training=False,
    settings=_with_absolute_paths(settings or LabSettings()),
  )
  processes = py_process.EnvironmentProcesses([make_environment], [level_name])
  with contextlib.closing(processes):
    (spec,) = processes.find_specs()
    arrays = processes.start_episodes(spec.observation_arrays)
    env_ids = processes.recv(1)
    for action in actions:
      frame = arrays.observation[0][0].copy()
      processes.send(np.array([action]), env_ids)
      processes.recv(1)
      yield frame, float(arrays.rewards[0]), bool(arrays.dones[0])


def check_levels(level_names: Sequence[str], dataset_path: str | None) -> None:
  """Checks that DeepMind Lab and the pictures that it shows are there.

  Lab itself fails without its pictures only at the level's first reset.

  Args:
    level_names: see LabEnvironments; levels of other families are ignored.
    dataset_path: see LabSettings.

  Raises:
    errors.SettingError: something is missing.
  """
  names = [n for n in level_names if levels.find_family(n) == 'lab']
  # Not imported: only the environments' processes may do that.
  if names and importlib.util.find_spec('deepmind_lab') is None:
    raise errors.SettingError(
      f'{names[0]} needs the Python package of DeepMind Lab, which is not '
      f'installed: docs/dmlab30.md says how to get it.'
    )
  if names and shutil.which('zip') is None:
    console.warn(
      'the program zip is missing: without it, DeepMind Lab cannot compile '
      'maps, and does not say why (apt install zip).'
    )
  path = dataset_path or ''
  pictured = [n for n in names if n.rsplit('/', 1)[-1] in _PICTURE_LEVELS]
  if not pictured or path == _NO_PICTURES:
    return
  if not path or not os.path.exists(os.path.join(path, _FIRST_PICTURE)):
    raise errors.SettingError(
      f'Pictures are missing for {" and ".join(pictured)}: set --dataset_path '
      f'to the folder of those by Brady et al. (2008), with {_FIRST_PICTURE} '
      f'in it, or to {_NO_PICTURES} for plain colours; it is {path!r}.'
    )


def find_spec(
  level_names: Sequence[str], settings: LabSettings | None = None
) -> tuple[environments.EnvironmentSpec, dict[str, Any]]:
  """Returns the spec and `settings()` of training environments.

  Starts no Lab, so levels that Lab does not have are not noticed.

  Args:
    level_names: see LabEnvironments.
    settings: see LabEnvironments.

  Raises:
    errors.SettingError: see check_levels.
  """
  settings = settings or LabSettings()
  check_levels(level_names, settings.dataset_path)
  return _make_spec(settings), _describe_settings(
    training=True, settings=settings
  )


def _with_absolute_paths(settings: LabSettings) -> LabSettings:
  """Returns the settings for a process with another working folder."""
  changes = {}
  if settings.level_cache_dir:
    changes['level_cache_dir'] = os.path.abspath(settings.level_cache_dir)
  if settings.dataset_path and settings.dataset_path != _NO_PICTURES:
    changes['dataset_path'] = os.path.abspath(settings.dataset_path)
  return dataclasses.replace(settings, **changes)


def _check_cache(settings: LabSettings) -> LabSettings:
  """Warns, once for all environments, if the cache cannot be written to."""
  if not settings.level_cache_dir:
    return settings
  try:
    run_folder.make_folder(settings.level_cache_dir, 'level_cache_dir')
  except run_folder.RunFolderError as error:
    console.warn(f'{error}: new maps are not kept.')
    return dataclasses.replace(settings, keeps_new_maps=False)
  return settings


def _make_spec(settings: LabSettings) -> environments.EnvironmentSpec:
  return environments.EnvironmentSpec(
    frame_shape=(settings.height, settings.width, 3),
    frame_dtype=np.dtype(np.uint8),
    num_actions=len(ACTIONS),
    frames_per_step=settings.frames_per_step,
    stack=1,
    action_meanings=tuple(ACTIONS),
    has_instruction=True,
  )


def _describe_settings(training: bool, settings: LabSettings) -> dict[str, Any]:
  """Returns what Lab's constructor gets, by name."""
  about = {'renderer': settings.renderer} | _make_config(training, settings)
  if settings.level_cache_dir:
    about['level_cache'] = settings.level_cache_dir
    about['num_maps_per_level'] = settings.num_maps_per_level
  return about


def _make_config(training: bool, settings: LabSettings) -> dict[str, str]:
  """Returns the level's settings; Lab takes strings only."""
  config = {
    'width': str(settings.width),
    'height': str(settings.height),
    # Below it, mazes and psychlab print pages about each map.
    'logLevel': 'WARN',
  }
  if settings.dataset_path:
    config['datasetPath'] = settings.dataset_path
  if not training:
    config['allowHoldOutLevels'] = 'true'
    config['mixerSeed'] = str(_TEST_MIXER_SEED)
  return config


def _make_lab(level_name: str, training: bool, settings: LabSettings) -> Any:
  """Returns a deepmind_lab.Lab."""
  import deepmind_lab  # Not on PyPI: needed only to play its levels.

  cache = None
  if settings.level_cache_dir:
    cache = level_cache.LevelCache(
      settings.level_cache_dir, settings.keeps_new_maps
    )
  try:
    return deepmind_lab.Lab(
      levels.lab_path(level_name),
      ['RGB_INTERLEAVED', 'INSTR'],
      config=_make_config(training, settings),
      renderer=settings.renderer,
      level_cache=cache,
    )
  except RuntimeError as error:
    if 'Level not found' not in str(error):
      raise
    raise py_process_worker.UnusableLevelError(
      f'DeepMind Lab has no level {level_name}: the path is relative to '
      f'game_scripts/levels in Lab, without .lua.'
    ) from error
