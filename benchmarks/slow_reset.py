"""Measures how much a slow environment slows down the others.

  python -m benchmarks.slow_reset --json=FILE.json

It runs two trainings with 16 environments each, in turn. In one of them, the
first environment sleeps 10 s at each reset, every 5 steps: it is almost always
asleep. The figure of interest is how many frames per second of the other 15 are
trained on. See benchmarks/README.md.
"""

import contextlib
import signal

from absl import app
from absl import flags
import numpy as np

from benchmarks import render_env
from benchmarks import report
from benchmarks import training_process

FLAGS = flags.FLAGS

flags.DEFINE_float('window_secs', 20.0, 'Seconds of each measurement.')
flags.DEFINE_float('warmup_secs', 15.0, 'Seconds of warm-up per training.')

_TRAINING_FLAGS = (
  '--num_actors=1',
  f'--envs_per_actor={1 + len(render_env.OTHERS)}',
  '--batch_size=32',
  '--unroll_length=20',
  '--total_environment_frames=1000000000',
)


def start_training(first: str) -> training_process.TrainingProcess:
  """Starts a training with `first` as its first environment."""
  levels = ','.join(
    f'gym:benchmarks.render_env:{name}-v0'
    for name in (first, *render_env.OTHERS)
  )
  return training_process.TrainingProcess(
    [f'--level_name={levels}', *_TRAINING_FLAGS]
  )


def measure(
  training: training_process.TrainingProcess, secs: float
) -> tuple[float, float]:
  """Returns the frames/s of the first environment, and of all the others."""
  updates = training.run(secs, min_updates=2)
  played = np.concatenate([update.level_index for update in updates[1:]])
  share = float(np.mean(played == 0))
  frames = training_process.frames_per_second(updates)
  return frames * share, frames * (1 - share)


def main(argv):
  """Measures, then prints and writes the results."""
  if len(argv) > 1:
    raise app.UsageError(f'unknown argument: {argv[1]!r}')
  # SIGTERM acts as Ctrl-C: the trainings must not outlive this process.
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  with contextlib.ExitStack() as stack:
    trainings = []
    for first in ('First', 'FirstSlow'):
      trainings.append(start_training(first))
      stack.callback(trainings[-1].close)
      trainings[-1].run(FLAGS.warmup_secs, min_updates=2)

    def measure_round():
      (first, others), (slow_first, slow_others) = (
        measure(training, FLAGS.window_secs) for training in trainings
      )
      return {
        'all fast: first (frames/s)': first,
        'all fast: others (frames/s)': others,
        'first slow: first (frames/s)': slow_first,
        'first slow: others (frames/s)': slow_others,
        'others, first slow / all fast': slow_others / others,
      }

    rounds = report.repeat(measure_round)
  report.finish(rounds)


if __name__ == '__main__':
  app.run(main)
