"""DMLab-30: its levels, their reference scores, the human-normalized score.

Levels go by their bare names; in DeepMind Lab they are below `LAB_PATH`. Two of
them have one version for training and another for testing.
"""

from collections.abc import Mapping, Sequence

import numpy as np

import suites

LAB_PATH = 'contributed/dmlab30/'

# From the deepmind/scalable_agent release, on which published scores are based:
# the paper's own table labels some rows differently.
_SCORES = {
  # Test level: mean return of (random play, a human).
  'rooms_collect_good_objects_test': (0.073, 10),
  'rooms_exploit_deferred_effects_test': (8.501, 85.65),
  'rooms_select_nonmatching_object': (0.312, 65.9),
  'rooms_watermaze': (4.065, 54),
  'rooms_keys_doors_puzzle': (4.135, 53.8),
  'language_select_described_object': (-0.07, 389.5),
  'language_select_located_object': (1.929, 280.7),
  'language_execute_random_task': (-5.913, 254.05),
  'language_answer_quantitative_question': (-0.33, 184.5),
  'lasertag_one_opponent_small': (-0.224, 12.65),
  'lasertag_three_opponents_small': (-0.214, 18.55),
  'lasertag_one_opponent_large': (-0.083, 18.6),
  'lasertag_three_opponents_large': (-0.102, 31.5),
  'natlab_fixed_large_map': (2.173, 36.9),
  'natlab_varying_map_regrowth': (2.989, 24.45),
  'natlab_varying_map_randomized': (7.346, 42.35),
  'skymaze_irreversible_path_hard': (0.1, 100),
  'skymaze_irreversible_path_varied': (14.4, 100),
  'psychlab_arbitrary_visuomotor_mapping': (0.163, 58.75),
  'psychlab_continuous_recognition': (0.224, 58.3),
  'psychlab_sequential_comparison': (0.129, 39.5),
  'psychlab_visual_search': (0.085, 78.5),
  'explore_object_locations_small': (3.575, 74.45),
  'explore_object_locations_large': (4.673, 65.65),
  'explore_obstructed_goals_small': (6.76, 206),
  'explore_obstructed_goals_large': (2.61, 119.5),
  'explore_goal_locations_small': (7.66, 267.5),
  'explore_goal_locations_large': (3.14, 194.5),
  'explore_object_rewards_few': (2.073, 77.7),
  'explore_object_rewards_many': (2.438, 106.7),
}

RANDOM_SCORES = {level: random for level, (random, _) in _SCORES.items()}

HUMAN_SCORES = {level: human for level, (_, human) in _SCORES.items()}

# The test level by the training level, in the order of the suite.
LEVEL_MAPPING = {level.replace('_test', '_train'): level for level in _SCORES}

# The 30 levels to train on.
ALL_LEVELS = tuple(LEVEL_MAPPING)

SUITE = suites.Suite(
  name='dmlab30',
  levels=ALL_LEVELS,
  random_scores=RANDOM_SCORES,
  human_scores=HUMAN_SCORES,
  summaries={
    'cap_100': lambda percents: np.mean(np.minimum(percents, 100)),
    'no_cap': np.mean,
  },
  test_levels=LEVEL_MAPPING,
  path=LAB_PATH,
  example='rooms_watermaze',
)

# All 32 names: of the levels to train on, and of the two for testing only.
NAMES = SUITE.names


def compute_human_normalized_score(
  level_returns: Mapping[str, Sequence[float]], per_level_cap: float | None
) -> float:
  """Returns the mean score of the 30 levels in percent (paper, section 5.3).

  Args:
    level_returns: a level's episode returns, unclipped, by its training or its
      test name. Levels that are not of the suite are left out with a warning.
    per_level_cap: the upper limit of a level's score, in percent: 100 for the
      capped score of the paper, None for no limit. There is no lower limit.

  Raises:
    ValueError: a level has no returns, some that are not finite, or returns
      under two of its names; says which, by test name.
  """
  return float(np.mean(SUITE.normalize_all(level_returns, per_level_cap)))
