"""Tests of several learners in step, as processes of this machine."""

import signal
import time

import pytest

from tests import cluster as cluster_lib
from tests import program

pytestmark = pytest.mark.slow

_TIMEOUT_SECS = 20


@pytest.fixture
def cluster(tmp_path):
  with cluster_lib.Cluster(tmp_path, num_learners=2) as cluster:
    yield cluster


@pytest.mark.parametrize('stopped', [0, 1])
def test_a_learner_that_stands_still_is_missed(cluster, stopped):
  """As behind a broken network; learners log the episodes of all actors."""
  settings = {
    'level_name': ','.join(program.COUNT.format(length) for length in (3, 7)),
    'save_checkpoint_secs': 300,
  }
  first, second = (
    cluster.start(
      'learner', task, connect_timeout_secs=_TIMEOUT_SECS, **settings
    )
    for task in (0, 1)
  )
  for task in (0, 1):
    cluster.start('actor', task, **settings)
  first.wait_for_training()
  first.wait_until(lambda: 'Count7' in str(cluster.rows()))
  assert 'Count3' in str(cluster.rows())  # Each from one actor.
  silent, other = ((first, second), (second, first))[stopped]
  silent.process.send_signal(signal.SIGSTOP)
  begin = time.monotonic()
  assert other.finish(timeout_secs=_TIMEOUT_SECS + 60.0) == 1
  assert time.monotonic() - begin > _TIMEOUT_SECS - 1
  (line,) = other.error_lines()
  assert line.startswith(
    f'Error: waited {_TIMEOUT_SECS} s (--connect_timeout_secs) to update '
    f'together with {cluster.hosts[stopped]}: one has stopped, or gets no '
    'unrolls'
  )
  if stopped == 1:
    assert list(cluster.logdir.glob('checkpoints/frames-*'))
  silent.process.send_signal(signal.SIGCONT)
  assert silent.finish() == 1
  (line,) = silent.error_lines()
  assert line.endswith(
    'Start all learners again: they go on from the checkpoint.'
  )


def test_learners_learn_though_one_is_killed_on_the_way(cluster):
  """As configs/cartpole.flags, by two learners and four actors."""

  def start(job_name, task):
    return cluster.start(
      job_name,
      task,
      flagfile='configs/cartpole.flags',
      level_name=None,
      total_environment_frames=None,
      num_actors=4,
      envs_per_actor=4,
      batch_size=4,
      unroll_length=20,
      log_every_secs=5,
      save_checkpoint_secs=20,
    )

  for task in range(4):
    start('actor', task)
  first, second = (start('learner', task) for task in (0, 1))
  first.wait_until(lambda: cluster.frames() > 100_000, 1800.0)
  first.wait_until(lambda: list(cluster.logdir.glob('checkpoints/frames-*')))
  second.process.kill()
  assert first.finish() == 1
  (line,) = first.error_lines()
  assert line.startswith('Error: another learner has ended.')
  first, _ = (start('learner', task) for task in (0, 1))
  first.wait_until(
    lambda: _best_return(cluster) >= 450 or cluster.frames() >= 1e6, 3600.0
  )
  assert 'continuing from' in first.out
  best = _best_return(cluster)
  print(f'{best} within {cluster.frames():,} frames')
  assert best >= 450


def _best_return(cluster):
  return max(
    (row.get('episode_return_mean_100', 0.0) for row in cluster.rows()),
    default=0,
  )
