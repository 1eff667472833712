"""Measures the cost of moving unrolls from an actor to its learner.

  python -m benchmarks.transport --json=FILE.json

There are two processes, wired as in training on several machines, but the actor
does not play and the learner does not train. In turn with this, in rounds, a
plain TCP connection between the same processes moves as many bytes, in messages
of the same size. See benchmarks/README.md.
"""

from collections.abc import Callable
import contextlib
import math
import multiprocessing
from multiprocessing import connection
import socket
import time
from typing import NamedTuple

from absl import app
from absl import flags
import numpy as np

from cluster import registry
import experiment  # noqa: F401 (sets what TensorFlow reads at its import)

# isort: split
import tensorflow as tf

from benchmarks import report
from cluster import learner_client
from cluster import membership
import environments
import local_cluster
import networks
import unrolls

tf1 = tf.compat.v1

FLAGS = flags.FLAGS

flags.DEFINE_float('megabytes', 1500.0, 'Megabytes that a measurement moves.')

_BATCH_SIZE = 32
_SETTINGS = {'num_actors': 1}


class Case(NamedTuple):
  """A kind of unroll to move.

  Attributes:
    name: its name in the results.
    spec: the environments' spec.
    unroll_length: T.
    at_once: the number of unrolls that an actor enqueues together.
  """

  name: str
  spec: environments.EnvironmentSpec
  unroll_length: int
  at_once: int

  def specs(self) -> unrolls.ActorOutput:
    """Returns `unrolls.unroll_specs` for an agent with an LSTM."""
    agent = networks.Agent(self.spec, 'deep', use_lstm=True)
    return unrolls.unroll_specs(agent, self.spec, self.unroll_length)


_ATARI = environments.EnvironmentSpec(
  frame_shape=(84, 84),
  frame_dtype=np.dtype(np.uint8),
  num_actions=18,
  frames_per_step=4,
  stack=4,
  action_meanings=None,
)
_LAB = environments.EnvironmentSpec(
  frame_shape=(72, 96, 3),
  frame_dtype=np.dtype(np.uint8),
  num_actions=9,
  frames_per_step=4,
  stack=1,
  action_meanings=None,
  has_instruction=True,
)
# Games step together, so their unrolls fill together; Lab levels step
# independently.
_CASES = (
  Case('Atari', _ATARI, unroll_length=20, at_once=8),
  Case('Lab', _LAB, unroll_length=100, at_once=1),
)


def count_bytes(specs: unrolls.ActorOutput) -> int:
  """Returns the size of one unroll in bytes."""
  return sum(
    spec.shape.num_elements() * spec.dtype.size
    for spec in tf.nest.flatten(specs)
  )


class LearnerSide:
  """The learner's queue and staging area, without training."""

  def __init__(self, cluster: membership.Cluster, specs: unrolls.ActorOutput):
    """Starts the server, and lets actors join."""
    self._server = membership.start_server(cluster)
    with tf.Graph().as_default(), membership.on_learner(cluster):
      queue = unrolls.make_queue(specs, _BATCH_SIZE)
      batch, stage, stage_next = unrolls.stage(queue, specs, _BATCH_SIZE)
      first = batch.level_index
      with tf1.device(cluster.learner_device):
        actors_registry = registry.ActorRegistry(cluster.num_actors)
      session = tf1.Session(self._server.target)
      actors_registry.open(session, _SETTINGS)
      self._stage = session.make_callable(stage)
      self._unstage = session.make_callable(first)
      self._step = session.make_callable(
        (first, stage_next), accept_options=True
      )

  def receive(self, num_batches: int) -> None:
    """Receives `num_batches` batches."""
    # As in `learner.Learner.run`.
    options = tf1.RunOptions(inter_op_thread_pool=-1)
    self._stage()
    for _ in range(num_batches - 1):
      self._step(options=options)
    self._unstage()


def serve(
  case: Case, port: int, tcp_port: int, orders: connection.Connection
) -> None:
  """Runs the learner's process.

  Args:
    case: the kind of unroll to receive.
    port: the learner's port.
    tcp_port: the port on which the actor listens for a plain connection.
    orders: first sends 0, once everything is ready. Then, until it is closed,
      it receives orders ('unrolls' or 'bytes', and the number of batches), and
      sends the CPU seconds that each order took.
  """
  specs = case.specs()
  side = LearnerSide(_cluster('learner', port), specs)
  stream = socket.create_connection(('localhost', tcp_port))
  batch = memoryview(bytearray(_BATCH_SIZE * count_bytes(specs)))

  def receive_bytes(num_batches):
    for _ in range(num_batches):
      received = 0
      while received < len(batch):
        received += stream.recv_into(batch[received:])

  receive = {'unrolls': side.receive, 'bytes': receive_bytes}
  orders.send(0.0)
  with contextlib.suppress(EOFError):
    while True:
      what, num_batches = orders.recv()
      start = time.process_time()
      receive[what](num_batches)
      orders.send(time.process_time() - start)


def _cluster(job_name, port):
  return membership.Cluster(job_name, 0, (f'localhost:{port}',), 1)


