"""Suites of levels: reference scores, and scores as a share of a human's.

`dmlab30` and `atari57` each define one, `SUITE`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import difflib
import re
import warnings

import numpy as np

from runtime import errors

# What "did you mean" suggests is at least this similar, on difflib's scale; or
# it contains a name of at least this many letters.
_MIN_SIMILARITY = 0.75
_MIN_LETTERS = 4


@dataclasses.dataclass(frozen=True, eq=False)
class Suite:
  """Levels that are scored together, in percent: 0 is random play, 100 human.

  Attributes:
    name: of the suite, such as 'dmlab30'.
    levels: the levels to train on, in the suite's order.
    random_scores: mean return of random play by test level, in the same order.
    human_scores: mean return of a human by test level.
    summaries: functions that sum up the scores of all levels, float64 [levels]
      in percent, in one number, by name.
    test_levels: the level to test on, by the level to train on. Levels that it
      does not contain are tested on themselves.
    path: the folder that a level's name may begin with; '' for none.
    example: the name of a level, for error messages.
  """

  name: str
  levels: tuple[str, ...]
  random_scores: Mapping[str, float]
  human_scores: Mapping[str, float]
  summaries: Mapping[str, Callable[[np.ndarray], float]]
  test_levels: Mapping[str, str] = dataclasses.field(default_factory=dict)
  path: str = ''
  example: str = ''

  @property
  def names(self) -> tuple[str, ...]:
    """The names of all levels: to train on, and to test on only."""
    return tuple(dict.fromkeys([*self.levels, *self.random_scores]))

  def find_level(self, name: str) -> str:
    """Returns the name of the level that is meant by any usual spelling of it.

    Args:
      name: of a level to train or to test on, see `find_name`. All up to the
        end of `path` is dropped.

    Raises:
      errors.SettingError: the suite has no such level; names similar ones.
    """
    if self.path:
      name = name.rpartition(self.path)[2]
    hint = f'a level of {self.name} is named like {self.example}'
    return find_name(name, self.names, hint)

  def normalize(self, level_name: str, episode_return: float) -> float:
    """Returns the score of one level in percent.

    Args:
      level_name: see find_level.
      episode_return: of a full episode, unclipped, or a mean of such.

    Raises:
      errors.SettingError: the suite has no such level.
    """
    level = self._find_test_level(level_name)
    random, human = self.random_scores[level], self.human_scores[level]
    return 100 * (episode_return - random) / (human - random)

  def normalize_all(
    self,
    level_returns: Mapping[str, Sequence[float]],
    per_level_cap: float | None = None,
  ) -> np.ndarray:
    """Returns the scores of all levels in percent, each of its mean return.

    Args:
      level_returns: a level's episode returns, unclipped, by its name. Levels
        that are not of the suite are left out with a warning.
      per_level_cap: the upper limit of a level's score, in percent; None for no
        limit. There is no lower limit.

    Returns:
      float64 [levels], in the suite's order.

    Raises:
      ValueError: a level has no returns, some that are not finite, or returns
        under two of its names; says which.
    """
    returns = {}
    for name, values in level_returns.items():
      try:
        level = self._find_test_level(name)
      except errors.SettingError:
        warnings.warn(
          f'{name} does not enter the score: it is not a level of {self.name}.',
          stacklevel=3,
        )
        continue
      if level in returns:
        raise ValueError(f'There are returns of {level} under two names.')
      returns[level] = np.asarray(values, np.float64)
    self._check_complete(returns)
    scores = np.array(
      [
        self.normalize(level, returns[level].mean())
        for level in self.random_scores
      ]
    )
    return (
      scores if per_level_cap is None else np.minimum(scores, per_level_cap)
    )

  def scores(
    self, level_returns: Mapping[str, Sequence[float]], prefix: str
  ) -> dict[str, float]:
    """Returns the scores of the suite in percent, by tag.

    Args:
      level_returns: see normalize_all.
      prefix: what the episodes were for, 'training' or 'test'.

    Returns:
      One score for each summary, such as 'dmlab30/training_cap_100'. Empty if
      a level has no returns yet.
    """
    played = {
      self._find_test_level(name)
      for name, returns in level_returns.items()
      if len(returns)
    }
    if not played.issuperset(self.random_scores):
      return {}
    percents = self.normalize_all(level_returns)
    return {
      f'{self.name}/{prefix}_{summary}': float(summarize(percents))
      for summary, summarize in self.summaries.items()
    }

  def _find_test_level(self, name: str) -> str:
    level = self.find_level(name)
    return self.test_levels.get(level, level)

  def _check_complete(self, returns: Mapping[str, np.ndarray]) -> None:
    levels = self.random_scores
    missing = [
      level
      for level in levels
      if level not in returns or not returns[level].size
    ]
    if missing:
      raise ValueError(
        'The score needs returns of every level; there are none of '
        f'{", ".join(missing)}.'
      )
    broken = [
      level for level in levels if not np.isfinite(returns[level]).all()
    ]
    if broken:
      raise ValueError(f'There are returns that are not finite: {broken}.')


def find_name(name: str, known: Iterable[str], hint: str) -> str:
  """Returns the known name that is meant by any usual spelling of it.

  Case and underscores do not matter, nor does Gymnasium's way to name a game:
  'up_n_down', 'UpNDown' and 'ALE/UpNDown-v5' are one.

  Args:
    name: of a level.
    known: the names there are.
    hint: what to say of names if none is similar.

  Raises:
    errors.SettingError: there is no such name; names similar ones.
  """
  names = {_normal_spelling(level): level for level in known}
  spelling = _normal_spelling(name)
  if spelling in names:
    return names[spelling]
  similar = difflib.get_close_matches(spelling, names, cutoff=_MIN_SIMILARITY)
  if not similar and len(spelling) >= _MIN_LETTERS:
    similar = [key for key in names if spelling in key][:3]
  if similar:
    hint = f'did you mean {" or ".join(names[key] for key in similar)}?'
  else:
    hint += '.'
  raise errors.SettingError(f'Unknown level {name!r}: {hint}')


def _normal_spelling(name: str) -> str:
  name = name.removeprefix('ALE/')
  name = re.sub(r'(NoFrameskip|Deterministic)?-v\d+$', '', name)
  return name.replace('_', '').lower()
