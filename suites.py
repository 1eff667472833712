"""What the suites of levels, `dmlab30` and `atari57`, have in common.

A suite is a module. It holds the names of its levels, `RANDOM_SCORES` and
`HUMAN_SCORES`, and the functions `find_level`, `normalize` (one level) and
`compute_human_normalized_score` (all of them).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import difflib
import warnings

import numpy as np


def find_level(name: str, known: Iterable[str]) -> str:
  """Returns the known name that is meant by any usual spelling of it.

  Case and underscores do not matter, nor does Gymnasium's way to name a game:
  'up_n_down', 'UpNDown' and 'ALE/UpNDown-v5' are one.

  Raises:
    ValueError: there is no such name; tells some that are near.
  """
  names = {_spelling(level): level for level in known}
  spelling = _spelling(name)
  if spelling in names:
    return names[spelling]
  near = [names[match] for match in difflib.get_close_matches(spelling, names)]
  if near:
    hint = ' or '.join(near)
    raise ValueError(f'Unknown level {name!r}: did you mean {hint}?')
  raise ValueError(
    f'Unknown level {name!r}: an Atari game is named like up_n_down, a '
    'DMLab-30 level like rooms_watermaze, a Gymnasium environment like '
    'gym:CartPole-v1.'
  )


def _spelling(name: str) -> str:
  name = name.removeprefix('ALE/').removesuffix('-v5')
  return name.replace('_', '').lower()


def normalize(
  episode_return: float, random_score: float, human_score: float
) -> float:
  """Returns where a return lies between random (0) and human play (100)."""
  return 100 * (episode_return - random_score) / (human_score - random_score)


def normalize_levels(
  level_returns: Mapping[str, Sequence[float]],
  find: Callable[[str], str],
  random_scores: Mapping[str, float],
  human_scores: Mapping[str, float],
  per_level_cap: float | None,
) -> np.ndarray:
  """Normalizes the mean return of each level of a suite.

  Args:
    level_returns: a level's episode returns, unclipped, by its name. Levels of
      no suite or of another one are left out with a warning.
    find: returns a level's key in the scores; a ValueError means it has none.
    random_scores: by level; its order is that of the result.
    human_scores: by level.
    per_level_cap: the most that a level can contribute, in percent; None for no
      limit. There is no lower limit.

  Returns:
    float64 [levels], in percent.

  Raises:
    ValueError: a level has no returns, some that are not finite, or returns
      under two of its names; tells which.
  """
  returns = {}
  for name, values in level_returns.items():
    try:
      level = find(name)
    except ValueError:
      warnings.warn(
        f'{name} does not enter the score: it is not a level of the suite.',
        stacklevel=3,
      )
      continue
    if level in returns:
      raise ValueError(f'There are returns of {level} under two names.')
    returns[level] = np.asarray(values, np.float64)
  _check_complete(returns, random_scores)
  scores = np.array(
    [
      normalize(returns[level].mean(), random_score, human_scores[level])
      for level, random_score in random_scores.items()
    ]
  )
  return scores if per_level_cap is None else np.minimum(scores, per_level_cap)


def _check_complete(
  returns: Mapping[str, np.ndarray], levels: Iterable[str]
) -> None:
  missing = [
    level for level in levels if level not in returns or not returns[level].size
  ]
  if missing:
    raise ValueError(
      'The score needs returns of every level; there are none of '
      f'{", ".join(missing)}.'
    )
  broken = [level for level in levels if not np.isfinite(returns[level]).all()]
  if broken:
    raise ValueError(f'There are returns that are not finite: {broken}.')
