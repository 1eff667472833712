"""Environments with faults; `gym:tests.odd_env:<id>` names them."""

import os
import tempfile
import time

import gymnasium
import numpy as np

from tests import count_env


class OddEnv(count_env.CountEnv):
  """Returns what its arguments say."""

  def __init__(self, reward=1.0, terminated=False, truncated=False, wait=0.0):
    time.sleep(wait)
    super().__init__(length=10**6)
    self._returned = reward, terminated, truncated

  def step(self, action):
    observation, *_ = super().step(action)
    return observation, *self._returned, {}


class FailingEnv(count_env.CountEnv):
  """Fails in its first step, or in a later one of its second episode."""

  def __init__(self, first=True, how='raise'):
    super().__init__(length=4)
    self._fails = first
    self._how = how

  def step(self, action):
    self._step += 1
    if self._fails and self._how == 'raise':
      raise ZeroDivisionError(f'The dice fell off at {time.monotonic()}.')
    if self._fails:
      os._exit(7)
    return super().step(action)


class OldResetEnv(count_env.CountEnv):
  """Has the reset of Gym before 0.26."""

  def reset(self):
    return np.float32([0])


class OldReturnEnv(count_env.CountEnv):
  """Returns no info from its reset, as in Gym before 0.26."""

  def reset(self, *, seed=None, options=None):
    return super().reset(seed=seed, options=options)[0]


class OldStepEnv(count_env.CountEnv):
  """Returns four values from its step, as in Gym before 0.26."""

  def step(self, action):
    observation, reward, terminated, _, info = super().step(action)
    return observation, reward, terminated, info


class WritingEnv(count_env.CountEnv):
  """Writes beside itself and into the folder for temporary files."""

  def reset(self, *, seed=None, options=None):
    for folder in ('', tempfile.gettempdir()):
      with open(os.path.join(folder, 'written.txt'), 'a') as file:
        file.write('a reset\n')
    return super().reset(seed=seed, options=options)


class NoEnv:
  """Is no gymnasium.Env."""

  observation_space = gymnasium.spaces.Box(0, 1, [1])
  action_space = gymnasium.spaces.Discrete(2)


class SpaceEnv(count_env.CountEnv):
  """Shows samples of a space."""

  def __init__(self, space):
    super().__init__()
    self.observation_space = space

  def reset(self, *, seed=None, options=None):
    _, info = super().reset(seed=seed, options=options)
    return self.observation_space.sample(), info

  def step(self, action):
    _, *rest = super().step(action)
    return self.observation_space.sample(), *rest


def _register(gym_id, entry_point, **kwargs):
  gymnasium.register(f'{gym_id}-v0', entry_point, kwargs=kwargs)


_register('Odd', OddEnv)
_register('Failing', FailingEnv)
_register('OldReset', OldResetEnv)
_register('OldReturn', OldReturnEnv)
_register('OldStep', OldStepEnv)
gymnasium.register('OldStepLimited-v0', OldStepEnv, max_episode_steps=9)
_register('Writing', WritingEnv)
_register('NoEnv', NoEnv)
_register(
  'Screen',
  SpaceEnv,
  space=gymnasium.spaces.Dict(
    screen=gymnasium.spaces.Box(0, 255, (3, 24, 32), np.uint8),
    variables=gymnasium.spaces.Box(-np.inf, np.inf, [2]),
    mission=gymnasium.spaces.Text(9),
  ),
)
_register('Empty', SpaceEnv, space=gymnasium.spaces.Box(0, 1, (0, 3)))
