"""Tests of the environments' contract and of each family."""

import time

import numpy as np
import pytest

import atari_environments
import environments
import py_process


def make(*level_names, num_envs=1, seed=1, training=True, **kwargs):
  return environments.make_environments(
    level_names, num_envs, seed, training=training, **kwargs
  )


def step_all(envs, num_steps, action=None):
  """Steps until there are num_steps outputs; yields (env_id, output's row)."""
  generator = np.random.default_rng(0)
  count = 0
  while count < num_steps:
    env_ids, outputs = envs.recv(timeout_secs=20)
    assert len(env_ids), 'no environment became ready'
    for row, env_id in enumerate(env_ids):
      yield (
        int(env_id),
        environments.StepOutput(
          outputs.reward[row],
          environments.StepOutputInfo(*(x[row] for x in outputs.info)),
          outputs.done[row],
          outputs.observation[row],
        ),
      )
      count += 1
    actions = generator.integers(0, envs.spec.num_actions, len(env_ids))
    if action is not None:
      actions = np.full(len(env_ids), action)
    envs.send(actions.astype(np.int32), env_ids)


def finished(rows):
  """Returns the returns and lengths of all games that end in these rows."""
  return [
    (float(row.info.episode_return), int(row.info.episode_step))
    for _, row in rows
    if row.info.episode_done
  ]


class EnvironmentsContract:
  """What holds for every family. Its games last more than 3 steps."""

  level_name = ''

  @pytest.fixture
  def envs(self):
    envs = make(self.level_name, num_envs=3, max_batch=2)
    yield envs
    envs.close()

  def test_types_and_shapes(self, envs):
    for _ in range(8):
      env_ids, outputs = envs.recv(timeout_secs=20)
      n = len(env_ids)
      assert 1 <= n <= 2
      assert env_ids.dtype == np.int32
      assert outputs.reward.dtype == np.float32
      assert outputs.done.dtype == bool
      assert outputs.info.episode_return.dtype == np.float32
      assert outputs.info.episode_step.dtype == np.int32
      assert outputs.info.episode_done.dtype == bool
      assert outputs.observation.dtype == envs.spec.observation_dtype
      assert outputs.observation.shape == (n, *envs.spec.observation_shape)
      for field in (outputs.reward, *outputs.info, outputs.done):
        assert field.shape == (n,)
      envs.send(np.zeros(n, np.int32), env_ids)

  def test_first_output_of_each_environment(self, envs):
    seen = set()
    for env_id, row in step_all(envs, 40):
      if env_id not in seen:
        assert row.done
        assert not row.info.episode_done
        assert row.reward == row.info.episode_return == 0
        assert row.info.episode_step == 0
      seen.add(env_id)
    assert seen == {0, 1, 2}

  def test_info_adds_up(self, envs):
    returns, steps = np.zeros(3), np.full(3, -1)
    for env_id, row in step_all(envs, 200):
      returns[env_id] += row.reward
      steps[env_id] += 1
      assert row.info.episode_return == pytest.approx(returns[env_id])
      assert row.info.episode_step == steps[env_id]
      if row.info.episode_done:
        assert row.done
        returns[env_id] = steps[env_id] = 0

  def test_outputs_are_the_callers_own(self, envs):
    kept = []
    for _ in range(10):
      env_ids, outputs = envs.recv(timeout_secs=20)
      kept.append((outputs, [np.copy(outputs.observation), *outputs.reward]))
      envs.send(np.zeros(len(env_ids), np.int32), env_ids)
    for outputs, (observation, *reward) in kept:
      np.testing.assert_array_equal(outputs.observation, observation)
      np.testing.assert_array_equal(outputs.reward, reward)
      outputs.observation[...] = 0  # Writable.

  def test_refuses_actions_out_of_range(self, envs):
    env_ids, _ = envs.recv(timeout_secs=20)
    for wrong in (-1, envs.spec.num_actions):
      with pytest.raises(ValueError, match='from 0 to'):
        envs.send(np.full(len(env_ids), wrong, np.int32), env_ids)
    with pytest.raises(ValueError, match='integers'):
      envs.send(np.zeros(len(env_ids), np.float32), env_ids)
    with pytest.raises(ValueError, match='one action'):
      envs.send(np.zeros(len(env_ids) + 1, np.int32), env_ids)
    envs.send(np.zeros(len(env_ids), np.int32), env_ids)

  def test_refuses_a_second_action(self, envs):
    env_ids, _ = envs.recv(timeout_secs=20)
    envs.send(np.zeros(len(env_ids), np.int32), env_ids)
    with pytest.raises(ValueError, match='recv'):
      envs.send(np.zeros(len(env_ids), np.int32), env_ids)

  def test_refuses_to_wait_for_nothing(self, envs):
    received = 0
    while received < 3:
      received += len(envs.recv(timeout_secs=20)[0])
    with pytest.raises(RuntimeError, match='send actions first'):
      envs.recv()

  def test_close_twice(self, envs):
    envs.close()
    envs.close()

  def test_batch_of_one(self):
    envs = make(self.level_name, num_envs=1)
    ids = [env_id for env_id, _ in step_all(envs, 10)]
    assert ids == [0] * 10
    envs.close()

  def test_seeds(self):
    def first_observations(seed):
      envs = make(self.level_name, num_envs=2, max_batch=2, seed=seed)
      # One action for all: who is ready first is chance.
      rows = list(step_all(envs, 60, action=0))
      envs.close()
      frames = [
        [row.observation for env_id, row in rows if env_id == i]
        for i in range(2)
      ]
      return envs.seeds, [np.stack(f[:15]).tobytes() for f in frames]

    seeds, frames = first_observations(3)
    assert len(set(seeds)) == 2
    assert all(type(seed) is int for seed in seeds)
    assert frames[0] != frames[1]
    assert first_observations(3) == (seeds, frames)
    # Two actors of one run.
    assert not set(first_observations([3, 0])[0]) & set(
      first_observations([3, 1])[0]
    )

  def test_refuses_bad_numbers(self):
    with pytest.raises(ValueError, match='num_envs'):
      make(self.level_name, num_envs=0)
    with pytest.raises(ValueError, match='max_batch'):
      make(self.level_name, num_envs=2, max_batch=3)


