"""Tests of collectives.py: several learners are one with a larger batch."""

import concurrent.futures

import numpy as np
import pytest
import tensorflow as tf

from cluster import collectives
from cluster import membership
import config
import environments
import local_cluster
import training
import unrolls as unrolls_lib

tf1 = tf.compat.v1

_SPEC = environments.EnvironmentSpec(
  (3,), np.dtype(np.float32), num_actions=4, frames_per_step=3, stack=1,
  action_meanings=None,
)  # fmt: skip
_T = 5
_UPDATES = 20


def _config(batch_size, queue_capacity, popart):
  return config.make(
    # As many levels as there are actions.
    level_name='gym:a,gym:b,gym:c,gym:d',
    agent='vector',
    popart=popart,
    queue_capacity=queue_capacity,
    batch_size=batch_size,
    unroll_length=_T,
    discounting=0.99,
    baseline_cost=0.5,
    entropy_cost=0.01,
    reward_clipping='abs_one',
    learning_rate=0.001,
    decay=0.99,
    momentum=0.0,
    epsilon=0.01,
    max_gradient_norm=1.0,  # Is over it: the norm is that of the sum.
    total_environment_frames=10**9,
  )


class Run:
  """A learner with as many unrolls as it needs in its queue."""

  def __init__(
    self,
    batch_size,
    make_unroll,
    popart_levels,
    seed=1,
    cluster=None,
    target='',
  ):
    cluster = cluster or membership.Cluster('learner', 0, ('localhost:1',), 1)
    group = collectives.Group(
      len(cluster.learner_hosts), cluster.task, cluster.learner_device
    )
    size = batch_size * (_UPDATES + 1)
    with tf.Graph().as_default():
      tf1.set_random_seed(seed)
      with tf1.device(f'/job:learner/task:{cluster.task}' if target else ''):
        self.learner, queue, self._specs = training.build_learner(
          _config(batch_size, size, popart_levels is not None), _SPEC, group
        )
        enqueue, feeds = unrolls_lib.make_enqueue(queue, self._specs)
        init = tf1.global_variables_initializer()
        self._frames = self.learner.num_environment_frames.read_value()
      self.session = tf1.Session(
        target, config=membership.session_config(cluster)
      )
      # Alone: learners begin at different times.
      self.session.run(init)
      unrolls = [make_unroll(self._specs, i) for i in range(size)]
      self.session.run(
        enqueue,
        {
          feed: np.stack(arrays)
          for feed, *arrays in zip(
            feeds, *map(tf.nest.flatten, unrolls), strict=True
          )
        },
      )
      self.session.graph.finalize()

  def update(self):
    results = []
    self.session.run(self.learner.broadcast_weights)
    self.learner.run(
      self.session, results.append, lambda: len(results) == _UPDATES
    )
    return results

  def values(self):
    return self.session.run(list(self.learner.variables))


def _unroll(specs, seed):
  generator = np.random.default_rng(seed)

  def fill(s):
    dtype = s.dtype.as_numpy_dtype
    if dtype == np.bool_:
      return generator.random(s.shape) < 0.2
    if dtype in (np.int32, np.int64):
      return generator.integers(0, _SPEC.num_actions, s.shape).astype(dtype)
    return generator.normal(size=s.shape).astype(dtype)

  return tf.nest.map_structure(fill, specs)._replace(policy_version=np.int64(0))


def start_two():
  hosts = tuple(
    f'localhost:{port}' for port in local_cluster.find_free_ports(2)
  )
  clusters = [membership.Cluster('learner', k, hosts, 2) for k in range(2)]
  return clusters, [membership.start_server(cluster) for cluster in clusters]


@pytest.mark.parametrize('popart_levels', [None, _SPEC.num_actions])
def test_two_learners_are_one_with_twice_the_batch(popart_levels):
  clusters, servers = start_two()

  def train(k):
    # Learner k's share of each batch of 6 is 3; its first weights are others.
    run = Run(
      3,
      lambda specs, i: _unroll(specs, i // 3 * 6 + k * 3 + i % 3),
      popart_levels,
      seed=1 + k,
      cluster=clusters[k],
      target=servers[k].target,
    )
    return run, run.update()

  with concurrent.futures.ThreadPoolExecutor() as pool:
    (first, results), (second, _) = pool.map(train, range(2))
  alone = Run(6, _unroll, popart_levels)
  expected = alone.update()

  for one, other in zip(first.values(), second.values(), strict=True):
    np.testing.assert_array_equal(one, other)
  for one, other in zip(first.values(), alone.values(), strict=True):
    np.testing.assert_allclose(one, other, atol=1e-5)
  for result, other in zip(results, expected, strict=True):
    assert result.num_environment_frames == other.num_environment_frames
    np.testing.assert_array_equal(result.level_index, other.level_index)
    for one, same in zip(result.info, other.info, strict=True):
      np.testing.assert_array_equal(one, same)
  norms = [r.scalars['gradient_norm'] for r in results]
  assert min(norms) > 1.0
  np.testing.assert_allclose(
    norms, [r.scalars['gradient_norm'] for r in expected], rtol=1e-3
  )


def test_for_one_learner_collectives_do_nothing():
  with tf.Graph().as_default() as graph:
    tensors = [tf.constant([1.0]), tf.constant(2.0)]
    assert collectives.Group().all_reduce(tensors) == tensors
    assert collectives.Group().all_gather(tensors) == tensors
    assert collectives.Group().broadcast([]).type == 'NoOp'
    assert len(graph.get_operations()) == 3


def test_a_learner_waits_no_longer_than_told_and_can_save():
  (cluster, _), (server, _) = start_two()
  group = collectives.Group(2, 0, cluster.learner_device, timeout_secs=1.0)
  with tf.Graph().as_default(), membership.on_learner(cluster):
    weight = tf.Variable([3.0])
    sums = group.all_reduce([weight.read_value()])
    parts = group.all_gather([weight.read_value()])
    init = tf1.global_variables_initializer()
    with tf1.Session(
      server.target, config=membership.session_config(cluster)
    ) as run:
      run.run(init)
      for exchange in (sums, parts):
        with pytest.raises(tf.errors.DeadlineExceededError):
          run.run(exchange)
        assert run.run(weight) == 3.0


def test_bits_survive_the_exchange():
  values = np.array([np.nan, 1e-40, -0.0, 3.3, np.inf], np.float32)
  shares = [np.stack([values, values * np.float32(k)]) for k in (3, 5)]
  clusters, servers = start_two()

  def exchange(k):
    group = collectives.Group(2, k, clusters[k].learner_device)
    with tf.Graph().as_default(), membership.on_learner(clusters[k]):
      tensors = [
        tf.constant(shares[k]),
        tf.constant([[k], [2**31 - 1]]),
        tf.constant([bool(k)]),
      ]
      result = group.all_gather(tensors)
      with tf1.Session(
        servers[k].target, config=membership.session_config(clusters[k])
      ) as session:
        return session.run(result)

  with concurrent.futures.ThreadPoolExecutor() as pool:
    results = list(pool.map(exchange, range(2)))
  for floats, integers, booleans in results:
    assert floats.tobytes() == np.concatenate(shares, axis=1).tobytes()
    np.testing.assert_array_equal(integers, [[0, 1], [2**31 - 1] * 2])
    assert booleans.tolist() == [False, True]
