"""Tests of whole suites, as a user trains and tests them."""

import json
import os
import pathlib

import pytest

import atari57
import dmlab30
from tests import program

_FAKE_LAB = str(pathlib.Path(__file__).parent / 'fake_lab')


@pytest.fixture
def lab(monkeypatch):
  """Puts the stand-in for DeepMind Lab on the programs' path."""
  monkeypatch.setenv('PYTHONPATH', _FAKE_LAB)
  monkeypatch.setenv('PATH', _FAKE_LAB, prepend=os.pathsep)
  monkeypatch.setenv('FAKE_LAB_EPISODE_FRAMES', '80')


def _rows(logdir):
  lines = (logdir / 'metrics.jsonl').read_text().splitlines()
  return [json.loads(line) for line in lines]


def _run(folder, **flags):
  with program.Program(folder, **flags) as run:
    assert run.finish(timeout_secs=550) == 0, run.err
  return run


@pytest.mark.slow
def test_dmlab30(lab, tmp_path):
  logdir = tmp_path / 'run'
  flags = {
    'level_name': 'dmlab30',
    'dataset_path': 'dummy',
    'logdir': logdir,
  }
  trained = _run(
    tmp_path / 'train',
    num_actors=30,
    envs_per_actor=1,
    total_environment_frames=8000,
    **flags,
  )
  assert trained.out.startswith('IMPALA on dmlab30 (30 levels)\n')
  assert 'dmlab30/training_cap_100' in trained.out
  tags = {tag for row in _rows(logdir) for tag in row}
  for level in dmlab30.ALL_LEVELS:
    assert f'{level}/episode_return' in tags
  assert {'dmlab30/training_cap_100', 'dmlab30/training_no_cap'} <= tags

  tested = _run(
    tmp_path / 'test',
    mode='test',
    logdir=logdir,
    test_num_episodes=2,
    dataset_path='dummy',
  )
  written = json.loads((logdir / 'test.json').read_text())
  assert set(written['levels']) == set(dmlab30.LEVEL_MAPPING.values())
  for level in written['levels'].values():
    assert level['frames'] == [80, 80]
  expected = dmlab30.compute_human_normalized_score(
    {name: level['returns'] for name, level in written['levels'].items()},
    per_level_cap=100,
  )
  score = written['suite_scores']['dmlab30/test_cap_100']
  assert score == pytest.approx(expected)
  assert f'dmlab30/test_cap_100 {score:.1f} %' in tested.out
  assert 'rooms_collect_good_objects_test' in tested.out
  assert not (logdir / 'test_progress.json').exists()


def test_levels_without_an_environment_are_named(lab, tmp_path):
  run = _run(
    tmp_path / 'train',
    level_name='rooms_watermaze,explore_object_rewards_few',
    num_actors=1,
    envs_per_actor=1,
    batch_size=1,
    total_environment_frames=100,
    logdir=tmp_path / 'run',
  )
  (warning,) = run.error_lines()
  assert warning.startswith('Warning: 1 of 2 levels have no environment')
  assert warning.endswith('explore_object_rewards_few.')


@pytest.mark.slow
def test_atari57_logs_every_game_and_scores_all(tmp_path):
  logdir = tmp_path / 'run'
  _run(
    tmp_path / 'train',
    level_name='atari57',
    envs_per_actor=57,
    total_environment_frames=20_000,
    logdir=logdir,
  )
  # A test that is stopped goes on where it was.
  with program.Program(
    tmp_path / 'first', mode='test', logdir=logdir, test_num_episodes=1
  ) as first:
    progress = logdir / 'test_progress.json'
    first.wait_until(progress.exists, timeout_secs=500)
    first.process.terminate()
    first.process.wait()
  played = json.loads(progress.read_text())['scores']
  assert 1 <= len(played) < 57
  second = _run(
    tmp_path / 'second', mode='test', logdir=logdir, test_num_episodes=1
  )
  assert f'{len(played)} levels were played before.' in second.out
  written = json.loads((logdir / 'test.json').read_text())
  assert list(written['levels']) == list(atari57.GAMES)
  for name, level in played.items():
    assert written['levels'][name]['returns'] == level['returns']
  assert 'atari57/test_median' in written['suite_scores']
  assert 'atari57/test_median' in second.out
