"""Tests of evaluation/scores.py."""

import dataclasses
import json

import numpy as np
import pytest
import tensorflow as tf

import actor
import environments
from evaluation import scores as scores_lib
import networks
from tests import contract

_COUNT = 'gym:tests.count_env:Count{}-v0'


class FakeEnvironments(environments.Environments):
  """Episodes of given lengths, which are also their returns.

  All environments are ready at the same time.
  """

  spec = environments.EnvironmentSpec(
    (1,), np.dtype(np.float32), num_actions=9, frames_per_step=4, stack=1,
    action_meanings=None,
  )  # fmt: skip

  def __init__(self, lengths, level_names=('a',), order=None):
    """Makes E environments.

    Args:
      lengths: [E][episode]; the last is repeated for all later episodes.
      level_names: given to the environments round robin.
      order: the order in which the environments become ready.
    """
    super().__init__(level_names, len(lengths), seed=1)
    self._episodes = environments.EpisodeTotals(len(lengths))
    self._lengths = lengths
    self._episode_numbers = np.zeros([len(lengths)], int)
    self._steps = np.full([len(lengths)], -1)
    self._order = np.array(
      range(len(lengths)) if order is None else order, np.int32
    )
    self.actions = []

  def recv(self, timeout_secs=None):
    ids = self._order
    self._steps[ids] += 1
    first = np.array([not self.actions] * len(ids))
    lengths = [
      self._lengths[i][min(self._episode_numbers[i], len(self._lengths[i]) - 1)]
      for i in ids
    ]
    done = (self._steps[ids] == lengths) & ~first
    info, _ = self._episodes.add(ids, np.float32(~first), done)
    self._steps[ids[done]] = 0
    self._episode_numbers[ids[done]] += 1
    observation = environments.Observation(np.float32(ids)[:, None], ())
    return ids, environments.StepOutput(
      np.float32(~first), info, done | first, observation
    )

  def send(self, actions, env_ids):
    self._check_actions(actions, env_ids)
    np.testing.assert_array_equal(env_ids, self._order)
    self.actions.append(actions[np.argsort(env_ids)])

  def close(self):
    pass


class CountingAgent:
  """Counts the steps of an episode in its state; the count is the action."""

  def initial_state(self, batch_size):
    zeros = np.zeros([batch_size], np.int32)
    return zeros, zeros


def counting_act(last_actions, env_outputs, state):
  count, twice = state
  np.testing.assert_array_equal(twice, 2 * count)
  np.testing.assert_array_equal(last_actions, count % 9)
  count = np.where(env_outputs.done, 0, count) + 1
  outputs = networks.AgentOutput((count % 9).astype(np.int32), None)
  return outputs, (count, 2 * count)


def evaluate(envs, num_episodes, **kwargs):
  return scores_lib.evaluate(
    counting_act, CountingAgent(), envs, num_episodes, **kwargs
  )


def score_of(returns, frames=None):
  returns = np.array(returns, float)
  recording = scores_lib.Recording(1, np.zeros([1], np.int32), returns[0])
  frames = np.ones([len(returns)], int) if frames is None else np.array(frames)
  return scores_lib.LevelScore(returns, frames, recording)


# Which episodes count.


def test_the_first_to_begin_count_in_the_order_of_their_beginnings():
  # They begin at steps A 0, B 0, A 2, A 4, B 7; the fifth does not count.
  envs = FakeEnvironments([[2, 2, 30, 1], [7, 1, 1]])
  score = evaluate(envs, 4)['a']
  assert score.returns.tolist() == [2, 7, 2, 30]
  assert score.frames.tolist() == [8, 28, 8, 120]


@pytest.mark.parametrize('num_episodes', [1, 2, 3])
@pytest.mark.parametrize('order', [[0, 1, 2], [2, 1, 0]])
def test_fewer_episodes_than_environments(num_episodes, order):
  # It does not matter which is ready first, or ends first.
  envs = FakeEnvironments([[9], [5], [1]], order=order)
  score = evaluate(envs, num_episodes)['a']
  assert score.returns.tolist() == [9, 5, 1][:num_episodes]


@pytest.mark.parametrize('num_episodes', [4, 7, 50])
def test_more_episodes_than_environments(num_episodes):
  envs = FakeEnvironments([[3, 1, 4], [1, 5, 9], [2, 6, 5]])
  score = evaluate(envs, num_episodes)['a']
  assert len(score.returns) == len(score.frames) == num_episodes
  assert score.returns[:4].tolist() == [3, 1, 2, 5]


