"""An environment that only an agent that learns plays well."""

import gymnasium
import numpy as np

LEVEL_NAME = 'gym:tests.recall_env:Recall-v0'
_NUM_SCORED = 3


class RecallEnv(gymnasium.Env):
  """Shows a random bit at each step; the right action is the bit before it.

  The only reward comes at the end: the mean over the scored actions, 1 for each
  that was right and -1 for each that was not. So 1 is the best return, and 0
  the expected return of random play. The first action is not scored.
  """

  def __init__(self):
    self.observation_space = gymnasium.spaces.Box(0, 1, [2])
    self.action_space = gymnasium.spaces.Discrete(2)
    self._bits = []
    self._score = 0

  def reset(self, *, seed=None, options=None):
    super().reset(seed=seed)
    self._bits = []
    self._score = 0
    return self._show(), {}

  def step(self, action):
    if len(self._bits) > 1:
      self._score += 1 if action == self._bits[-2] else -1
    observation = self._show()
    done = len(self._bits) == _NUM_SCORED + 2
    reward = self._score / _NUM_SCORED if done else 0.0
    return observation, reward, done, False, {}

  def _show(self):
    """Draws the next bit and returns it as a one-hot vector."""
    self._bits.append(int(self.np_random.integers(2)))
    return np.eye(2, dtype=np.float32)[self._bits[-1]]


gymnasium.register('Recall-v0', RecallEnv)
