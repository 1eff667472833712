"""A training in a process of its own, to be measured and paused by benchmarks.

It is `experiment.py` itself, all of it, with a clock on the learner's updates.
A benchmark stops it (SIGSTOP) while it measures something else, so that what is
compared is measured in the same minutes on the same machine:

  training = TrainingProcess(['--level_name=pong'])
  training.run(min_secs=20, min_updates=3)  # Warm-up.
  updates = training.run(min_secs=10, min_updates=3)

POSIX only. This side does not import TensorFlow.
"""

from collections.abc import Sequence
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

from absl import app
import psutil

_CHECKOUT = pathlib.Path(__file__).resolve().parent.parent
_POLL_SECS = 0.1
_MEMORY_EVERY_SECS = 1.0
# No update takes as long, and no start.
_TIMEOUT_SECS = 300.0


class Update(NamedTuple):
  """One update of the learner.

  Attributes:
    secs: when it was done, on the monotonic clock.
    num_environment_frames: trained on by then.
    level_index: of the levels in the order of `--level_name`, the one that
      each unroll of the batch was played on.
  """

  secs: float
  num_environment_frames: int
  level_index: list[int]


class TrainingProcess:
  """A run of `experiment.py`, which trains only inside `run`.

  Attributes:
    peak_memory: the most bytes that the process and its children took together,
      sampled once a second while they ran: 'pss' counts a shared page once,
      'rss' once for each process.
  """

  def __init__(self, flags: Sequence[str]):
    """Starts it; its run folder is a temporary one.

    Args:
      flags: of `experiment.py`.
    """
    self._folder = tempfile.TemporaryDirectory()
    folder = pathlib.Path(self._folder.name)
    updates_path = folder / 'updates.jsonl'
    updates_path.touch()
    self._updates = open(updates_path, encoding='utf-8')
    self._partial_line = ''
    self._log_path = folder / 'log.txt'
    self.peak_memory = {'pss': 0, 'rss': 0}
    command = [sys.executable, '-m', 'benchmarks.training_process']
    with open(self._log_path, 'w', encoding='utf-8') as log:
      self._process = psutil.Popen(
        [*command, str(updates_path), *flags, f'--logdir={folder / "run"}'],
        cwd=_CHECKOUT,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
      )

  def run(self, min_secs: float, min_updates: int) -> list[Update]:
    """Lets it train for a while.

    Args:
      min_secs: seconds to train for at least.
      min_updates: updates to wait for, beside the first. The first one may have
        begun before the pause: rates count from its end.

    Returns:
      The updates that were done meanwhile, at least `min_updates` + 1.

    Raises:
      RuntimeError: it has ended, or does not get on.
    """
    updates = []
    memory_due = start = last = time.monotonic()
    for process in self._tree():
      process.resume()
    try:
      while time.monotonic() < start + min_secs or len(updates) <= min_updates:
        time.sleep(_POLL_SECS)
        new = self._read_updates()
        updates += new
        now = time.monotonic()
        last = now if new else last
        if self._process.poll() is not None or now > last + _TIMEOUT_SECS:
          log = self._log_path.read_text(encoding='utf-8')
          raise RuntimeError(f'The training has stopped:\n{log[-5000:]}')
        if now >= memory_due:
          self._sample_memory()
          memory_due = now + _MEMORY_EVERY_SECS
    finally:
      for process in self._tree():
        process.suspend()
    # What was done between the last look and the pause belongs to neither.
    self._read_updates()
    return updates

  def close(self) -> None:
    """Ends it at once."""
    for process in self._tree():
      # Some end by themselves when the others have.
      with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()
    self._process.wait()
    self._updates.close()
    self._folder.cleanup()

  def _tree(self) -> list[psutil.Process]:
    if self._process.poll() is not None:
      return []
    return [self._process, *self._process.children(recursive=True)]

  def _read_updates(self) -> list[Update]:
    text = self._partial_line + self._updates.read()
    *lines, self._partial_line = text.split('\n')
    return [Update(*json.loads(line)) for line in lines]

  def _sample_memory(self) -> None:
    memory = [process.memory_full_info() for process in self._tree()]
    for kind, peak in self.peak_memory.items():
      total = sum(getattr(one, kind) for one in memory)
      self.peak_memory[kind] = max(peak, total)


def frames_per_second(updates: Sequence[Update]) -> float:
  """Returns the frames trained from the first update's end to the last's."""
  first, last = updates[0], updates[-1]
  frames = last.num_environment_frames - first.num_environment_frames
  return frames / (last.secs - first.secs)


def main(updates_path: str, flags: Sequence[str]) -> None:
  """Is the process: `experiment.py` that notes its updates in a file."""
  # As Python does for a script; and it is under this name that experiment.py
  # finds its own flags.
  sys.path.insert(0, os.fspath(_CHECKOUT))
  sys.argv = ['experiment', *flags]
  # This order: experiment.py sets what TensorFlow reads at its import.
  import experiment
  import learner as learner_lib

  file = open(updates_path, 'a', encoding='utf-8')

  class TimedLearner(learner_lib.Learner):
    """The learner, with a clock on its updates."""

    def run(self, session, on_update, should_stop):
      def note(result):
        on_update(result)
        update = Update(
          time.monotonic(),
          int(result.num_environment_frames),
          result.level_index.tolist(),
        )
        file.write(json.dumps(update) + '\n')
        file.flush()

      super().run(session, note, should_stop)

  learner_lib.Learner = TimedLearner
  app.run(experiment.main)


if __name__ == '__main__':
  main(sys.argv[1], sys.argv[2:])
