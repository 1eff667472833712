"""Tests of experiment.py: the program as a user starts it."""

import json
import os
import pathlib
import re
import shutil
import signal
import sys
import time

from absl import flags
from absl.testing import flagsaver
import numpy as np
import pytest
import tensorflow as tf

import config
import environments
import experiment
import networks
from runtime import errors
from tests import program
import torsos

COUNT = program.COUNT
_TWO_LEVELS = f'{COUNT.format(3)},{COUNT.format(7)}'
_FRAMES = 2000
_RATE = 4e-4  # The default.

Program = program.Program


def _checkpoint_frames(logdir):
  """Returns the frames of the newest checkpoint, by its name."""
  path = tf.train.latest_checkpoint(pathlib.Path(logdir) / 'checkpoints')
  frames = int(path.rsplit('-', 1)[1])
  assert tf.train.load_variable(path, 'num_environment_frames') == frames
  return frames


def _read_metrics(logdir):
  lines = (pathlib.Path(logdir) / 'metrics.jsonl').read_text().splitlines()
  return [json.loads(line) for line in lines]


def _seeds(text):
  return re.search(r'seeds: (.*)', text)[1]


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """A run to its end: its folder, and the program that has made it."""
  folder = tmp_path_factory.mktemp('run')
  logdir = folder / 'logs' / 'run'
  with Program(
    folder / 'program',
    level_name=_TWO_LEVELS,
    logdir=logdir,
    total_environment_frames=_FRAMES,
  ) as done:
    assert done.finish() == 0, done.err
  return logdir, done


def test_a_run_ends_in_good_order(run):
  logdir, done = run
  assert done.error_lines() == []
  assert done.out.startswith(f'IMPALA on {_TWO_LEVELS}\n')
  assert f'budget       {_FRAMES:,} environment frames\n' in done.out
  assert re.search(
    r'^ *2.00k / 2.00k frames \(100.0%\) \| [\d,]+ frames/s \| 0s left \| '
    r'return \(last 100\) \d\.\d \| queue \d/4: ',
    done.out,
    re.M,
  )
  assert done.out.splitlines()[-1].startswith('Saved.')
  # To the frame: 4 unrolls of 5 steps at a time.
  assert _checkpoint_frames(logdir) == _FRAMES


def test_a_run_leaves_its_settings(run):
  logdir, _ = run
  config = json.loads((logdir / 'config.json').read_text())
  settings = config['settings']
  assert settings['level_name'] == _TWO_LEVELS
  assert settings['batch_size'] == 4
  assert settings['repeat_action_probability'] == 0.0
  assert 'tensorflow' in config['versions']


def test_a_run_leaves_its_curves(run):
  logdir, _ = run
  rows = _read_metrics(logdir)
  assert rows[-1]['num_environment_frames'] == _FRAMES
  frames = [row['num_environment_frames'] for row in rows]
  assert frames == sorted(frames)
  assert all(f % 20 == 0 for f in frames)
  merged = {tag: value for row in rows for tag, value in row.items()}
  for length in (3, 7):
    level = COUNT.format(length)
    assert merged[f'{level}/episode_return'] == length
    assert merged[f'{level}/episode_frames'] == length
    # Whatever an unroll cuts, none is lost or counted twice.
    episodes = sum(row.get(f'{level}/episodes', 0) for row in rows)
    assert abs(episodes - _FRAMES / 2 / length) <= _FRAMES * 0.05
  steps = sum(
    row.get(f'{COUNT.format(n)}/episodes', 0) * n
    for row in rows
    for n in (3, 7)
  )
  assert _FRAMES - 10 <= steps <= _FRAMES
  for tag in (
    'losses/total',
    'losses/policy_gradient',
    'losses/baseline',
    'losses/entropy',
    'entropy',
    'frames_per_second',
    'gradient_norm',
    'policy_lag',
    'queue_size',
    'train_secs',
  ):
    assert merged[tag] is not None, tag
  assert merged['learning_rate'] == pytest.approx(_RATE * 20 / _FRAMES)
  assert len(list(logdir.glob('events.out.tfevents.*'))) == 1


