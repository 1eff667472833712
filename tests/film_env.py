"""Toy environments that render; `gym:tests.film_env:<id>` names them."""

import gymnasium
import numpy as np


class FilmEnv(gymnasium.Env):
  """Its actions are 5 and 6; shows the step, and ends after six.

  Args:
    render_mode: see gymnasium.Env.
    image: what it shows, None for the step's number in all of 101 x 75 pixels.
    noise: whether rewards are drawn from a generator that no seed reaches.
  """

  metadata = {'render_modes': ['rgb_array']}  # The usual: no render_fps.

  def __init__(self, render_mode=None, image=None, noise=False):
    self.observation_space = gymnasium.spaces.Box(0, 9, [1])
    self.action_space = gymnasium.spaces.Discrete(2, start=5)
    self.render_mode = render_mode
    self._image = image
    self._generator = np.random.default_rng() if noise else None

  def reset(self, *, seed=None, options=None):
    super().reset(seed=seed)
    self._step = 0
    return np.float32([0]), {}

  def step(self, action):
    assert self.action_space.contains(action)
    self._step += 1
    reward = action * float(self.np_random.random()) + np.random.random()
    if self._generator:
      reward = self._generator.random()
    return np.float32([self._step]), reward, self._step == 6, False, {}

  def render(self):
    if self._image is not None:
      return self._image
    return np.full([101, 75, 3], 40 * self._step, np.uint8)


for _name, _kwargs in (
  ('Film-v0', {}),
  ('FilmNoise-v0', {'noise': True}),
  ('FilmGrey-v0', {'image': np.zeros([4, 6], np.uint8)}),
):
  gymnasium.register(_name, FilmEnv, kwargs=_kwargs)