def test_two_levels_with_n_each():
  envs = FakeEnvironments([[2], [3], [2], [3], [2]], ['a', 'b'])
  scores = evaluate(envs, 4)
  assert list(scores) == ['a', 'b']
  assert scores['a'].returns.tolist() == [2] * 4
  assert scores['b'].returns.tolist() == [3] * 4
  assert scores['a'].recording.seed == envs.seeds[0]
  assert scores['b'].recording.seed == envs.seeds[1]
  assert len(scores['b'].recording.actions) == 3


def test_short_episodes_are_not_favoured():
  generator = np.random.default_rng(0)
  means, naive_means = [], []
  for _ in range(60):
    lengths = generator.choice([1, 19], [8, 40])  # 10 on average.
    means.append(evaluate(FakeEnvironments(lengths), 12)['a'].mean)
    ends = np.cumsum(lengths, axis=1).ravel()
    naive_means.append(lengths.ravel()[np.argsort(ends, kind='stable')][:12])
  # One episode deviates by 9, the mean of 60 * 12 by 0.34.
  assert abs(np.mean(means) - 10) < 4 * 0.34
  assert np.mean(naive_means) < 8


def test_refuses_to_play_no_episode():
  with pytest.raises(ValueError, match='num_episodes'):
    evaluate(FakeEnvironments([[1]]), 0)


def test_counts_progress_over_all_levels():
  calls = []
  envs = FakeEnvironments([[2], [3]], ['a', 'b'])
  evaluate(envs, 2, on_progress=lambda *call: calls.append(call))
  assert calls == [(1, 4), (2, 4), (3, 4), (4, 4)]


# How they are played.


def test_records_the_first_episode_of_the_first_environment():
  envs = FakeEnvironments([[12, 3], [2]], order=[1, 0])
  recording = evaluate(envs, 5)['a'].recording
  assert recording.seed == envs.seeds[0]
  assert recording.episode_return == 12
  assert recording.actions.dtype == np.int32
  # The agent's count: each environment has its own state.
  assert recording.actions.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 2, 3]
  sent = np.stack(envs.actions)[:12, 0]
  np.testing.assert_array_equal(recording.actions, sent)


def test_plays_levels_in_processes():
  levels = [_COUNT.format(3), _COUNT.format(20)]
  envs = contract.make(*levels, num_envs=3, training=False)
  try:
    scores = scores_lib.evaluate(_act_zero, CountingAgent(), envs, 3)
  finally:
    envs.close()
  assert {name: s.returns.tolist() for name, s in scores.items()} == {
    levels[0]: [3, 3, 3],
    levels[1]: [20, 20, 20],
  }
  assert scores[levels[1]].frames.tolist() == [20, 20, 20]


def _act_zero(last_actions, env_outputs, state):
  actions = np.zeros_like(last_actions)
  return networks.AgentOutput(actions, None), tuple(state)


def test_plays_a_policy():
  envs = contract.make('gym:CartPole-v1', num_envs=3, training=False)
  try:
    with tf.Graph().as_default():
      tf.compat.v1.set_random_seed(1)
      agent = networks.Agent(envs.spec, 'vector', use_lstm=True)
      policy = actor.Policy(agent, envs.spec)
      with tf.compat.v1.Session() as session:
        session.run(tf.compat.v1.global_variables_initializer())
        scores = scores_lib.evaluate(policy.bind(session), agent, envs, 5)
  finally:
    envs.close()
  score = scores['gym:CartPole-v1']
  assert len(score.returns) == 5
  assert score.min >= 8
  assert len(score.recording.actions) == score.recording.episode_return
  # Drawn, not the most likely one.
  assert set(score.recording.actions.tolist()) == {0, 1}


# How they are reported.


def test_summary():
  score = score_of([1, 2, 3, 10])
  assert (score.mean, score.median, score.min, score.max) == (4, 2.5, 1, 10)
  # Deviations -3, -2, -1, 6: sqrt(50 / 3) / sqrt(4).
  assert score.standard_error == pytest.approx(2.0412414523)


def test_the_error_of_one_episode_is_unknown():
  score = score_of([7])
  assert score.standard_error is None
  assert (score.mean, score.median, score.min, score.max) == (7, 7, 7, 7)


