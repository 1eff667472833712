"""Small environments that render; `gym:tests.film_env:<id>` names them."""

import gymnasium
import numpy as np


class FilmEnv(gymnasium.Env):
  """Has the actions 5 and 6, and ends after six steps.

  Args:
    render_mode: see gymnasium.Env.
    image: what it renders; None for 101 x 75 pixels of 40 times the step.
    noise: whether rewards come from a generator that is not seeded.
    raise_at: the step that raises.
    resize_at: the step whose image is smaller.
  """

  metadata = {'render_modes': ['rgb_array']}  # The usual: no render_fps.

  def __init__(
    self,
    render_mode=None,
    image=None,
    noise=False,
    raise_at=None,
    resize_at=None,
  ):
    self.observation_space = gymnasium.spaces.Box(0, 9, [1])
    self.action_space = gymnasium.spaces.Discrete(2, start=5)
    self.render_mode = render_mode
    self._image = image
    self._raise_at = raise_at
    self._resize_at = resize_at
    self._generator = np.random.default_rng() if noise else None

  def reset(self, *, seed=None, options=None):
    super().reset(seed=seed)
    self._step = 0
    return np.float32([0]), {}

  def step(self, action):
    assert self.action_space.contains(action)
    self._step += 1
    if self._step == self._raise_at:
      raise ZeroDivisionError
    reward = action * float(self.np_random.random()) + np.random.random()
    if self._generator:
      reward = self._generator.random()
    return np.float32([self._step]), reward, self._step == 6, False, {}

  def render(self):
    if self._image is not None:
      return self._image
    if self._step == self._resize_at:
      return np.zeros([1, 1, 3], np.uint8)
    return np.full([101, 75, 3], 40 * self._step, np.uint8)


for _name, _kwargs in (
  ('Film-v0', {}),
  ('FilmNoise-v0', {'noise': True}),
  ('FilmRaise-v0', {'raise_at': 1}),
  ('FilmResize-v0', {'resize_at': 1}),
  ('FilmGrey-v0', {'image': np.zeros([4, 6], np.uint8)}),
):
  gymnasium.register(_name, FilmEnv, kwargs=_kwargs)
