"""Tests of what goes wrong with a cluster, each with real processes."""

import os
import pathlib
import signal
import sys
import time

import pytest

from tests import cluster as cluster_lib

pytestmark = pytest.mark.slow

# From the moment at which an actor can go on until it does.
_REJOIN_SECS = 60.0


@pytest.fixture
def cluster(tmp_path):
  with cluster_lib.Cluster(tmp_path) as cluster:
    yield cluster


@pytest.fixture(scope='module')
def running(tmp_path_factory):
  """A cluster that plays, with its processes; nobody does harm to it."""
  with cluster_lib.Cluster(tmp_path_factory.mktemp('running')) as cluster:
    yield cluster, *cluster.start_all()


def _kill(process):
  """As the system does when memory runs out; sees to the environments too."""
  process.process.kill()
  process.process.wait()


def test_an_actor_killed_and_started_again_rejoins(cluster):
  learner, actor, _ = cluster.start_all()
  _kill(actor)
  again = cluster.start('actor', 0)
  with cluster_lib.within(30, 'until the learner has gone on'):
    cluster.wait_for_training(learner)
  with cluster_lib.within(_REJOIN_SECS, 'until it plays again, start included'):
    cluster_lib.wait_to_play(again)
  cluster.wait_for_actor(learner, 0)
  frames = [row['num_environment_frames'] for row in cluster.rows()]
  assert frames == sorted(frames)
  assert learner.error_lines() == []


def test_an_actor_stopped_for_a_minute_goes_on(cluster):
  learner, actor, _ = cluster.start_all()
  actor.process.send_signal(signal.SIGSTOP)
  end = time.monotonic() + 60
  while time.monotonic() < end:
    cluster.wait_for_training(learner)
  assert learner.out.splitlines()[-1].endswith('| 1 of 2 actors play')
  actor.process.send_signal(signal.SIGCONT)
  with cluster_lib.within(_REJOIN_SECS, 'until it is trained on again'):
    cluster.wait_for_actor(learner, 0)
  assert actor.error_lines() == []


def test_an_environment_killed_is_made_anew(cluster):
  learner, actor, _ = cluster.start_all()
  (environment,) = _children(*_children(actor.process.pid))
  os.kill(environment, signal.SIGKILL)
  with cluster_lib.within(_REJOIN_SECS, 'until it is trained on again'):
    actor.wait_until(lambda: 'It starts anew' in actor.err)
    cluster.wait_for_actor(learner, 0)
  assert 'ended by SIGKILL' in actor.err
  assert 'Traceback' not in actor.err


def _children(process_id):
  path = pathlib.Path(f'/proc/{process_id}/task/{process_id}/children')
  return [int(child) for child in path.read_text().split()]


@pytest.mark.parametrize('level', ['CountCalm3', 'Count3'])
def test_actors_go_on_with_a_restarted_learner(cluster, level):
  """Their environments are slow, or the learner is and its queue full."""
  settings = {'level_name': f'gym:tests.count_env:{level}-v0'}
  learner = cluster.start(
    'learner', learning_rate=0.1, save_checkpoint_secs=5, **settings
  )
  actors = [cluster.start('actor', task, **settings) for task in (0, 1)]
  for actor in actors:
    cluster_lib.wait_to_play(actor)
  learner.wait_until(lambda: list(cluster.logdir.glob('checkpoints/*.index')))
  cluster.wait_for_training(learner)
  _kill(learner)
  with cluster_lib.within(_REJOIN_SECS, 'until both play, start included'):
    # Its weights stay as they were saved, so that the actors' must be the same.
    learner = cluster.start(
      'learner', learning_rate=0, allow_changed_settings=True, **settings
    )
    for actor in actors:
      cluster_lib.wait_to_play(actor, times=2)
  with cluster_lib.within(_REJOIN_SECS, 'until it has trained'):
    cluster.wait_for_training(learner)
  assert 'continuing from' in learner.out
  rows = cluster.rows()
  frames = [row['num_environment_frames'] for row in rows]
  assert frames == sorted(frames)
  new = [row for row in rows if not row['learning_rate']]
  assert all(0 <= row['policy_lag'] < 10 for row in new)
  assert new[-1]['max_abs_log_rho'] < 1e-4


@pytest.mark.parametrize(
  ('timeout_secs', 'patience_secs', 'end_secs'), [(20, 20, 40), (60, 40, 60)]
)
def test_actors_end_without_their_learner(
  cluster, timeout_secs, patience_secs, end_secs
):
  learner, *actors = cluster.start_all(connect_timeout_secs=timeout_secs)
  _kill(learner)
  problem = f'no learner at {cluster.hosts[0]} for {patience_secs} s .*refused'
  with cluster_lib.within(end_secs, 'until both have ended'):
    for actor in actors:
      cluster_lib.assert_fails(actor, problem, 90)


