"""Measures the cost of running actors in separate processes.

  python -m benchmarks.processes --json=FILE.json
  python -m benchmarks.processes --agent=deep --json=FILE.json

It takes all flags of `experiment.py`. It runs two trainings on the same games,
alternating in rounds. One is a single process; in the other, the learner and
`--num_actors` actors are separate processes. See benchmarks/README.md.
"""

import contextlib
import signal

from absl import app
from absl import flags

import experiment  # noqa: F401 (its flags)

# isort: split
from benchmarks import report
from benchmarks import training_process
import config as config_lib

FLAGS = flags.FLAGS

flags.DEFINE_float('window_secs', 20.0, 'Seconds of each measurement.')
flags.DEFINE_integer(
  'min_updates', 3, 'Minimum number of updates per measurement.'
)
flags.DEFINE_float('warmup_secs', 20.0, 'Seconds of warm-up per training.')

# The batch is the paper's.
_DEFAULTS = {'num_actors': 4, 'envs_per_actor': 32, 'batch_size': 32}
_WHO = ('one process', 'several processes')


def measure(
  training: training_process.TrainingProcess, who: str
) -> dict[str, float]:
  """Measures a training; returns figures by name."""
  updates = training.run(FLAGS.window_secs, FLAGS.min_updates)
  frames = training_process.frames_per_second(updates)
  learner, actors = (1e6 * cores / frames for cores in training.cores)
  figures = {
    f'{who} (frames/s)': frames,
    f'{who} (CPU-us/frame)': learner + actors,
  }
  if actors:
    figures[f'{who}: learner (CPU-us/frame)'] = learner
    figures[f'{who}: actors (CPU-us/frame)'] = actors
  return figures


def main(argv):
  """Measures, then prints and writes the results."""
  if len(argv) > 1:
    raise app.UsageError(f'unknown argument: {argv[1]!r}')
  # SIGTERM acts as Ctrl-C: the trainings must not outlive this process.
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  config = config_lib.from_flags(_DEFAULTS)
  own = training_process.to_flags(config)
  with contextlib.ExitStack() as stack:
    trainings = []
    for num_actors in (0, config.cluster.num_actors):
      trainings.append(training_process.TrainingProcess(own, num_actors))
      stack.callback(trainings[-1].close)
      trainings[-1].wait_for_actors()
      trainings[-1].run(FLAGS.warmup_secs, FLAGS.min_updates)

    def measure_round():
      figures = {}
      for training, who in zip(trainings, _WHO, strict=True):
        figures |= measure(training, who)
      for unit in ('(frames/s)', '(CPU-us/frame)'):
        one, several = (figures[f'{who} {unit}'] for who in _WHO)
        figures[f'several / one {unit}'] = several / one
      return figures

    rounds = report.repeat(measure_round)
    more = {
      'settings': config.values(),
      'memory_bytes': {
        who: training.measure_memory()
        for training, who in zip(trainings, _WHO, strict=True)
      },
    }
  report.finish(rounds, more)


if __name__ == '__main__':
  app.run(main)
