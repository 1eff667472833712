"""Toy environments; `gym:tests.count_env:<id>` names them."""

import os
import sys
import time

import gymnasium
import numpy as np


class CountEnv(gymnasium.Env):
  """Shows the number of the step, 0 at a reset.

  Args:
    length: how many steps an episode takes.
    reward: of each step; a list has one for each step.
    end: 'terminated' or 'truncated', how an episode ends.
    reset_secs: how long a reset sleeps.
    step_secs: how long a step sleeps.
    raise_at: the step that raises, -1 for the reset.
    exit_at: the step that kills the process.
  """

  def __init__(
    self,
    length=3,
    reward=1.0,
    end='terminated',
    reset_secs=0.0,
    step_secs=0.0,
    raise_at=None,
    exit_at=None,
  ):
    self.observation_space = gymnasium.spaces.Box(0, np.inf, [1])
    self.action_space = gymnasium.spaces.Discrete(2)
    self._rewards = np.broadcast_to(reward, [length])
    self._end = end
    self._reset_secs = reset_secs
    self._step_secs = step_secs
    self._raise_at = raise_at
    self._exit_at = exit_at
    self._step = 0

  def reset(self, *, seed=None, options=None):
    super().reset(seed=seed)
    if self._raise_at == -1:
      raise OSError('The level is broken.')
    time.sleep(self._reset_secs)
    self._step = 0
    return np.float32([0]), {}

  def step(self, action):
    time.sleep(self._step_secs)
    self._step += 1
    if self._step == self._raise_at:
      raise OSError('The level is broken.')
    if self._step == self._exit_at:
      os._exit(7)
    done = self._step == len(self._rewards)
    return (
      np.float32([self._step]),
      float(self._rewards[self._step - 1]),
      done and self._end == 'terminated',
      done and self._end == 'truncated',
      {},
    )


class SecondEpisodeRaisesEnv(CountEnv):
  """Plays one episode, and fails in the next."""

  def __init__(self):
    super().__init__(length=4)
    self._episode = 0

  def reset(self, *, seed=None, options=None):
    self._episode += 1
    if self._episode == 2:
      self._raise_at = 2
    return super().reset(seed=seed)


class SeedEnv(CountEnv):
  """Shows a random number at each reset, and which modules are loaded."""

  def reset(self, *, seed=None, options=None):
    super().reset(seed=seed)
    return np.float32([self.np_random.random()]), {}

  def step(self, action):
    _, _, terminated, truncated, info = super().step(action)
    has_tensorflow = any(name.startswith('tensorflow') for name in sys.modules)
    observation = np.float32([np.random.random()])
    return observation, float(has_tensorflow), terminated, truncated, info


class BlindEnv(CountEnv):
  """Shows nothing: no step can be told from another."""

  def reset(self, *, seed=None, options=None):
    observation, info = super().reset(seed=seed)
    return observation * 0, info

  def step(self, action):
    observation, *rest = super().step(action)
    return observation * 0, *rest


class ImageEnv(CountEnv):
  """Shows a small image; its actions are 5 and 6, and the reward shows them."""

  def __init__(self, shape=(4, 6, 3), **kwargs):
    super().__init__(**kwargs)
    self.observation_space = gymnasium.spaces.Box(0, 255, shape, np.uint8)
    self.action_space = gymnasium.spaces.Discrete(2, start=5)

  def _image(self):
    return np.full(self.observation_space.shape, self._step, np.uint8)

  def reset(self, *, seed=None, options=None):
    _, info = super().reset(seed=seed)
    return self._image(), info

  def step(self, action):
    _, _, terminated, truncated, info = super().step(action)
    return self._image(), float(action), terminated, truncated, info


class MisfitEnv(ImageEnv):
  """Shows at step 2 what its observation space does not say."""

  def __init__(self, shown):
    super().__init__()
    self._shown = shown

  def _image(self):
    return self._shown if self._step == 2 else super()._image()


