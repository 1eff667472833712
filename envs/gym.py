"""Gymnasium environments, each in its own process."""

from collections.abc import Sequence
import contextlib
import difflib
import functools
import random

import gymnasium
import numpy as np

import environments
from envs import in_processes
from envs import instructions
import levels
import py_process
import py_process_worker


class GymEnvironments(in_processes.ProcessEnvironments):
  """Gymnasium environments that step and reset without waiting for others.

  An episode ends where the environment terminates or truncates it, and the next
  begins in the same step: no action is lost on a reset.
  """

  def __init__(
    self,
    level_names: Sequence[str],
    num_envs: int,
    seed: int | Sequence[int],
    max_batch: int | None = None,
    max_restarts: int = 0,
  ):
    """Makes all environments at once; does not wait for their first resets.

    Args:
      level_names: 'gym:<id>' or 'gym:<module>:<id>', where importing the module
        registers the id. All must have the same spaces.
      num_envs: see Environments.
      seed: see Environments.
      max_batch: see Environments.
      max_restarts: see py_process.EnvironmentProcesses.

    Raises:
      errors.SettingError: a level is unknown, or its spaces are not supported
        or differ from those of the others.
      py_process.EnvironmentFailed: an environment could not be made.
    """
    super().__init__(
      GymEnvironment, level_names, num_envs, seed, max_batch, max_restarts
    )


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
    return processes.specs[0]


class GymEnvironment:
  """One Gymnasium environment as `py_process` runs it, in its own process."""

  def __init__(self, level_name: str, seed: int, num_restarts: int = 0):
    """Makes the environment.

    Args:
      level_name: see GymEnvironments.
      seed: for the first reset, and for code that draws from the global
        generators of Python and NumPy.
      num_restarts: added to the seed, so that what failed is not repeated.

    Raises:
      py_process_worker.UnusableLevelError: it does not exist, or its spaces are
        not supported.
    """
    seed += num_restarts
    random.seed(seed)
    np.random.seed(seed)
    self._seed = seed
    gym_id = levels.gym_id(level_name)
    try:
      self._env = gymnasium.make(gym_id, disable_env_checker=True)
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
      raise py_process_worker.UnusableLevelError(
        _describe_unknown(level_name, gym_id, error)
      ) from error
    self._keys = _find_keys(self._env.observation_space)
    self.spec = _make_spec(level_name, self._env, self._keys)
    self._level_name = level_name
    self._first_action = int(self._env.action_space.start)

  def reset(self) -> Sequence[np.ndarray]:
    """Starts an episode; only the first one is seeded."""
    observation, _ = self._env.reset(seed=self._seed)
    self._seed = None
    return self._split(observation)

  def step(self, action: int) -> tuple[Sequence[np.ndarray], float, bool]:
    """Takes one step."""
    observation, reward, terminated, truncated, _ = self._env.step(
      action + self._first_action
    )
    return self._split(observation), reward, terminated or truncated

  def _split(self, observation) -> Sequence[np.ndarray]:
    """Returns the frame and, if there is one, the hashed instruction."""
    if self._keys is None:
      return (self._check(observation),)
    frame, text = (observation[key] for key in self._keys)
    return self._check(frame), instructions.hash_words(text)

  def _check(self, frame) -> np.ndarray:
    """Returns the frame; refuses one that would have to be cast or cut."""
    frame, spec = np.asarray(frame), self.spec
    fits = np.can_cast(frame.dtype, spec.frame_dtype, 'same_kind')
    if frame.shape != spec.frame_shape or not fits:
      raise ValueError(
        f'{self._level_name} shows {frame.dtype} {list(frame.shape)}, but its '
        f'observation space says {spec.frame_dtype} {list(spec.frame_shape)}.'
      )
    return frame

  def close(self) -> None:
    """Closes the environment."""
    self._env.close()


def _describe_unknown(level_name: str, gym_id: str, error: Exception) -> str:
  message = ' '.join(str(error).split())
  near = difflib.get_close_matches(gym_id, gymnasium.registry)
  if near and 'Did you mean' not in message:
    message += f' Did you mean {" or ".join(map(levels.gym_level, near))}?'
  return f'Cannot make {level_name}: {message}'


def _find_keys(space: gymnasium.Space) -> tuple[str, str] | None:
  """Returns the keys of frame and text in a Dict of exactly these two."""
  if not isinstance(space, gymnasium.spaces.Dict) or len(space.spaces) != 2:
    return None
  # Samples tell: MiniGrid's missions have a space of their own, not Text.
  texts = [k for k, s in space.spaces.items() if isinstance(s.sample(), str)]
  if len(texts) != 1:
    return None
  (frame,) = space.spaces.keys() - texts
  return frame, texts[0]


def _make_spec(
  level_name: str, env: gymnasium.Env, keys: tuple[str, str] | None
) -> environments.EnvironmentSpec:
  """Checks the spaces and returns their spec."""
  actions, observations = env.action_space, env.observation_space
  if keys:
    observations = observations[keys[0]]
  if not isinstance(actions, gymnasium.spaces.Discrete):
    raise py_process_worker.UnusableLevelError(
      f'{level_name} has the action space {actions}; only Discrete is '
      f'supported.'
    )
  is_box = isinstance(observations, gymnasium.spaces.Box)
  is_vector = is_box and len(observations.shape) == 1
  is_image = (
    is_box
    and len(observations.shape) in (2, 3)
    and observations.dtype == np.uint8
  )
  if not is_vector and not is_image:
    raise py_process_worker.UnusableLevelError(
      f'{level_name} has the observation space {observations}; only a '
      f'Box is supported, of a vector or an image (uint8 [H, W] or [H, W, C]), '
      f'alone or in a Dict with a Text.'
    )
  meanings = getattr(env.unwrapped, 'get_action_meanings', lambda: None)()
  return environments.EnvironmentSpec(
    frame_shape=observations.shape,
    frame_dtype=np.dtype(np.float32 if is_vector else np.uint8),
    num_actions=int(actions.n),
    frames_per_step=1,
    stack=1,
    action_meanings=tuple(meanings) if meanings else None,
    has_instruction=keys is not None,
  )
