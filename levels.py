"""Levels by name: what `--level_name` means.

The prefixes 'gym:' and 'lab:', and which name belongs to which family or suite,
are known here only. Environments' processes import this: no TensorFlow.
"""

import ast
import collections
from collections.abc import Collection, Iterable, Mapping, Sequence
import re
from typing import Any, Literal
import urllib.parse

from ale_py import roms

import atari57
import dmlab30
from runtime import errors
import suites

Family = Literal['atari', 'lab', 'gym']

_GYM = 'gym:'
_LAB = 'lab:'
_SUITES = {suite.name: suite for suite in (atari57.SUITE, dmlab30.SUITE)}
# ale-py has ROMs of these, but ends the whole process when it loads one.
_UNPLAYABLE_GAMES = {'combat', 'joust', 'maze_craze', 'warlords'}
_GAMES = set(roms.get_all_rom_ids()) - _UNPLAYABLE_GAMES
# Gymnasium's id of a game.
_GYM_GAME = re.compile(
  r'(?:ALE/)?(?P<game>\w+?)(?P<ram>-ram)?'
  r'(?P<kind>NoFrameskip|Deterministic)?-v(?P<version>\d+)'
)
_HINT = (
  f'an Atari game is named like {atari57.SUITE.example}, a DMLab-30 level like '
  f'{dmlab30.SUITE.example}, a Gymnasium environment like {_GYM}CartPole-v1'
)


def parse(level_name_flag: str, training: bool) -> list[str]:
  """Returns the names of the levels to play, all levels of a suite included.

  Args:
    level_name_flag: one of these, or several, separated by commas:
      'dmlab30' or 'atari57': all levels of the suite.
      'rooms_watermaze', with or without its path in Lab: a level of DMLab-30.
      'pong', 'Pong', 'PongNoFrameskip-v4': an Atari game, see `find_game`.
      'lab:<path>': any other level of DeepMind Lab.
      'gym:<id>', 'gym:<module>:<id>': a Gymnasium environment, perhaps with
        arguments, see `gym_arguments`.
    training: whether to train. Otherwise the two levels of DMLab-30 that have a
      version for testing are replaced by it.

  Returns:
    A game's ROM name ('pong'), a DMLab-30 level's bare name, and all others as
    they were given. No two are the same.

  Raises:
    errors.SettingError: a name is unknown, empty, given twice, stands for other
      settings than ours, or is that of a level for testing only, where training
      is asked for.
  """
  names = []
  for name in level_name_flag.split(','):
    names += _expand(name.strip())
  for suite in _SUITES.values():
    if training:
      _check_not_held_out(names, suite)
    else:
      names = [suite.test_levels.get(name, name) for name in names]
  counts = collections.Counter(names)
  repeated = [name for name, count in counts.items() if count > 1]
  if repeated:
    raise errors.SettingError(
      f'{level_name_flag!r} names some levels more than once: '
      f'{", ".join(repeated)}.'
    )
  return names


def _expand(name: str) -> Sequence[str]:
  """Returns the levels that one name stands for."""
  if not name:
    raise errors.SettingError(
      'A level has an empty name: is there a comma too many?'
    )
  if name.startswith(_GYM):
    gym_arguments(name)  # Refuses what is not understood.
    return [name]
  if name.removeprefix(_LAB).startswith(dmlab30.LAB_PATH):
    return [dmlab30.SUITE.find_level(name)]
  if name.startswith(_LAB):
    return [name]
  if _GYM_GAME.fullmatch(name):
    return [find_game(name)]
  known = [*_SUITES, *dmlab30.NAMES, *_GAMES]
  name = suites.find_name(name, known, _HINT)
  return _SUITES[name].levels if name in _SUITES else [name]


def _check_not_held_out(names: Iterable[str], suite: suites.Suite) -> None:
  for training_level, test_level in suite.test_levels.items():
    if test_level != training_level and test_level in names:
      raise errors.SettingError(
        f'{test_level} is for testing only: train on {training_level}.'
      )


def find_family(level_name: str) -> Family:
  """Returns the family of environments that play a level.

  Args:
    level_name: as `parse` returns it. What is of no other family counts as an
      Atari game; see `find_game` for whether there is such a game.
  """
  if level_name.startswith(_GYM):
    return 'gym'
  if level_name.startswith(_LAB) or level_name in dmlab30.NAMES:
    return 'lab'
  return 'atari'


