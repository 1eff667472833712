"""Plays the popular environments of docs/tasks.md by their names, unchanged."""

import importlib.util
import os
import subprocess
import sys

import gymnasium
import pytest

from tests import program

# The version depends on Gymnasium's.
_TAXI = 'Taxi-v4' if 'Taxi-v4' in gymnasium.registry else 'Taxi-v3'
# The module that must be installed, and what the agent sees: the shape of the
# frame, how many numbers beside it, and whether a text.
_LEVELS = {
  'gym:FrozenLake-v1': (None, [16], 0, False),
  f'gym:{_TAXI}': (None, [500], 0, False),
  'gym:Blackjack-v1': (None, [45], 0, False),
  'gym:CliffWalking-v1': (None, [48], 0, False),
  'gym:CartPole-v1': (None, [4], 0, False),
  'gym:Acrobot-v1': (None, [6], 0, False),
  'gym:MountainCar-v0': (None, [2], 0, False),
  'gym:LunarLander-v3': ('Box2D', [8], 0, False),
  'gym:CarRacing-v3?continuous=false': ('Box2D', [96, 96, 3], 0, False),
  'gym:ale_py:ALE/Pong-v5': ('ale_py', [210, 160, 3], 0, False),
  'gym:minigrid:MiniGrid-DoorKey-5x5-v0': ('minigrid', [7, 7, 3], 4, True),
  'gym:minigrid:BabyAI-GoToRedBall-v0': ('minigrid', [7, 7, 3], 4, True),
  'gym:minatar.gym:MinAtar/Breakout-v1': ('minatar', [10, 10, 4], 0, False),
  'gym:vizdoom.gymnasium_wrapper:VizdoomBasic-v1': (
    *('vizdoom', [240, 320, 3], 1, False),
  ),
  'gym:highway_env:highway-v0': ('highway_env', [25], 0, False),
  'gym:flappy_bird_gymnasium:FlappyBird-v0': (
    *('flappy_bird_gymnasium', [180], 0, False),
  ),
  "gym:nle:NetHackScore-v0?observation_keys=['glyphs'%2C'blstats']": (
    *('nle', [1686], 0, False),
  ),
  'gym:miniworld:MiniWorld-Hallway-v0': ('miniworld', [60, 80, 3], 0, False),
  'gym:gymnasium_2048:gymnasium_2048/TwentyFortyEight-v0': (
    *('gymnasium_2048', [4, 4, 16], 0, False),
  ),
  'gym:popgym:popgym-RepeatPreviousEasy-v0': ('popgym', [4], 0, False),
  'gym:memory_gym:MortarMayhem-Grid-v0': (
    *('memory_gym', [84, 84, 3], 0, False),
  ),
}
_PLAY = """
import sys
import numpy as np
from envs import gym

env = gym.GymEnvironment(sys.argv[1], seed=1, shows_cuts=True)
shapes = [shape for shape, _ in env.spec.observation_arrays]
generator = np.random.default_rng(0)
observation = env.reset()
for _ in range(60):
  assert [array.shape for array in observation] == shapes
  action = int(generator.integers(env.spec.num_actions))
  observation, reward, done, cut = env.step(action)
  assert type(reward) is float and type(done) is bool and type(cut) is bool
  if done or cut:
    observation = env.reset()
env.close()
spec = env.spec
print(list(spec.frame_shape), spec.vector_size, spec.has_instruction)
"""


@pytest.mark.parametrize('level_name', _LEVELS)
def test_plays_unchanged(level_name, tmp_path):
  package, *seen = _LEVELS[level_name]
  if package and importlib.util.find_spec(package) is None:
    pytest.skip(f'needs {package}: see docs/tasks.md')
  # In a process of its own, as in training, and without a screen.
  result = subprocess.run(
    [sys.executable, '-c', _PLAY, level_name],
    cwd=tmp_path,
    env=os.environ | {'PYTHONPATH': str(program.ROOT), 'PYGLET_HEADLESS': '1'},
    capture_output=True,
    text=True,
    timeout=100,
  )
  assert result.returncode == 0, result.stderr
  assert result.stdout.splitlines()[-1] == ' '.join(map(str, seen))


def test_image_numbers_and_text_train_together(tmp_path):
  if importlib.util.find_spec('minigrid') is None:
    pytest.skip('needs minigrid: see docs/tasks.md')
  with program.Program(
    tmp_path / 'output',
    level_name='gym:minigrid:MiniGrid-Empty-5x5-v0',
    logdir=tmp_path / 'run',
    use_lstm=True,
    total_environment_frames=400,
  ) as run:
    assert run.finish() == 0, run.err
