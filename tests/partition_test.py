"""Tests of a cluster whose network breaks, in network namespaces."""

import os
import shutil
import subprocess
import time
import uuid

import pytest

from tests import cluster as cluster_lib
from tests import program

pytestmark = pytest.mark.slow


class Network:
  """Hosts 10.77.0.1, 10.77.0.2, ..., each a namespace, joined by a bridge.

  The bridge has a namespace of its own. A port that is taken from it loses
  all packets, and nobody is told.
  """

  def __init__(self):
    self._name = f'impala-{uuid.uuid4().hex[:8]}'
    self._namespaces = []

  def make(self, num_hosts):
    """Makes all that there is."""
    self._add_namespace('bridge')
    self._change('link', 'add', 'bridge', 'type', 'bridge')
    self._change('link', 'set', 'bridge', 'up')
    for host in range(num_hosts):
      self._add_host(host)

  def _add_namespace(self, name):
    _ip('netns', 'add', f'{self._name}-{name}')
    self._namespaces.append(f'{self._name}-{name}')
    _ip('-n', self._namespaces[-1], 'link', 'set', 'lo', 'up')

  def _add_host(self, host):
    self._add_namespace(host)
    name = self._namespaces[-1]
    self._change(
      *('link', 'add', f'port{host}', 'type', 'veth'),
      *('peer', 'name', 'eth0', 'netns', name),
    )
    self._change('link', 'set', f'port{host}', 'up')
    _ip('-n', name, 'addr', 'add', f'{address(host)}/24', 'dev', 'eth0')
    _ip('-n', name, 'link', 'set', 'eth0', 'up')
    self.heal(host)

  def _change(self, *arguments):
    _ip('-n', f'{self._name}-bridge', *arguments)

  def inside(self, host):
    """Returns what starts the program on a host."""
    name = f'{self._name}-{host}'
    return ('ip', 'netns', 'exec', name, *program.COMMAND)

  def cut(self, host):
    """Cuts a host off."""
    self._change('link', 'set', f'port{host}', 'nomaster')

  def heal(self, host):
    """Joins a host to the others."""
    self._change('link', 'set', f'port{host}', 'master', 'bridge')

  def remove(self):
    """Removes all hosts."""
    for name in self._namespaces:
      _ip('netns', 'del', name)


def address(host):
  """Returns a host's address."""
  return f'10.77.0.{host + 1}'


def _ip(*arguments):
  subprocess.run(['ip', *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def network():
  if os.geteuid() or not shutil.which('ip'):
    pytest.skip('network namespaces need root, and iproute2')
  network = Network()
  try:
    network.make(num_hosts=3)
    yield network
  except subprocess.CalledProcessError as error:
    pytest.skip(f'no network namespaces here: {error.stderr.strip()}')
  finally:
    network.remove()


@pytest.fixture
def cluster(tmp_path, network):
  """A cluster whose learner is on host 0; see `_start`."""
  with cluster_lib.Cluster(tmp_path, _learner_hosts(1)) as cluster:
    yield cluster


def _learner_hosts(count):
  return [f'{address(host)}:2222' for host in range(count)]


def _start(cluster, network, **settings):
  """Starts a learner on host 0, actor 0 on host 1 and actor 1 on host 2."""
  started = [
    cluster.start(job, task, command=network.inside(host), **settings)
    for host, job, task in (
      (0, 'learner', 0), (1, 'actor', 0), (2, 'actor', 1),
    )
  ]  # fmt: skip
  for task in (0, 1):
    cluster.wait_for_actor(started[0], task)
  return started


@pytest.mark.parametrize('seconds', [8, 30])
def test_an_actor_cut_off_for_a_while_goes_on(cluster, network, seconds):
  """Less than a call to the learner may take, or more."""
  learner, actor, _ = _start(cluster, network)
  network.cut(1)
  end = time.monotonic() + seconds
  while time.monotonic() < end:
    cluster.wait_for_training(learner)
  network.heal(1)
  with cluster_lib.within(2 * seconds + 10, 'until it is trained on again'):
    cluster.wait_for_actor(learner, 0)
  for process in (learner, actor):
    assert process.error_lines() == []


def test_an_actor_cut_off_for_good_ends_and_may_be_replaced(cluster, network):
  learner, actor, other = _start(cluster, network, connect_timeout_secs=20)
  network.cut(1)
  with cluster_lib.within(45, 'until the actor has ended'):
    cluster_lib.assert_fails(
      actor, f'no learner at {cluster.hosts[0]} for 20 s', 60
    )
  cluster.wait_for_training(learner)
  network.heal(1)
  again = cluster.start('actor', 0, command=network.inside(1))
  with cluster_lib.within(60, 'until another plays, start included'):
    cluster_lib.wait_to_play(again)
  cluster.wait_for_actor(learner, 0)
  assert 'Waiting' not in other.out.rpartition('Playing')[2]


def test_learners_cut_off_from_each_other_end(tmp_path, network):
  with cluster_lib.Cluster(tmp_path, _learner_hosts(2)) as cluster:
    learners = [
      cluster.start(
        *('learner', task), command=network.inside(task),
        connect_timeout_secs=20,
      )
      for task in (0, 1)
    ]  # fmt: skip
    for task in (0, 1):
      cluster.start('actor', task, command=network.inside(2))
    cluster.wait_for_training(learners[0])
    network.cut(1)
    with cluster_lib.within(45, 'until both learners have ended'):
      for task, learner in enumerate(learners):
        cluster_lib.assert_fails(
          learner,
          f'waited 20 s .* with {cluster.hosts[1 - task]}: .*Start all',
          60,
        )
    assert list(cluster.logdir.glob('checkpoints/*.index'))
