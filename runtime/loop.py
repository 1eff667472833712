"""Runs a training from start to end: restores, trains, logs and saves.

The training is a `training.LocalTraining` or a `training.ClusterLearner`.
"""

from collections.abc import Sequence
import os
import time
from typing import Any

import tensorflow as tf

import config as config_lib
import environments
import learner as learner_lib
import levels
from runtime import checkpoint
from runtime import console
from runtime import errors
from runtime import monitor as monitor_lib
from runtime import run_folder
from runtime import signals
from runtime import threads as threads_lib

_POLL_SECS = 0.5


class NotFiniteError(errors.UserError, ArithmeticError):
  """The loss or the gradient of an update is not finite."""


def run(training: Any) -> bool:
  """Trains until the frame budget is spent or a signal ends it.

  Args:
    training: the first or only learner of the run, already entered.

  Returns:
    Whether the frame budget is spent.

  Raises:
    errors.UserError: the run cannot continue; the message says why.
  """
  config, session, learner = training.config, training.session, training.learner
  logdir = config.run.logdir
  settings = config.describe()
  checkpoints = checkpoint.Checkpoints(logdir, learner.variables)
  # A run that stopped before its first frame holds nothing to keep.
  if checkpoints.has_trained():
    run_folder.check_settings(
      logdir,
      settings,
      frozenset(config_lib.names(may_change=True)),
      config.run.allow_changed_settings,
    )
    checkpoints.restore(session)
  first_frame = int(session.run(learner.num_environment_frames))
  run_folder.write_settings(logdir, settings)
  console.say(describe_run(training, first_frame))
  warn_of_levels_left_out(config, training.level_names)
  monitor = monitor_lib.Monitor(
    logdir,
    training.level_names,
    training.spec.frames_per_step,
    first_frame,
    config.update.total_environment_frames,
    config.update.queue_capacity,
  )
  session.graph.finalize()
  threads = threads_lib.Threads(training.close_queue)
  saver = _Saver(checkpoints, session, config.run.save_checkpoint_secs)

  def on_update(result):
    monitor.on_update(result)
    saver.save_if_due(monitor.num_environment_frames)

  with signals.stopping(threads.stop):
    training.start(threads, on_update)
    _report_until_the_end(training, threads, monitor)
    threads.join()
    _raise_if_not_finite(threads.failure, config, monitor)
    # Asks the session: a step that was interrupted after it changed the weights
    # is missing from the monitor.
    frames = int(session.run(learner.num_environment_frames))
    is_saved = checkpoints.save(session, frames)
    monitor.report()
    monitor.close()
    training.linger()
  if threads.failure:
    raise training.explain(threads.failure)
  if not is_saved:
    raise checkpoint.CheckpointError('the end of the run could not be saved')
  console.say(f'Saved. The same command resumes the run: {logdir}')
  return frames >= config.update.total_environment_frames


def assist(training: Any) -> bool:
  """Trains in step with the first learner, which restores, logs and saves.

  Args:
    training: a learner other than the first, already entered.

  Returns:
    Whether the frame budget is spent.
  """
  threads = threads_lib.Threads(training.close_queue)
  with signals.stopping(threads.stop):
    training.start(threads, lambda _: None)
    while not threads.wait(_POLL_SECS):
      pass
    threads.join()
    training.linger()
    if threads.failure:
      raise training.explain(threads.failure)
    frames = int(training.session.run(training.learner.num_environment_frames))
  console.say('This learner has ended.')
  return frames >= training.config.update.total_environment_frames


class _Saver:
  """Saves checkpoints at regular intervals."""

  def __init__(
    self,
    checkpoints: checkpoint.Checkpoints,
    session: tf.compat.v1.Session,
    every_secs: float,
  ):
    self._checkpoints = checkpoints
    self._session = session
    self._every_secs = every_secs
    self._saved = time.monotonic()

  def save_if_due(self, num_environment_frames: int) -> None:
    if time.monotonic() - self._saved >= self._every_secs:
      self._checkpoints.save(self._session, num_environment_frames)
      self._saved = time.monotonic()


def _report_until_the_end(
  training: Any, threads: threads_lib.Threads, monitor: monitor_lib.Monitor
) -> None:
  every_secs = training.config.run.log_every_secs
  due = time.monotonic() + every_secs
  while not threads.wait(_POLL_SECS):
    monitor.sample_queue(training.queue_size())
    if time.monotonic() >= due:
      monitor.report(training.describe_actors())
      due = time.monotonic() + every_secs


def _raise_if_not_finite(
  failure: Exception | None,
  config: config_lib.Config,
  monitor: monitor_lib.Monitor,
) -> None:
  """Raises if the loss or gradient of an update was not finite.

  The run then ends without a save: the last checkpoint is better.
  """
  if not isinstance(failure, tf.errors.InvalidArgumentError):
    return
  what = learner_lib.find_non_finite(failure)
  if what:
    raise NotFiniteError(
      f'the {what} of {config.envs.level_name} is not finite, in the update '
      f'after {monitor.num_environment_frames:,} environment frames. The '
      'weights were not changed; the last checkpoint is kept. Try a lower '
      '--learning_rate.'
    ) from failure


def describe_run(training: Any, first_frame: int) -> str:
  """Returns the text that is printed when a run starts."""
  config, level_names = training.config, training.level_names
  variables = training.learner.agent.variables
  num_weights = sum(v.shape.num_elements() for v in variables)
  gpus = len(tf.config.list_physical_devices('GPU'))
  memory = 'with' if config.agent.use_lstm else 'without'
  task = config.envs.level_name
  if len(level_names) > task.count(',') + 1:  # A suite.
    task += f' ({len(level_names)} levels)'
  logdir = config.run.logdir
  return console.startup_block(
    task=task,
    agent=(
      f'{config.agent.agent} network {memory} LSTM,'
      f' {console.format_count(num_weights)} parameters'
    ),
    devices=f'{environments.count_cores()} cores, {gpus or "no"} GPU',
    total_environment_frames=config.update.total_environment_frames,
    first_frame=first_frame,
    logdir=logdir,
    checkpoint_dir=os.path.join(logdir, 'checkpoints'),
    environment_settings=training.about,
  )


def warn_of_levels_left_out(
  config: config_lib.Config, level_names: Sequence[str]
) -> None:
  """Warns if there are fewer environments than levels."""
  left_out = levels.without_environment(
    level_names, level_names[: config.num_envs]
  )
  if left_out:
    console.warn(
      f'{len(left_out)} of {len(level_names)} levels have no environment, so '
      'there will be no score for the suite. Raise --num_actors or '
      f'--envs_per_actor to include {", ".join(left_out)}.'
    )
