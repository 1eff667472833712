"""Tests of learner_client.py, against a learner's server in this process."""

import resource
import threading
import time

import numpy as np
import pytest
import tensorflow as tf

from cluster import learner_client
from cluster import membership
from cluster import registry
import environments
import local_cluster
import networks
import unrolls

tf1 = tf.compat.v1

_SETTINGS = {'num_actors': 2, 'levels': ['a', 'b'], 'unroll_length': 3}
_CAPACITY = 4


def _make_agent():
  spec = environments.EnvironmentSpec(
    (2,), np.dtype(np.float32), num_actions=3, frames_per_step=1, stack=1,
    action_meanings=None,
  )  # fmt: skip
  agent = networks.Agent(spec, 'vector', False, name='agent')
  specs = unrolls.unroll_specs(agent, spec, _SETTINGS['unroll_length'])
  agent.step(
    tf.zeros([1], tf.int32),
    environments.StepOutput(
      tf.zeros([1]), (), tf.zeros([1], bool),
      environments.Observation(tf.zeros([1, 2]), ()),
    ),
    agent.initial_state(1),
  )  # fmt: skip
  return agent, specs


class FakeLearner:
  """A server, and all that actors look for on it."""

  def __init__(self):
    self.cluster = membership.Cluster(
      'learner', 0, (f'localhost:{local_cluster.find_free_ports(1)[0]}',), 2
    )
    self._server = membership.start_server(self.cluster)
    with tf.Graph().as_default(), membership.on_learner(self.cluster):
      agent, specs = _make_agent()
      self.weights = agent.variables
      self.num_updates = tf1.get_variable(
        'num_updates', initializer=np.int64(7), use_resource=True
      )
      self.registry = registry.ActorRegistry(2)
      queue = unrolls.make_queue(specs, _CAPACITY)
      self._size = queue.size()
      self._dequeue = queue.dequeue_many(1)
      self._init = tf1.global_variables_initializer()
      self.session = tf1.Session(self._server.target)

  def start(self, **settings):
    self.session.run(self._init)
    self.registry.open(self.session, _SETTINGS | settings)

  def die(self):
    """Forgets all that it held, as a new process would."""
    graph = self.session.graph
    tf1.Session.reset(self._server.target)
    self.session = tf1.Session(self._server.target, graph)

  def size(self):
    return self.session.run(self._size)

  def dequeue(self):
    return self.session.run(self._dequeue)

  def num_playing(self):
    return self.session.run(self.registry.num_playing)


@pytest.fixture(scope='module')
def server():
  return FakeLearner()


@pytest.fixture
def learner(server):
  """A learner that has just begun."""
  server.die()
  server.start()
  return server


class Client:
  """A connection with all that it is made from."""

  def __init__(self, cluster, task=0, timeout_secs=30.0, settings=_SETTINGS):
    self.stopping = threading.Event()
    self.cluster = membership.Cluster('actor', task, cluster.learner_hosts, 9)
    with tf.Graph().as_default():
      agent, specs = _make_agent()
      self.unrolls = [
        np.ones([2, *s.shape], s.dtype.as_numpy_dtype)
        for s in tf.nest.flatten(specs)
      ]
      self.connection = learner_client.LearnerClient(
        self.cluster, specs, _CAPACITY, agent.variables, settings,
        timeout_secs, self.stopping.is_set,
      )  # fmt: skip


def _until(condition, timeout_secs=30.0):
  end = time.monotonic() + timeout_secs
  while not condition():
    assert time.monotonic() < end
    time.sleep(0.05)


def test_weights_come_and_unrolls_go(learner):
  client = Client(learner.cluster)
  assert not client.connection.poll()
  num_updates, weights = client.connection.read_weights()
  assert num_updates == 7
  for mine, theirs in zip(
    weights, learner.session.run(learner.weights), strict=True
  ):
    np.testing.assert_array_equal(mine, theirs)
  client.connection.enqueue(*client.unrolls)
  assert learner.size() == 2
  for sent, arrived in zip(client.unrolls, learner.dequeue(), strict=True):
    np.testing.assert_array_equal(sent[:1], arrived)
  client.connection.leave()


def test_learns_of_the_end(learner):
  client = Client(learner.cluster)
  assert not client.connection.poll()
  assert learner.num_playing() == 1
  learner.registry.end(learner.session)
  assert client.connection.poll()
  client.connection.leave()
  assert learner.num_playing() == 0
  start = time.monotonic()
  learner.registry.linger(learner.session)
  assert time.monotonic() - start < 5


