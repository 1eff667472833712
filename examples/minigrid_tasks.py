"""Small tasks that are told in words: MiniGrid's, with one observation for all.

Importing this registers five of them (MiniGrid: Chevalier-Boisvert et al.,
2023); `gym:examples.minigrid_tasks:<id>` names them.

  id             mission               reached by
  GoToDoor-v0    go to the red door    `done` next to the one of four doors
  GoToObject-v0  go to the blue box    `done` next to the one of two objects
  Fetch-v0       get a green key       `pickup` in front of the one of two
  LavaGap-v0     avoid the lava ...    stepping on the goal, not into lava
  Empty-v0       get to the green ...  stepping on the goal

Each is one room of 3 x 3 or, for GoToObject, 4 x 4 squares, laid out anew in
each episode. An episode ends with the wrong `done` or `pickup`, too, and after
40 steps. Its return is 0 unless the mission is fulfilled, then 1 - 0.9 n / 40
after n steps: some 0.9 at best.
"""

import functools
from typing import Any

import gymnasium
import numpy as np

try:
  from minigrid import envs
  from minigrid import minigrid_env
  from minigrid.core import actions
  from minigrid.core import constants
except ModuleNotFoundError as error:
  raise ModuleNotFoundError(
    f'{error}; the MiniGrid tasks need it: pip install minigrid'
  ) from error

_MAX_STEPS = 40
_VIEW_SIZE = 5
_ACTIONS = (
  actions.Actions.left,
  actions.Actions.right,
  actions.Actions.forward,
  actions.Actions.pickup,
  actions.Actions.done,
)
_KINDS = ('wall', 'door', 'key', 'ball', 'box', 'goal', 'lava')
# Missions name no other colours.
_COLOURED_KINDS = ('door', 'key', 'ball', 'box')


class Task(gymnasium.ObservationWrapper):
  """A MiniGrid environment as the agent gets it.

  Observations are a Dict of `view`, float32 [325], and the text `mission`. The
  view are the 5 x 5 squares before the agent as seen by it, 13 numbers each: a
  1 for the kind of thing there, and a 1 for its colour if a mission may name
  it. Actions are those that the tasks have a use for: turn left, turn right, go
  forward, pick up, done.
  """

  def __init__(self, env: minigrid_env.MiniGridEnv):
    super().__init__(env)
    spaces = env.observation_space
    height, width, _ = spaces['image'].shape
    size = height * width * _CELLS.shape[-1]
    self.observation_space = gymnasium.spaces.Dict(
      {
        'view': gymnasium.spaces.Box(0, 1, [size], np.float32),
        'mission': spaces['mission'],
      }
    )
    self.action_space = gymnasium.spaces.Discrete(len(_ACTIONS))

  def step(self, action: int):
    """Takes one step; see gymnasium.Env."""
    return super().step(_ACTIONS[action])

  def observation(self, observation: dict[str, Any]) -> dict[str, Any]:
    """Spells out the squares' codes; see gymnasium.ObservationWrapper."""
    kinds, colours, _ = np.moveaxis(observation['image'], -1, 0)
    view = _CELLS[kinds, colours].reshape(-1)
    return {'view': view, 'mission': observation['mission']}


def _make_cells() -> np.ndarray:
  """Returns what a square shows by its codes, float32 [kinds, colours, 13]."""
  num_colours = len(constants.COLOR_TO_IDX)
  kinds = np.zeros([len(constants.OBJECT_TO_IDX), len(_KINDS)], np.float32)
  colours = np.zeros([len(kinds), num_colours, num_colours], np.float32)
  for i, kind in enumerate(_KINDS):
    kinds[constants.OBJECT_TO_IDX[kind], i] = 1
  for kind in _COLOURED_KINDS:
    colours[constants.OBJECT_TO_IDX[kind]] = np.eye(num_colours)
  kinds = np.repeat(kinds[:, None], num_colours, axis=1)
  return np.concatenate([kinds, colours], axis=-1)


_CELLS = _make_cells()


def _make(make_env, **kwargs):
  env = make_env(max_steps=_MAX_STEPS, agent_view_size=_VIEW_SIZE, **kwargs)
  return Task(env)


for _gym_id, _make_env in (
  ('GoToDoor-v0', functools.partial(envs.GoToDoorEnv, size=5)),
  ('GoToObject-v0', functools.partial(envs.GoToObjectEnv, size=6, numObjs=2)),
  ('Fetch-v0', functools.partial(envs.FetchEnv, size=5, numObjs=2)),
  ('LavaGap-v0', functools.partial(envs.LavaGapEnv, size=5)),
  ('Empty-v0', functools.partial(envs.EmptyEnv, size=5, agent_start_pos=None)),
):
  gymnasium.register(_gym_id, functools.partial(_make, _make_env))
