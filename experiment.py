"""Trains an IMPALA agent, or plays a trained one.

  python experiment.py                        trains Pong
  python experiment.py --mode=test            plays what was trained
  python experiment.py --job_name=learner     trains, with actors elsewhere
  python experiment.py --job_name=actor       is one of them
  python experiment.py --helpshort            lists the flags

This file wires the parts together. The algorithm is in
`actor.py`, `learner.py` and `vtrace.py`, the agent in `networks.py`.
"""

from collections.abc import Mapping, Sequence
import contextlib
import os
import sys
import time
from typing import Any

from absl import app
from absl import flags

# Both have to be set before TensorFlow is imported. On many processors
# TensorFlow leaves oneDNN out unless told so: it is 2 to 3 times faster.
os.environ.setdefault('TF_ENABLE_ONEDNN_OPTS', '1')
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

import tensorflow as tf  # noqa: E402

from cluster import learner_client  # noqa: E402
from cluster import membership  # noqa: E402
import environments  # noqa: E402
from evaluation import test_mode  # noqa: E402
import levels  # noqa: E402
import py_process  # noqa: E402
from runtime import checkpoint  # noqa: E402
from runtime import console  # noqa: E402
from runtime import metrics  # noqa: E402
from runtime import monitor as monitor_lib  # noqa: E402
from runtime import threads as threads_lib  # noqa: E402
import settings  # noqa: E402
import training as training_lib  # noqa: E402

tf1 = tf.compat.v1

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(settings)


def train() -> None:
  """Trains until the frames are spent, or a signal ends it."""
  cluster = settings.read_cluster()
  level_names = levels.parse(FLAGS.level_name, training=True)
  if cluster.job_name == 'actor':
    act(cluster, level_names)
    return
  # Other learners than the first write nothing.
  claim = contextlib.nullcontext()
  if cluster.task == 0:
    claim = checkpoint.claim_folder(FLAGS.logdir)
  with claim:
    if cluster.job_name == 'learner':
      learn(cluster, level_names)
    else:
      train_alone(level_names)


def train_alone(level_names: Sequence[str]) -> None:
  """Trains with an actor in this process."""
  envs = settings.make_envs(
    level_names, True, FLAGS.num_actors * FLAGS.envs_per_actor
  )
  with contextlib.closing(envs), tf.Graph().as_default():
    config = prepare(envs.spec, level_names)
    training = training_lib.build_local(
      envs,
      level_names,
      lambda name: settings.make_agent(name, envs.spec),
      settings.make_hyperparameters(),
      FLAGS.queue_capacity,
      FLAGS.seed,
    )
    with training.session:
      run_training(
        training,
        envs.spec,
        level_names,
        config,
        {
          'environments': envs.num_envs,
          'seeds': describe_seeds(envs),
          **envs.settings(),
        },
      )


def prepare(
  spec: environments.EnvironmentSpec,
  level_names: Sequence[str],
  check: bool = True,
) -> dict[str, Any]:
  """Completes the flags; returns the run's settings.

  Args:
    spec: of the environments.
    level_names: of the run.
    check: whether to compare them with those that the run had before.
  """
  settings.fill_in_flags(spec, level_names)
  config = settings.own_settings()
  if check:
    checkpoint.check_settings(
      FLAGS.logdir, config, FLAGS.allow_changed_settings
    )
  return config


def learn(cluster: membership.Cluster, level_names: Sequence[str]) -> None:
  """Trains with actors in other processes."""
  server = membership.start_server(cluster)
  # Only to see what they are like.
  with contextlib.closing(settings.make_envs(level_names, True, 1)) as envs:
    spec, about_envs = envs.spec, envs.settings()
  membership.wait_for_learners(cluster, FLAGS.connect_timeout_secs)
  with tf.Graph().as_default():
    config = prepare(spec, level_names, cluster.task == 0)
    training = training_lib.build_distributed(
      cluster,
      server,
      spec,
      lambda name: settings.make_agent(name, spec),
      settings.make_hyperparameters(),
      FLAGS.queue_capacity,
      FLAGS.seed,
      settings.agreed_settings(spec, level_names),
      FLAGS.connect_timeout_secs,
    )
    about = {'actors': membership.describe_actors(cluster)} | about_envs
    with training.session:
      if cluster.task == 0:
        run_training(training, spec, level_names, config, about)
      else:
        assist(training)


def act(cluster: membership.Cluster, level_names: Sequence[str]) -> None:
  """Plays for a learner in another process."""
  learner_client.hide_gpus()
  learner_client.keep_memory()
  envs = settings.make_envs(
    level_names, True, FLAGS.envs_per_actor, cluster.task
  )
  with contextlib.closing(envs), tf.Graph().as_default():
    console.say(f'Environments with the seeds {describe_seeds(envs)}.')
    settings.fill_in_flags(envs.spec, level_names)
    learner_client.play(
      cluster,
      envs,
      level_names,
      settings.make_agent('agent', envs.spec),
      settings.agreed_settings(envs.spec, level_names),
      FLAGS.connect_timeout_secs,
    )


