"""Gymnasium environments, in processes of their own."""

from collections.abc import Sequence
import contextlib
import dataclasses
import difflib
import functools
import importlib
import inspect
import random
import statistics
import time
from typing import Any

import gymnasium
from gymnasium.envs import registration
import numpy as np

import environments
from envs import in_processes
from envs import spaces
import levels
import py_process
import py_process_worker

# How long a trial of each level takes, and of all of them at most.
_TRIAL_SECS = 0.05
_MAX_TRIALS_SECS = 2.0
# As many environments share a process as take a step in this time altogether;
# those with longer resets do not, because the others would wait for it.
_TURN_SECS = 0.002
_MAX_RESET_SECS = 0.05


@dataclasses.dataclass(frozen=True)
class GymSettings:
  """How Gymnasium environments are run.

  Attributes:
    envs_per_process: how many take turns in one process; None to let a trial
      decide: one if they are slow, half of them if they are fast.
    bootstrap_at_time_limit: whether an episode that the environment truncates
      ends with its last observation, see environments.StepOutputInfo, in
      training. Otherwise it ends like any other.
  """

  envs_per_process: int | None = 1
  bootstrap_at_time_limit: bool = True


class GymEnvironments(in_processes.ProcessEnvironments):
  """Gymnasium environments that step and reset without waiting for others.

  Where the environment terminates an episode, the next begins in the same step:
  no action is lost on a reset.
  """

  def __init__(
    self,
    level_names: Sequence[str],
    num_envs: int,
    seed: int | Sequence[int],
    *,
    training: bool,
    max_batch: int | None = None,
    max_restarts: int = 0,
    settings: GymSettings | None = None,
  ):
    """Makes all environments at once; does not wait for their first resets.

    Args:
      level_names: 'gym:<id>' or 'gym:<module>:<id>', where importing the module
        registers the id; perhaps with arguments, see levels.gym_arguments. All
        must have the same spaces.
      num_envs: see Environments.
      seed: see Environments.
      training: whether the agent learns from them.
      max_batch: see Environments.
      max_restarts: see py_process.EnvironmentProcesses.
      settings: how they are run; None for the defaults.

    Raises:
      errors.SettingError: a level is unknown, or its spaces are not supported
        or differ from those of the others.
      py_process.EnvironmentFailed: an environment could not be made.
    """
    settings = settings or GymSettings()
    self._envs_per_process = (
      settings.envs_per_process
      or _choose_envs_per_process(level_names, num_envs)
    )
    make_environment = functools.partial(
      GymEnvironment,
      shows_cuts=training and settings.bootstrap_at_time_limit,
    )
    super().__init__(
      make_environment,
      level_names,
      num_envs,
      seed,
      max_batch,
      max_restarts,
      self._envs_per_process,
    )

  def settings(self) -> dict[str, Any]:
    """Returns how many environments share a process."""
    return {'envs_per_process': self._envs_per_process}


