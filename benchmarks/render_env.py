"""Environments that wait, as if they rendered elsewhere.

Their names are `gym:benchmarks.render_env:<id>`. They are not in the benchmarks
that use them, since an environment's process imports no module of the program.
"""

import time

import gymnasium
import numpy as np


class RenderEnv(gymnasium.Env):
  """Shows noise, with slow steps and possibly much slower resets.

  It sleeps and does not compute: benchmarks with it measure waiting, not cores.

  Args:
    length: steps in an episode.
    step_secs: how long a step sleeps, in seconds.
    reset_secs: how long a reset sleeps, in seconds.
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


def _register(
  name: str, length: int, step_secs: float, reset_secs: float = 0.0
) -> None:
  gymnasium.register(
    f'{name}-v0',
    RenderEnv,
    kwargs={
      'length': length,
      'step_secs': step_secs,
      'reset_secs': reset_secs,
    },
  )


# For scaling.py.
_register('Waiting', length=100, step_secs=0.1)

# For slow_reset.py. All are the same except the slow one. They have different
# names so that their unrolls can be told apart in a batch.
OTHERS = tuple(f'Other{i}' for i in range(1, 16))
for _name in ('First', *OTHERS):
  _register(_name, length=5, step_secs=0.002)
_register('FirstSlow', length=5, step_secs=0.002, reset_secs=10.0)
