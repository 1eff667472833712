"""Tests of cluster/learners.py: learners that differ, or lose each other."""

import concurrent.futures
import queue
import socket

import pytest
import tensorflow as tf

from cluster import collectives
from cluster import learners
from cluster import membership
import local_cluster
from tests import collectives_test

tf1 = tf.compat.v1


@pytest.mark.parametrize(
  'error',
  [
    tf.errors.AbortedError,
    tf.errors.FailedPreconditionError,
    tf.errors.UnavailableError,
  ],
)
def test_a_learner_that_ended_is_told(error):
  with pytest.raises(membership.LearnerLost) as told:
    _raise(error, ('a:1', 'b:2'))
  assert str(told.value) == (
    'another learner has ended. Start all learners again: they go on from the '
    'checkpoint.'
  )


def test_a_learner_that_is_silent_is_told():
  with socket.socket() as silent:
    silent.bind(('', 0))
    silent.listen()
    port = silent.getsockname()[1]
    hosts = ('a:1', f'localhost:{port}')
    with pytest.raises(membership.LearnerLost) as told:
      _raise(tf.errors.DeadlineExceededError, hosts)
    assert str(told.value).startswith(
      'waited 7 s (--connect_timeout_secs) to update together with '
      f'localhost:{port}: one has stopped, or gets no unrolls from its actors'
    )
  gone = f'localhost:{local_cluster.find_free_ports(1)[0]}'
  with pytest.raises(
    membership.LearnerLost,
    match=f'with {gone}: {gone} cannot be reached, Connection refused. Start',
  ):
    _raise(tf.errors.DeadlineExceededError, ('a:1', gone))


def test_other_failures_are_passed_on():
  with pytest.raises(tf.errors.InvalidArgumentError):
    _raise(tf.errors.InvalidArgumentError, ('a:1', 'b:2'))


def _raise(error, hosts):
  cluster = membership.Cluster('learner', 0, hosts, 2)
  failure = error(None, None, 'why')
  explained = learners.explain_failure(failure, cluster, 7)
  assert failure in (explained, explained.__cause__)
  raise explained


def test_the_first_collective_has_a_limit(monkeypatch, capsys):
  cluster = membership.Cluster('learner', 0, ('a:1', 'localhost:1'), 2)
  exits = queue.Queue()
  monkeypatch.setattr(learners.os, '_exit', exits.put)
  monkeypatch.setattr(learners, '_NOTICE_SECS', 0.1)
  with learners.limit_first_collective(cluster, 60):
    pass
  with learners.limit_first_collective(cluster, 0.1):
    assert exits.get(timeout=10) == 1
  assert exits.empty()
  out, err = capsys.readouterr()
  assert out == 'Waiting for localhost:1.\n'
  assert err.startswith(
    'Error: waited 0.1 s (--connect_timeout_secs) to update'
  )


def test_learners_with_other_settings_are_refused():
  def compare(k):
    group = collectives.Group(2, k, clusters[k].learner_device)
    with tf.Graph().as_default(), membership.on_learner(clusters[k]):
      fingerprints = learners.make_fingerprints(
        group, {'batch_size': 4 + k, 'levels': ['a'], 'agent': f'torso{k}'}
      )
      with tf1.Session(
        servers[k].target, config=membership.session_config(clusters[k])
      ) as session:
        return session.run(fingerprints)

  clusters, servers = collectives_test.start_two()
  with concurrent.futures.ThreadPoolExecutor() as pool:
    for fingerprints in pool.map(compare, range(2)):
      with pytest.raises(
        ValueError, match='differ in batch_size, agent: start'
      ):
        learners.check_fingerprints(fingerprints)
  learners.check_fingerprints({'batch_size': [4, 4]})


def test_updates_have_a_limit(monkeypatch, capsys):
  cluster = membership.Cluster('learner', 0, ('a:1', 'localhost:1'), 2)
  exits, closed = queue.Queue(), queue.Queue()
  monkeypatch.setattr(learners.os, '_exit', exits.put)
  monkeypatch.setattr(learners, '_NOTICE_SECS', 0.1)

  def limit():
    return learners.limit_updates(cluster, 0.1, lambda: closed.put(True))

  with pytest.raises(tf.errors.DeadlineExceededError), limit() as note_update:
    with pytest.raises(queue.Empty):  # Before the first, actors may be late.
      closed.get(timeout=1.5)
    note_update()
    assert closed.get(timeout=10)
    # What a dequeue ends with.
    raise tf.errors.OutOfRangeError(None, None, 'closed')
  with limit() as note_update:
    note_update()
    # Where closing the queue does not help.
    assert exits.get(timeout=10) == 1
  assert 'to update together with localhost:1' in capsys.readouterr().err
  with pytest.raises(tf.errors.OutOfRangeError), limit():
    raise tf.errors.OutOfRangeError(None, None, 'closed')
