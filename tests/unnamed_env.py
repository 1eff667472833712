"""Tasks of minigrid_tasks.py whose missions name nothing: 'go to the door'.

`gym:tests.unnamed_env:<id>` names them, GoToDoorUnnamed-v0 and so on. The
return an agent learns to get here is what can be had without reading.
"""

import gymnasium
from minigrid.core import constants

from examples import minigrid_tasks  # noqa: F401 (registers the tasks)

_NAMES = {*constants.COLOR_NAMES, 'key', 'ball', 'box'}


class Unnamed(gymnasium.ObservationWrapper):
  """Leaves out the words that tell one thing from another."""

  def observation(self, observation):
    words = observation['mission'].split()
    mission = ' '.join(word for word in words if word not in _NAMES)
    return observation | {'mission': mission}


for _task in ('GoToDoor', 'GoToObject', 'Fetch'):
  gymnasium.register(
    f'{_task}Unnamed-v0',
    lambda _id=f'{_task}-v0', **kwargs: Unnamed(gymnasium.make(_id, **kwargs)),
  )
