"""What a run prints: the startup block and the progress line.

Everything is counted in environment frames, not in agent steps.
"""

import atexit
import collections
from collections.abc import Callable, Mapping
import os
import shlex
import sys
import time
from typing import Any, TextIO


def say(text: str, file: TextIO | None = None) -> None:
  """Prints and flushes; a failure to print does not affect the run.

  Args:
    text: the text to print.
    file: where to print; standard output if not given.
  """
  file = file or sys.stdout
  try:
    print(text, file=file, flush=True)
  except BrokenPipeError:
    _discard(file)  # Permanently: the reader has gone.
  except OSError:
    pass  # A log on a full disk, which may have room again later.


def warn(text: str) -> None:
  """Prints a warning to standard error, as `say` does."""
  say(f'Warning: {text}', sys.stderr)


def keep_exit_code() -> None:
  """Makes sure that this process ends with its own exit code.

  Without this, Python exits with 120 if it cannot write the last of standard
  output or error: nobody reads it any more, or the disk is full. And it fails
  at characters that standard output lacks. Must be called first in the main
  program: handlers of the exit run in reverse order, and the others may print.
  """
  # Closed standard streams (`>&-`) are opened. Otherwise the next file to be
  # opened would get the number of one, and receive what libraries print.
  for number in range(3):
    try:
      os.fstat(number)
    except OSError:
      os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
  # As standard error does, e.g. with the name of a folder.
  if sys.stdout is not None and sys.stdout.errors == 'strict':
    sys.stdout.reconfigure(errors='backslashreplace')
  atexit.register(_flush_or_discard)


def _flush_or_discard() -> None:
  """Flushes standard output and error; discards what cannot be written."""
  for file in (sys.stdout, sys.stderr):
    if file is None or file.closed:
      continue
    try:
      file.flush()
    except OSError:
      _discard(file)


def _discard(file: TextIO) -> None:
  """Discards what is in a file's buffer and all later output to the file."""
  with open(os.devnull, 'w') as nowhere:
    os.dup2(nowhere.fileno(), file.fileno())


class FrameRate:
  """Environment frames per second, and the time left."""

  def __init__(
    self,
    num_environment_frames: int = 0,
    recent_secs: float = 30.0,
    monotonic: Callable[[], float] = time.monotonic,
  ):
    """Starts the clock.

    Args:
      num_environment_frames: frames trained before (a resumed run).
      recent_secs: the length of the window of `recent`, in seconds.
      monotonic: the clock, in seconds.
    """
    self._monotonic = monotonic
    self._recent_secs = recent_secs
    self._first = (monotonic(), int(num_environment_frames))
    self._marks = collections.deque([self._first])

  def update(self, num_environment_frames: int) -> float:
    """Records the frames so far; returns frames/s since the last call."""
    mark = (self._monotonic(), int(num_environment_frames))
    rate = _rate(self._marks[-1], mark)
    self._marks.append(mark)
    # Keeps the newest mark that is at least `recent_secs` old.
    while self._marks[1][0] <= mark[0] - self._recent_secs:
      self._marks.popleft()
    return rate

  @property
  def recent(self) -> float:
    """Frames/s over about the last `recent_secs`, up to the last update."""
    return _rate(self._marks[0], self._marks[-1])

  @property
  def overall(self) -> float:
    """Frames/s since the start of this process, up to the last update."""
    return _rate(self._first, self._marks[-1])

  def seconds_left(self, total_environment_frames: int) -> float | None:
    """Returns the time to `total_environment_frames` at the recent speed.

    Args:
      total_environment_frames: the budget.

    Returns:
      Seconds; 0 if the budget is spent, None if no frames are being trained.
    """
    frames_left = total_environment_frames - self._marks[-1][1]
    if frames_left <= 0:
      return 0.0
    return frames_left / self.recent if self.recent > 0 else None


def bottleneck(queue_size: float, queue_capacity: int) -> str:
  """Returns what limits the speed, judged by how full the learner's queue is.

  Unrolls wait in the queue only if the learner is slower than the actors. If it
  is less than a third full, the learner waits for the actors, and more actors
  help. If it is more than two thirds full, the actors wait for the learner: a
  faster learner helps, and more actors do not.

  Args:
    queue_size: unrolls in the queue, the mean over an interval.
    queue_capacity: the most unrolls that the queue holds.

  Raises:
    ValueError: the capacity is not positive.
  """
  if queue_capacity <= 0:
    raise ValueError(f'queue_capacity must be positive, not {queue_capacity}.')
  if queue_size < queue_capacity / 3:
    return 'the actors are the limit'
  if queue_size > queue_capacity * 2 / 3:
    return 'the learner is the limit'
  return 'balanced'


