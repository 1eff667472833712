"""An environment that waits, as if something rendered elsewhere."""

import time

import gymnasium
import numpy as np


class RenderEnv(gymnasium.Env):
  """Shows noise; takes time for a step, and maybe much more for a reset.

  Args:
    length: steps in an episode.
    step_secs: how long a step sleeps: benchmarks with it are about waiting, not
      about cores.
    reset_secs: how long a reset sleeps.
  """

  observation_space = gymnasium.spaces.Box(0, 1, [4])
  action_space = gymnasium.spaces.Discrete(2)

  def __init__(self, length: int, step_secs: float, reset_secs: float):
    self._length = length
    self._step_secs = step_secs
    self._reset_secs = reset_secs
    self._step = 0

  def reset(self, *, seed=None, options=None):
    super().reset(seed=seed)
    time.sleep(self._reset_secs)
    self._step = 0
    return self._observe(), {}

  def step(self, action):
    time.sleep(self._step_secs)
    self._step += 1
    return self._observe(), 1.0, self._step == self._length, False, {}

  def _observe(self):
    return self.np_random.random([4], np.float32)


def register(
  gym_id: str, length: int, step_secs: float, reset_secs: float
) -> None:
  """Registers a `RenderEnv` under a name."""
  gymnasium.register(
    gym_id,
    RenderEnv,
    kwargs={
      'length': length,
      'step_secs': step_secs,
      'reset_secs': reset_secs,
    },
  )
