"""Tests of envs/atari.py."""

import ale_py
from ale_py import roms
import numpy as np
import pytest

import atari57
import environments
from envs import atari
from tests import contract


class TestAtari(contract.EnvironmentsContract):
  level_name = 'freeway'

  def test_spec(self):
    envs = contract.make('pong', num_envs=1)
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
    envs = contract.make('pong')
    arguments = atari._vector_arguments(envs._settings)
    assert arguments['repeat_action_probability'] == 0
    assert arguments['max_num_frames_per_episode'] == 108_000
    assert (
      envs.settings().items()
      >= {
        'reward_clipping': False,
        'use_fire_reset': False,
      }.items()
    )
    assert arguments['stack_num'] == 4

  def test_stacks_are_blank_before_an_episode(self):
    settings = atari.AtariSettings(max_episode_frames=40)
    envs = contract.make('breakout', num_envs=2, atari_settings=settings)
    before = {}
    for env_id, row in contract.step_all(envs, 2 * 60):
      stack = row.observation.frame
      begins = row.info.episode_done and not row.info.truncated
      if begins or row.info.episode_step == 0:
        before[env_id] = np.zeros_like(stack)
      np.testing.assert_array_equal(stack[:-1], before[env_id][1:])
      assert stack[-1].any()
      before[env_id] = stack

  def test_full_action_set_and_sticky_actions(self):
    settings = atari.AtariSettings(
      full_action_set=True, repeat_action_probability=0.25
    )
    envs = contract.make(
      'pong', 'breakout', num_envs=4, atari_settings=settings
    )
    assert envs.spec.num_actions == 18
    assert envs.settings()['repeat_action_probability'] == 0.25
    assert envs.level_names == ['pong', 'breakout'] * 2
    assert {env_id for env_id, _ in contract.step_all(envs, 16)} == {0, 1, 2, 3}

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
      atari.AtariSettings(**wrong)

  def test_cap_counts_frames_and_each_step_is_four(self):
    settings = atari.AtariSettings(
      max_noops=0, max_episode_frames=400, bootstrap_at_time_limit=False
    )
    envs = contract.make('freeway', num_envs=2, atari_settings=settings)
    rows = list(contract.step_all(envs, 2 * 301))
    assert [steps for _, steps in contract.finished(rows)] == [100] * 6
    # The emulator's own counter, over all three episodes.
    info = envs._groups[0]._vector.recv()[-1]
    assert info['frame_number'].tolist() == [4 * 301]

  @pytest.mark.parametrize('training', [True, False])
  def test_noops_are_1_to_30(self, training):
    settings = atari.AtariSettings(
      max_episode_frames=4, bootstrap_at_time_limit=False
    )
    envs = contract.make(
      'freeway',
      num_envs=4,
      max_batch=4,
      training=training,
      atari_settings=settings,
    )
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
    for _ in range(750):
      env_ids, outputs = envs.recv()
      counts += last_info['episode_frame_number'].tolist()
      envs.send(np.zeros(4, np.int32), env_ids)
    assert len(resets) > 1  # At least one 0 was drawn again.
    assert min(counts) == 1
    assert max(counts) == 30
    assert abs(np.mean(counts) - 15.5) < 0.6

  def test_no_noops(self):
    settings = atari.AtariSettings(max_noops=0, max_episode_frames=40)
    envs = contract.make('freeway', num_envs=2, atari_settings=settings)
    firsts = [
      row.observation.frame
      for _, row in contract.step_all(envs, 50)
      if row.done
    ]
    assert len(firsts) > 4
    for first in firsts:
      np.testing.assert_array_equal(first, firsts[0])

  def test_games_are_deterministic_without_sticky_actions(self):
    settings = atari.AtariSettings(max_noops=0)
    envs = [
      contract.make('pong', seed=s, atari_settings=settings) for s in (1, 2)
    ]
    for (_, a), (_, b) in zip(
      *(contract.step_all(e, 60) for e in envs), strict=True
    ):
      np.testing.assert_array_equal(a.observation.frame, b.observation.frame)

  def test_life_loss_ends_episodes_in_training_only(self):
    def play(training):
      envs = contract.make('breakout', seed=5, training=training)
      return [row for _, row in contract.step_all(envs, 700)]

    training, evaluation = play(True), play(False)
    for row, other in zip(training, evaluation, strict=True):
      # The same frames, with the same totals.
      np.testing.assert_array_equal(
        row.observation.frame, other.observation.frame
      )
      assert row.info == other.info
    games = sum(row.info.episode_done for row in training)
    assert games >= 2
    assert sum(row.done for row in evaluation) == 1 + games
    # A game has five lives; four are lost before its end.
    lost = 0
    for row in training[1:]:
      lost += row.done
      if row.info.episode_done:
        assert lost == 5
        lost = 0

  def test_games_without_lives_end_only_at_their_end(self):
    envs = contract.make('pong', num_envs=4, max_batch=4)
    rows = list(contract.step_all(envs, 4 * 1100))
    games = contract.finished(rows)
    assert games
    assert sum(bool(row.done) for _, row in rows) == 4 + len(games)
    assert all(value <= -14 for value, _ in games)

  def test_rewards_are_not_clipped(self):
    envs = contract.make('qbert', num_envs=4, max_batch=4)
    assert max(row.reward for _, row in contract.step_all(envs, 800)) >= 25

  def test_waiting_for_fire_ends_at_the_cap(self):
    settings = atari.AtariSettings(max_episode_frames=2000)
    envs = contract.make('breakout', training=False, atari_settings=settings)
    rows = list(contract.step_all(envs, 1001, action=0))
    assert contract.finished(rows) == [(0.0, 500)] * 2

  def test_frames_are_the_maximum_of_the_last_two(self):
    arguments = atari._vector_arguments(atari.AtariSettings(max_noops=0))
    # The emulator's own size: nothing is scaled.
    arguments |= {'img_height': 210, 'img_width': 160}
    group = atari._AtariGroup(
      np.zeros([1], np.int32), 'asteroids', [1], arguments
    )
    ale = ale_py.ALEInterface()
    ale.setFloat('repeat_action_probability', 0.0)
    ale.loadROM(roms.get_rom_path('asteroids'))
    frames = list(group.recv()[-1][0])
    flickers = 0
    for _ in range(50):
      group.send(np.array([1]))
      *_, stacks = group.recv()
      for _ in range(3):
        ale.act(1)
      before = ale.getScreenGrayscale()
      ale.act(1)
      last = ale.getScreenGrayscale()
      frames.append(np.maximum(before, last))
      np.testing.assert_array_equal(stacks[0], frames[-4:])
      flickers += (before != last).any()
    assert flickers > 25

  def test_zero_lives_can_mean_a_last_life(self):
    envs = contract.make('bank_heist', num_envs=4, max_batch=4)
    lost = np.zeros(4, int)
    counts = []
    for env_id, row in contract.step_all(envs, 4 * 700):
      lost[env_id] += row.done and row.info.episode_step > 0
      if row.info.episode_done:
        counts.append(int(lost[env_id]))
        lost[env_id] = 0
    assert counts  # The game starts with 4 spare lives.
    assert set(counts) == {5}