def test_table():
  scores = {'pong': score_of([20, 21], [7000, 8001]), 'qbert': score_of([1250])}
  assert scores_lib.table(scores) == '\n'.join(
    [
      'level  episodes      mean    median  standard error       min       max'
      '  mean frames',
      'pong          2     20.50     20.50            0.50     20.00     21.00'
      '        7,500',
      'qbert         1  1,250.00  1,250.00               -  1,250.00  1,250.00'
      '            1',
    ]
  )


def test_write(tmp_path):
  path = tmp_path / 'test.json'
  path.write_text('old')
  settings = {
    'checkpoint': tmp_path / 'model.ckpt-7',
    'num_environment_frames': np.int64(123),
    'seed': None,
  }
  scores = {'pong': score_of([20, 21], [7000, 8001]), 'qbert': score_of([1250])}
  scores_lib.write(path, scores, settings, {'atari57/median': 7.5})
  assert json.loads(path.read_text()) == {
    'settings': {
      'checkpoint': str(tmp_path / 'model.ckpt-7'),
      'num_environment_frames': 123,
      'seed': None,
    },
    'suite_scores': {'atari57/median': 7.5},
    'levels': {
      'pong': {
        'mean': 20.5,
        'median': 20.5,
        'standard_error': pytest.approx(0.5),
        'min': 20,
        'max': 21,
        'returns': [20, 21],
        'frames': [7000, 8001],
      },
      'qbert': {
        'mean': 1250,
        'median': 1250,
        'standard_error': None,
        'min': 1250,
        'max': 1250,
        'returns': [1250],
        'frames': [1],
      },
    },
  }
  assert [p.name for p in tmp_path.iterdir()] == ['test.json']


def test_write_is_all_or_nothing(tmp_path):
  path = tmp_path / 'test.json'
  path.write_text('old')
  with pytest.raises(ValueError):
    scores_lib.write(path, {'pong': score_of([1])}, {'seed': np.nan}, {})
  assert path.read_text() == 'old'
  with pytest.raises(FileNotFoundError):
    scores_lib.write(tmp_path / 'no' / 'test.json', {}, {}, {})
  assert [p.name for p in tmp_path.iterdir()] == ['test.json']


def test_table_of_a_suite():
  table = scores_lib.table(
    {'pong': score_of([20, 21]), 'qbert': score_of([1250])},
    lambda name, value: {'pong': 2 * value, 'qbert': value / 100}[name],
  )
  header, pong, qbert = table.splitlines()
  assert header.endswith('human-normalized')
  assert pong.endswith('41.0 %') and qbert.endswith('12.5 %')


def test_the_same_evaluation_resumes_from_its_progress(tmp_path):
  path = tmp_path / 'progress.json'
  same = {'checkpoint': 'frames-7', 'test_num_episodes': 2}
  progress = scores_lib.Progress(path, same)
  assert not progress.scores
  recording = scores_lib.Recording(7, np.array([1, 0], np.int32), 20.0)
  score = dataclasses.replace(score_of([20, 21]), recording=recording)
  progress.add({'pong': score})
  progress.add({'qbert': dataclasses.replace(score, returns=np.ones([1]))})

  again = scores_lib.Progress(path, same)
  assert list(again.scores) == ['pong', 'qbert']
  np.testing.assert_array_equal(again.scores['pong'].returns, [20, 21])
  np.testing.assert_array_equal(again.scores['pong'].frames, score.frames)
  assert again.scores['pong'].recording.seed == 7
  np.testing.assert_array_equal(again.scores['pong'].recording.actions, [1, 0])

  other = scores_lib.Progress(path, same | {'checkpoint': 'frames-8'})
  assert not other.scores
  again.finish()
  assert not list(tmp_path.iterdir())


def test_damaged_progress_is_ignored(tmp_path):
  path = tmp_path / 'progress.json'
  for text in ('', '{', '[]', '{"evaluation": {}}', '{"evaluation": 1}'):
    path.write_text(text)
    assert not scores_lib.Progress(path, {}).scores


@pytest.mark.parametrize(
  ('num_episodes', 'num_envs', 'expected'),
  [
    (200, 8, [('a', 8), ('b', 8), ('c', 8)]),
    (4, 8, [('ab', 8), ('c', 4)]),
    (1, 8, [('abc', 3)]),
    (3, 1, [('a', 1), ('b', 1), ('c', 1)]),
  ],
)
def test_share_out(num_episodes, num_envs, expected):
  groups = scores_lib.share_out(list('abc'), num_episodes, num_envs)
  assert [(''.join(group), n) for group, n in groups] == expected
