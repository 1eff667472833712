"""Tests of dmlab30.py, and of suites.py as far as atari57.py uses it too."""

import math
import pathlib
import statistics
import subprocess
import sys

import numpy as np
import pytest

import dmlab30

_HELD_OUT = {
  'rooms_collect_good_objects_test',
  'rooms_exploit_deferred_effects_test',
}


def _returns(share, **changes):
  """Returns a return per test level: 0 is random play, 1 human."""
  return {
    level: [random + share * (dmlab30.HUMAN_SCORES[level] - random)]
    for level, random in dmlab30.RANDOM_SCORES.items()
  } | changes


def _score(level_returns, per_level_cap=None):
  return dmlab30.compute_human_normalized_score(level_returns, per_level_cap)


def test_counts_of_names():
  assert len(dmlab30.LEVEL_MAPPING) == len(dmlab30.ALL_LEVELS) == 30
  assert len(set(dmlab30.LEVEL_MAPPING.values())) == 30
  assert len(set(dmlab30.NAMES)) == len(dmlab30.NAMES) == 32
  assert set(dmlab30.NAMES) - set(dmlab30.ALL_LEVELS) == _HELD_OUT


def test_two_levels_have_a_version_for_testing():
  assert {
    train: test
    for train, test in dmlab30.LEVEL_MAPPING.items()
    if train != test
  } == {test.replace('_test', '_train'): test for test in _HELD_OUT}


def test_levels_are_in_order():
  assert list(dmlab30.LEVEL_MAPPING) == list(dmlab30.ALL_LEVELS)
  assert dmlab30.ALL_LEVELS[0] == 'rooms_collect_good_objects_train'
  assert dmlab30.ALL_LEVELS[17] == 'skymaze_irreversible_path_varied'
  assert dmlab30.ALL_LEVELS[29] == 'explore_object_rewards_many'


@pytest.mark.parametrize(
  ('scores', 'total', 'weighted_total'),
  [
    (dmlab30.RANDOM_SCORES, 72.617, 1335.922),
    (dmlab30.HUMAN_SCORES, 3110.15, 49389.5),
  ],
)
def test_scores_are_the_published_ones(scores, total, weighted_total):
  assert list(scores) == list(dmlab30.LEVEL_MAPPING.values())
  assert math.fsum(scores.values()) == pytest.approx(total, abs=1e-9)
  weighted = [
    position * score for position, score in enumerate(scores.values(), 1)
  ]
  assert math.fsum(weighted) == pytest.approx(weighted_total, abs=1e-9)


@pytest.mark.parametrize('per_level_cap', [None, 100])
@pytest.mark.parametrize('share', [0, 0.5, 1])
def test_random_play_scores_0_and_a_human_100(share, per_level_cap):
  score = _score(_returns(share), per_level_cap)
  assert type(score) is float
  assert score == pytest.approx(100 * share, abs=1e-4)


def test_one_level_at_human():
  level = 'psychlab_visual_search'
  score = _score(_returns(0, **{level: [dmlab30.HUMAN_SCORES[level]]}))
  assert score == pytest.approx(3.333333, abs=1e-4)


def test_matches_a_literal_sum():
  generator = np.random.default_rng(1)
  returns = {
    level: generator.normal(30, 40, size=generator.integers(1, 9)).tolist()
    for level in dmlab30.ALL_LEVELS
  }
  expected = {cap: 0.0 for cap in (None, 100, 20)}
  for train, test in dmlab30.LEVEL_MAPPING.items():
    random, human = dmlab30.RANDOM_SCORES[test], dmlab30.HUMAN_SCORES[test]
    share = (statistics.mean(returns[train]) - random) / (human - random)
    for cap in expected:
      percent = 100 * share
      expected[cap] += (percent if cap is None else min(percent, cap)) / 30
  for cap, score in expected.items():
    assert _score(returns, cap) == pytest.approx(score, abs=1e-4)