def find_game(name: str) -> str:
  """Returns the name of a game's ROM for any usual spelling of the game.

  Args:
    name: such as 'up_n_down', 'UpNDown' or 'UpNDownNoFrameskip-v4'. The latter
      is Gymnasium's name; 'UpNDownDeterministic-v4' is another.

  Raises:
    errors.SettingError: there is no such game, and similar ones are named; or
      the name is Gymnasium's and stands for settings that are not the defaults
      here. Then the error says how to get them.
  """
  match = _GYM_GAME.fullmatch(name)
  if not match:
    return suites.find_name(name, _GAMES, _HINT)
  hint = f'a Gymnasium environment is named like {_GYM}{name}'
  game = suites.find_name(match['game'], _GAMES, hint)
  differences = _find_differences(game, match)
  if differences:
    raise errors.SettingError(f'{name} {" and ".join(differences)}.')
  return game


def _find_differences(game: str, match: re.Match) -> list[str]:
  """Returns what a game of Gymnasium's has that it does not have here."""
  differences = []
  if match['ram']:
    differences.append(
      f'shows the memory of the console, while --level_name={game} shows images'
    )
  if match['version'] in ('0', '5'):
    differences.append(
      f'has sticky actions: use --level_name={game} '
      f'--repeat_action_probability=0.25, or --level_name={game} without them'
    )
  if match['version'] != '5' and not match['kind']:
    differences.append(
      'repeats each action 2 to 4 times at random, while '
      f'--level_name={game} always repeats it 4 times'
    )
  return differences


def gym_id(level_name: str) -> str:
  """Returns the id, with its module if it has one, of a level 'gym:<id>'."""
  return level_name.removeprefix(_GYM).partition('?')[0]


def gym_arguments(level_name: str) -> dict[str, Any]:
  """Returns the arguments of a level 'gym:<id>?<name>=<value>&...'.

  A value is a Python literal (`3`, `1e-3`, `None`, `[1, 2]`), `true`, `false`
  or `null` in any case, or else a string. As in a URL, `%2C` is a comma, `%26`
  an ampersand and `%20` a blank.

  Raises:
    errors.SettingError: an argument has no name or no value, or is given twice.
  """
  arguments = {}
  _, mark, query = level_name.partition('?')
  for part in query.split('&') if mark else ():
    name, equals, value = part.partition('=')
    if not name.isidentifier() or not equals:
      raise errors.SettingError(
        f'{level_name}: {part!r} is not <name>=<value>.'
      )
    if name in arguments:
      raise errors.SettingError(f'{level_name} gives {name} twice.')
    arguments[name] = _to_value(urllib.parse.unquote(value))
  return arguments


def _to_value(text: str) -> Any:
  constants = {'true': True, 'false': False, 'null': None, 'none': None}
  if text.lower() in constants:
    return constants[text.lower()]
  try:
    return ast.literal_eval(text)
  except (ValueError, SyntaxError):
    return text


def gym_level(gym_id: str) -> str:
  """Returns the name of the level that is a Gymnasium environment."""
  return _GYM + gym_id


def lab_path(level_name: str) -> str:
  """Returns the path in DeepMind Lab of 'lab:<path>' or a DMLab-30 level."""
  if level_name in dmlab30.NAMES:
    return dmlab30.LAB_PATH + level_name
  return level_name.removeprefix(_LAB)


def find_suite(level_names: Collection[str]) -> suites.Suite | None:
  """Returns the suite that all these levels belong to.

  Args:
    level_names: as `parse` returns them.

  Returns:
    None if a level belongs to no suite, or to another one than the rest.
  """
  for suite in _SUITES.values():
    if set(suite.names).issuperset(level_names):
      return suite
  return None


def suite_scores(
  level_names: Collection[str],
  level_returns: Mapping[str, Sequence[float]],
  prefix: str,
) -> dict[str, float]:
  """Returns the scores of the suite in percent, by tag; see Suite.scores.

  Args:
    level_names: the levels of the run.
    level_returns: a level's returns, unclipped, by its name.
    prefix: what the episodes were for, 'training' or 'test'.

  Returns:
    Empty if the run is not of a whole suite, or a level has no returns yet.
  """
  suite = find_suite(level_names)
  return suite.scores(level_returns, prefix) if suite else {}


def without_environment(
  level_names: Iterable[str], env_level_names: Iterable[str]
) -> list[str]:
  """Returns those levels that no environment plays, in their order.

  Environments take levels round robin: where there are fewer environments than
  levels, the last levels get none, and no score of the suite can be computed.

  Args:
    level_names: the levels of the run.
    env_level_names: the level of each environment.
  """
  played = set(env_level_names)
  return [name for name in level_names if name not in played]