def test_the_same_command_goes_on_even_if_the_folder_has_moved(run, tmp_path):
  logdir, first = run
  moved = tmp_path / 'umgez\u00f6gen \u2713'
  shutil.copytree(logdir, tmp_path / 'away')
  shutil.move(tmp_path / 'away', moved)
  before = _read_metrics(moved)
  with Program(
    tmp_path / 'program',
    # Its name cannot be printed there.
    {'PYTHONIOENCODING': 'ascii', 'LC_ALL': 'C'},
    level_name=_TWO_LEVELS,
    logdir=moved,
    total_environment_frames=2 * _FRAMES,
  ) as resumed:
    assert resumed.finish() == 0, resumed.err
  assert resumed.error_lines() == []
  assert f'continuing from {_FRAMES:,}' in resumed.out
  assert _seeds(resumed.out) == _seeds(first.out)
  rows = _read_metrics(moved)
  assert rows[: len(before)] == before
  new = rows[len(before) :]
  assert new[0]['num_environment_frames'] > _FRAMES
  assert new[-1]['num_environment_frames'] == 2 * _FRAMES
  for row in new:  # Decays over the new total.
    left = 1 - (row['num_environment_frames'] - 20) / (2 * _FRAMES)
    assert row['learning_rate'] == pytest.approx(_RATE * left)
  assert _checkpoint_frames(moved) == 2 * _FRAMES
  assert _checkpoint_frames(logdir) == _FRAMES


def test_what_a_user_can_mend_ends_in_one_line(run, tmp_path):
  logdir, _ = run
  (tmp_path / 'file').write_text('')
  before = sorted(logdir.rglob('*'))
  cases = {
    'changed': (
      {'logdir': logdir, 'level_name': COUNT.format(7), 'use_lstm': True},
      ['level_name was', 'use_lstm was', '--allow_changed_settings'],
    ),
    'misspelt': (
      {'logdir': tmp_path / 'a', 'level_name': 'gym:CartPoel-v1'},
      ['CartPoel', 'Did you mean', 'CartPole'],
    ),
    'unwritable': (
      {'logdir': tmp_path / 'file', 'level_name': COUNT.format(7)},
      ['cannot write to ', '(--logdir)'],
    ),
    'unfilmed': (
      {'logdir': logdir, 'mode': 'test', 'video': tmp_path / 'file'},
      ['cannot write to ', '(--video)'],
    ),
    'alone': (
      {'logdir': tmp_path / 'b', 'task': 1, 'level_name': COUNT.format(7)},
      ['--task', 'need --job_name='],
    ),
    'untrained': (
      {'logdir': tmp_path / 'none', 'mode': 'test'},
      ['no run in', 'none'],
    ),
    'unsaved': (
      {'logdir': tmp_path / 'unsaved' / 'run', 'mode': 'test'},
      ['no checkpoint in'],
    ),
  }
  (tmp_path / 'unsaved' / 'run').mkdir(parents=True)
  shutil.copy(logdir / 'config.json', tmp_path / 'unsaved' / 'run')
  programs = {
    name: Program(tmp_path / name, **settings)
    for name, (settings, _) in cases.items()
  }
  for name, refused in programs.items():
    with refused:
      assert refused.finish() == 1, name
    lines = refused.error_lines()
    assert len(lines) == 1, refused.err
    assert lines[0].startswith('Error: ')
    for part in cases[name][1]:
      assert part in lines[0]
  assert sorted(logdir.rglob('*')) == before
  assert not (tmp_path / 'none').exists()
  assert not (tmp_path / 'unsaved' / 'run' / 'test.json').exists()