class TestAtari(EnvironmentsContract):
  level_name = 'freeway'

  def test_spec(self):
    envs = make('pong', num_envs=1)
    assert envs.spec == environments.EnvironmentSpec(
      (84, 84),
      np.dtype(np.uint8),
      6,
      4,
      4,
      ('NOOP', 'FIRE', 'RIGHT', 'LEFT', 'RIGHTFIRE', 'LEFTFIRE'),
    )
    assert envs.level_names == ['pong']

  def test_settings_are_the_papers(self):
    envs = make('pong')
    arguments = envs._vector_arguments()
    assert arguments['repeat_action_probability'] == 0
    assert arguments['max_num_frames_per_episode'] == 108_000
    assert (
      envs.settings().items()
      >= {
        'reward_clipping': False,
        'use_fire_reset': False,
        'stack_num': 1,
      }.items()
    )

  def test_full_action_set_and_sticky_actions(self):
    settings = atari_environments.AtariSettings(
      full_action_set=True, repeat_action_probability=0.25
    )
    envs = make('pong', 'breakout', num_envs=4, atari_settings=settings)
    assert envs.spec.num_actions == 18
    assert envs.settings()['repeat_action_probability'] == 0.25
    assert envs.level_names == ['pong', 'breakout'] * 2
    assert {env_id for env_id, _ in step_all(envs, 16)} == {0, 1, 2, 3}

  @pytest.mark.parametrize(
    'wrong',
    [
      {'frames_per_step': 0},
      {'max_noops': -1},
      {'max_episode_frames': 3},
      {'repeat_action_probability': 1.5},
    ],
  )
  def test_refuses_settings(self, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
      atari_environments.AtariSettings(**wrong)

  def test_cap_counts_frames_and_full_steps_of_four(self):
    settings = atari_environments.AtariSettings(
      max_noops=0, max_episode_frames=400
    )
    envs = make('freeway', num_envs=2, atari_settings=settings)
    rows = list(step_all(envs, 2 * 301))
    assert [steps for _, steps in finished(rows)] == [100] * 6
    # The emulator's own counter, over all three games.
    info = envs._groups[0]._vector.recv()[-1]
    assert info['frame_number'].tolist() == [4 * 301]

  def test_noops_are_1_to_30(self):
    settings = atari_environments.AtariSettings(max_episode_frames=4)
    envs = make('freeway', num_envs=4, max_batch=4, atari_settings=settings)
    group = envs._groups[0]
    counts = []
    resets = []
    reset = group._vector.reset

    def counting_reset(**kwargs):
      resets.append(kwargs)
      stacks, info = reset(**kwargs)
      last_info.update(info)
      return stacks, info

    last_info = {}
    recv = group._vector.recv

    def counting_recv():
      result = recv()
      last_info.update(result[-1])
      return result

    group._vector.reset, group._vector.recv = counting_reset, counting_recv
    for _ in range(100):
      env_ids, outputs = envs.recv()
      counts += last_info['episode_frame_number'].tolist()
      envs.send(np.zeros(4, np.int32), env_ids)
    assert len(resets) > 1  # It has drawn again for 0.
    assert min(counts) == 1
    assert max(counts) == 30
    assert abs(np.mean(counts) - 15.5) < 4 * 8.66 / np.sqrt(len(counts))

  def test_no_noops(self):
    settings = atari_environments.AtariSettings(
      max_noops=0, max_episode_frames=40
    )
    envs = make('freeway', num_envs=2, atari_settings=settings)
    firsts = [row.observation for _, row in step_all(envs, 50) if row.done]
    assert len(firsts) > 4
    for first in firsts:
      np.testing.assert_array_equal(first, firsts[0])

  def test_without_sticky_actions_games_repeat(self):
    settings = atari_environments.AtariSettings(max_noops=0)
    envs = [make('pong', seed=s, atari_settings=settings) for s in (1, 2)]
    for (_, a), (_, b) in zip(*(step_all(e, 60) for e in envs), strict=True):
      np.testing.assert_array_equal(a.observation, b.observation)

  def test_life_loss_ends_episodes_in_training_only(self):
    def play(training):
      envs = make('breakout', seed=5, training=training)
      return [row for _, row in step_all(envs, 700)]

    training, evaluation = play(True), play(False)
    for row, other in zip(training, evaluation, strict=True):
      # The same games, frame by frame, with the same totals.
      np.testing.assert_array_equal(row.observation, other.observation)
      assert row.info == other.info
    games = sum(row.info.episode_done for row in training)
    assert games >= 2
    assert sum(row.done for row in evaluation) == 1 + games
    # Five lives a game, four of them lost before its end.
    lost = 0
    for row in training[1:]:
      lost += row.done
      if row.info.episode_done:
        assert lost == 5
        lost = 0

  def test_games_without_lives_end_at_their_end(self):
    envs = make('pong', num_envs=4, max_batch=4)
    rows = list(step_all(envs, 4 * 1100))
    games = finished(rows)
    assert games
    assert sum(bool(row.done) for _, row in rows) == 4 + len(games)
    assert all(value <= -14 for value, _ in games)

  def test_rewards_are_not_clipped(self):
    envs = make('qbert', num_envs=4, max_batch=4)
    assert max(row.reward for _, row in step_all(envs, 800)) >= 25

  def test_zero_lives_can_be_a_life(self):
    envs = make('bank_heist', num_envs=4, max_batch=4)
    lost = np.zeros(4, int)
    counts = []
    for env_id, row in step_all(envs, 4 * 700):
      lost[env_id] += row.done and row.info.episode_step > 0
      if row.info.episode_done:
        counts.append(int(lost[env_id]))
        lost[env_id] = 0
    assert counts  # Starts with 4 spare lives.
    assert set(counts) == {5}


class TestGym(EnvironmentsContract):
  level_name = 'gym:CartPole-v1'

  def test_spec(self):
    envs = make('gym:CartPole-v1')
    envs.close()
    assert envs.spec == environments.EnvironmentSpec(
      (4,), np.dtype(np.float32), 2, 1, 1, None
    )

  def test_restart_takes_no_step(self):
    envs = make('gym:tests.count_env:Count3-v0')
    rows = [row for _, row in step_all(envs, 301)]
    envs.close()
    assert finished(enumerate(rows)) == [(3.0, 3)] * 100
    assert [row.observation[0] for row in rows[:7]] == [0, 1, 2, 0, 1, 2, 0]
    assert [row.done for row in rows[:7]] == [True, False, False] * 2 + [True]
    assert sum(row.reward for row in rows) == 300

  def test_truncation_ends_an_episode(self):
    envs = make('gym:tests.count_env:CountTruncated-v0')
    assert finished(step_all(envs, 7)) == [(3.0, 3)] * 2
    envs.close()

  def test_last_reward_belongs_to_the_ending_episode(self):
    envs = make('gym:tests.count_env:CountLastReward-v0')
    rows = [row for _, row in step_all(envs, 5)]
    envs.close()
    assert [row.reward for row in rows] == [0, 0, 0, 5, 0]
    assert [row.info.episode_return for row in rows] == [0, 0, 0, 5, 0]
    assert [row.info.episode_step for row in rows] == [0, 1, 2, 3, 1]

  def test_levels_of_different_lengths_take_turns(self):
    lengths = [1, 7, 20, 33]
    envs = make(
      *(f'gym:tests.count_env:Count{n}-v0' for n in lengths), num_envs=8
    )
    games = {env_id: [] for env_id in range(8)}
    rewards = []
    for env_id, row in step_all(envs, 800):
      games[env_id] += finished([(env_id, row)])
      rewards.append(row.reward)
    envs.close()
    assert sum(rewards) == len(rewards) - 8  # All but the first outputs.
    for env_id, totals in games.items():
      length = lengths[env_id % 4]
      assert totals
      assert set(totals) == {(float(length), length)}

  @pytest.mark.parametrize(
    ('name', 'shape'), [('Image', (4, 6, 3)), ('GreyImage', (4, 6))]
  )
  def test_images_and_actions_that_do_not_start_at_0(self, name, shape):
    envs = make(f'gym:tests.count_env:{name}-v0')
    rows = [row for _, row in step_all(envs, 3, action=1)]
    envs.close()
    assert envs.spec.observation_shape == shape
    assert [row.reward for row in rows] == [0, 6, 6]
    assert (rows[2].observation == 2).all()

  def test_hidden_velocities(self):
    envs = make('gym:tests.count_env:CartPoleHidden-v0')
    envs.close()
    assert envs.spec.observation_shape == (2,)

  def test_global_random_numbers_differ(self):
    envs = make('gym:tests.count_env:Seed-v0', num_envs=3, max_batch=3)
    rows = [row for _, row in step_all(envs, 30)]
    envs.close()
    values = [float(row.observation[0]) for row in rows]
    assert len(set(values)) == len(values)

  def test_slow_resets_hold_up_nobody(self):
    start = time.monotonic()
    envs = make(
      'gym:tests.count_env:CountSlowReset-v0',
      'gym:tests.count_env:Count3-v0',
      num_envs=4,
    )
    assert {env_id for env_id, _ in step_all(envs, 200)} == {1, 3}
    closing = time.monotonic()
    envs.close()
    assert closing - start < 5
    assert time.monotonic() - closing < 3

  def test_timeout_gives_an_empty_batch(self):
    envs = make('gym:tests.count_env:CountSlowReset-v0')
    env_ids, outputs = envs.recv(timeout_secs=0.1)
    assert env_ids.shape == outputs.reward.shape == (0,)
    assert outputs.observation.shape == (0, 1)
    envs.send(np.zeros([0], np.int32), env_ids)
    envs.close()

  def test_nan_reward_is_stopped(self):
    envs = make(
      'gym:tests.count_env:Count100-v0',
      'gym:tests.count_env:CountNan-v0',
      num_envs=2,
    )
    with pytest.raises(py_process.EnvironmentFailed, match='reward nan') as e:
      list(step_all(envs, 100))
    envs.close()
    assert (e.value.env_id, e.value.step) == (1, 7)
    assert str(e.value).startswith('gym:tests.count_env:CountNan-v0')

  @pytest.mark.parametrize(
    ('gym_id', 'message'),
    [
      ('CartPol-v1', 'CartPole'),
      ('CartPole-v9', 'v1'),
      ('nowhere:X-v0', 'nowhere'),
      ('no id', 'no id'),
      ('Pendulum-v1', 'Discrete'),
      ('Blackjack-v1', 'Box'),
    ],
  )
  def test_refuses_levels(self, gym_id, message):
    with pytest.raises(ValueError, match=message) as e:
      make(f'gym:{gym_id}', num_envs=2)
    assert f'gym:{gym_id}' in str(e.value)
    assert '\n' not in str(e.value)

  def test_refuses_levels_with_different_spaces(self):
    with pytest.raises(ValueError, match='same observations'):
      make('gym:CartPole-v1', 'gym:Acrobot-v1', num_envs=2)


@pytest.mark.parametrize(
  'name', ['up_n_down', 'UpNDown', 'ALE/UpNDown-v5', 'upndown']
)
def test_spellings_of_games(name):
  assert atari_environments.find_game(name) == 'up_n_down'


def test_refuses_unknown_games_and_mixtures():
  with pytest.raises(ValueError, match='did you mean .*pong'):
    make('pnog')
  with pytest.raises(ValueError, match='gym:CartPole-v1'):
    make('zzzzzz')
  with pytest.raises(ValueError, match='cannot share'):
    make('pong', 'gym:CartPole-v1', num_envs=2)
  with pytest.raises(ValueError, match='pong 6, breakout 4'):
    make('pong', 'breakout', num_envs=2)
  with pytest.raises(ValueError, match='empty'):
    make()