class Cost(NamedTuple):
  """The cost of moving some batches: wall-clock seconds and CPU seconds."""

  secs: float
  actor_cpu_secs: float
  learner_cpu_secs: float


class ActorSide:
  """An actor with full unrolls, and a learner in another process."""

  def __init__(self, case: Case):
    """Starts the learner and connects."""
    specs = case.specs()
    self.unroll_bytes = count_bytes(specs)
    self._at_once = case.at_once
    # One unroll per environment, on the first axis as in `actor.Actor`; enough
    # environments for a batch.
    self._unrolls = [
      np.ones([_BATCH_SIZE, *spec.shape], spec.dtype.as_numpy_dtype)
      for spec in tf.nest.flatten(specs)
    ]
    self._bytes = np.ones([_BATCH_SIZE, self.unroll_bytes], np.uint8)
    (port,) = local_cluster.find_free_ports(1)
    with socket.create_server(('localhost', 0)) as server:
      spawn = multiprocessing.get_context('spawn')
      self._orders, theirs = spawn.Pipe()
      self._process = spawn.Process(
        target=serve,
        args=(case, port, server.getsockname()[1], theirs),
        daemon=True,
      )
      self._process.start()
      theirs.close()
      self._orders.recv()
      self._stream, _ = server.accept()
    self._client = learner_client.LearnerClient(
      _cluster('actor', port),
      specs,
      _BATCH_SIZE,
      weights=[],
      settings=_SETTINGS,
      timeout_secs=60.0,
      should_stop=lambda: not self._process.is_alive(),
    )
    self._client.poll()

  def measure_unrolls(self, num_batches: int) -> Cost:
    """Enqueues batches, as `actor.Actor` does."""

    def send(ids):
      self._client.enqueue(*(array[ids] for array in self._unrolls))

    return self._measure('unrolls', num_batches, send)

  def measure_bytes(self, num_batches: int) -> Cost:
    """Moves as many bytes, in messages of the same size, over plain TCP."""

    def send(ids):
      self._stream.sendall(self._bytes[ids[0] : ids[-1] + 1])

    return self._measure('bytes', num_batches, send)

  def _measure(self, what, num_batches, send: Callable) -> Cost:
    self._orders.send((what, num_batches))
    groups = np.arange(_BATCH_SIZE).reshape([-1, self._at_once])
    start, cpu_start = time.perf_counter(), time.process_time()
    for _ in range(num_batches):
      for ids in groups:
        send(ids)
    learner_cpu_secs = self._orders.recv()
    return Cost(
      time.perf_counter() - start,
      time.process_time() - cpu_start,
      learner_cpu_secs,
    )

  def close(self) -> None:
    """Ends the learner."""
    self._client.leave()
    self._stream.close()
    self._orders.close()
    self._process.join()


def measure(case: Case, side: ActorSide, megabytes: float) -> dict[str, float]:
  """Measures one round; returns figures by name."""
  num_batches = math.ceil(megabytes * 1e6 / (_BATCH_SIZE * side.unroll_bytes))
  num_unrolls = num_batches * _BATCH_SIZE
  megabytes = num_unrolls * side.unroll_bytes / 1e6
  frames = num_unrolls * case.unroll_length * case.spec.frames_per_step
  unrolls = side.measure_unrolls(num_batches)
  tcp = side.measure_bytes(num_batches)
  figures = {
    'unrolls (MB/s)': megabytes / unrolls.secs,
    'unrolls (frames/s)': frames / unrolls.secs,
    'unrolls, actor (CPU-ms each)': 1e3 * unrolls.actor_cpu_secs / num_unrolls,
    'unrolls, learner (CPU-ms each)': (
      1e3 * unrolls.learner_cpu_secs / num_unrolls
    ),
    'plain TCP (MB/s)': megabytes / tcp.secs,
    'plain TCP, actor (CPU-ms each)': 1e3 * tcp.actor_cpu_secs / num_unrolls,
    'plain TCP, learner (CPU-ms each)': (
      1e3 * tcp.learner_cpu_secs / num_unrolls
    ),
    'unrolls / plain TCP': tcp.secs / unrolls.secs,
  }
  return {f'{case.name}: {name}': value for name, value in figures.items()}


def main(argv):
  """Measures, then prints and writes the results."""
  if len(argv) > 1:
    raise app.UsageError(f'unknown argument: {argv[1]!r}')
  learner_client.keep_memory()  # As actors do.
  with contextlib.ExitStack() as stack:
    sides = [
      stack.enter_context(contextlib.closing(ActorSide(case)))
      for case in _CASES
    ]

    def measure_round():
      figures = {}
      for case, side in zip(_CASES, sides, strict=True):
        figures |= measure(case, side, FLAGS.megabytes)
      return figures

    measure_round()  # A warm-up.
    rounds = report.repeat(measure_round)
  report.finish(
    rounds,
    {
      'unroll_bytes': {
        case.name: side.unroll_bytes
        for case, side in zip(_CASES, sides, strict=True)
      },
      'unrolls_at_once': {case.name: case.at_once for case in _CASES},
    },
  )


if __name__ == '__main__':
  app.run(main)