def test_actors_miss_a_learner_that_is_silent(cluster):
  """As behind a broken network: nobody closes the connection."""
  learner, *actors = cluster.start_all(connect_timeout_secs=20)
  learner.process.send_signal(signal.SIGSTOP)
  with cluster_lib.within(60, 'until both have ended'):
    for actor in actors:
      cluster_lib.assert_fails(actor, 'it does not answer', 100)


@pytest.mark.parametrize('victim', [0, 1])
def test_learners_end_and_resume_together(tmp_path, victim):
  with cluster_lib.Cluster(tmp_path, num_learners=2) as cluster:
    actors = [cluster.start('actor', task) for task in (0, 1)]
    learners = [cluster.start('learner', task) for task in (0, 1)]
    cluster.wait_for_training(learners[0])
    _kill(learners[victim])
    with cluster_lib.within(15, 'until the other learner has ended'):
      cluster_lib.assert_fails(
        learners[1 - victim], 'another learner has ended. Start all', 60
      )
    enough = cluster.frames() + 1000
    again = [
      cluster.start('learner', task, total_environment_frames=enough)
      for task in (0, 1)
    ]
    cluster_lib.assert_ends_well(*again, *actors)
    assert 'continuing from' in again[0].out
    for actor in actors:
      assert actor.out.count('Playing for the learner') == 2


def test_a_port_that_is_taken_is_named(running):
  cluster, learner, *_ = running
  # In a folder of its own: that of the first is refused before the port is.
  second = cluster.start('learner', logdir=cluster.logdir.parent / 'second')
  with cluster_lib.within(15, 'until it has ended, start included'):
    cluster_lib.assert_fails(
      second, f'cannot listen at {cluster.hosts[0]}: Address already in use'
    )
  cluster.wait_for_training(learner)


def test_an_actor_waits_for_its_learner(cluster):
  actor = cluster.start('actor', connect_timeout_secs=120)
  actor.wait_until(lambda: 'Waiting for the learner' in actor.out, 120)
  time.sleep(20)
  learner = cluster.start('learner')
  with cluster_lib.within(_REJOIN_SECS, 'until it plays, start included'):
    cluster_lib.wait_to_play(actor)
  cluster.wait_for_actor(learner, 0)


def test_an_actor_waits_no_longer_than_it_was_told(cluster):
  actor = cluster.start('actor', connect_timeout_secs=10)
  actor.wait_until(lambda: 'Waiting for the learner' in actor.out, 120)
  with cluster_lib.within(20, 'until it has ended'):
    cluster_lib.assert_fails(
      actor, f'no learner at {cluster.hosts[0]} for 10 s .*refused'
    )


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    ({'task': 7}, r'task 7 is outside 0\.\.1: there are 2 actors'),
    ({'task': 7, 'num_actors': 8}, r'task 7 is outside 0\.\.1: .*num_act'),
    ({'num_actors': 3}, 'num_actors is 3 here and 2 there'),
    ({'unroll_length': 7}, 'unroll_length is 7 here and 5 there'),
    ({}, 'another process plays as actor 0: give each its own --task'),
  ],
)
def test_an_actor_that_does_not_fit_is_refused(running, settings, message):
  cluster, learner, *actors = running
  refused = cluster.start(
    **{'job_name': 'actor', 'connect_timeout_secs': 60} | settings
  )
  with cluster_lib.within(_REJOIN_SECS, 'until it has ended, start included'):
    cluster_lib.assert_fails(refused, message)
  for task in (0, 1):
    cluster.wait_for_actor(learner, task)
    assert 'Waiting' not in actors[task].out.rpartition('Playing')[2]


@pytest.mark.parametrize('signum', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_only_that_process(cluster, signum):
  learner, actor, other = cluster.start_all()
  os.killpg(actor.process.pid, signum)
  with cluster_lib.within(10, 'until the actor has ended'):
    cluster_lib.assert_ends_well(actor, code=75)
  assert actor.out.splitlines()[-1] == 'Actor 0 has ended.'
  cluster.wait_for_training(learner)
  os.killpg(learner.process.pid, signum)
  with cluster_lib.within(10, 'until the learner has ended'):
    cluster_lib.assert_ends_well(learner, code=75)
  assert learner.out.splitlines()[-1].startswith('Saved.')
  assert other.process.poll() is None


@pytest.mark.parametrize('signum', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_local_cluster(cluster, signum):
  command = [
    *(sys.executable, 'local_cluster.py', '--num_actors=2'),
    *(f'--output_dir={cluster.logdir.parent}', '--'),
  ]
  everything = cluster.start(
    None,
    None,
    command=command,
    num_actors=None,
    learner_hosts=None,
  )
  for task in (0, 1):
    cluster.wait_for_actor(everything, task)
  os.killpg(everything.process.pid, signum)
  with cluster_lib.within(10, 'until all processes have ended'):
    assert everything.finish() == 75, everything.err
  assert everything.error_lines() == []
  assert list(cluster.logdir.glob('checkpoints/*.index'))
