"""Tests of config.py: a flag is a field, and a config comes of either."""

import dataclasses
import math

from absl import flags
from absl.testing import flagsaver
import pytest

import config
import experiment  # noqa: F401 (defines the flags)
from runtime import errors
import torsos


def _from_flags(*arguments, defaults=None):
  with flagsaver.flagsaver():
    flags.FLAGS(['experiment.py', *arguments])
    return config.from_flags(defaults)


def test_every_field_is_a_flag_with_its_default_and_help():
  for name, value in config.Config().values().items():
    flag = flags.FLAGS[name]
    assert flag.default == ([] if name == 'learner_hosts' else value), name
    assert flag.help


def test_no_flag_is_a_field_of_two_sections():
  sections = dataclasses.fields(config.Config)
  fields = [f for section in sections for f in dataclasses.fields(section.type)]
  assert len(fields) == len(config.Config().values())


def test_without_flags_all_is_by_default():
  assert _from_flags() == config.make() == config.make(logdir='runs/pong')


def test_flags_and_python_make_the_same():
  made = config.make(
    level_name='breakout', use_lstm=True, learner_hosts=('a:1', 'b:2'), decay=1
  )
  arguments = ['--level_name=breakout', '--use_lstm', '--decay=1']
  assert _from_flags(*arguments, '--learner_hosts=a:1,b:2') == made
  assert made.envs.level_name == 'breakout' and made.agent.use_lstm
  assert made.run.logdir == 'runs/breakout'


def test_the_command_line_wins_over_given_defaults():
  made = _from_flags(
    '--batch_size=3', defaults={'batch_size': 5, 'unroll_length': 7}
  )
  assert (made.update.batch_size, made.update.unroll_length) == (3, 7)
  # Even where it says what is the default.
  made = _from_flags('--batch_size=8', defaults={'batch_size': 5})
  assert made.update.batch_size == 8


@pytest.mark.parametrize(
  ('values', 'message'),
  [
    ({'batch_size': 0}, '--batch_size=0 must be at least 1'),
    ({'discounting': 1.5}, '--discounting=1.5 must be at most 1'),
    ({'learning_rate': math.nan}, '--learning_rate=nan must be a finite'),
    ({'learning_rate': math.inf}, '--learning_rate=inf must be a finite'),
    ({'learning_rate': 'a'}, '--learning_rate=a must be a finite number'),
    ({'seed': 1.5}, '--seed=1.5 must be an integer'),
    ({'use_lstm': 1}, '--use_lstm=1 must be True or False'),
    ({'learner_hosts': 'a:1'}, '--learner_hosts=a:1 must be a tuple'),
    ({'agent': 'huge'}, '--agent=huge must be one of shallow, deep, vector'),
    ({'mode': None}, '--mode=None must be a string'),
    ({'batchsize': 8}, "no setting 'batchsize': did you mean 'batch_size'?"),
  ],
)
def test_what_does_not_fit_is_named(values, message):
  with pytest.raises(errors.SettingError) as error:
    config.make(**values)
  assert message in str(error.value)


_PATHS = ('logdir', 'video', 'level_cache_dir', 'dataset_path')


def test_paths_begin_at_home(monkeypatch):
  assert set(config.names(path=True)) == set(_PATHS)
  monkeypatch.setenv('HOME', '/home/me')
  for name in _PATHS:
    assert config.make(**{name: '~/a b'}).values()[name] == '/home/me/a b'
    assert _from_flags(f'--{name}=~').values()[name] == '/home/me'
    for same in ('a/~', './~x', '/a~', 'dummy', 'c:/d'):
      assert config.make(**{name: same}).values()[name] == same


@pytest.mark.parametrize('name', _PATHS)
@pytest.mark.parametrize(
  ('path', 'message'),
  [
    ('', '= must name a folder.'),
    ('gs://bucket/run', '=gs://bucket/run must be .* mount the store'),
    ('s3://bucket', '=s3://bucket must be a folder of this machine'),
    ('hdfs://a:1/b', 'mount'),
    ('~nobody-of-this-name/run', 'no such home folder'),
  ],
)
def test_paths_of_nowhere_are_refused(name, path, message):
  with pytest.raises(errors.SettingError, match=f'--{name}.*{message}'):
    _from_flags(f'--{name}={path}')


def test_a_config_is_replaced_not_changed():
  before = config.make()
  after = before.replace(batch_size=4, seed=7)
  assert (after.update.batch_size, after.run.seed) == (4, 7)
  assert before == config.make()
  with pytest.raises(dataclasses.FrozenInstanceError):
    before.update.batch_size = 4


def test_completes_what_depends_on_the_environments():
  one = config.make(batch_size=6).completed(1, 'shallow')
  assert one.agent.agent == 'shallow'
  assert one.update.queue_capacity == 6
  assert not one.envs.full_action_set
  many = config.make(agent='deep', queue_capacity=2).completed(57, 'shallow')
  assert many.agent.agent == 'deep'
  assert many.update.queue_capacity == 2
  assert many.envs.full_action_set


def test_says_what_a_value_is_tied_to():
  assert set(config.names(of_run=True)) >= {'level_name', 'agent', 'popart'}
  agreed = set(config.names(agreed=True))
  assert agreed >= {'seed', 'unroll_length', 'num_actors', 'queue_capacity'}
  assert 'batch_size' not in agreed
  may_change = set(config.names(may_change=True))
  assert may_change >= {'logdir', 'total_environment_frames', 'video'}
  assert not may_change & set(config.names(of_run=True))


def test_names_the_torsos_that_there_are():
  assert set(config.TORSOS) == set(torsos.TORSOS)