def test_plays_what_was_trained(run, tmp_path):
  logdir, _ = run
  logdir = shutil.copytree(logdir, tmp_path / 'run')
  own = Program(
    tmp_path / 'own', mode='test', logdir=logdir, test_num_episodes=3
  )
  other = Program(
    tmp_path / 'other',
    mode='test',
    logdir=logdir,
    level_name=COUNT.format(20),
    test_num_episodes=1,
  )
  with own as played, other:
    assert played.finish() == 0, played.err
    assert other.finish() == 0, other.err
  assert played.error_lines() == []
  path = logdir / 'test_gym_tests.count_env_Count20-v0.json'
  assert list(json.loads(path.read_text())['levels']) == [COUNT.format(20)]
  assert f'Playing {logdir}/checkpoints/frames-{_FRAMES}' in played.out
  scores = json.loads((logdir / 'test.json').read_text())
  assert scores['settings']['num_environment_frames'] == _FRAMES
  for length in (3, 7):
    level = scores['levels'][COUNT.format(length)]
    assert level['returns'] == [length] * 3
    assert level['frames'] == [length] * 3


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    ([1], 'is damaged'),
    ({'settings': {'level_name': [1]}}, '--level_name=.1. must be a string'),
    ({'settings': {'popart': None}}, '--popart=None must be True or False'),
  ],
)
def test_names_a_file_of_settings_that_is_damaged(tmp_path, settings, message):
  path = tmp_path / 'config.json'
  path.write_text(json.dumps(settings))
  with (
    flagsaver.flagsaver(),
    pytest.raises(errors.UserError, match=f'^{path} .*{message}'),
  ):
    flags.FLAGS(['', '--mode=test', f'--logdir={tmp_path}'])
    experiment.read_config()


def test_one_environment_fills_a_large_batch(tmp_path):
  with Program(
    tmp_path / 'program',
    level_name=COUNT.format(3),
    logdir=tmp_path / 'run',
    envs_per_actor=1,
    batch_size=32,
    queue_capacity=1,
    total_environment_frames=320,
  ) as run:
    assert run.finish() == 0, run.err
  assert '320 / 320 frames (100.0%)' in run.out


def test_a_run_does_not_need_a_reader(tmp_path):
  # Who reads goes away, or the disk that the output goes to is full.
  def start(name, where, folder, **flags):
    script = f'set -o pipefail; "$0" "$@" {where}'
    return Program(
      tmp_path / folder / name,
      command=['bash', '-c', script, *program.COMMAND],
      logdir=tmp_path / name / 'run',
      **flags,
    )

  cases = {'gone': '| head -n 1', 'full': '> /dev/full'}
  flags = {
    'level_name': 'gym:tests.count_env:Talkative-v0',
    'total_environment_frames': _FRAMES,
  }
  runs = [start(*case, 'train', **flags) for case in cases.items()]
  for run in runs:
    with run:
      assert run.finish() == 0, run.err
    assert run.error_lines() == []
  for name in cases:
    assert _checkpoint_frames(tmp_path / name / 'run') == _FRAMES
  flags = {'mode': 'test', 'test_num_episodes': 2}
  with start('gone', cases['gone'], 'test', **flags) as played:
    assert played.finish() == 0, played.err
  assert played.error_lines() == []
  assert (tmp_path / 'gone' / 'run' / 'test.json').exists()


def test_failures_end_the_run_and_name_their_place(tmp_path):
  settings = {
    # One environment, and a queue smaller than the batch.
    'raise': {
      'level_name': COUNT.format('Raise'),
      'envs_per_actor': 1,
      'queue_capacity': 1,
    },
    'nan': {'level_name': COUNT.format('Nan')},
    'huge': {
      'level_name': 'gym:tests.huge_env:CountHuge-v0',
      'reward_clipping': 'none',
      'save_checkpoint_secs': 0,
    },
  }
  programs = {
    name: Program(tmp_path / name, logdir=tmp_path / name / 'run', **more)
    for name, more in settings.items()
  }
  lines = {}
  for name, failed in programs.items():
    with failed:
      assert failed.finish() == 1, name
    lines[name] = failed.error_lines()
    errors = [line for line in lines[name] if line.startswith('Error: ')]
    assert len(errors) == 1, failed.err
    # Before it, the first restart; the others were for the same reason.
    warnings = lines[name][: lines[name].index(errors[0])]
    del lines[name][: len(warnings)]
    count = sum(line.startswith('Warning: ') for line in warnings)
    assert count == (1 if name == 'raise' else 0), failed.err
    assert 'Saved.' not in failed.out

  text = '\n'.join(lines['raise'])
  assert lines['raise'][0] == (
    f'Error: {COUNT.format("Raise")}: environment 0 failed at step 50'
  )
  assert text.endswith('OSError: The level is broken.')
  # The environment's traceback has been shown; the program's is not.
  assert 'Traceback' not in text
  assert 100 <= _checkpoint_frames(tmp_path / 'raise' / 'run') <= 200

  text = ' '.join(lines['nan'])
  assert f'{COUNT.format("Nan")}: environment ' in text
  assert 'failed at step 7' in text
  assert 'nan' in text
  assert 'Traceback' not in text

  assert len(lines['huge']) == 1
  assert 'is not finite' in lines['huge'][0]
  assert 'the last checkpoint is kept' in lines['huge'][0]
  saved = _checkpoint_frames(tmp_path / 'huge' / 'run')
  assert 400 <= saved <= 700
  assert f' {saved:,} environment frames' in lines['huge'][0]
  path = tf.train.latest_checkpoint(tmp_path / 'huge' / 'run' / 'checkpoints')
  for name, _ in tf.train.list_variables(path):
    assert tf.reduce_all(
      tf.math.is_finite(tf.cast(tf.train.load_variable(path, name), tf.float32))
    ), name


