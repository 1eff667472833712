"""Measures the speed of training against the limits of the machine.

  python -m benchmarks.throughput --json=FILE.json
  python -m benchmarks.throughput --agent=deep --json=FILE.json

It takes all flags of `experiment.py`. The limits are the speed of the games
alone and the speed of TensorFlow's matrix product. It also measures the learner
alone and V-trace alone. All are measured in turn, in rounds, so that other load
on the machine affects all of them alike. See benchmarks/README.md.
"""

from collections.abc import Callable
import contextlib
import dataclasses
import math
import os
import signal
import time

from absl import app
from absl import flags
from ale_py import vector_env
import numpy as np

import experiment  # noqa: F401 (sets what TensorFlow reads at its import)

# isort: split
import tensorflow as tf

from benchmarks import report
from benchmarks import training_process
import config as config_lib
import environments
from envs import make
import learner
import networks
import torsos
import unrolls
import vtrace

tf1 = tf.compat.v1

FLAGS = flags.FLAGS

flags.DEFINE_float(
  'window_secs',
  10.0,
  'Seconds of each measurement; training takes two of them, V-trace a fifth.',
)
flags.DEFINE_integer(
  'min_updates', 3, 'Minimum number of updates per measurement of the learner.'
)
flags.DEFINE_float('warmup_secs', 20.0, 'Seconds of warm-up of the training.')

_DEFAULTS = {
  'agent': 'shallow',
  'use_lstm': True,
  # The paper's batch size, and enough games to fill two batches.
  'batch_size': 32,
  'num_actors': 4,
}
_MATRIX_SIZE = 2048
# That of Pong. The cost of V-trace hardly depends on it.
_NUM_ACTIONS = 6


class GamesAlone:
  """The games without an agent, with random actions, on all cores.

  It uses the emulator's vector environment directly, with the settings of
  training but all games in one group: this is the fastest known way.
  """

  def __init__(self, envs: environments.Environments):
    """Starts as many games as `envs` has, with its settings."""
    self._frames = envs.num_envs * envs.spec.frames_per_step
    self._actions = np.random.default_rng(1).integers(
      envs.spec.num_actions, size=[1000, envs.num_envs], dtype=np.int32
    )
    self._vector = vector_env.AtariVectorEnv(
      envs.level_names[0], envs.num_envs, **envs.settings()
    )
    self._vector.reset(seed=np.array(envs.seeds))
    self._next = 0

  def measure(self, secs: float) -> float:
    """Returns frames/s."""

    def step():
      self._vector.send(self._actions[self._next % len(self._actions)])
      self._vector.recv()
      self._next += 1

    return self._frames / time_call(step, secs)


class _ConstantQueue:
  """A queue that always has the same batch, without being one."""

  def __init__(self, specs: unrolls.ActorOutput, batch_size: int):
    # Variables, since TensorFlow computes the results of constants only once.
    self._batch = [
      tf1.get_local_variable(
        f'batch_{i}',
        initializer=random_array([batch_size, *spec.shape], spec.dtype),
        use_resource=True,
      )
      for i, spec in enumerate(tf.nest.flatten(specs))
    ]

  def dequeue_many(self, _):
    return [variable.read_value() for variable in self._batch]

  def size(self):
    return tf.constant(0)


