"""Tests of time limits: what environments show at a cut, and what is learnt."""

import numpy as np
import tensorflow as tf

import config as config_lib
import environments
from envs import atari
from envs import gym
from runtime import threads
from tests import contract
import training

_CUT = 'gym:tests.count_env:CountTruncated-v0'


def play(num_steps, **settings):
  envs = contract.make(_CUT, gym_settings=gym.GymSettings(**settings))
  rows = [row for _, row in contract.step_all(envs, num_steps)]
  envs.close()
  return rows


class TestEnvironments:
  def test_shows_the_last_observation(self):
    rows = play(9)
    shown = [row.observation.frame[0] for row in rows]
    assert shown == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert [bool(row.info.truncated) for row in rows] == [
      False, False, False, True, False, False, False, True, False
    ]  # fmt: skip
    # A step of the environment is never a step of two episodes.
    assert [bool(row.done) for row in rows] == [
      True, False, False, False, True, False, False, False, True
    ]  # fmt: skip
    assert [row.reward for row in rows] == [0, 1, 1, 1, 0, 1, 1, 1, 0]
    assert contract.finished(enumerate(rows)) == [(3.0, 3)] * 2
    # What follows is like an environment's very first output.
    assert rows[4].info == rows[0].info == (0, 0, False, False)

  def test_can_be_an_end(self):
    rows = play(7, bootstrap_at_time_limit=False)
    assert [row.observation.frame[0] for row in rows] == [0, 1, 2, 0, 1, 2, 0]
    assert [bool(row.done) for row in rows] == [True, False, False] * 2 + [True]
    assert not any(row.info.truncated for row in rows)
    assert contract.finished(enumerate(rows)) == [(3.0, 3)] * 2

  def test_is_an_end_in_an_evaluation(self):
    envs = contract.make(_CUT, training=False)
    rows = [row for _, row in contract.step_all(envs, 7)]
    envs.close()
    assert not any(row.info.truncated for row in rows)
    assert contract.finished(enumerate(rows)) == [(3.0, 3)] * 2

  def test_reward_on_the_last_step_is_kept(self):
    envs = contract.make('gym:tests.count_env:CountLastOf20-v0')
    rows = [row for _, row in contract.step_all(envs, 211)]
    envs.close()
    assert sum(row.reward for row in rows) == 10
    assert contract.finished(enumerate(rows)) == [(1.0, 20)] * 10
    assert sum(not row.info.truncated for row in rows) == 201

  def test_an_end_in_every_step(self):
    envs = contract.make('gym:tests.count_env:CountTruncated1-v0')
    rows = [row for _, row in contract.step_all(envs, 8)]
    envs.close()
    assert [bool(row.info.truncated) for row in rows] == [False, True] * 4
    assert [bool(row.done) for row in rows] == [True, False] * 4
    assert contract.finished(enumerate(rows)) == [(1.0, 1)] * 4


class TestAtari:
  def _play(self, bootstrap, num_steps=60):
    settings = atari.AtariSettings(
      max_episode_frames=80, bootstrap_at_time_limit=bootstrap
    )
    envs = contract.make(
      'pong', num_envs=2, max_batch=2, atari_settings=settings
    )
    rows = list(contract.step_all(envs, 2 * num_steps, action=0))
    envs.close()
    return [row for env_id, row in rows if env_id == 0]

  def test_shows_the_last_observation(self):
    rows = self._play(bootstrap=True)
    cuts = [t for t, row in enumerate(rows) if row.info.truncated]
    assert len(cuts) >= 2
    for t in cuts[:-1]:
      cut, first = rows[t], rows[t + 1]
      assert cut.info.episode_done and not cut.done
      assert first.done and first.info == (0, 0, False, False)
      assert first.reward == 0
      # The stack goes on, and is blank after it.
      newest = cut.observation.frame[:-1]
      np.testing.assert_array_equal(newest, rows[t - 1].observation.frame[1:])
      assert not first.observation.frame[:-1].any()
      assert rows[t + 2].info.episode_step == 1

  def test_the_episodes_are_the_same(self):
    """Cut or ended, the same frames are played, up to the first limit."""
    cut, ended = self._play(True, 40), self._play(False, 40)
    (t, *_) = [i for i, row in enumerate(ended) if row.info.episode_done]
    assert cut[t].info.truncated
    for a, b in zip(cut[:t], ended[:t], strict=True):
      np.testing.assert_array_equal(a.observation.frame, b.observation.frame)
    assert cut[t].info[:3] == ended[t].info[:3]


def learn_value(level_name, **settings):
  """Trains, and returns the mean value of the inputs that a BlindEnv gives."""
  config = config_lib.make(
    level_name=level_name,
    num_actors=1,
    envs_per_actor=4,
    envs_per_process=4,
    batch_size=4,
    discounting=0.9,
    learning_rate=0.005,
    # A bound would make the rare large errors, those of ends, count less.
    max_gradient_norm=0.0,
    total_environment_frames=15_000,
    **settings,
  )
  with training.LocalTraining(config, [level_name]) as run:
    value = run.learner.agent.unroll(
      tf.constant([[0, 1]]),  # The last actions.
      environments.StepOutput(
        reward=tf.ones([1, 2]),
        info=(),
        done=tf.zeros([1, 2], tf.bool),
        observation=environments.Observation(tf.zeros([1, 2, 1]), ()),
      ),
      (),
    )[1]
    running = threads.Threads(run.close_queue)
    run.start(running, lambda result: None)
    assert running.wait(100.0)
    running.join()
    assert running.failure is None
    return float(np.mean(run.session.run(value)))


def test_values_do_not_fall_before_a_time_limit():
  """Reward 1 a step, gamma 0.9: worth 10 with no end, on average 8 with it."""
  truncated = 'gym:tests.count_env:BlindTruncated-v0'
  assert 9.5 < learn_value(truncated) < 10.5
  # As in the original, a cut is an end.
  assert 7 < learn_value(truncated, bootstrap_at_time_limit=False) < 9
  assert 7 < learn_value('gym:tests.count_env:BlindTerminated-v0') < 9