def test_a_run_folder_that_is_deleted_is_an_error_at_the_next_save(tmp_path):
  logdir = tmp_path / 'run'
  with Program(
    tmp_path / 'program',
    level_name=COUNT.format(3),
    logdir=logdir,
    save_checkpoint_secs=1,
    total_environment_frames=10**9,
  ) as run:
    run.wait_for_training()
    shutil.rmtree(logdir)
    assert run.finish() == 1, run.err
  (line,) = run.error_lines()
  assert line.startswith(
    f'Error: cannot save: {logdir}/checkpoints was deleted'
  )
  assert 'Saved.' not in run.out
  assert not logdir.exists()


_BROKEN = """
import sys
from absl import app
import experiment, networks, tensorflow as tf

unroll = networks.Agent.unroll

def broken(self, *args):
  logits, baseline, state = unroll(self, *args)
  return logits, {fault}, state

networks.Agent.unroll = broken
app.run(experiment.main)
"""


def test_an_error_of_our_own_keeps_its_traceback(tmp_path):
  """One line is for what a user can mend; file and line are for the rest."""
  faults = {
    'shape': ('baseline + tf.zeros([7, 9])', 'Dimensions must be equal'),
    'index': ('tf.gather(baseline, [99])[0] + baseline', 'is not in'),
  }
  programs = {}
  for name, (fault, _) in faults.items():
    script = tmp_path / f'{name}.py'
    script.write_text(_BROKEN.format(fault=fault))
    programs[name] = Program(
      tmp_path / name,
      {'PYTHONPATH': str(program.ROOT)},
      command=[sys.executable, str(script)],
      level_name=COUNT.format(3),
      logdir=tmp_path / name / 'run',
    )
  for name, failed in programs.items():
    with failed:
      assert failed.finish() == 1
    assert 'Traceback (most recent call last)' in failed.err, name
    assert f'{name}.py", line' in failed.err
    assert faults[name][1] in failed.err
    assert 'Error: ' not in failed.err.splitlines()[0]
    assert '--learning_rate' not in failed.err


def test_signals_end_the_run_in_good_order(run, tmp_path):
  common = {'total_environment_frames': 10**9}
  interrupted = Program(
    tmp_path / 'int',
    logdir=tmp_path / 'int' / 'run',
    level_name=COUNT.format(100),
    seed=2,
    **common,
  )
  # Its environments are all in a reset of 10 s.
  terminated = Program(
    tmp_path / 'term',
    logdir=tmp_path / 'term' / 'run',
    level_name=COUNT.format('SlowReset'),
    **common,
  )
  with interrupted, terminated:
    interrupted.wait_for_training()
    # The program, the supervisor and two environments.
    processes = interrupted.processes()
    assert len(processes) == 4
    for process_id in processes:
      maps = pathlib.Path(f'/proc/{process_id}/maps').read_text()
      assert '/dev/shm' not in maps  # Nothing to be left there.
    terminated.wait_until(lambda: ' frames/s ' in terminated.out)
    start = time.monotonic()
    # The terminal sends it to all.
    os.killpg(interrupted.process.pid, signal.SIGINT)
    terminated.process.send_signal(signal.SIGTERM)
    for stopped in (interrupted, terminated):
      assert stopped.finish(timeout_secs=20.0) == 75, stopped.err
      assert time.monotonic() - start < 20
      assert stopped.error_lines() == []
      assert 'Stopping' in stopped.out
      assert stopped.out.splitlines()[-1].startswith('Saved.')
  # Where nothing was trained, there is nothing to keep.
  with Program(
    tmp_path / 'again',
    logdir=tmp_path / 'term' / 'run',
    level_name=COUNT.format(3),
    use_lstm=True,
    total_environment_frames=20,
  ) as again:
    assert again.finish() == 0, again.err
  frames = _checkpoint_frames(tmp_path / 'int' / 'run')
  assert frames > 0
  last = _read_metrics(tmp_path / 'int' / 'run')[-1]
  assert frames - 20 <= last['num_environment_frames'] <= frames
  assert _checkpoint_frames(tmp_path / 'term' / 'run') == 20

  _, other = run
  assert _seeds(interrupted.out) != _seeds(other.out)
  assert len(set(_seeds(interrupted.out).split(', '))) == 2


