"""Measures the cost of a frame with few and with many actor processes.

  python -m benchmarks.scaling --json=FILE.json

There are one learner and 64 actors, of which 1, 2, 4, ... play in turn, in
rounds. The environments wait most of the time, so that all fit on a few cores.
The frames per second therefore grow with the number of actors; the figure of
interest is the CPU time per frame. See benchmarks/README.md.
"""

import contextlib
import signal

from absl import app
from absl import flags

from benchmarks import report
from benchmarks import training_process

FLAGS = flags.FLAGS

flags.DEFINE_integer(
  'max_actors', 64, 'Maximum number of actors, a power of two.'
)
FLAGS.set_default('rounds', 2)
flags.DEFINE_float('window_secs', 15.0, 'Seconds of each measurement.')
flags.DEFINE_float('settle_secs', 3.0, 'Seconds before each measurement.')

_TRAINING_FLAGS = (
  '--level_name=gym:benchmarks.render_env:Waiting-v0',
  '--envs_per_actor=1',
  '--batch_size=4',
  '--unroll_length=20',
  '--total_environment_frames=1000000000',
)


def measure(
  training: training_process.TrainingProcess, num_actors: int
) -> dict[str, float]:
  """Measures with `num_actors` actors playing; returns figures by name."""
  training.run(FLAGS.settle_secs, 1, num_actors)
  updates = training.run(FLAGS.window_secs, 3, num_actors)
  frames = training_process.frames_per_second(updates)
  learner, actors = (1e6 * cores / frames for cores in training.cores)
  return {
    f'{num_actors} actors (frames/s)': frames,
    f'{num_actors} actors: learner (CPU-us/frame)': learner,
    f'{num_actors} actors: actors (CPU-us/frame)': actors,
    f'{num_actors} actors: all (CPU-us/frame)': learner + actors,
  }


def compare(figures: dict[str, float], most: int) -> dict[str, float]:
  """Returns the ratios of figures with `most` actors to those with 4."""
  return {
    f'{most} / 4 actors{what}': figures[f'{most} actors{what}']
    / figures[f'4 actors{what}']
    for what in (' (frames/s)', ': all (CPU-us/frame)')
  }


def main(argv):
  """Measures, then prints and writes the results."""
  if len(argv) > 1:
    raise app.UsageError(f'unknown argument: {argv[1]!r}')
  # SIGTERM acts as Ctrl-C: the training must not outlive this process.
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  counts = [2**i for i in range(FLAGS.max_actors.bit_length())]
  training = training_process.TrainingProcess(_TRAINING_FLAGS, counts[-1])
  with contextlib.closing(training):
    training.wait_for_actors()

    def measure_round():
      figures = {}
      for num_actors in reversed(counts):
        figures |= measure(training, num_actors)
      return figures | compare(figures, counts[-1])

    rounds = report.repeat(measure_round)
    memory = training.measure_memory()
  report.finish(rounds, {'flags': _TRAINING_FLAGS, 'memory_bytes': memory})


if __name__ == '__main__':
  app.run(main)
