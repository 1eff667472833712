"""Trains an IMPALA agent, or tests a trained one.

  python experiment.py                        trains on Pong
  python experiment.py --mode=test            tests the trained agent
  python experiment.py --job_name=learner     trains, with remote actors
  python experiment.py --job_name=actor       runs one of these actors
  python experiment.py --helpshort            lists the flags

This file turns flags into a config, and the config into one job. The algorithm
is in `actor.py`, `learner.py` and `vtrace.py`, and the agent is in
`networks.py`. `training.py` wires them together.
"""

from collections.abc import Iterator
import contextlib
import os
import sys

from absl import app
from absl import flags

from runtime import signals

if __name__ == '__main__':
  signals.install()  # First: all that follows takes seconds.

# Both must be set before TensorFlow is imported. On many processors, TensorFlow
# does not use oneDNN by default, although it is 2 to 3 times faster.
os.environ.setdefault('TF_ENABLE_ONEDNN_OPTS', '1')
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

import tensorflow as tf  # noqa: E402

from cluster import membership  # noqa: E402
import config as config_lib  # noqa: E402
from evaluation import test_mode  # noqa: E402
import levels  # noqa: E402
from runtime import console  # noqa: E402
from runtime import errors  # noqa: E402
from runtime import limits  # noqa: E402
from runtime import loop  # noqa: E402
from runtime import run_folder  # noqa: E402
import training as training_lib  # noqa: E402

FLAGS = flags.FLAGS
config_lib.define_flags()
flags.adopt_module_key_flags(config_lib)


def read_config() -> config_lib.Config:
  """Reads the config from the command line.

  Flags that are not given there come from TF_CONFIG, or, in the test mode, from
  the settings of the tested run.
  """
  config = config_lib.from_flags()
  if config.run.mode == 'test':
    settings = run_folder.read_settings(config.run.logdir)
    names = config_lib.names(of_run=True)
    # A flag may have been added since the run was started.
    defaults = {name: settings[name] for name in names if name in settings}
    defaults['logdir'] = config.run.logdir
    with _naming(run_folder.config_path(config.run.logdir)):
      return config_lib.from_flags(defaults)
  if FLAGS['job_name'].present and FLAGS.job_name == 'local':
    return config
  tf_config = membership.read_tf_config()
  if not tf_config:
    return config
  with _naming('TF_CONFIG'):
    config = config_lib.from_flags(tf_config)
    membership.from_config(config.cluster)  # Checks it.
  return config


@contextlib.contextmanager
def _naming(source: object) -> Iterator[None]:
  """Makes errors say that the settings that do not fit come from `source`."""
  try:
    yield
  except errors.SettingError as error:
    raise errors.SettingError(f'{source} does not fit: {error}') from error


def train(config: config_lib.Config) -> bool:
  """Trains until the frame budget is spent or a signal ends it.

  Returns:
    Whether the run is over.
  """
  level_names = levels.parse(config.envs.level_name, training=True)
  # Made for every job, since it checks that the cluster's flags are consistent.
  cluster = membership.from_config(config.cluster)
  if cluster.job_name == 'actor':
    with training_lib.RemoteActor(config, level_names) as actor:
      return actor.run()
  is_first = cluster.task == 0  # Only the first learner writes files.
  claim = contextlib.nullcontext()
  if is_first:
    claim = run_folder.claim_folder(config.run.logdir)
  wirings = {
    'local': training_lib.LocalTraining,
    'learner': training_lib.ClusterLearner,
  }
  with claim, wirings[cluster.job_name](config, level_names) as training:
    return loop.run(training) if is_first else loop.assist(training)


def main(argv):
  """Runs the job; errors that a user can fix end in one line, no traceback."""
  tf.get_logger().setLevel('ERROR')
  if len(argv) > 1:
    raise app.UsageError(f'unknown argument: {argv[1]!r}')
  limits.raise_soft_limits()
  try:
    config = read_config()
    if config.run.mode == 'test':
      test_mode.test(config)
    elif not train(config):
      sys.exit(signals.EXIT_STOPPED)
  except (errors.UserError, OSError) as error:
    sys.exit(f'Error: {error}')


if __name__ == '__main__':
  console.keep_exit_code()
  app.run(main)
