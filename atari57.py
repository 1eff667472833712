"""Atari-57: its games, their reference scores, the human-normalized score."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

import suites

# From dqn_zoo's atari_data.py: full episodes with 1 to 30 no-ops at the start,
# cut at 108,000 frames. The table of Mnih et al. (2015) must not be mixed with
# it: its episodes are cut after five minutes.
_SCORES = {
  # Game: mean return of (random play, a human).
  'alien': (227.8, 7127.7),
  'amidar': (5.8, 1719.5),
  'assault': (222.4, 742.0),
  'asterix': (210.0, 8503.3),
  'asteroids': (719.1, 47388.7),
  'atlantis': (12850.0, 29028.1),
  'bank_heist': (14.2, 753.1),
  'battle_zone': (2360.0, 37187.5),
  'beam_rider': (363.9, 16926.5),
  'berzerk': (123.7, 2630.4),
  'bowling': (23.1, 160.7),
  'boxing': (0.1, 12.1),
  'breakout': (1.7, 30.5),
  'centipede': (2090.9, 12017.0),
  'chopper_command': (811.0, 7387.8),
  'crazy_climber': (10780.5, 35829.4),
  'defender': (2874.5, 18688.9),
  'demon_attack': (152.1, 1971.0),
  'double_dunk': (-18.6, -16.4),
  'enduro': (0.0, 860.5),
  'fishing_derby': (-91.7, -38.7),
  'freeway': (0.0, 29.6),
  'frostbite': (65.2, 4334.7),
  'gopher': (257.6, 2412.5),
  'gravitar': (173.0, 3351.4),
  'hero': (1027.0, 30826.4),
  'ice_hockey': (-11.2, 0.9),
  'jamesbond': (29.0, 302.8),
  'kangaroo': (52.0, 3035.0),
  'krull': (1598.0, 2665.5),
  'kung_fu_master': (258.5, 22736.3),
  'montezuma_revenge': (0.0, 4753.3),
  'ms_pacman': (307.3, 6951.6),
  'name_this_game': (2292.3, 8049.0),
  'phoenix': (761.4, 7242.6),
  'pitfall': (-229.4, 6463.7),
  'pong': (-20.7, 14.6),
  'private_eye': (24.9, 69571.3),
  'qbert': (163.9, 13455.0),
  'riverraid': (1338.5, 17118.0),
  'road_runner': (11.5, 7845.0),
  'robotank': (2.2, 11.9),
  'seaquest': (68.4, 42054.7),
  'skiing': (-17098.1, -4336.9),
  'solaris': (1236.3, 12326.7),
  'space_invaders': (148.0, 1668.7),
  'star_gunner': (664.0, 10250.0),
  'surround': (-10.0, 6.5),
  'tennis': (-23.8, -8.3),
  'time_pilot': (3568.0, 5229.2),
  'tutankham': (11.4, 167.6),
  'up_n_down': (533.4, 11693.2),
  'venture': (0.0, 1187.5),
  'video_pinball': (16256.9, 17667.9),
  'wizard_of_wor': (563.5, 4756.5),
  'yars_revenge': (3092.9, 54576.9),
  'zaxxon': (32.5, 9173.3),
}

RANDOM_SCORES = {game: random for game, (random, _) in _SCORES.items()}

HUMAN_SCORES = {game: human for game, (_, human) in _SCORES.items()}

# The 57 games, by the names of their ROMs.
GAMES = tuple(_SCORES)


SUITE = suites.Suite(
  name='atari57',
  levels=GAMES,
  random_scores=RANDOM_SCORES,
  human_scores=HUMAN_SCORES,
  summaries={'median': np.median, 'mean': np.mean},
  example='up_n_down',
)


class HumanNormalizedScore(NamedTuple):
  """The score of the suite, in percent.

  Attributes:
    median: over the games: the number to report (paper, table 4).
    mean: over the games, dominated by a few with scores in the thousands.
  """

  median: float
  mean: float


def compute_human_normalized_score(
  level_returns: Mapping[str, Sequence[float]],
  per_level_cap: float | None = None,
) -> HumanNormalizedScore:
  """Returns the median and the mean score of the 57 games in percent.

  Args:
    level_returns: a game's episode returns, unclipped, by its name. Levels that
      are not of the suite are left out with a warning.
    per_level_cap: the upper limit of a game's score, in percent; None for no
      limit, as in the paper. There is no lower limit.

  Raises:
    ValueError: a game has no returns, some that are not finite, or returns
      under two spellings; says which.
  """
  scores = SUITE.normalize_all(level_returns, per_level_cap)
  return HumanNormalizedScore(float(np.median(scores)), float(np.mean(scores)))
