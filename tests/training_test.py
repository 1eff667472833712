"""Tests of training.py: what is said when learners lose each other."""

import socket

import pytest
import tensorflow as tf

import distributed
from tests import link_test
import training


@pytest.mark.parametrize(
  'error',
  [
    tf.errors.AbortedError,
    tf.errors.FailedPreconditionError,
    tf.errors.UnavailableError,
  ],
)
def test_a_learner_that_ended_is_told(error):
  with pytest.raises(distributed.LearnerLost) as told:
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
    with pytest.raises(distributed.LearnerLost) as told:
      _raise(tf.errors.DeadlineExceededError, hosts)
    assert str(told.value).startswith(
      'waited 7 s (--connect_timeout_secs) to update together with '
      f'localhost:{port}: one has stopped, or gets no unrolls from its actors'
    )
  gone = f'localhost:{link_test.free_port()}'
  with pytest.raises(
    distributed.LearnerLost,
    match=f'with {gone}: {gone} cannot be reached, Connection refused. Start',
  ):
    _raise(tf.errors.DeadlineExceededError, ('a:1', gone))


def test_other_failures_are_passed_on():
  with pytest.raises(tf.errors.InvalidArgumentError):
    _raise(tf.errors.InvalidArgumentError, ('a:1', 'b:2'))


def _raise(error, hosts):
  cluster = distributed.Cluster('learner', 0, hosts, 2)
  training.raise_failure(error(None, None, 'why'), cluster, 7)