def _choose_envs_per_process(level_names: Sequence[str], num_envs: int) -> int:
  """Tries the levels; returns how many environments to run in a process."""
  # At least two processes, so that one half steps while the policy works.
  most = -(-num_envs // 2)
  if most == 1:
    return 1
  make_trial = functools.partial(_Trial, tuple(dict.fromkeys(level_names)))
  trial = py_process.EnvironmentProcesses([make_trial], level_names[:1])
  with contextlib.closing(trial):
    try:
      (secs,) = trial.find_specs(_MAX_TRIALS_SECS)
    except py_process.EnvironmentFailed:
      secs = None  # It fails again soon, where this is reported.
  if secs is None:
    return 1
  step, reset = secs
  wanted = int(_TURN_SECS / step) if reset <= _MAX_RESET_SECS else 1
  wanted = max(1, min(most, wanted))
  num_processes = -(-num_envs // wanted)
  return -(-num_envs // num_processes)


class _Trial:
  """Tries levels, and reports how long their steps take as its spec."""

  def __init__(self, level_names: Sequence[str], num_restarts: int):
    del num_restarts
    times = [_time_calls(name) for name in level_names]
    self.spec = tuple(max(column) for column in zip(*times, strict=True))

  def close(self) -> None:
    """Does nothing: all environments are closed."""


def find_spec(level_name: str) -> environments.EnvironmentSpec:
  """Returns the spec of an environment, which is made for it but not reset.

  Args:
    level_name: see GymEnvironments.

  Raises:
    errors.SettingError: it does not exist, or its spaces are not supported.
    py_process.EnvironmentFailed: it could not be made.
  """
  make_environment = functools.partial(GymEnvironment, level_name, 0)
  processes = py_process.EnvironmentProcesses([make_environment], [level_name])
  with contextlib.closing(processes):
    return processes.find_specs()[0]


class GymEnvironment:
  """One Gymnasium environment as `py_process` runs it."""

  def __init__(
    self,
    level_name: str,
    seed: int,
    num_restarts: int = 0,
    shows_cuts: bool = False,
  ):
    """Makes the environment.

    Args:
      level_name: see GymEnvironments.
      seed: for the first reset, and for code that draws from the global
        generators of Python and NumPy.
      num_restarts: added to the seed, so that what failed is not repeated.
      shows_cuts: see GymSettings.bootstrap_at_time_limit.

    Raises:
      py_process_worker.UnusableLevelError: it does not exist, does not take the
        arguments, is not a Gymnasium environment, or has spaces that are not
        supported.
    """
    seed += num_restarts
    random.seed(seed)
    np.random.seed(seed)
    self._seed = seed
    self._level_name = level_name
    self._shows_cuts = shows_cuts
    self._env = make(level_name)
    try:
      self._encode = spaces.Encoder(self._env.observation_space)
    except spaces.UnsupportedSpaceError as error:
      raise py_process_worker.UnusableLevelError(
        f'{level_name} has an observation space that the agent cannot see: '
        f'{error}.'
      ) from error
    self.spec = _make_spec(level_name, self._env, self._encode)
    self._first_action = int(self._env.action_space.start)

  def reset(self) -> Sequence[np.ndarray]:
    """Starts an episode; only the first one is seeded."""
    try:
      observation, _ = self._env.reset(seed=self._seed)
    except (TypeError, ValueError) as error:
      self._refuse_old_interface(error)
      raise
    self._seed = None
    return self._see(observation)

  def step(self, action: int) -> tuple[Sequence[np.ndarray], float, bool, bool]:
    """Takes one step; see py_process_worker.EnvironmentProtocol."""
    try:
      observation, reward, terminated, truncated, _ = self._env.step(
        action + self._first_action
      )
    except (TypeError, ValueError) as error:
      self._refuse_old_interface(error)
      raise
    reward = self._to_scalar('reward', reward, float)
    is_over = self._to_scalar('terminated', terminated, bool)
    is_cut = self._to_scalar('truncated', truncated, bool) and not is_over
    if is_cut and not self._shows_cuts:
      is_over, is_cut = True, False
    return self._see(observation), reward, is_over, is_cut

  def _see(self, observation: Any) -> Sequence[np.ndarray]:
    try:
      return self._encode(observation)
    except spaces.MisfitError as error:
      raise spaces.MisfitError(f'{self._level_name} {error}.') from error

  def _to_scalar(self, name: str, value: Any, kind: type) -> float | bool:
    """Returns what an environment returned, if it is one number or bool."""
    if type(value) is kind:
      return value
    try:
      array = np.asarray(value)
    except ValueError:  # Lists of different lengths.
      array = np.array(None)
    if array.size == 1 and array.dtype.kind in 'biuf':
      number = array.item()
      if kind is float or number in (0, 1):
        return kind(number)
    wanted = 'a number' if kind is float else 'True or False'
    raise spaces.MisfitError(
      f'{self._level_name} returned {value!r:.100} of shape '
      f'{list(array.shape)} as {name}, which must be {wanted}.'
    )

  def _refuse_old_interface(self, error: Exception) -> None:
    """Raises if it is the interface of Gym before 0.26 that has failed."""
    if _is_old_interface(error):
      raise py_process_worker.UnusableLevelError(
        f'{self._level_name} has the interface of Gym before version 0.26 '
        f'({error}): its reset must take seed and options and return an '
        f'observation and a dict, and its step must return five values.'
      ) from error

  def close(self) -> None:
    """Closes the environment."""
    self._env.close()


def _time_calls(level_name: str) -> tuple[float, float]:
  """Returns the seconds that a step and a reset of an environment take.

  Another program on the same cores can delay any call: the median and the
  minimum do not count that.
  """
  steps, resets = [], []
  with contextlib.closing(GymEnvironment(level_name, seed=0)) as environment:

    def timed(secs, call, *arguments):
      start = time.perf_counter()
      result = call(*arguments)
      secs.append(time.perf_counter() - start)
      return result

    end = time.perf_counter() + _TRIAL_SECS
    is_over = True
    while time.perf_counter() < end or len(resets) < 2:
      if is_over:
        timed(resets, environment.reset)
      action = len(steps) % environment.spec.num_actions
      _, _, is_over, _ = timed(steps, environment.step, action)
      is_over |= time.perf_counter() > end
  return statistics.median(steps), min(resets)


def _is_old_interface(error: Exception) -> bool:
  """Returns whether not the user's code raised it, but its caller."""
  trace = error.__traceback__
  while trace.tb_next:
    trace = trace.tb_next
  where = trace.tb_frame.f_globals.get('__name__', '')
  return where.startswith(('gymnasium.', __name__)) and any(
    sign in str(error)
    for sign in (
      'unpack (expected 2',
      'unpack (expected 5',
      "unexpected keyword argument 'seed'",
      "unexpected keyword argument 'options'",
    )
  )


def make(level_name: str, **more_arguments: Any) -> gymnasium.Env:
  """Makes the Gymnasium environment of a level, in this process.

  Args:
    level_name: see GymEnvironments.
    **more_arguments: for the environment, besides those of the level's name.

  Raises:
    py_process_worker.UnusableLevelError: see GymEnvironment.
  """
  gym_id = levels.gym_id(level_name)
  arguments = levels.gym_arguments(level_name)
  try:
    _register(gym_id.rpartition(':')[0])
    return gymnasium.make(
      gym_id, **{'disable_env_checker': True} | arguments | more_arguments
    )
  except (gymnasium.error.Error, ModuleNotFoundError) as error:
    raise py_process_worker.UnusableLevelError(
      _describe_unknown(level_name, gym_id, error)
    ) from error
  except TypeError as error:
    text = str(error)
    if 'gymnasium.Env class' in text or 'incompatible with Gymnasium' in text:
      raise py_process_worker.UnusableLevelError(
        f'{level_name} is not a Gymnasium environment: its class does not '
        f'inherit from gymnasium.Env.'
      ) from error
    unknown = _find_unknown(gym_id, arguments)
    if not unknown:
      raise
    raise py_process_worker.UnusableLevelError(
      f'Cannot make {level_name}: {unknown}'
    ) from error


def _register(module: str) -> None:
  """Imports a module, which registers environments, or has a function for it.

  MinAtar is one of those with a function.
  """
  if module:
    register_envs = getattr(importlib.import_module(module), 'register_envs', 0)
    if callable(register_envs):
      register_envs()


def _find_unknown(gym_id: str, arguments: dict[str, Any]) -> str:
  """Returns which argument an environment does not take; '' if all are fine."""
  spec = gymnasium.registry.get(gym_id.rpartition(':')[2])
  if not arguments or spec is None:
    return ''
  creator = spec.entry_point
  if isinstance(creator, str):
    creator = registration.load_env_creator(creator)
  known = list(inspect.signature(creator).parameters)
  for name in arguments:
    if name not in known:
      return f'it takes no argument {name!r}, but {", ".join(known) or "none"}.'
  return ''


def _describe_unknown(level_name: str, gym_id: str, error: Exception) -> str:
  message = ' '.join(str(error).split())
  near = difflib.get_close_matches(gym_id, gymnasium.registry)
  if near and 'Did you mean' not in message:
    message += f' Did you mean {" or ".join(map(levels.gym_level, near))}?'
  return f'Cannot make {level_name}: {message}'


def _make_spec(
  level_name: str, env: gymnasium.Env, encoder: spaces.Encoder
) -> environments.EnvironmentSpec:
  """Checks the actions and returns the spec."""
  actions = env.action_space
  if not isinstance(actions, gymnasium.spaces.Discrete):
    raise py_process_worker.UnusableLevelError(
      f'{level_name} has the action space {actions}; only Discrete is '
      f'supported.'
    )
  meanings = getattr(env.unwrapped, 'get_action_meanings', lambda: None)()
  return environments.EnvironmentSpec(
    frame_shape=encoder.frame_shape,
    frame_dtype=encoder.frame_dtype,
    num_actions=int(actions.n),
    frames_per_step=1,
    stack=1,
    action_meanings=tuple(meanings) if meanings else None,
    has_instruction=encoder.has_instruction,
    vector_size=encoder.vector_size,
  )
