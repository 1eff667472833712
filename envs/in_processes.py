"""Environments that are Python objects, in processes of their own."""

from collections.abc import Callable, Sequence
import functools
import math

import numpy as np

import environments
import py_process
import py_process_worker
from runtime import console
from runtime import errors

# Not far above, squares overflow float32, and with them losses and gradients.
_LARGEST_MAGNITUDE = 1e19
# After this, what is not made yet is named, and the others play.
_MAKE_SECS = 60.0


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
    envs_per_process: int = 1,
  ):
    """Makes all environments at once; does not wait for their first resets.

    If some take longer than a minute, the others play without them until they
    are made.

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
      envs_per_process: see py_process.EnvironmentProcesses.

    Raises:
      errors.SettingError: a level cannot be used, or has other observations or
        actions than the rest.
      py_process.EnvironmentFailed: an environment could not be made.
    """
    super().__init__(level_names, num_envs, seed, max_batch)
    self._first_level = None
    self._processes = py_process.EnvironmentProcesses(
      [
        functools.partial(make_environment, level_name, env_seed)
        for level_name, env_seed in zip(
          self.level_names, self.seeds, strict=True
        )
      ],
      self.level_names,
      max_restarts,
      envs_per_process,
      self._check_spec,
    )
    try:
      self._wait_for_specs()
      self._arrays = self._processes.start_episodes(
        self.spec.observation_arrays
      )
    except BaseException:
      self.close()
      raise

  def _wait_for_specs(self) -> None:
    """Waits until all environments are made, or some within the time."""
    specs = []
    while not any(specs):
      specs = self._processes.find_specs(_MAKE_SECS)
      late = [i for i, spec in enumerate(specs) if spec is None]
      if late:
        console.warn(
          f'{self.level_names[late[0]]}: environment {late[0]} is not made '
          f'after {_MAKE_SECS:g} s ({len(late)} of {len(specs)} are not). '
          f'{"The others play." if any(specs) else "Still waiting."}'
        )

  def _check_spec(
    self, env_id: int, spec: environments.EnvironmentSpec
  ) -> None:
    """Keeps the first spec, and checks that all others are equal."""
    level_name = self.level_names[env_id]
    if self._first_level is None:
      self.spec, self._first_level = spec, level_name
    if spec != self.spec:
      raise errors.SettingError(
        f'Levels of one run must have the same observations and actions: '
        f'{self._first_level} has {_describe(self.spec)}, {level_name} has '
        f'{_describe(spec)}.'
      )

  def recv(
    self, timeout_secs: float | None = None
  ) -> tuple[np.ndarray, environments.StepOutput]:
    """Waits for environments that are ready; see Environments."""
    env_ids = self._processes.recv(self.max_batch, timeout_secs)
    arrays = self._arrays
    rewards, steps = arrays.rewards[env_ids], arrays.steps[env_ids]
    done, truncated = arrays.dones[env_ids], arrays.cuts[env_ids]
    parts = [part[env_ids] for part in arrays.observation]
    info = environments.StepOutputInfo(
      arrays.returns[env_ids], steps, done | truncated, truncated
    )
    self._check_values(env_ids, info, rewards, parts)
    # An output without a step is an environment's very first one, or as if.
    return env_ids, environments.StepOutput(
      rewards, info, done | (steps == 0), self.spec.to_observation(parts)
    )

  def _check_values(
    self,
    env_ids: np.ndarray,
    info: environments.StepOutputInfo,
    rewards: np.ndarray,
    parts: Sequence[np.ndarray],
  ) -> None:
    """Raises EnvironmentFailed for what would make losses or gradients NaN."""
    checked = [('reward', rewards)]
    checked += [('observation', p) for p in parts if p.dtype == np.float32]
    for name, array in checked:
      usable = np.abs(array) <= _LARGEST_MAGNITUDE  # False for NaN too.
      if usable.all():
        continue
      values = array.reshape(len(array), math.prod(array.shape[1:]))
      usable = usable.reshape(values.shape).all(axis=1)
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
  text = f' with {spec.vector_size} numbers' if spec.vector_size else ''
  if spec.has_instruction:
    text += ' and text' if text else ' with text'
  return (
    f'{spec.frame_dtype} {list(spec.frame_shape)}{text} and '
    f'{spec.num_actions} actions'
  )
