"""Tests the flag files of `configs/` against the flags of `experiment.py`."""

import copy
import pathlib
import re

from absl import flags
import pytest

import config
import experiment  # noqa: F401 (defines the flags)
import levels

_CHECKOUT = pathlib.Path(__file__).resolve().parent.parent
_FILES = sorted((_CHECKOUT / 'configs').glob('*.flags'))

# The paper's table G.1, and section 5.3.2 for the agent and the frames.
_ATARI = {
  'agent': 'deep',
  'use_lstm': False,
  'total_environment_frames': 200_000_000,
  'unroll_length': 20,
  'batch_size': 32,
  'discounting': 0.99,
  'baseline_cost': 0.5,
  'entropy_cost': 0.01,
  'reward_clipping': 'abs_one',
  'learning_rate': 6e-4,
  'momentum': 0.0,
  'epsilon': 0.01,
  'max_gradient_norm': 40.0,
  'decay': 0.99,  # Of the released code.
  'full_action_set': False,
  'repeat_action_probability': 0.0,
  'test_num_episodes': 200,
}

# Section 5.3.2: one agent for all games.
_ATARI57 = _ATARI | {
  'level_name': 'atari57',
  'total_environment_frames': 57 * 200_000_000,
  'full_action_set': True,
}

# The released code: its README, and the defaults of its flags.
_DMLAB30 = {
  'level_name': 'dmlab30',
  'agent': 'deep',
  'use_lstm': True,
  'total_environment_frames': 10**10,
  'num_actors': 150,
  'envs_per_actor': 1,
  'unroll_length': 100,
  'batch_size': 32,
  'discounting': 0.99,
  'baseline_cost': 0.5,
  'entropy_cost': 0.0033391318945337044,
  'reward_clipping': 'soft_asymmetric',
  'learning_rate': 0.00031866995608948655,
  'momentum': 0.0,
  'decay': 0.99,
  'epsilon': 0.1,
  'max_gradient_norm': 0.0,
  'test_num_episodes': 500,  # Of the paper, table 3.
}

_PUBLISHED = {
  'atari.flags': _ATARI,
  'atari57.flags': _ATARI57,
  'dmlab30.flags': _DMLAB30,
}


def _parse(path, *arguments):
  """Returns a copy of the program's flags, with those of a file read in."""
  # FLAGS itself stays as it is: other tests use it.
  values = copy.deepcopy(flags.FLAGS)
  values.unparse_flags()
  for name in values:
    values[name].unparse()
  rest = values(['experiment.py', f'--flagfile={path}', *arguments])
  assert rest == ['experiment.py']
  return values


def _names(path):
  """Returns the flags that a file sets, as they stand there."""
  lines = path.read_text().splitlines()
  return [re.split('[ =]', line)[0] for line in lines if line.startswith('-')]


def test_there_are_files():
  names = {path.name for path in _FILES}
  assert {'pong.flags', *_PUBLISHED} <= names


@pytest.mark.parametrize('path', _FILES, ids=lambda path: path.name)
def test_parses(path):
  values = _parse(path)
  assert any(flag.present for flag in values._flags().values())


@pytest.mark.parametrize('path', _FILES, ids=lambda path: path.name)
def test_sets_each_flag_once(path):
  names = _names(path)
  assert len(names) == len(set(names))


@pytest.mark.parametrize('path', _FILES, ids=lambda path: path.name)
def test_each_line_is_short_enough_to_read(path):
  # A flag cannot be broken: a list of levels may be longer.
  lines = path.read_text().splitlines()
  assert max(len(line) for line in lines if not line.startswith('--')) <= 80


def test_pong_is_the_default():
  values = _parse(_CHECKOUT / 'configs' / 'pong.flags')
  defaults = config.Config().values() | {'learner_hosts': []}
  assert {name: values[name].value for name in defaults} == defaults


def test_pong_names_all_that_is_learnt_from():
  values = _parse(_CHECKOUT / 'configs' / 'pong.flags')
  depends_on_others = {'queue_capacity'}
  for name in (
    config.UpdateConfig.__dataclass_fields__.keys() - depends_on_others
  ):
    assert values[name].present, name


@pytest.mark.parametrize('name', _PUBLISHED)
def test_is_what_was_published(name):
  values = _parse(_CHECKOUT / 'configs' / name)
  published = _PUBLISHED[name]
  assert {flag: values[flag].value for flag in published} == published
  assert {flag for flag in published if not values[flag].present} == set()


@pytest.mark.parametrize('path', _FILES, ids=lambda path: path.name)
def test_every_level_has_as_many_environments(path):
  values = _parse(path)
  num_envs = values['num_actors'].value * values['envs_per_actor'].value
  names = levels.parse(values['level_name'].value, training=True)
  assert num_envs % len(names) == 0


def test_the_command_line_wins_where_it_comes_later():
  values = _parse(_CHECKOUT / 'configs' / 'atari.flags', '--agent=shallow')
  assert values['agent'].value == 'shallow'
