"""Tests of levels.py."""

import numpy as np
import pytest

import atari57
import dmlab30
import environments
import levels
from runtime import errors


@pytest.mark.parametrize(
  ('flag', 'names'),
  [
    ('pong', ['pong']),
    ('UpNDown', ['up_n_down']),
    ('JamesbondNoFrameskip-v4, adventure', ['jamesbond', 'adventure']),
    ('rooms_watermaze', ['rooms_watermaze']),
    ('contributed/dmlab30/rooms_watermaze', ['rooms_watermaze']),
    ('lab:contributed/dmlab30/rooms_watermaze', ['rooms_watermaze']),
    ('lab:tests/empty_room_test', ['lab:tests/empty_room_test']),
    (
      'gym:CartPole-v1,gym:corridor:Corridor-v0,gym:ALE/Pong-v5',
      ['gym:CartPole-v1', 'gym:corridor:Corridor-v0', 'gym:ALE/Pong-v5'],
    ),
    ('atari57', list(atari57.GAMES)),
    ('DMLab30', list(dmlab30.ALL_LEVELS)),
    ('rooms_watermaze,atari57', ['rooms_watermaze', *atari57.GAMES]),
  ],
)
def test_parse(flag, names):
  assert levels.parse(flag, training=True) == names
  assert levels.parse(flag, training=False) == [
    dmlab30.LEVEL_MAPPING.get(name, name) for name in names
  ]


@pytest.mark.parametrize(
  ('query', 'wanted'),
  [
    ('', {}),
    ('?a=3&b=1e-3', {'a': 3, 'b': 0.001}),
    (
      '?a=true&b=False&c=none&d=null',
      {'a': True, 'b': False, 'c': None, 'd': None},
    ),
    ('?a=8x8&b=', {'a': '8x8', 'b': ''}),
    (
      '?a=%5B1%2C2%5D&b=x%20y%26z&c=u=v',
      {'a': [1, 2], 'b': 'x y&z', 'c': 'u=v'},
    ),
    ('?a="3"&b=1e+3', {'a': '3', 'b': 1000.0}),
  ],
)
def test_gym_arguments(query, wanted):
  name = f'gym:my.module:Id-v0{query}'
  assert levels.gym_id(name) == 'my.module:Id-v0'
  arguments = levels.gym_arguments(name)
  assert arguments == wanted
  assert [type(v) for v in arguments.values()] == [
    type(v) for v in wanted.values()
  ]
  assert levels.parse(name, training=True) == [name]


@pytest.mark.parametrize(
  'query', ['?', '?a', '?a=1&', '?=1', '?a b=1', '?a=1&a=2']
)
def test_bad_gym_arguments(query):
  with pytest.raises(errors.SettingError, match='gym:Id-v0') as e:
    levels.parse(f'gym:Id-v0{query}', training=True)
  assert '\n' not in str(e.value)


def test_testing_plays_the_test_levels():
  names = levels.parse('dmlab30', training=False)
  assert names == list(dmlab30.LEVEL_MAPPING.values())
  assert len(names) == 30
  assert names[:2] == [
    'rooms_collect_good_objects_test',
    'rooms_exploit_deferred_effects_test',
  ]
  # A run's settings name the training level; a user may name either.
  for version in 'train', 'test':
    name = f'rooms_collect_good_objects_{version}'
    assert levels.parse(name, training=False) == names[:1]


def test_training_refuses_the_test_levels():
  assert not [
    name for name in levels.parse('dmlab30', training=True) if '_test' in name
  ]
  with pytest.raises(
    ValueError, match='train on rooms_collect_good_objects_train'
  ):
    levels.parse('pong,rooms_collect_good_objects_test', training=True)