@pytest.mark.parametrize(
  ('shape', 'dtype', 'agent'),
  [
    ([4], np.float32, 'vector'),
    ([84, 84], np.uint8, 'shallow'),
    ([20, 20, 3], np.uint8, 'shallow'),
    ([7, 7, 3], np.uint8, 'deep'),
  ],
)
def test_the_agent_goes_by_the_observation(shape, dtype, agent):
  spec = environments.EnvironmentSpec(
    tuple(shape), np.dtype(dtype), 2, 1, 1, None
  )
  completed = config.make().completed(1, torsos.default_torso(spec))
  assert completed.agent.agent == agent
  networks.make_agent(completed, spec)


def test_a_test_takes_the_settings_of_the_run(tmp_path):
  # An older run, from before there was `use_lstm`.
  before = {
    'agent': 'deep',
    'full_action_set': True,
    'level_name': 'pong,breakout',
    'popart': True,
    'repeat_action_probability': 0.25,
  }
  text = json.dumps({'settings': before})
  (tmp_path / 'config.json').write_text(text)
  spec = environments.EnvironmentSpec(
    (84, 84), np.dtype(np.uint8), num_actions=18, frames_per_step=4, stack=4,
    action_meanings=None,
  )  # fmt: skip
  with flagsaver.flagsaver():
    flags.FLAGS(
      ['', '--mode=test', f'--logdir={tmp_path}', '--test_num_episodes=3']
    )
    played = experiment.read_config()
  assert played == config.make(
    **before, mode='test', logdir=str(tmp_path), test_num_episodes=3
  )
  assert networks.make_agent(played, spec).popart_levels == 2
  suite = played.replace(level_name='atari57')
  assert networks.make_agent(suite, spec).popart_levels == 57
  without = suite.replace(popart=False)
  assert networks.make_agent(without, spec).popart_levels is None


@pytest.mark.parametrize(
  'flag',
  [
    '--batch_size=0',
    '--batch_size=2.5',
    '--decay=1.5',
    '--discounting=2',
    '--discounting=-0.1',
    '--entropy_cost=nan',
    '--envs_per_actor=0',
    '--epsilon=-1',
    '--learning_rate=-1',
    '--learning_rate=inf',
    '--learning_rate=nan',
    '--max_gradient_norm=-1',
    '--num_actors=0',
    '--queue_capacity=0',
    '--repeat_action_probability=1.1',
    '--reward_clipping=abs_two',
    '--seed=-1',
    '--test_num_episodes=0',
    '--total_environment_frames=0',
    '--unroll_length=0',
  ],
)
def test_bad_values_are_refused_by_name(flag):
  name = flag[2:].partition('=')[0]
  with (
    flagsaver.flagsaver(),
    pytest.raises(
      (flags.IllegalFlagValueError, errors.SettingError), match=name
    ),
  ):
    flags.FLAGS(['experiment.py', flag])
    config.from_flags()


def test_a_misspelt_flag_is_refused_with_what_is_near():
  with flagsaver.flagsaver(), pytest.raises(flags.UnrecognizedFlagError) as e:
    flags.FLAGS(['experiment.py', '--batchsize=3'])
  assert 'batch_size' in str(e.value)
