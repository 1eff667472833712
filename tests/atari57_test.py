"""Tests of atari57.py."""

import math
import statistics

from ale_py import roms
import gymnasium
import numpy as np
import pytest

import atari57
import levels


def _returns(share, **changes):
  """Returns a return per game: 0 is random play, 1 human."""
  return {
    game: [random + share * (atari57.HUMAN_SCORES[game] - random)]
    for game, random in atari57.RANDOM_SCORES.items()
  } | changes


def test_games_are_57_roms():
  assert len(set(atari57.GAMES)) == len(atari57.GAMES) == 57
  assert set(atari57.GAMES) < set(roms.get_all_rom_ids())
  assert list(atari57.GAMES) == sorted(atari57.GAMES)


@pytest.mark.parametrize(
  ('scores', 'total', 'weighted_total'),
  [
    (atari57.RANDOM_SCORES, 50864.9, 1266554.2),
    (atari57.HUMAN_SCORES, 606494.2, 17871784.3),
  ],
)
def test_scores_are_the_published_ones(scores, total, weighted_total):
  assert tuple(scores) == atari57.GAMES
  assert math.fsum(scores.values()) == pytest.approx(total, abs=1e-6)
  weighted = [
    position * score for position, score in enumerate(scores.values(), 1)
  ]
  assert math.fsum(weighted) == pytest.approx(weighted_total, abs=1e-6)


def test_a_human_beats_random_play_in_every_game():
  for game in atari57.GAMES:
    assert atari57.HUMAN_SCORES[game] > atari57.RANDOM_SCORES[game]


@pytest.mark.parametrize(
  ('game', 'episode_return', 'percent'),
  [
    ('breakout', 640.43, 2217.8125),
    ('pong', 20.98, 118.0737),
    ('skiing', -10180.38, 54.2090),
    ('double_dunk', -0.33, 830.4545),
    ('kangaroo', 47, -0.1676),
  ],
)
def test_scores_of_published_returns(game, episode_return, percent):
  score = atari57.SUITE.normalize(game, episode_return)
  assert score == pytest.approx(percent, abs=1e-4)
  # All other games are at random play.
  scores = atari57.compute_human_normalized_score(
    _returns(0, **{game: [episode_return - 1, episode_return + 1]})
  )
  assert scores == pytest.approx((0, percent / 57), abs=1e-4)


@pytest.mark.parametrize('share', [0, 0.5, 1])
def test_random_play_scores_0_and_a_human_100(share):
  score = atari57.compute_human_normalized_score(_returns(share))
  assert score == pytest.approx((100 * share,) * 2, abs=1e-4)
  assert score == (score.median, score.mean)
  assert {type(value) for value in score} == {float}


@pytest.mark.parametrize('per_level_cap', [None, 100])
def test_median_and_mean(per_level_cap):
  generator = np.random.default_rng(1)
  shares = generator.normal(0.8, 1.5, size=57)
  returns = {
    game: _returns(share)[game]
    for game, share in zip(atari57.GAMES, shares, strict=True)
  }
  percents = [100 * share for share in shares.tolist()]
  if per_level_cap is not None:
    percents = [min(percent, per_level_cap) for percent in percents]
  score = atari57.compute_human_normalized_score(returns, per_level_cap)
  assert score.median == pytest.approx(statistics.median(percents), abs=1e-4)
  assert score.mean == pytest.approx(statistics.mean(percents), abs=1e-4)


def test_incomplete_returns():
  returns = _returns(1, pong=[], breakout=[math.nan])
  del returns['zaxxon']
  with pytest.raises(ValueError, match='none of pong, zaxxon'):
    atari57.compute_human_normalized_score(returns)
  with pytest.raises(ValueError, match='finite.*breakout'):
    atari57.compute_human_normalized_score(
      returns | _returns(1, breakout=[math.nan])
    )
  with pytest.raises(ValueError, match='up_n_down'):
    atari57.compute_human_normalized_score(_returns(1, UpNDown=[5]))
  with pytest.warns(UserWarning, match='rooms_watermaze'):
    score = atari57.compute_human_normalized_score(
      _returns(1, rooms_watermaze=[5])
    )
  assert score == pytest.approx((100, 100), abs=1e-4)


@pytest.mark.parametrize('game', atari57.GAMES)
def test_spellings(game):
  camel = ''.join(part.capitalize() for part in game.split('_'))
  # These two have the settings of AtariSettings.
  same = [f'{camel}{kind}-v4' for kind in ('NoFrameskip', 'Deterministic')]
  other = f'ALE/{camel}-v5'
  assert other in gymnasium.registry
  for name in game, game.replace('_', ''), camel, *same:
    assert levels.find_game(name) == game
  for name in game, camel, *same, other:
    assert atari57.SUITE.find_level(name) == game
    assert atari57.SUITE.normalize(name, atari57.HUMAN_SCORES[game]) == (
      pytest.approx(100)
    )


def test_unknown_names():
  with pytest.raises(ValueError, match='did you mean jamesbond'):
    atari57.SUITE.normalize('jamesbnd', 5)
  # A game, but not one of the 57.
  assert levels.find_game('adventure') == 'adventure'
  with pytest.raises(ValueError, match='adventure'):
    atari57.SUITE.normalize('adventure', 5)