@pytest.mark.parametrize(
  ('flag', 'message'),
  [
    ('pnog', "'pnog': did you mean pong"),
    ('pong,rooms_watermaz', "'rooms_watermaz': did you mean rooms_watermaze"),
    ('contributed/dmlab30/room_watermaze', 'did you mean rooms_watermaze'),
    ('lab:contributed/dmlab30/room_watermaze', 'did you mean rooms_watermaze'),
    ('dmlab-30', 'did you mean dmlab30'),
    ('Montezuma', 'did you mean montezuma_revenge'),
    ('brekaout', 'did you mean breakout'),
    ('atari_75', 'did you mean atari57'),
    ('contributed/dmlab30/pong', 'Unknown level'),
    ('zzzzzz', 'up_n_down.*rooms_watermaze.*gym:CartPole-v1'),
    ('', 'empty name'),
    ('pong,', 'empty name'),
    ('pong, ,breakout', 'empty name'),
  ],
)
def test_refuses_unknown_and_empty_names(flag, message):
  with pytest.raises(errors.SettingError, match=message) as raised:
    levels.parse(flag, training=True)
  assert '\n' not in str(raised.value)


def test_refuses_repeated_levels():
  with pytest.raises(ValueError, match='than once: pong, breakout.$'):
    levels.parse(
      'pong,breakout,UpNDown,Pong,BreakoutDeterministic-v4', training=True
    )
  with pytest.raises(ValueError, match='than once: rooms_watermaze.$'):
    levels.parse('dmlab30,rooms_watermaze', training=True)
  with pytest.raises(ValueError, match='than once: gym:CartPole-v1.$'):
    levels.parse('gym:CartPole-v1,gym:CartPole-v1', training=False)
  names = 'rooms_collect_good_objects_train,rooms_collect_good_objects_test'
  with pytest.raises(ValueError, match='once: rooms_collect_good_objects_test'):
    levels.parse(names, training=False)


@pytest.mark.parametrize(
  ('name', 'family'),
  [
    ('pong', 'atari'),
    ('rooms_watermaze', 'lab'),
    ('rooms_collect_good_objects_test', 'lab'),
    ('lab:tests/empty_room_test', 'lab'),
    ('gym:CartPole-v1', 'gym'),
    ('gym:ALE/Pong-v5', 'gym'),
  ],
)
def test_families(name, family):
  assert levels.find_family(name) == family


@pytest.mark.parametrize(
  'name',
  [
    'up_n_down',
    'UpNDown',
    'upndown',
    'UpNDownNoFrameskip-v4',
    'ALE/UpNDownDeterministic-v4',
  ],
)
def test_spellings_of_games(name):
  assert levels.find_game(name) == 'up_n_down'


@pytest.mark.parametrize(
  ('name', 'message'),
  [
    (
      'ALE/MsPacman-v5',
      'has sticky actions: use --level_name=ms_pacman '
      '--repeat_action_probability=0.25, or --level_name=ms_pacman without '
      'them.',
    ),
    ('MsPacman-v5', '--repeat_action_probability=0.25'),
    ('MsPacmanNoFrameskip-v0', '--repeat_action_probability=0.25'),
    ('MsPacman-v4', '2 to 4 times .* --level_name=ms_pacman always'),
    ('MsPacman-v0', 'sticky .* and repeats each action 2 to 4 times'),
    ('MsPacman-ramNoFrameskip-v4', 'the console, .*--level_name=ms_pacman'),
    ('MsPacmen-v5', "'MsPacmen': did you mean ms_pacman?"),
    ('CartPole-v1', 'like gym:CartPole-v1.$'),
  ],
)
def test_gym_names_of_games_with_other_settings_say_how_to_get_them(
  name, message
):
  for find in levels.find_game, lambda name: levels.parse(name, training=True):
    with pytest.raises(errors.SettingError, match=message) as raised:
      find(name)
    assert '\n' not in str(raised.value)


@pytest.mark.parametrize('name', ['doom', 'cart', 'tekken', 'minecraft'])
def test_suggests_no_names_that_are_far(name):
  with pytest.raises(errors.SettingError) as raised:
    levels.parse(name, training=True)
  assert 'did you mean' not in str(raised.value)


@pytest.mark.parametrize('name', ['combat', 'joust', 'maze_craze', 'Warlords'])
def test_refuses_games_that_would_end_the_process(name):
  for find in levels.find_game, lambda name: levels.parse(name, training=True):
    with pytest.raises(errors.SettingError, match='Unknown level'):
      find(name)