class LearnerAlone:
  """The learner's own loop on one batch that never changes."""

  def __init__(
    self,
    config: config_lib.Config,
    spec: environments.EnvironmentSpec,
  ):
    """Builds the graph.

    Args:
      config: the config of the run. The learning rate is set to 0: this does
        not change the cost, but keeps the weights finite.
      spec: the environments' spec.
    """
    hyperparameters = config.update
    self._graph = tf.Graph()
    with self._graph.as_default():
      agent = networks.make_agent(config, spec)
      specs = unrolls.unroll_specs(agent, spec, hyperparameters.unroll_length)
      self._learner = learner.Learner(
        agent,
        _ConstantQueue(specs, hyperparameters.batch_size),
        specs,
        spec.frames_per_step,
        dataclasses.replace(
          hyperparameters, learning_rate=0.0, total_environment_frames=10**15
        ),
      )
      self._initialise = tf.group(
        tf1.global_variables_initializer(), tf1.local_variables_initializer()
      )

  def measure(self, secs: float, min_updates: int) -> float:
    """Returns frames/s, measured from the end of the first update."""
    marks = []

    def on_update(result):
      marks.append((time.perf_counter(), int(result.num_environment_frames)))

    def should_stop():
      return len(marks) > min_updates and marks[-1][0] >= marks[0][0] + secs

    # A new session each time: the loop leaves a batch in the staging area.
    with tf1.Session(graph=self._graph) as session:
      session.run(self._initialise)
      self._learner.run(session, on_update, should_stop)
    (start, first), (end, last) = marks[0], marks[-1]
    return (last - first) / (end - start)


class Kernels:
  """V-trace alone, and TensorFlow's matrix product."""

  def __init__(self, unroll_length: int, batch_size: int):
    """Builds the graph."""
    with tf.Graph().as_default():
      matrix, logits, mu_logits, values, bootstrap = (
        tf1.get_variable(name, initializer=random_array(shape, tf.float32))
        for name, shape in (
          ('matrix', [_MATRIX_SIZE, _MATRIX_SIZE]),
          ('logits', [unroll_length, batch_size, _NUM_ACTIONS]),
          ('mu_logits', [unroll_length, batch_size, _NUM_ACTIONS]),
          ('values', [unroll_length, batch_size]),
          ('bootstrap', [batch_size]),
        )
      )
      returns = vtrace.from_logits(
        behaviour_policy_logits=mu_logits,
        target_policy_logits=logits,
        actions=tf.cast(values * _NUM_ACTIONS, tf.int32),
        discounts=0.99 * tf.ones_like(values),
        rewards=values,
        values=values,
        bootstrap_value=bootstrap,
      )
      matmul = tf.matmul(matrix, matrix)
      session = tf1.Session()
      session.run(tf1.global_variables_initializer())
      # Fetches the operation, not its value, which need not be copied.
      self._matmul = session.make_callable(matmul.op)
      self._vtrace = session.make_callable((returns.vs, returns.pg_advantages))

  def measure_matmul(self, secs: float) -> float:
    """Returns GFLOP/s."""
    return 2 * _MATRIX_SIZE**3 / time_call(self._matmul, secs) / 1e9

  def measure_vtrace(self, secs: float) -> float:
    """Returns microseconds, including those of an empty session call."""
    return time_call(self._vtrace, secs) * 1e6


def random_array(shape, dtype: tf.DType) -> np.ndarray:
  """Returns random numbers, in [0, 256) for uint8 and else in [0, 1).

  False for bool: no episode ends, and every step counts.
  """
  if dtype == tf.bool:
    return np.zeros(shape, bool)
  scale = 256 if dtype == tf.uint8 else 1
  numbers = np.random.default_rng(1).random(shape) * scale
  return numbers.astype(dtype.as_numpy_dtype)


def time_call(call: Callable, secs: float) -> float:
  """Returns the seconds per call, the mean over `secs` seconds of calls."""
  call()
  start = now = time.perf_counter()
  calls = 0
  while now < start + secs:
    call()
    calls += 1
    now = time.perf_counter()
  return (now - start) / calls


def count_forward_flops(
  config: config_lib.Config, spec: environments.EnvironmentSpec
) -> int:
  """Counts the floating-point operations of the network for one agent step.

  They are those of convolutions and matrix products, including the LSTM's. Each
  multiply-add counts as two. The count comes from the shapes in the graph.
  """
  with tf.Graph().as_default() as graph:
    agent = networks.make_agent(config, spec)
    env_outputs = environments.StepOutput(
      reward=tf.zeros([1, 1]),
      info=(),
      done=tf.zeros([1, 1], tf.bool),
      observation=environments.Observation(
        tf.zeros([1, 1, *spec.observation_shape]), ()
      ),
    )
    state = tf.nest.map_structure(tf.constant, agent.initial_state(1))
    agent.unroll(tf.zeros([1, 1], tf.int32), env_outputs, state)
    flops = 0
    for op in graph.get_operations():
      # Each output sums over all but the last dimension of the weights.
      if op.type in ('Conv2D', 'Conv3D', 'MatMul'):
        summed = math.prod(op.inputs[1].shape[:-1])
        flops += 2 * op.outputs[0].shape.num_elements() * summed
  return flops


