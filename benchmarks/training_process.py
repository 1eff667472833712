"""A training in separate processes, which benchmarks can measure and pause.

It is the whole of `experiment.py`, with a clock on the learner's updates. A
benchmark pauses it (SIGSTOP) while it measures something else. The things it
compares are then measured in the same minutes, on the same machine:

  training = TrainingProcess(['--level_name=pong'])
  training.run(min_secs=20, min_updates=3)  # Warm-up.
  updates = training.run(min_secs=10, min_updates=3)

If actors are separate processes, it can run with only some of them.

It needs POSIX. The benchmark's process does not import TensorFlow.
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

import config as config_lib
import local_cluster

_CHECKOUT = pathlib.Path(__file__).resolve().parent.parent
_POLL_SECS = 0.1
_MEMORY_EVERY_SECS = 1.0
# No update and no start takes this long.
_TIMEOUT_SECS = 300.0


class Update(NamedTuple):
  """One update of the learner.

  Attributes:
    secs: the time at which it was done, on the monotonic clock.
    num_environment_frames: frames trained on by then.
    level_index: for each unroll of the batch, the index of its level in
      `--level_name`.
  """

  secs: float
  num_environment_frames: int
  level_index: list[int]


class Cores(NamedTuple):
  """CPU seconds used per second, including those of environments."""

  learner: float
  actors: float


class TrainingProcess:
  """A run of `experiment.py`, which trains only inside `run`.

  Attributes:
    peak_memory: the most bytes that the learner's process and its children used
      together, sampled once a second while they ran: 'pss' counts a shared page
      once, 'rss' once for each process.
    cores: the cores used in the last `run`.
  """

  def __init__(self, flags: Sequence[str], num_actors: int = 0):
    """Starts the training, with a temporary run folder.

    Args:
      flags: flags of `experiment.py`.
      num_actors: actors in separate processes; 0 for a single process.
    """
    self._folder = tempfile.TemporaryDirectory()
    folder = pathlib.Path(self._folder.name)
    updates_path = folder / 'updates.jsonl'
    updates_path.touch()
    self._updates = open(updates_path, encoding='utf-8')
    self._partial_line = ''
    self.peak_memory = {'pss': 0, 'rss': 0}
    self.cores = Cores(0.0, 0.0)
    flags = [*flags, f'--logdir={folder / "run"}']
    module = ['-m', 'benchmarks.training_process', str(updates_path)]
    self._logs = {}
    if not num_actors:
      self._learner = self._start([*module, *flags])
      self._actors = []
      return
    port = local_cluster.find_free_ports(1)[0]
    # The timeout is long, so that a pause does not count as a lost connection.
    flags += [
      f'--learner_hosts=localhost:{port}',
      f'--num_actors={num_actors}',
      '--connect_timeout_secs=10000',
    ]
    self._learner = self._start([*module, *flags, '--job_name=learner'])
    self._actors = [
      self._start(['experiment.py', *flags, '--job_name=actor', f'--task={i}'])
      for i in range(num_actors)
    ]

  def _start(self, command: Sequence[str]) -> psutil.Popen:
    path = pathlib.Path(self._folder.name) / f'log{len(self._logs)}.txt'
    with open(path, 'w', encoding='utf-8') as log:
      process = psutil.Popen(
        [sys.executable, *command],
        cwd=_CHECKOUT,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
      )
    self._logs[process] = path
    return process

  def run(
    self, min_secs: float, min_updates: int, num_actors: int | None = None
  ) -> list[Update]:
    """Lets it train for a while.

    Args:
      min_secs: the minimum time to train for, in seconds.
      min_updates: updates to wait for, besides the first. The first may have
        begun before the last pause, so rates are measured from its end.
      num_actors: how many of the actors play; None for all.

    Returns:
      The updates that were done, at least `min_updates` + 1.

    Raises:
      RuntimeError: a process has ended or makes no progress.
    """
    actors = self._actors[:num_actors]
    updates = []
    memory_due = start = last = time.monotonic()
    for process in _trees([self._learner, *actors]):
      process.resume()
    try:
      while time.monotonic() < start + min_secs or len(updates) <= min_updates:
        time.sleep(_POLL_SECS)
        new = self._read_updates()
        if new and not updates:
          before = _read_clocks(self._learner, actors)
        updates += new
        now = time.monotonic()
        last = now if new else last
        self._check(is_stuck=now > last + _TIMEOUT_SECS)
        if now >= memory_due:
          self._sample_memory()
          memory_due = now + _MEMORY_EVERY_SECS
      after = _read_clocks(self._learner, actors)
    finally:
      for process in _trees([self._learner, *actors]):
        process.suspend()
    # Discards updates between the last read and the pause: they belong to no
    # measurement.
    self._read_updates()
    secs, *cpu_secs = (b - a for a, b in zip(before, after, strict=True))
    self.cores = Cores(*(one / secs for one in cpu_secs))
    return updates

  def wait_for_actors(self) -> None:
    """Lets it train until all actors have joined the learner."""
    while not all(
      'Playing for' in self._logs[actor].read_text(encoding='utf-8')
      for actor in self._actors
    ):
      self.run(min_secs=1.0, min_updates=0)

  def measure_memory(self) -> int:
    """Returns the memory of all processes together, as PSS in bytes."""
    return _measure_memory([self._learner, *self._actors])['pss']

  def close(self) -> None:
    """Kills all processes."""
    for process in _trees([self._learner, *self._actors]):
      # Some end by themselves once the others have ended.
      with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()
    for process in [self._learner, *self._actors]:
      process.wait()
    self._updates.close()
    self._folder.cleanup()

  def _read_updates(self) -> list[Update]:
    text = self._partial_line + self._updates.read()
    *lines, self._partial_line = text.split('\n')
    return [Update(*json.loads(line)) for line in lines]

  def _check(self, is_stuck: bool) -> None:
    for process, log in self._logs.items():
      if process.poll() is not None or is_stuck:
        text = log.read_text(encoding='utf-8')
        raise RuntimeError(f'The training has stopped:\n{text[-5000:]}')

  def _sample_memory(self) -> None:
    memory = _measure_memory([self._learner])
    for kind, peak in self.peak_memory.items():
      self.peak_memory[kind] = max(peak, memory[kind])


def _measure_memory(processes: Sequence[psutil.Popen]) -> dict[str, int]:
  infos = [one.memory_full_info() for one in _trees(processes)]
  return {kind: sum(getattr(i, kind) for i in infos) for kind in ('pss', 'rss')}


def _read_clocks(
  learner: psutil.Popen, actors: Sequence[psutil.Popen]
) -> tuple[float, float, float]:
  """Returns the time, and the CPU seconds used by the learner and by actors."""
  return time.monotonic(), *(
    # Includes children that have ended.
    sum(sum(process.cpu_times()[:4]) for process in _trees(processes))
    for processes in ([learner], actors)
  )


def _trees(processes: Sequence[psutil.Popen]) -> list[psutil.Process]:
  """Returns the processes that still run, each followed by its descendants."""
  return [
    one
    for process in processes
    if process.poll() is None
    for one in (process, *process.children(recursive=True))
  ]


def to_flags(config: config_lib.Config) -> list[str]:
  """Returns the command-line flags that result in a config."""
  return [
    f'--{name}={value}'
    for name, value in config.values().items()
    if value is not None and value != ()
  ]


def frames_per_second(updates: Sequence[Update]) -> float:
  """Returns frames/s from the end of the first update to that of the last."""
  first, last = updates[0], updates[-1]
  frames = last.num_environment_frames - first.num_environment_frames
  return frames / (last.secs - first.secs)


def main(updates_path: str, flags: Sequence[str]) -> None:
  """Runs `experiment.py`, and writes its updates to a file."""
  # As if experiment.py were run as a script: its folder is on the path, and it
  # finds its own flags under this name.
  sys.path.insert(0, os.fspath(_CHECKOUT))
  sys.argv = ['experiment', *flags]
  # In this order: experiment.py sets variables that TensorFlow reads when it is
  # imported.
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