class ThirdVectorEnv(CountEnv):
  """Shows [1, element, 2] at step 3 and else zeros."""

  def __init__(self, element):
    super().__init__(length=9)
    self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, [3])
    self._element = element

  def reset(self, *, seed=None, options=None):
    _, info = super().reset(seed=seed)
    return np.zeros([3], np.float32), info

  def step(self, action):
    _, *rest = super().step(action)
    shown = [1, self._element, 2] if self._step == 3 else [0, 0, 0]
    return np.float32(shown), *rest


class TextEnv(CountEnv):
  """Gives an instruction too, another in each episode."""

  def __init__(self, **kwargs):
    super().__init__(**kwargs)
    self._episode = -1
    self.observation_space = gymnasium.spaces.Dict(
      {
        'vector': self.observation_space,
        'mission': gymnasium.spaces.Text(100),
      }
    )

  def _both(self, observation):
    text = ' '.join(['word'] * self._episode)
    return {'vector': observation, 'mission': text}

  def reset(self, *, seed=None, options=None):
    self._episode += 1
    observation, info = super().reset(seed=seed)
    return self._both(observation), info

  def step(self, action):
    observation, *rest = super().step(action)
    return self._both(observation), *rest


class HiddenVelocities(gymnasium.ObservationWrapper):
  """CartPole that shows positions only: it takes a memory to balance."""

  def __init__(self, env):
    super().__init__(env)
    self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, [2])

  def observation(self, observation):
    return observation[::2]


class TalkativeEnv(CountEnv):
  """Prints at each reset."""

  def reset(self, *, seed=None, options=None):
    print('A new episode.')
    return super().reset(seed=seed, options=options)


def _make_hidden_cart_pole(**kwargs):
  return HiddenVelocities(gymnasium.make('CartPole-v1', **kwargs))


def _register(gym_id, entry_point=CountEnv, **kwargs):
  gymnasium.register(gym_id, entry_point, kwargs=kwargs)


for _length in (1, 3, 7, 20, 33, 100):
  _register(f'Count{_length}-v0', length=_length)
for _length in (3, 7):
  _register(f'CountCalm{_length}-v0', length=_length, step_secs=0.01)
_register('CountTruncated-v0', end='truncated')
_register('CountTruncated1-v0', length=1, end='truncated')
_register('CountLastOf20-v0', length=20, reward=[0] * 19 + [1], end='truncated')
_register('BlindTruncated-v0', BlindEnv, length=50, end='truncated')
_register('BlindTerminated-v0', BlindEnv, length=50)
_register('CountLastReward-v0', reward=[0, 0, 5])
_register('CountSlowReset-v0', length=5, reset_secs=10.0)
_register('CountRaise-v0', length=100, raise_at=50)
_register('CountRaiseAtReset-v0', raise_at=-1)
_register('CountExit-v0', length=100, exit_at=5)
_register('CountNan-v0', length=9, reward=[1.0] * 6 + [np.nan] * 3)
_register('CountHuge-v0', length=9, reward=[1.0] * 6 + [-2e19] * 3)
_register('CountNearlyHuge-v0', length=9, reward=-9e18)
_register('NanVector-v0', ThirdVectorEnv, element=np.nan)
_register('HugeVector-v0', ThirdVectorEnv, element=-3e38)
_register('NearlyHugeVector-v0', ThirdVectorEnv, element=-9e18)
_register('SecondEpisodeRaises-v0', SecondEpisodeRaisesEnv)
_register('Talkative-v0', TalkativeEnv, length=100)
_register('Seed-v0', SeedEnv, length=4)
_register('Image-v0', ImageEnv)
_register('Misshapen-v0', MisfitEnv, shown=np.ones((4, 6, 1), np.uint8))
_register('Mistyped-v0', MisfitEnv, shown=np.ones((4, 6, 3), np.float32))
_register('Text-v0', TextEnv, length=3)
_register('GreyImage-v0', ImageEnv, shape=(4, 6))
_register('CartPoleHidden-v0', _make_hidden_cart_pole)
