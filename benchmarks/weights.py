"""Measures the cost of actors fetching the learner's weights.

  python -m benchmarks.weights --json=FILE.json

A learner that does not train and 1 or 4 actors that do not play are wired as in
training on several machines. The actors fetch weights as fast as they can. See
benchmarks/README.md.
"""

import contextlib
import multiprocessing
from multiprocessing import connection
import time

from absl import app
from absl import flags
import numpy as np

from cluster import registry
import experiment  # noqa: F401 (sets what TensorFlow reads at its import)

# isort: split
import tensorflow as tf

import actor
from benchmarks import report
from cluster import learner_client
from cluster import membership
import environments
import local_cluster
import networks
import unrolls

tf1 = tf.compat.v1

FLAGS = flags.FLAGS

flags.DEFINE_integer('fetches', 200, 'Fetches per actor and measurement.')

_NUM_ACTORS = (1, 4)
_SETTINGS = {'num_actors': max(_NUM_ACTORS)}
_SPEC = environments.EnvironmentSpec(
  frame_shape=(84, 84),
  frame_dtype=np.dtype(np.uint8),
  num_actions=6,
  frames_per_step=4,
  stack=4,
  action_meanings=None,
)


def make_agent() -> networks.Agent:
  """Makes the shallow agent with its weights, 0.68M floats."""
  agent = networks.Agent(_SPEC, 'shallow', use_lstm=False, name='agent')
  actor.Policy(agent, _SPEC)
  return agent


def serve(cluster: membership.Cluster) -> tf1.Session:
  """Starts the learner; returns the session that holds its weights."""
  server = membership.start_server(cluster)
  with tf.Graph().as_default(), membership.on_learner(cluster):
    make_agent()
    tf1.get_variable('num_updates', initializer=np.int64(0), use_resource=True)
    with tf1.device(cluster.learner_device):
      actors_registry = registry.ActorRegistry(cluster.num_actors)
    session = tf1.Session(server.target)
    session.run(tf1.global_variables_initializer())
    actors_registry.open(session, _SETTINGS)
  return session


def fetch(cluster: membership.Cluster, orders: connection.Connection) -> None:
  """Runs an actor's process, which fetches weights on request.

  Args:
    cluster: says which actor this is.
    orders: first sends None, once the actor is ready. Then it receives numbers
      of fetches, 0 to end, and sends the CPU seconds per fetch for each.
  """
  with tf.Graph().as_default():
    agent = make_agent()
    client = learner_client.LearnerClient(
      cluster,
      unrolls.unroll_specs(agent, _SPEC, unroll_length=20),
      queue_capacity=1,
      weights=agent.variables,
      settings=_SETTINGS,
      timeout_secs=60.0,
      should_stop=lambda: False,
    )
  client.poll()
  client.read_weights()
  orders.send(None)
  while count := orders.recv():
    start = time.process_time()
    for _ in range(count):
      client.read_weights()
    orders.send((time.process_time() - start) / count)


def measure(
  actors: list[connection.Connection], num_bytes: int
) -> dict[str, float]:
  """Measures with these actors; returns figures by name."""
  start, cpu_start = time.perf_counter(), time.process_time()
  for orders in actors:
    orders.send(FLAGS.fetches)
  actor_secs = np.mean([orders.recv() for orders in actors])
  fetches = FLAGS.fetches * len(actors)
  cpu_secs = (time.process_time() - cpu_start) / fetches
  secs = (time.perf_counter() - start) / fetches
  who = f'{len(actors)} actors' if len(actors) > 1 else '1 actor'
  return {
    f'{who}: weights (MB/s)': num_bytes / secs / 1e6,
    f'{who}: learner (CPU-ms a fetch)': cpu_secs * 1e3,
    f'{who}: actor (CPU-ms a fetch)': float(actor_secs) * 1e3,
  }


def main(argv):
  """Measures, then prints and writes the results."""
  if len(argv) > 1:
    raise app.UsageError(f'unknown argument: {argv[1]!r}')
  hosts = (f'localhost:{local_cluster.find_free_ports(1)[0]}',)
  num_actors = max(_NUM_ACTORS)
  with tf.Graph().as_default():
    weights = make_agent().variables
  num_bytes = sum(w.shape.num_elements() * w.dtype.size for w in weights)
  spawn = multiprocessing.get_context('spawn')
  with contextlib.ExitStack() as stack:
    stack.enter_context(
      serve(membership.Cluster('learner', 0, hosts, num_actors))
    )
    actors = []
    for task in range(num_actors):
      ours, theirs = spawn.Pipe()
      actors.append(ours)
      cluster = membership.Cluster('actor', task, hosts, num_actors)
      spawn.Process(target=fetch, args=[cluster, theirs], daemon=True).start()
    for orders in actors:
      orders.recv()

    def measure_round():
      figures = {}
      for n in _NUM_ACTORS:
        figures |= measure(actors[:n], num_bytes)
      return figures

    rounds = report.repeat(measure_round)
    for orders in actors:
      orders.send(0)
  report.finish(rounds, {'bytes_of_weights': num_bytes})


if __name__ == '__main__':
  app.run(main)