def test_other_settings_are_refused_with_both_values(learner):
  client = Client(
    learner.cluster, settings=_SETTINGS | {'unroll_length': 5, 'stack': 4}
  )
  with pytest.raises(ValueError) as error:
    client.connection.poll()
  text = str(error.value)
  assert 'unroll_length is 5 here and 3 there' in text
  assert 'stack is 4 here and None there' in text
  assert 'levels' not in text
  assert '\n' not in text


def test_a_task_beyond_the_learners_count_is_refused(learner):
  client = Client(learner.cluster, task=7)
  with pytest.raises(ValueError, match=r'task 7 is outside 0\.\.1: .*num_act'):
    client.connection.poll()


def test_one_slot_is_for_one_process(learner, monkeypatch):
  first, second = Client(learner.cluster), Client(learner.cluster)
  other = Client(learner.cluster, task=1)
  for client in (first, other, second):
    assert not client.connection.poll()
  assert learner.num_playing() == 2
  monkeypatch.setattr(learner_client, '_SLOT_SECS', 0.1)
  time.sleep(0.2)
  with pytest.raises(ValueError, match='another process plays as actor 0'):
    second.connection.poll()
  # Nor has it sent anything.
  second.stopping.set()
  with pytest.raises(learner_client.Stopped):
    second.connection.enqueue(*second.unrolls)
  assert not first.connection.poll()


def test_the_slot_of_one_that_has_left_is_free(learner):
  first, second = Client(learner.cluster), Client(learner.cluster)
  first.connection.poll()
  first.connection.leave()
  second.connection.poll()
  assert second.connection.read_weights()[0] == 7


def test_the_slot_of_one_without_heartbeat_is_free(server, monkeypatch):
  # Only the learner's monotonic clock counts: the other one may be set back.
  now = 1000.0
  monkeypatch.setattr(registry.time, 'monotonic', lambda: now)
  server.die()
  server.start()
  first, second = Client(server.cluster), Client(server.cluster)
  first.connection.poll()
  now += registry.HEARTBEAT_TIMEOUT_SECS - 1
  server.registry.tick(server.session)
  second.connection.poll()
  assert server.num_playing() == 1
  second.stopping.set()
  with pytest.raises(learner_client.Stopped):
    second.connection.read_weights()
  second.stopping.clear()
  now += 2
  server.registry.tick(server.session)
  assert server.num_playing() == 0
  second.connection.poll()
  assert second.connection.read_weights()[0] == 7
  # It was only stopped for a while. It does not play beside the other.
  first.connection.poll()
  first.stopping.set()
  with pytest.raises(learner_client.Stopped):
    first.connection.read_weights()


def test_waits_for_a_learner_and_goes_on_after_its_restart(server, capsys):
  server.die()  # It is up, but has not begun.
  client = Client(server.cluster)
  results = []

  def read():
    results.append(client.connection.read_weights()[0])

  for _ in range(2):
    results.clear()
    thread = threading.Thread(target=read)
    thread.start()
    assert not client.connection.poll()
    assert not results
    server.start()
    _until(lambda: not client.connection.poll() and results)
    assert results == [7]
    server.die()
  out = capsys.readouterr().out
  address = server.cluster.learner_host
  assert f'Waiting for the learner at {address}: ' in out
  assert out.count(f'Playing for the learner at {address}.') == 2


def test_leaving_ends_a_wait_for_room(learner):
  client = Client(learner.cluster)
  client.connection.poll()
  client.connection.enqueue(*client.unrolls)
  client.connection.enqueue(*client.unrolls)
  errors = []

  def send():
    try:
      client.connection.enqueue(*client.unrolls)
    except learner_client.Stopped as error:
      errors.append(error)

  thread = threading.Thread(target=send)
  thread.start()
  time.sleep(0.3)
  assert thread.is_alive()
  client.stopping.set()
  client.connection.leave()
  thread.join(10)
  assert len(errors) == 1


def test_without_a_learner_it_gives_up_at_the_limit(capsys):
  cluster = membership.Cluster(
    'learner', 0, (f'localhost:{local_cluster.find_free_ports(1)[0]}',), 2
  )
  client = Client(cluster, timeout_secs=0.5)
  assert not client.connection.poll()
  assert 'Connection refused' in capsys.readouterr().out
  time.sleep(0.5)
  with pytest.raises(membership.LearnerLost) as error:
    client.connection.poll()
  assert str(error.value) == (
    f'no learner at {cluster.learner_host} for 0.5 s (--connect_timeout_secs):'
    ' Connection refused'
  )


def test_memory_of_messages_is_kept():
  def count_faults():
    start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
      message = [np.ones([3_000_000], np.uint8) for _ in range(4)]
      del message
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - start

  learner_client.keep_memory()
  count_faults()
  # Each message has 3000 pages.
  assert count_faults() < 3000