def progress_line(
  num_environment_frames: int,
  total_environment_frames: int,
  frames_per_second: float,
  seconds_left: float | None,
  score: str,
  queue_size: float,
  queue_capacity: int,
  about_actors: str = '',
) -> str:
  """Returns the progress of a run as one line, without a newline.

  Args:
    num_environment_frames: frames trained so far.
    total_environment_frames: the budget.
    frames_per_second: environment frames per second.
    seconds_left: see `FrameRate.seconds_left`.
    score: the agent's score, e.g. 'return (last 100) 3.5'.
    queue_size: see `bottleneck`.
    queue_capacity: see `bottleneck`.
    about_actors: e.g. '3 of 4 actors play'.
  """
  done = num_environment_frames / max(total_environment_frames, 1)
  left = '-' if seconds_left is None else format_duration(seconds_left)
  return (
    f'{format_count(num_environment_frames):>7} /'
    f' {format_count(total_environment_frames)} frames ({done:.1%})'
    f' | {frames_per_second:,.0f} frames/s'
    f' | {left} left'
    f' | {score}'
    f' | queue {queue_size:.0f}/{queue_capacity}:'
    f' {bottleneck(queue_size, queue_capacity)}'
    f'{about_actors and " | " + about_actors}'
  )


def startup_block(
  task: str,
  agent: str,
  devices: str,
  total_environment_frames: int,
  first_frame: int,
  logdir: str | os.PathLike,
  checkpoint_dir: str | os.PathLike,
  environment_settings: Mapping[str, Any],
) -> str:
  """Returns the text at the start of a run: what runs, and how to stop it.

  Args:
    task: what the agent is trained on, e.g. 'pong' or 'dmlab30 (30 levels)'.
    agent: e.g. 'deep network with LSTM, 1.6M parameters'.
    devices: e.g. '1 GPU, 16 cores'.
    total_environment_frames: the budget.
    first_frame: environment frames trained before; 0 for a new run.
    logdir: where the metrics go.
    checkpoint_dir: where the checkpoints go.
    environment_settings: value by name, e.g. {'sticky actions': 0.0}.

  Returns:
    Several lines, the last without a newline.
  """
  logdir = os.path.abspath(logdir)
  frames = f'{total_environment_frames:,} environment frames'
  if first_frame:
    frames += f', continuing from {first_frame:,}'
  rows = [
    ('agent', agent),
    ('devices', devices),
    ('budget', frames),
    ('logs', logdir),
    ('checkpoints', os.path.abspath(checkpoint_dir)),
    ('watch', f'tensorboard --logdir={shlex.quote(logdir)}'),
    ('stop', 'Ctrl-C saves and ends; the same command resumes'),
  ]
  # One line per setting, so that none is lost in a long line.
  for index, (name, value) in enumerate(environment_settings.items()):
    rows.append(('' if index else 'environment', f'{name}: {value}'))
  return '\n'.join(
    [f'IMPALA on {task}', *(f'  {name:<12} {text}' for name, text in rows)]
  )


def format_count(count: float) -> str:
  """Returns a count with three digits: 999, 12.3k, 1.23M, 200M, 1.00B."""
  for unit, suffix in ((1e9, 'B'), (1e6, 'M'), (1e3, 'k')):
    # From 999.5 on, the smaller unit would round to four digits.
    if count >= 0.9995 * unit:
      scaled = count / unit
      decimals = 2 if scaled < 9.995 else 1 if scaled < 99.95 else 0
      return f'{scaled:.{decimals}f}{suffix}'
  return f'{count:.0f}'


def format_duration(seconds: float) -> str:
  """Returns a duration in its largest units: 45s, 12m 05s, 2d 03h."""
  minutes, seconds = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  days, hours = divmod(hours, 24)
  if days:
    return f'{days}d {hours:02}h'
  if hours:
    return f'{hours}h {minutes:02}m'
  if minutes:
    return f'{minutes}m {seconds:02}s'
  return f'{seconds}s'


def _rate(start: tuple[float, int], end: tuple[float, int]) -> float:
  """Returns frames/s between two (seconds, frames); 0 if no time has passed."""
  seconds = end[0] - start[0]
  return (end[1] - start[1]) / seconds if seconds > 0 else 0.0