def test_cap_limits_the_mean_of_a_level_not_its_returns():
  random, human = 4.065, 54
  # 0 % and 300 %: the mean of 150 % is capped at 100 %.
  returns = _returns(0, rooms_watermaze=[random, random + 3 * (human - random)])
  assert _score(returns, 100) == pytest.approx(100 / 30, abs=1e-4)
  assert _score(returns) == pytest.approx(150 / 30, abs=1e-4)


def test_there_is_no_floor():
  assert _score(_returns(-2), 100) == pytest.approx(-200, abs=1e-4)


def test_takes_training_names_and_paths():
  returns = _returns(0.25)
  by_training_name = {
    train: returns[test] for train, test in dmlab30.LEVEL_MAPPING.items()
  }
  by_path = {
    f'contributed/dmlab30/{name}': by_training_name[name]
    for name in by_training_name
  }
  assert _score(by_training_name) == pytest.approx(25, abs=1e-4)
  assert _score(by_path) == pytest.approx(25, abs=1e-4)


def test_names_the_levels_without_returns():
  returns = _returns(1, rooms_watermaze=[], natlab_fixed_large_map=np.array([]))
  del returns['rooms_exploit_deferred_effects_test']
  with pytest.raises(ValueError) as raised:
    _score(returns)
  named = {name for name in dmlab30.NAMES if name in str(raised.value)}
  assert named == {
    'natlab_fixed_large_map',
    'rooms_exploit_deferred_effects_test',
    'rooms_watermaze',
  }


@pytest.mark.parametrize('value', [math.nan, math.inf, -math.inf])
def test_names_the_levels_with_returns_that_are_not_finite(value):
  returns = _returns(1, rooms_watermaze=[1, value, 2])
  with pytest.raises(ValueError, match=r'finite.*rooms_watermaze') as raised:
    _score(returns, 100)
  assert 'natlab' not in str(raised.value)


def test_ignores_other_levels_with_a_warning():
  returns = _returns(1, pong=[math.nan], **{'gym:CartPole-v1': []})
  with pytest.warns(UserWarning) as warned:
    assert _score(returns) == pytest.approx(100, abs=1e-4)
  assert [str(warning.message).split()[0] for warning in warned] == [
    'pong',
    'gym:CartPole-v1',
  ]
  assert {warning.filename for warning in warned} == {__file__}


def test_does_not_warn_otherwise(recwarn):
  _score(_returns(1))
  assert not recwarn.list


def test_refuses_returns_under_two_names():
  returns = _returns(1, rooms_collect_good_objects_train=[5])
  with pytest.raises(ValueError, match='rooms_collect_good_objects_test'):
    _score(returns)


def test_normalizes_one_level():
  assert dmlab30.SUITE.normalize('rooms_watermaze', 4.065) == pytest.approx(0)
  assert dmlab30.SUITE.normalize(
    'rooms_collect_good_objects_train', 10
  ) == pytest.approx(100)
  assert dmlab30.SUITE.normalize(
    'contributed/dmlab30/language_execute_random_task', 124.0685
  ) == pytest.approx(50, abs=1e-4)
  with pytest.raises(ValueError, match='did you mean rooms_watermaze'):
    dmlab30.SUITE.normalize('rooms_watermaz', 5)


@pytest.mark.parametrize('name', dmlab30.NAMES)
def test_finds_levels(name):
  assert dmlab30.SUITE.find_level(name) == name
  assert dmlab30.SUITE.find_level(f'contributed/dmlab30/{name}') == name
  assert dmlab30.SUITE.find_level(f'lab:contributed/dmlab30/{name}') == name


def test_refuses_unknown_levels():
  with pytest.raises(ValueError, match='did you mean .*skymaze_irreversible'):
    dmlab30.SUITE.find_level('contributed/dmlab30/skymaze_irreversible_path')
  with pytest.raises(ValueError, match='like rooms_watermaze'):
    dmlab30.SUITE.find_level('pong')


def test_needs_no_tensorflow():
  # Environments import it in processes that must not load TensorFlow.
  program = (
    'import sys, atari57, dmlab30, levels; '
    'sys.exit("tensorflow" in sys.modules)'
  )
  checkout = pathlib.Path(__file__).parent.parent
  subprocess.run([sys.executable, '-c', program], cwd=checkout, check=True)
