"""Tests of several learners in step, as processes of this machine."""

import json
import signal
import time

import pytest

from tests import link_test
from tests import program

_TIMEOUT_SECS = 20


def _start(tmp_path, name, hosts, **flags):
  return program.Program(
    tmp_path / name,
    logdir=tmp_path / 'run',
    learner_hosts=hosts,
    **{'connect_timeout_secs': _TIMEOUT_SECS} | flags,
  )


def _free_hosts():
  return ','.join(f'localhost:{link_test.free_port()}' for _ in range(2))


def _rows(tmp_path):
  path = tmp_path / 'run' / 'metrics.jsonl'
  lines = path.read_text().splitlines() if path.exists() else []
  return [json.loads(line) for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize('stopped', [0, 1])
def test_a_learner_that_stands_still_is_missed(tmp_path, stopped):
  """As behind a broken network; learners log the episodes of all actors."""
  hosts = _free_hosts()
  counts = [program.COUNT.format(length) for length in (3, 7)]

  def start(job_name, task):
    return _start(
      tmp_path,
      f'{job_name}{task}',
      hosts,
      job_name=job_name,
      task=task,
      num_actors=2,
      envs_per_actor=1,
      level_name=','.join(counts),
      total_environment_frames=10**9,
      connect_timeout_secs=_TIMEOUT_SECS if job_name == 'learner' else 300,
    )

  with (
    start('learner', 0) as first,
    start('learner', 1) as second,
    start('actor', 0),
    start('actor', 1),
  ):
    first.wait_for_training()
    first.wait_until(lambda: 'Count7' in str(_rows(tmp_path)))
    assert 'Count3' in str(_rows(tmp_path))  # Each from one actor.
    silent, other = ((first, second), (second, first))[stopped]
    silent.process.send_signal(signal.SIGSTOP)
    begin = time.monotonic()
    assert other.finish(timeout_secs=_TIMEOUT_SECS + 60.0) == 1
    assert time.monotonic() - begin > _TIMEOUT_SECS - 1
    (line,) = other.error_lines()
    host = hosts.split(',')[stopped]
    assert line.startswith(
      f'Error: waited {_TIMEOUT_SECS} s (--connect_timeout_secs) to update '
      f'together with {host}: one has stopped, or gets no unrolls'
    )
    if stopped == 1:
      assert list(tmp_path.glob('run/checkpoints/frames-*'))
    silent.process.send_signal(signal.SIGCONT)
    assert silent.finish() == 1
    (line,) = silent.error_lines()
    assert line.endswith(
      'Start all learners again: they go on from the checkpoint.'
    )


@pytest.mark.slow
def test_learners_learn_though_one_is_killed_on_the_way(tmp_path):
  """As configs/cartpole.flags, by two learners and four actors."""
  hosts = _free_hosts()

  def start(name, job_name, task):
    return _start(
      tmp_path,
      name,
      hosts,
      job_name=job_name,
      task=task,
      flagfile='configs/cartpole.flags',
      num_actors=4,
      envs_per_actor=4,
      batch_size=4,
      unroll_length=20,
      log_every_secs=5,
      save_checkpoint_secs=20,
      connect_timeout_secs=300,
    )

  with (
    start('actor0', 'actor', 0),
    start('actor1', 'actor', 1),
    start('actor2', 'actor', 2),
    start('actor3', 'actor', 3),
  ):
    with (
      start('learner0', 'learner', 0) as first,
      start('learner1', 'learner', 1) as second,
    ):
      first.wait_until(lambda: _frames(tmp_path) > 100_000, 1800.0)
      first.wait_until(lambda: list(tmp_path.glob('run/checkpoints/frames-*')))
      second.process.kill()
      assert first.finish() == 1
      (line,) = first.error_lines()
      assert line.startswith('Error: another learner has ended.')
    with (
      start('learner0again', 'learner', 0) as first,
      start('learner1again', 'learner', 1),
    ):
      first.wait_until(
        lambda: _best_return(tmp_path) >= 450 or _frames(tmp_path) >= 1e6,
        3600.0,
      )
      assert 'continuing from' in first.out
  best = _best_return(tmp_path)
  print(f'{best} within {_frames(tmp_path):,} frames')
  assert best >= 450


def _frames(tmp_path):
  return max((r['num_environment_frames'] for r in _rows(tmp_path)), default=0)


def _best_return(tmp_path):
  return max(
    (r.get('episode_return_mean_100', 0.0) for r in _rows(tmp_path)), default=0
  )
