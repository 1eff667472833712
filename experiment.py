"""Trains an IMPALA agent, or plays a trained one.

  python experiment.py                        trains Pong
  python experiment.py --mode=test            plays what was trained
  python experiment.py --helpshort            lists the flags

This file wires the parts together. The algorithm is in
`actor.py`, `learner.py` and `vtrace.py`, the agent in `networks.py`.
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import os
import sys
import time
from typing import Any, NamedTuple

from absl import app
from absl import flags
import numpy as np

# Both have to be set before TensorFlow is imported. On many processors
# TensorFlow leaves oneDNN out unless told so: it is 2 to 3 times faster.
os.environ.setdefault('TF_ENABLE_ONEDNN_OPTS', '1')
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

import tensorflow as tf  # noqa: E402

import actor as actor_lib  # noqa: E402
import checkpoint  # noqa: E402
import console  # noqa: E402
import environments  # noqa: E402
import evaluation  # noqa: E402
import lab_environments  # noqa: E402
import learner as learner_lib  # noqa: E402
import levels  # noqa: E402
import metrics  # noqa: E402
import monitor as monitor_lib  # noqa: E402
import networks  # noqa: E402
import py_process  # noqa: E402
import settings  # noqa: E402
import video  # noqa: E402
import workers as workers_lib  # noqa: E402

tf1 = tf.compat.v1

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(settings)


class Training(NamedTuple):
  """A local run, ready to go; see `build_training`."""

  session: tf1.Session
  learner: learner_lib.Learner
  actor: actor_lib.Actor
  queue_size: tf.Tensor
  close_queue: tf.Operation


def build_training(
  envs: environments.Environments,
  level_names: Sequence[str],
  make_agent: Callable[[str], networks.Agent],
  hyperparameters: learner_lib.Hyperparameters,
  queue_capacity: int,
  seed: int,
) -> Training:
  """Wires one actor and the learner, in the current graph.

  Args:
    envs: what the actor plays.
    level_names: of the run, by level index.
    make_agent: makes a new agent from the name of its scope.
    hyperparameters: of the update.
    queue_capacity: in unrolls.
    seed: of weights and actions.
  """
  tf1.set_random_seed(seed)
  unroll_length = hyperparameters.unroll_length
  agent = make_agent('agent')
  specs = actor_lib.unroll_specs(agent, envs.spec, unroll_length)
  queue = actor_lib.make_queue(specs, queue_capacity)
  learner = learner_lib.Learner(
    agent, queue, specs, envs.spec.frames_per_step, hyperparameters
  )
  policy = actor_lib.Policy(make_agent('actor'), envs.spec)
  actor = actor_lib.Actor(
    envs,
    np.array([level_names.index(name) for name in envs.level_names], np.int32),
    policy,
    actor_lib.copy_weights(policy.agent, agent, learner.num_updates),
    queue,
    specs,
    unroll_length,
  )
  queue_size = queue.size()
  close_queue = queue.close(cancel_pending_enqueues=True)
  session = tf1.Session()
  session.run(tf1.global_variables_initializer())
  return Training(session, learner, actor, queue_size, close_queue)


def train() -> None:
  """Trains until the frames are spent, or a signal ends it."""
  level_names = levels.parse(FLAGS.level_name, training=True)
  checkpoint.check_folder(FLAGS.logdir)
  envs = settings.make_envs(
    level_names, True, FLAGS.num_actors * FLAGS.envs_per_actor
  )
  with contextlib.closing(envs), tf.Graph().as_default():
    settings.fill_in_flags(envs.spec, level_names)
    config = settings.own_settings()
    checkpoint.check_settings(
      FLAGS.logdir, config, FLAGS.allow_changed_settings
    )
    training = build_training(
      envs,
      level_names,
      lambda name: settings.make_agent(name, envs.spec),
      settings.make_hyperparameters(),
      FLAGS.queue_capacity,
      FLAGS.seed,
    )
    with training.session:
      run_training(training, envs, level_names, config)


def run_training(
  training: Training,
  envs: environments.Environments,
  level_names: Sequence[str],
  config: Mapping[str, Any],
) -> None:
  """Restores, trains, logs and saves."""
  session, learner = training.session, training.learner
  checkpoints = checkpoint.Checkpoints(FLAGS.logdir, learner.variables)
  checkpoints.restore(session)
  first_frame = int(session.run(learner.num_environment_frames))
  metrics.write_config(os.path.join(FLAGS.logdir, 'config.json'), config)
  print(describe_run(envs, level_names, learner, first_frame), flush=True)
  warn_of_levels_left_out(level_names, envs.level_names)
  monitor = monitor_lib.Monitor(
    FLAGS.logdir,
    level_names,
    envs.spec.frames_per_step,
    first_frame,
    FLAGS.total_environment_frames,
    FLAGS.queue_capacity,
  )
  session.graph.finalize()
  workers = workers_lib.Workers(lambda: session.run(training.close_queue))
  saved = time.monotonic()

  def on_update(result):
    nonlocal saved
    monitor.on_update(result)
    if time.monotonic() - saved >= FLAGS.save_checkpoint_secs:
      checkpoints.save(session, monitor.num_environment_frames)
      saved = time.monotonic()

  with workers_lib.stop_on_signals(workers.stop):
    workers.start(lambda: training.actor.run(session, workers.should_stop))
    workers.start(lambda: learner.run(session, on_update, workers.should_stop))
    supervise(workers, monitor, lambda: session.run(training.queue_size))
    workers.join()
    if isinstance(workers.failure, tf.errors.InvalidArgumentError):
      raise ArithmeticError(describe_numerics(workers.failure, monitor))
    monitor.report()
    monitor.close()
    # The monitor may lack an update: its step was cut after the weights moved.
    frames = int(session.run(learner.num_environment_frames))
    is_saved = checkpoints.save(session, frames)
  if workers.failure:
    raise workers.failure
  if not is_saved:
    raise checkpoint.CheckpointError('the end of the run is not saved')
  print(f'Saved. The same command goes on from here: {FLAGS.logdir}')


def supervise(
  workers: workers_lib.Workers,
  monitor: monitor_lib.Monitor,
  queue_size: Callable[[], int],
) -> None:
  """Reports until the workers end."""
  due = time.monotonic() + FLAGS.log_every_secs
  while not workers.wait(0.5):
    monitor.sample_queue(queue_size())
    if time.monotonic() >= due:
      monitor.report()
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


def describe_run(envs, level_names, learner, first_frame) -> str:
  """Returns the block that is printed when a run starts."""
  weights = sum(w.shape.num_elements() for w in learner.agent.variables)
  gpus = len(tf.config.list_physical_devices('GPU'))
  cores = environments.count_cores()
  memory = 'with' if FLAGS.use_lstm else 'without'
  more = ', ...' if envs.num_envs > 4 else ''
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
    environment_settings={
      'environments': envs.num_envs,
      'seeds': ', '.join(map(str, envs.seeds[:4])) + more,
      **envs.settings(),
    },
  )


def warn_of_levels_left_out(
  level_names: Sequence[str], env_level_names: Sequence[str]
) -> None:
  """Warns if there are fewer environments than levels."""
  left_out = levels.without_environment(level_names, env_level_names)
  if left_out:
    print(
      f'Warning: {len(left_out)} of {len(level_names)} levels have no '
      'environment, and there will be no score of the suite. Raise '
      f'--num_actors or --envs_per_actor for {", ".join(left_out)}.',
      file=sys.stderr,
    )


def test() -> None:
  """Plays a trained agent and prints and writes its scores."""
  settings.use_settings_of_run()
  level_names = levels.parse(FLAGS.level_name, training=False)
  lab_environments.check_levels(level_names, FLAGS.dataset_path)
  with contextlib.closing(
    settings.make_envs(level_names[:1], False, 1)
  ) as envs:
    spec = envs.spec
  with tf.Graph().as_default():
    tf1.set_random_seed(FLAGS.seed)
    policy = actor_lib.Policy(settings.make_agent('agent', spec), spec)
    frames = tf1.get_variable(
      'num_environment_frames', [], tf.int64, use_resource=True
    )
    variables = [frames, *policy.agent.variables]
    with tf1.Session() as session:
      path = checkpoint.Checkpoints(FLAGS.logdir, variables).restore(session)
      if path is None:
        raise checkpoint.CheckpointError(f'no checkpoint in {FLAGS.logdir}')
      print(f'Playing {path}', flush=True)
      about = settings.own_settings() | {
        'checkpoint': path,
        'num_environment_frames': int(session.run(frames)),
      }
      scores = play(level_names, policy.bind(session), policy.agent, about)
  report_scores(level_names, scores, about)
  if FLAGS.video:
    film(scores)


def play(
  level_names: Sequence[str],
  act: Callable,
  agent: networks.Agent,
  about: Mapping[str, Any],
) -> dict[str, evaluation.LevelScore]:
  """Plays all levels, as many at one time as cores allow.

  Args:
    level_names: what to play.
    act: see `actor.Policy.bind`.
    agent: see `evaluation.evaluate`.
    about: what the scores depend on. If all is as it was when an evaluation was
      stopped, this one goes on from there.
  """
  progress = evaluation.Progress(
    os.path.join(FLAGS.logdir, 'test_progress.json'), about
  )
  if progress.scores:
    print(f'{len(progress.scores)} levels were played before.')
  num_episodes = FLAGS.test_num_episodes
  left = [name for name in level_names if name not in progress.scores]
  most = min(
    FLAGS.num_actors * FLAGS.envs_per_actor, 4 * environments.count_cores()
  )
  total = num_episodes * len(level_names)
  for group, num_envs in evaluation.share_out(left, num_episodes, most):
    played = num_episodes * len(progress.scores)

    def show(done, of, played=played, name=group[-1]):
      # A line for each tenth of these levels.
      if done * 10 // of > (done - 1) * 10 // of:
        print(f'  {played + done} / {total} episodes, {name}', flush=True)

    with contextlib.closing(settings.make_envs(group, False, num_envs)) as envs:
      progress.add(evaluation.evaluate(act, agent, envs, num_episodes, show))
  progress.finish()
  return {name: progress.scores[name] for name in level_names}


def report_scores(
  level_names: Sequence[str],
  scores: Mapping[str, evaluation.LevelScore],
  about: Mapping[str, Any],
) -> None:
  """Prints the scores, those of a suite too, and writes `test.json`."""
  suite = levels.find_suite(level_names)
  print(evaluation.table(scores, suite and suite.normalize))
  suite_scores = levels.suite_scores(
    level_names, {name: score.returns for name, score in scores.items()}, 'test'
  )
  for name, value in suite_scores.items():
    print(f'{name} {value:.1f} %')
  result = os.path.join(FLAGS.logdir, 'test.json')
  evaluation.write(result, scores, about, suite_scores)
  print(f'Written to {result}')


def film(scores: Mapping[str, evaluation.LevelScore]) -> None:
  """Films an episode of each level into the folder `--video`."""
  os.makedirs(FLAGS.video, exist_ok=True)
  for name, score in scores.items():
    file_name = name.replace('/', '_').replace(':', '_') + '.mp4'
    path = os.path.join(FLAGS.video, file_name)
    seed, actions, episode_return = score.recording
    video.film(
      name,
      seed,
      actions,
      path,
      episode_return,
      settings.atari_settings(),
      settings.lab_settings(),
    )
    print(f'Filmed an episode with return {episode_return:g}: {path}')


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
    train() if FLAGS.mode == 'train' else test()
  except (
    ArithmeticError,
    ValueError,
    checkpoint.CheckpointError,
    py_process.EnvironmentFailed,
  ) as error:
    sys.exit(f'Error: {error}')
  except KeyboardInterrupt:
    sys.exit('Interrupted.')  # Before or after the training proper.


if __name__ == '__main__':
  app.run(main)