def measure_rounds(
  config: config_lib.Config,
  envs: environments.Environments,
  process: training_process.TrainingProcess,
) -> list[dict[str, float]]:
  """Measures everything in turn.

  Args:
    config: the config of the run.
    envs: gives the settings of the games.
    process: the training, after its warm-up.

  Returns:
    For each round, the figures by name.
  """
  games = GamesAlone(envs)
  learner_alone = LearnerAlone(config, envs.spec)
  kernels = Kernels(config.update.unroll_length, config.update.batch_size)
  secs, min_updates = FLAGS.window_secs, FLAGS.min_updates

  def measure_round():
    # Games that step together fill their unrolls together, so updates come in
    # bursts.
    updates = process.run(2 * secs, min_updates)
    return {
      'training (frames/s)': training_process.frames_per_second(updates),
      'games alone (frames/s)': games.measure(secs),
      'learner alone (frames/s)': learner_alone.measure(secs, min_updates),
      'matrix product (GFLOP/s)': kernels.measure_matmul(secs),
      'V-trace alone (us)': kernels.measure_vtrace(secs / 5),
    }

  return report.repeat(measure_round)


def add_ratios(figures: dict[str, float], step_flops: float) -> None:
  """Adds the ratios of a round to its figures.

  The useful work per frame trained on is the learner's forward pass and its
  backward pass, which counts twice as much. In training, the actor's forward
  pass is added. The step that two unrolls share counts once.

  Args:
    figures: the figures of one round, by name.
    step_flops: operations of the network's forward pass per environment frame.
  """
  training = figures['training (frames/s)']
  matmul = figures['matrix product (GFLOP/s)']
  learner_gflops = 3 * step_flops * figures['learner alone (frames/s)'] / 1e9
  training_gflops = 4 * step_flops * training / 1e9
  figures['learner alone (useful GFLOP/s)'] = learner_gflops
  figures['training (useful GFLOP/s)'] = training_gflops
  figures['training / games alone'] = (
    training / figures['games alone (frames/s)']
  )
  figures['learner alone / matrix product'] = learner_gflops / matmul
  figures['training / matrix product'] = training_gflops / matmul


def main(argv):
  """Measures, then prints and writes the results."""
  if len(argv) > 1:
    raise app.UsageError(f'unknown argument: {argv[1]!r}')
  # SIGTERM acts as Ctrl-C: the training must not outlive this process.
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  config = config_lib.from_flags(_DEFAULTS)
  process = training_process.TrainingProcess(training_process.to_flags(config))
  envs = make.from_config(
    config,
    [config.envs.level_name],
    training=True,
    num_envs=config.num_envs,
  )
  config = config.completed(1, torsos.default_torso(envs.spec))
  with contextlib.closing(process), contextlib.closing(envs):
    process.run(FLAGS.warmup_secs, FLAGS.min_updates)
    rounds = measure_rounds(config, envs, process)
  flops = count_forward_flops(config, envs.spec)
  for figures in rounds:
    add_ratios(figures, flops / envs.spec.frames_per_step)
  report.finish(
    rounds,
    {
      'TF_ENABLE_ONEDNN_OPTS': os.environ.get('TF_ENABLE_ONEDNN_OPTS'),
      'settings': config.values(),
      'forward_mflop_per_agent_step': flops / 1e6,
      'peak_memory_bytes': process.peak_memory,
    },
  )


if __name__ == '__main__':
  app.run(main)
