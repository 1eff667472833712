"""Tests of envs/gym.py."""

import numpy as np
import pytest

import environments
from envs import gym
from evaluation import films
from runtime import errors
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
      ('tests.odd_env:Empty-v0', 'cannot see: Box.* an axis of length 0'),
      ('tests.odd_env:NoEnv-v0', 'does not inherit from gymnasium.Env'),
      ('CartPole-v1?colour=red', "no argument 'colour', but sutton_barto"),
      ('tests.odd_env:Odd-v0?rewards=3', "no argument 'rewards', but reward, "),
    ],
  )
  def test_refuses_levels(self, gym_id, message):
    with pytest.raises(ValueError, match=message) as e:
      contract.make(f'gym:{gym_id}', num_envs=2)
    assert f'gym:{gym_id}' in str(e.value)
    assert '\n' not in str(e.value)


def make(name, **kwargs):
  return gym.GymEnvironment(f'gym:tests.odd_env:{name}', seed=1, **kwargs)


class TestArguments:
  def test_frozen_lake(self):
    env = gym.GymEnvironment(
      'gym:FrozenLake-v1?map_name=8x8&is_slippery=false', seed=1
    )
    other = gym.GymEnvironment('gym:FrozenLake-v1', seed=1)
    assert env.spec.frame_shape == (64,)
    assert other.spec.frame_shape == (16,)
    for _ in range(50):
      env.reset()
      (frame,), *_ = env.step(2)
      assert np.flatnonzero(frame).tolist() == [1]

  def test_those_of_gymnasium_itself(self):
    env = gym.GymEnvironment('gym:CartPole-v1?max_episode_steps=3', seed=1)
    env.reset()
    ends = [env.step(step % 2)[2] for step in range(3)]
    assert ends == [False, False, True]

  def test_evaluation_and_film_use_them(self, tmp_path):
    name = 'gym:CartPole-v1?max_episode_steps=3'
    envs = contract.make(name, training=False)
    rows = list(contract.step_all(envs, 4, action=0))
    envs.close()
    assert contract.finished(rows) == [(3.0, 3)]
    replayed = films.film(name, envs.seeds[0], [0] * 3, tmp_path / 'f.mp4', 3.0)
    assert replayed == 3


class TestValues:
  @pytest.mark.parametrize(
    ('reward', 'wanted'),
    [('2', 2), ('[2.5]', 2.5), ('[[-1]]', -1), ('True', 1)],
  )
  def test_takes_rewards_of_one_number(self, reward, wanted):
    env = make(f'Odd-v0?reward={reward}')
    env.reset()
    _, taken, _, _ = env.step(0)
    assert type(taken) is float
    assert taken == wanted

  @pytest.mark.parametrize('flag', ['1', '[True]'])
  def test_takes_flags_of_one_element(self, flag):
    env = make(f'Odd-v0?terminated={flag}')
    env.reset()
    assert env.step(0)[2] is True

  @pytest.mark.parametrize(
    ('name', 'value', 'shown'),
    [
      ('reward', '[1.0, 2.0]', r'\[1.0, 2.0\] of shape \[2\]'),
      ('reward', 'null', r'None of shape \[\]'),
      ('reward', 'high', r"'high' of shape \[\]"),
      ('reward', '[[1], [2, 3]]', r'\[\[1\], \[2, 3\]\] of shape'),
      ('terminated', '2', '2 of shape'),
      ('truncated', 'null', 'None of shape'),
      ('truncated', '[True, False]', r'of shape \[2\]'),
    ],
  )
  def test_names_others(self, name, value, shown):
    level = f'Odd-v0?{name}={value}'
    env = make(level)
    env.reset()
    kind = 'a number' if name == 'reward' else 'True or False'
    with pytest.raises(errors.UserError, match=f'{shown}.*{kind}') as e:
      env.step(0)
    assert str(e.value).startswith(f'gym:tests.odd_env:{level} returned')
    assert f' as {name}, ' in str(e.value)
    assert '\n' not in str(e.value)

  @pytest.mark.parametrize(
    'name', ['OldReset', 'OldReturn', 'OldStep', 'OldStepLimited']
  )
  def test_names_the_old_interface(self, name):
    env = make(f'{name}-v0')
    with pytest.raises(ValueError, match='interface of Gym before') as e:
      env.reset()
      env.step(0)
    assert str(e.value).startswith(f'gym:tests.odd_env:{name}-v0 ')
    assert '\n' not in str(e.value)

  def test_one_line_for_all_environments(self, capfd):
    envs = contract.make(
      'gym:tests.odd_env:OldStep-v0',
      num_envs=4,
      gym_settings=gym.GymSettings(envs_per_process=2),
    )
    with pytest.raises(ValueError, match='interface of Gym before'):
      list(contract.step_all(envs, 100))
    envs.close()
    assert capfd.readouterr().err == ''

  def test_screen_and_numbers_and_text(self):
    envs = contract.make('gym:tests.odd_env:Screen-v0', num_envs=2)
    rows = [row for _, row in contract.step_all(envs, 10)]
    envs.close()
    assert envs.spec.frame_shape == (24, 32, 3)
    assert (envs.spec.vector_size, envs.spec.has_instruction) == (2, True)
    shown = {row.observation.vector.tobytes() for row in rows}
    assert len(shown) == 10
    assert rows[0].observation.vector.dtype == np.float32


class TestEnvironmentsPerProcess:
  @pytest.mark.parametrize(
    ('name', 'num_envs', 'wanted'),
    [
      ('CartPole-v1', 16, 8),
      ('CartPole-v1', 5, 3),
      ('CartPole-v1', 2, 1),
      ('tests.count_env:CountCalm3-v0', 16, 1),
      # A trial takes too long, and fails.
      ('tests.count_env:CountSlowReset-v0', 16, 1),
      ('tests.odd_env:Failing-v0', 16, 1),
    ],
  )
  def test_a_trial_decides(self, name, num_envs, wanted):
    chosen = gym._choose_envs_per_process([f'gym:{name}'], num_envs)
    assert chosen == wanted

  def test_contract(self):
    """Whatever the groups, each environment plays its own episodes."""
    shown = []
    for count in (1, 2, 3, 5):
      envs = contract.make(
        'gym:FrozenLake-v1',
        'gym:FrozenLake-v1?is_slippery=false',
        num_envs=5,
        gym_settings=gym.GymSettings(envs_per_process=count),
      )
      rows = [[] for _ in range(5)]
      for env_id, row in contract.step_all(envs, 10_000, action=2):
        rows[env_id].append(row.observation.frame.tobytes())
        if min(map(len, rows)) >= 20:
          break
      envs.close()
      assert envs.settings() == {'envs_per_process': count}
      shown.append([b''.join(row[:20]) for row in rows])
    # Two of the five are without chance.
    assert len(set(shown[0])) == 4
    assert shown.count(shown[0]) == 4