class TestSeveralGames:
  def test_have_all_actions(self):
    envs = contract.make('pong', 'breakout', num_envs=4)
    assert envs.spec.num_actions == 18
    assert envs.settings()['full_action_space']

  def test_actions_that_skiing_does_not_have_are_noops(self):
    settings = atari.AtariSettings(full_action_set=True)
    envs = contract.make('skiing', 'pong', num_envs=2, training=False)
    names = envs.spec.action_meanings
    assert len(names) == 18
    # It has 9 actions; the 17th would hang it.
    assert len({env_id for env_id, _ in contract.step_all(envs, 400)}) == 2

    def play(action):
      envs = contract.make('skiing', atari_settings=settings, training=False)
      rows = contract.step_all(envs, 60, action=names.index(action))
      return [row.observation.frame for _, row in rows]

    noop = play('NOOP')
    np.testing.assert_array_equal(play('DOWNLEFTFIRE'), noop)
    # Actions are matched by name: their indices in its own list differ.
    assert not np.array_equal(play('LEFT'), noop)
    assert not np.array_equal(play('LEFT'), play('RIGHT'))

  def test_all_57_step(self):
    envs = contract.make(*atari57.GAMES, num_envs=57, max_batch=57)
    rows = list(contract.step_all(envs, 2 * 57))
    assert {env_id for env_id, _ in rows} == set(range(57))
