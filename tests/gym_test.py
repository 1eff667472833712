"""Tests of envs/gym.py."""

import numpy as np
import pytest

import environments
from envs import gym
from tests import contract


class TestGym(contract.EnvironmentsContract):
  level_name = 'gym:CartPole-v1'

  def test_spec(self):
    envs = contract.make('gym:CartPole-v1')
    envs.close()
    assert envs.spec == environments.EnvironmentSpec(
      (4,), np.dtype(np.float32), 2, 1, 1, None
    )

  @pytest.mark.parametrize(
    ('name', 'shape'), [('Image', (4, 6, 3)), ('GreyImage', (4, 6))]
  )
  def test_images_and_actions_that_do_not_start_at_0(self, name, shape):
    envs = contract.make(f'gym:tests.count_env:{name}-v0')
    rows = [row for _, row in contract.step_all(envs, 3, action=1)]
    envs.close()
    assert envs.spec.frame_shape == shape
    assert [row.reward for row in rows] == [0, 6, 6]
    assert (rows[2].observation.frame == 2).all()

  @pytest.mark.parametrize(
    ('name', 'message'),
    [
      ('Misshapen', r'shows uint8 \[4, 6, 1\], but .* uint8 \[4, 6, 3\]'),
      ('Mistyped', r'shows float32 \[4, 6, 3\], but .* uint8 \[4, 6, 3\]'),
    ],
  )
  def test_refuses_what_its_space_does_not_say(self, name, message):
    level_name = f'gym:tests.count_env:{name}-v0'
    env = gym.GymEnvironment(level_name, seed=1)
    env.reset()
    env.step(0)
    with pytest.raises(ValueError, match=f'{level_name} {message}'):
      env.step(0)

  def test_instructions(self):
    envs = contract.make('gym:tests.count_env:Text-v0')
    rows = [row for _, row in contract.step_all(envs, 10)]
    envs.close()
    assert envs.spec.has_instruction
    assert envs.spec.frame_shape == (1,)
    shown = [row.observation.frame[0] for row in rows]
    assert shown == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
    words = [(row.observation.instruction > 0).sum() for row in rows]
    assert words == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]

  def test_hidden_velocities(self):
    envs = contract.make('gym:tests.count_env:CartPoleHidden-v0')
    envs.close()
    assert envs.spec.frame_shape == (2,)

  def test_global_random_numbers_differ(self):
    envs = contract.make('gym:tests.count_env:Seed-v0', num_envs=3, max_batch=3)
    rows = [row for _, row in contract.step_all(envs, 30)]
    envs.close()
    values = [float(row.observation.frame[0]) for row in rows]
    assert len(set(values)) == len(values)

  @pytest.mark.parametrize(
    ('gym_id', 'message'),
    [
      ('CartPol-v1', 'CartPole'),
      ('CartPole-v9', 'v1'),
      ('nowhere:X-v0', 'nowhere'),
      ('no id', 'no id'),
      ('Pendulum-v1', 'Discrete'),
    ],
  )
  def test_refuses_levels(self, gym_id, message):
    with pytest.raises(ValueError, match=message) as e:
      contract.make(f'gym:{gym_id}', num_envs=2)
    assert f'gym:{gym_id}' in str(e.value)
    assert '\n' not in str(e.value)
