"""Levels by name: what `--level_name` means, and which suite levels are of."""

import collections
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import ModuleType

from ale_py import roms

import atari57
import dmlab30
import suites

_GYM = 'gym:'

# What the name of a suite stands for.
_SUITE_LEVELS = {'atari57': atari57.GAMES, 'dmlab30': dmlab30.ALL_LEVELS}


def parse(level_name_flag: str, training: bool) -> list[str]:
  """Returns the names of the levels to play, suites being spelt out.

  Args:
    level_name_flag: one of these, or several, separated by commas:
      'dmlab30' or 'atari57': all levels of the suite.
      'rooms_watermaze', with or without its path in Lab: a level of DMLab-30.
      'pong', 'Pong', 'ALE/Pong-v5': a game.
      'lab:<path>': any other level of DeepMind Lab.
      'gym:<id>', 'gym:<module>:<id>': a Gymnasium environment.
    training: whether to train. Otherwise the two levels of DMLab-30 that have a
      version for testing are replaced by it.

  Returns:
    A game's ROM name ('pong'), a DMLab-30 level's bare name, and all others as
    they were given. No two are the same.

  Raises:
    ValueError: a name is unknown, empty, given twice, or of a level that is for
      testing only where training is asked for.
  """
  names = []
  for name in level_name_flag.split(','):
    names += _expand(name.strip())
  if training:
    _check_not_held_out(names)
  else:
    names = [dmlab30.LEVEL_MAPPING.get(name, name) for name in names]
  counts = collections.Counter(names)
  repeated = [name for name, count in counts.items() if count > 1]
  if repeated:
    raise ValueError(
      f'{level_name_flag!r} names some levels more than once: '
      f'{", ".join(repeated)}.'
    )
  return names


def find_family(level_name: str) -> str:
  """Returns 'gym', 'lab' or 'atari': who makes this level's environments."""
  if level_name.startswith('gym:'):
    return 'gym'
  if level_name.startswith('lab:') or level_name in dmlab30.NAMES:
    return 'lab'
  return 'atari'


def gym_id(level_name: str) -> str:
  """Returns the id that Gymnasium knows a level 'gym:<id>' by."""
  return level_name.removeprefix(_GYM)


def _expand(name: str) -> Sequence[str]:
  if not name:
    raise ValueError('A level has an empty name: is there a comma too many?')
  if name.startswith('gym:'):
    return [name]
  if name.removeprefix('lab:').startswith(dmlab30.LAB_PATH):
    return [dmlab30.find_level(name)]
  if name.startswith('lab:'):
    return [name]
  known = [*_SUITE_LEVELS, *dmlab30.NAMES, *roms.get_all_rom_ids()]
  name = suites.find_level(name, known)
  return _SUITE_LEVELS.get(name, [name])


def _check_not_held_out(names: Iterable[str]) -> None:
  for training_level, test_level in dmlab30.LEVEL_MAPPING.items():
    if test_level != training_level and test_level in names:
      raise ValueError(
        f'{test_level} is for testing only: train on {training_level}.'
      )


def find_suite(level_names: Iterable[str]) -> ModuleType | None:
  """Returns the suite that all these levels belong to: `atari57` or `dmlab30`.

  Args:
    level_names: as `parse` returns them.

  Returns:
    The module (see `suites`); None if a level belongs to no suite, or to
    another one than the rest.
  """
  for suite, members in (atari57, atari57.GAMES), (dmlab30, dmlab30.NAMES):
    if set(members).issuperset(level_names):
      return suite
  return None


def suite_scores(
  level_names: Collection[str],
  level_returns: Mapping[str, Sequence[float]],
  prefix: str,
) -> dict[str, float]:
  """Returns the human-normalized scores of the suite in percent, by tag.

  Args:
    level_names: the levels of the run.
    level_returns: a level's returns, unclipped, by its name.
    prefix: what the episodes were for, 'training' or 'test'.

  Returns:
    'dmlab30/<prefix>_cap_100' and '_no_cap', or 'atari57/<prefix>_median' and
    '_mean'. Nothing if the run is not of a whole suite, or a level has no
    returns yet.
  """
  suite = find_suite(level_names)
  if suite is None or len(level_names) < len(suite.RANDOM_SCORES):
    return {}
  if not all(len(level_returns.get(name, ())) for name in level_names):
    return {}
  score = suite.compute_human_normalized_score
  if suite is atari57:
    median, mean = score(level_returns)
    return {f'atari57/{prefix}_median': median, f'atari57/{prefix}_mean': mean}
  return {
    f'dmlab30/{prefix}_cap_100': score(level_returns, per_level_cap=100),
    f'dmlab30/{prefix}_no_cap': score(level_returns, per_level_cap=None),
  }


def without_environment(
  level_names: Iterable[str], env_level_names: Iterable[str]
) -> list[str]:
  """Returns those levels that no environment plays, in their order.

  Environments are given levels round robin: where there are fewer of them than
  levels, the last levels get none, and no score of the suite can be computed.

  Args:
    level_names: the levels of the run.
    env_level_names: the level of each environment.
  """
  played = set(env_level_names)
  return [name for name in level_names if name not in played]
