"""Environments that are Python objects, each in its own process."""

from collections.abc import Callable, Sequence
import functools

import numpy as np

import environments
import py_process
import py_process_worker
from runtime import errors

# Not far above, squares overflow float32, and with them losses and gradients.
_LARGEST_MAGNITUDE = 1e19


class ProcessEnvironments(environments.Environments):
  """Environments that step and reset without waiting for others.

  The base class of the families that have no vector environment.
  """

  def __init__(
    self,
    make_environment: Callable[
      [str, int, int], py_process_worker.EnvironmentProtocol
    ],
    level_names: Sequence[str],
    num_envs: int,
    seed: int | Sequence[int],
    max_batch: int | None = None,
    max_restarts: int = 0,
  ):
    """Makes all environments at once; does not wait for their first resets.

    Args:
      make_environment: called in the environment's process with the level's
        name, the environment's own seed and the number of restarts so far. Must
        pickle. The `spec` of each environment is an EnvironmentSpec, and all
        are equal.
      level_names: see Environments.
      num_envs: see Environments.
      seed: see Environments.
      max_batch: see Environments.
      max_restarts: see py_process.EnvironmentProcesses.

    Raises:
      errors.SettingError: a level cannot be used, or has other observations or
        actions than the rest.
      py_process.EnvironmentFailed: an environment could not be made.
    """
    super().__init__(level_names, num_envs, seed, max_batch)
    self._processes = py_process.EnvironmentProcesses(
      [
        functools.partial(make_environment, level_name, env_seed)
        for level_name, env_seed in zip(
          self.level_names, self.seeds, strict=True
        )
      ],
      self.level_names,
      max_restarts,
      self._episodes.forget,
    )
    try:
      self.spec = self._join_specs(self._processes.specs)
      self._arrays = self._processes.start_episodes(
        self.spec.observation_arrays
      )
    except BaseException:
      self.close()
      raise

  def _join_specs(
    self, specs: Sequence[environments.EnvironmentSpec]
  ) -> environments.EnvironmentSpec:
    for level_name, spec in zip(self.level_names, specs, strict=True):
      if spec != specs[0]:
        raise errors.SettingError(
          f'Levels of one run must have the same observations and actions: '
          f'{self.level_names[0]} has {_describe(specs[0])}, {level_name} has '
          f'{_describe(spec)}.'
        )
    return specs[0]

  def recv(
    self, timeout_secs: float | None = None
  ) -> tuple[np.ndarray, environments.StepOutput]:
    """Waits for environments that are ready; see Environments."""
    env_ids = self._processes.recv(self.max_batch, timeout_secs)
    rewards = self._arrays.rewards[env_ids]
    episode_done = self._arrays.dones[env_ids]
    frames, *instruction = (part[env_ids] for part in self._arrays.observation)
    info, first = self._episodes.add(env_ids, rewards, episode_done)
    self._check_values(env_ids, info, rewards, frames)
    observation = environments.Observation(frames, *instruction or [()])
    return env_ids, environments.StepOutput(
      rewards, info, episode_done | first, observation
    )

  def _check_values(
    self,
    env_ids: np.ndarray,
    info: environments.StepOutputInfo,
    rewards: np.ndarray,
    frames: np.ndarray,
  ) -> None:
    """Raises EnvironmentFailed for what would make losses or gradients NaN."""
    checked = {'reward': rewards[:, np.newaxis]}
    if frames.dtype == np.float32:
      checked['observation'] = frames
    for name, values in checked.items():
      # False for NaN too.
      usable = (np.abs(values) <= _LARGEST_MAGNITUDE).all(axis=1)
      if usable.all():
        continue
      row = np.flatnonzero(~usable)[0]
      env_id = env_ids[row]
      raise py_process.EnvironmentFailed(
        self.level_names[env_id],
        env_id,
        info.episode_step[row],
        _describe_unusable(name, values[row]),
      )

  def send(self, actions: np.ndarray, env_ids: np.ndarray) -> None:
    """Starts a step of environments; see Environments."""
    self._check_actions(actions, env_ids)
    self._processes.send(actions, env_ids)

  def close(self) -> None:
    """Ends all processes within 3 s."""
    self._processes.close()


def _describe_unusable(name: str, values: np.ndarray) -> str:
  largest = values[np.argmax(np.abs(values))]  # The first NaN, if there is one.
  what = f'the reward {largest:g}'
  if name == 'observation':
    what = f'an observation that contains {largest:g}'
  return (
    f'It gave {what}. {name.capitalize()}s must be finite and at most '
    f'{_LARGEST_MAGNITUDE:g} in magnitude, or training overflows: normalise '
    f'them in the environment.'
  )


def _describe(spec: environments.EnvironmentSpec) -> str:
  text = ' with text' if spec.has_instruction else ''
  return (
    f'{spec.frame_dtype} {list(spec.frame_shape)}{text} and '
    f'{spec.num_actions} actions'
  )