def run_training(
  training: training_lib.Training,
  spec: environments.EnvironmentSpec,
  level_names: Sequence[str],
  config: Mapping[str, Any],
  about_envs: Mapping[str, Any],
) -> None:
  """Restores, trains, logs and saves.

  Args:
    training: to be run.
    spec: of the environments.
    level_names: by level index.
    config: the settings of the run.
    about_envs: what is told of the environments when the run starts.
  """
  session, learner = training.session, training.learner
  checkpoints = checkpoint.Checkpoints(FLAGS.logdir, learner.variables)
  checkpoints.restore(session)
  first_frame = int(session.run(learner.num_environment_frames))
  metrics.write_config(os.path.join(FLAGS.logdir, 'config.json'), config)
  console.say(describe_run(about_envs, level_names, learner, first_frame))
  warn_of_levels_left_out(level_names)
  monitor = monitor_lib.Monitor(
    FLAGS.logdir,
    level_names,
    spec.frames_per_step,
    first_frame,
    FLAGS.total_environment_frames,
    FLAGS.queue_capacity,
  )
  session.graph.finalize()
  threads = threads_lib.Threads(training.close_queue)
  saved = time.monotonic()

  def on_update(result):
    nonlocal saved
    monitor.on_update(result)
    if time.monotonic() - saved >= FLAGS.save_checkpoint_secs:
      checkpoints.save(session, monitor.num_environment_frames)
      saved = time.monotonic()

  with threads_lib.stop_on_signals(threads.stop):
    training.start_actors(threads)
    threads.start(lambda: training.run(on_update, threads.should_stop))
    supervise(threads, monitor, training)
    threads.join()
    if isinstance(threads.failure, tf.errors.InvalidArgumentError):
      raise ArithmeticError(describe_numerics(threads.failure, monitor))
    # The monitor may lack an update: its step was cut after the weights moved.
    frames = int(session.run(learner.num_environment_frames))
    is_saved = checkpoints.save(session, frames)
    monitor.report()
    monitor.close()
    training.linger()
  training.raise_failure(threads.failure)
  if not is_saved:
    raise checkpoint.CheckpointError('the end of the run is not saved')
  console.say(f'Saved. The same command goes on from here: {FLAGS.logdir}')


def assist(training: training_lib.Training) -> None:
  """Trains beside the first learner, which restores, logs and saves."""
  threads = threads_lib.Threads(training.close_queue)
  with threads_lib.stop_on_signals(threads.stop):
    training.start_actors(threads)
    threads.start(lambda: training.run(lambda _: None, threads.should_stop))
    while not threads.wait(0.5):
      pass
    threads.join()
    training.linger()
  training.raise_failure(threads.failure)
  console.say('This learner has ended.')


def supervise(
  threads: threads_lib.Threads,
  monitor: monitor_lib.Monitor,
  training: training_lib.Training,
) -> None:
  """Reports until the threads end."""
  due = time.monotonic() + FLAGS.log_every_secs
  while not threads.wait(0.5):
    monitor.sample_queue(training.queue_size())
    if time.monotonic() >= due:
      monitor.report(training.describe_actors())
      due = time.monotonic() + FLAGS.log_every_secs


def describe_numerics(
  error: tf.errors.InvalidArgumentError, monitor: monitor_lib.Monitor
) -> str:
  """Says which number of which update is not finite."""
  what = 'loss' if 'the loss' in error.message else 'gradient'
  return (
    f'the {what} of {FLAGS.level_name} is not finite, in the update after '
    f'{monitor.num_environment_frames:,} environment frames. The weights were '
    'not touched, the last checkpoint is kept. Try a lower --learning_rate.'
  )


def describe_seeds(envs: environments.Environments) -> str:
  """Returns the first few seeds."""
  more = ', ...' if envs.num_envs > 4 else ''
  return ', '.join(map(str, envs.seeds[:4])) + more


def describe_run(about_envs, level_names, learner, first_frame) -> str:
  """Returns the block that is printed when a run starts."""
  weights = sum(w.shape.num_elements() for w in learner.agent.variables)
  gpus = len(tf.config.list_physical_devices('GPU'))
  cores = environments.count_cores()
  memory = 'with' if FLAGS.use_lstm else 'without'
  task = FLAGS.level_name
  if len(level_names) > task.count(',') + 1:  # A suite.
    task += f' ({len(level_names)} levels)'
  return console.startup_block(
    task=task,
    agent=(
      f'{FLAGS.agent} network {memory} LSTM,'
      f' {console.format_count(weights)} parameters'
    ),
    devices=f'{cores} cores, {gpus or "no"} GPU',
    total_environment_frames=FLAGS.total_environment_frames,
    first_frame=first_frame,
    logdir=FLAGS.logdir,
    checkpoint_dir=os.path.join(FLAGS.logdir, 'checkpoints'),
    environment_settings=about_envs,
  )


def warn_of_levels_left_out(level_names: Sequence[str]) -> None:
  """Warns if there are fewer environments than levels."""
  num_envs = FLAGS.num_actors * FLAGS.envs_per_actor
  left_out = levels.without_environment(level_names, level_names[:num_envs])
  if left_out:
    console.warn(
      f'{len(left_out)} of {len(level_names)} levels have no environment, and '
      'there will be no score of the suite. Raise --num_actors or '
      f'--envs_per_actor for {", ".join(left_out)}.'
    )


def main(argv):
  """Runs the mode; what a user can mend ends in one line, not a traceback."""
  tf.get_logger().setLevel('ERROR')
  if len(argv) > 1:
    raise app.UsageError(f'unknown argument: {argv[1]!r}')
  if FLAGS.logdir is None:
    # A list of levels can be longer than a file name.
    name = FLAGS.level_name.replace('/', '_')[:100]
    FLAGS.logdir = os.path.join('runs', name)
  try:
    train() if FLAGS.mode == 'train' else test_mode.test()
  except (
    ArithmeticError,
    OSError,
    ValueError,
    checkpoint.CheckpointError,
    membership.LearnerLost,
    py_process.EnvironmentFailed,
  ) as error:
    sys.exit(f'Error: {error}')
  except KeyboardInterrupt:
    sys.exit('Interrupted.')  # Before or after the training proper.


if __name__ == '__main__':
  app.run(main)