def test_names_in_the_libraries():
  assert levels.gym_id('gym:CartPole-v1') == 'CartPole-v1'
  assert levels.gym_id('gym:corridor:Corridor-v0') == 'corridor:Corridor-v0'
  assert levels.gym_level('CartPole-v1') == 'gym:CartPole-v1'
  assert levels.lab_path('lab:tests/empty_room_test') == 'tests/empty_room_test'
  path = 'contributed/dmlab30/rooms_watermaze'
  assert levels.lab_path('rooms_watermaze') == path
  assert levels.lab_path(f'lab:{path}') == path


@pytest.mark.parametrize('training', [True, False])
@pytest.mark.parametrize(
  ('name', 'suite'), [('atari57', atari57.SUITE), ('dmlab30', dmlab30.SUITE)]
)
def test_suites(name, suite, training):
  names = levels.parse(name, training)
  assert levels.find_suite(names) is suite
  assert levels.find_suite(names[-1:]) is suite
  returns = {level: [1e9] for level in names}
  assert set(suite.normalize_all(returns, per_level_cap=100)) == {100}
  assert {suite.normalize(level, 1e9) > 100 for level in names} == {True}


@pytest.mark.parametrize(
  'name', ['adventure', 'gym:CartPole-v1', 'lab:tests/empty_room_test']
)
def test_levels_of_no_suite(name):
  assert levels.find_suite([name]) is None
  assert levels.find_suite(['pong', name]) is None


def test_levels_of_two_suites():
  assert levels.find_suite(['pong', 'rooms_watermaze']) is None


class _Environments(environments.Environments):
  """Has levels, and nothing to play."""

  recv = send = close = None


@pytest.mark.parametrize(
  ('num_envs', 'first_without'), [(48, 30), (30, 30), (29, 29), (10, 10)]
)
def test_levels_without_environment(num_envs, first_without):
  names = levels.parse('dmlab30', training=True)
  envs = _Environments(names, num_envs, seed=1)
  without = levels.without_environment(names, envs.level_names)
  assert without == names[first_without:]


def test_48_environments_for_30_levels():
  names = levels.parse('dmlab30', training=True)
  envs = _Environments(names, 48, seed=1)
  counts = [envs.level_names.count(name) for name in names]
  assert counts == [2] * 18 + [1] * 12


class TestSuiteScores:
  def test_of_atari57(self):
    returns = {game: [atari57.HUMAN_SCORES[game]] for game in atari57.GAMES}
    scores = levels.suite_scores(atari57.GAMES, returns, 'training')
    assert scores == pytest.approx(
      {'atari57/training_median': 100, 'atari57/training_mean': 100}
    )

  def test_of_dmlab30_in_training_and_test(self):
    for training, prefix in (True, 'training'), (False, 'test'):
      names = levels.parse('dmlab30', training)
      returns = {
        name: [2 * dmlab30.HUMAN_SCORES[dmlab30.LEVEL_MAPPING.get(name, name)]]
        for name in names
      }
      scores = levels.suite_scores(names, returns, prefix)
      assert list(scores) == [
        f'dmlab30/{prefix}_cap_100', f'dmlab30/{prefix}_no_cap'
      ]  # fmt: skip
      cap, no_cap = scores.values()
      assert cap == pytest.approx(100)
      assert no_cap > 190

  def test_needs_returns_of_every_level(self):
    returns = {game: np.ones([3]) for game in atari57.GAMES}
    assert levels.suite_scores(atari57.GAMES, returns, 'test')
    assert not levels.suite_scores(
      atari57.GAMES, returns | {'pong': np.ones([0])}, 'test'
    )
    del returns['alien']
    assert not levels.suite_scores(atari57.GAMES, returns, 'test')

  def test_needs_a_whole_suite(self):
    assert not levels.suite_scores(['pong'], {'pong': [1.0]}, 'test')
    assert not levels.suite_scores(['gym:X'], {'gym:X': [1.0]}, 'test')
