"""The curves of a run: TensorBoard event files and metrics.jsonl.

Everything is counted in environment frames, not in agent steps. Event files are
written record by record, without TensorFlow, so that a full disk costs a few
points of a curve, and does not end the run.
"""

import collections
from collections.abc import Callable, Iterable, Mapping
import contextlib
import io
import json
import math
import os
import pathlib
import re
import socket
import threading
import time

from tensorboard.compat.proto import event_pb2
from tensorboard.compat.proto import summary_pb2
from tensorboard.summary.writer import record_writer

from runtime import console
from runtime import run_folder

# The number of finished episodes in a "mean_100".
WINDOW = 100

# TensorBoard shows the description with every plot. It calls the axis "step",
# which could mean anything.
_METADATA = summary_pb2.SummaryMetadata(
  summary_description='The horizontal axis (step) counts environment frames.',
  plugin_data=summary_pb2.SummaryMetadata.PluginData(plugin_name='scalars'),
  data_class=summary_pb2.DATA_CLASS_SCALAR,
)
# TensorBoard's names for event files; the number is seconds since 1970.
_EVENT_FILE = re.compile(r'events\.out\.tfevents\.(\d+(?:\.\d+)?)\.')


class Episodes:
  """Finished episodes by level; any thread may add or read them."""

  def __init__(self):
    self._lock = threading.Lock()
    self._all_returns = collections.deque(maxlen=WINDOW)
    self._returns = collections.defaultdict(
      lambda: collections.deque(maxlen=WINDOW)
    )
    self._counts = collections.Counter()
    # By level, [episodes, sum of returns, sum of frames] since the last call of
    # `scalars`. Sums, not lists: they stay small even if it is never called.
    self._news = {}

  def add(
    self, level_name: str, episode_return: float, episode_frames: int
  ) -> None:
    """Adds a finished episode.

    Args:
      level_name: the first part of the tags, e.g. 'pong'.
      episode_return: the undiscounted sum of unclipped rewards.
      episode_frames: the length in environment frames.
    """
    episode_return = float(episode_return)
    with self._lock:
      self._all_returns.append(episode_return)
      self._returns[level_name].append(episode_return)
      self._counts[level_name] += 1
      news = self._news.setdefault(level_name, [0, 0.0, 0])
      news[0] += 1
      news[1] += episode_return
      news[2] += int(episode_frames)

  def scalars(self) -> dict[str, float]:
    """Returns scalars of the episodes finished since the last call, by tag.

    A level without new episodes has no tags. For the others:
      <level>/episode_return, <level>/episode_frames: means of new episodes.
      <level>/episodes: the number of new episodes.
      <level>/episode_return_mean_100: mean over the level's last 100 episodes.
      episode_return_mean_100: mean over the last 100 episodes of all levels.
    """
    scalars = {}
    with self._lock:
      for level_name, (episodes, returns, frames) in self._news.items():
        scalars[f'{level_name}/episode_return'] = returns / episodes
        scalars[f'{level_name}/episode_frames'] = frames / episodes
        scalars[f'{level_name}/episodes'] = episodes
        scalars[f'{level_name}/episode_return_mean_100'] = _mean(
          self._returns[level_name]
        )
      if self._news:
        scalars['episode_return_mean_100'] = _mean(self._all_returns)
      self._news = {}
    return scalars

  def mean_return(self, level_name: str | None = None) -> float | None:
    """Returns the mean return of the last 100 episodes, None if there are none.

    Args:
      level_name: the level, or None for all levels together.
    """
    with self._lock:
      if level_name is None:
        return _mean(self._all_returns)
      return _mean(self._returns.get(level_name, ()))

  def last_returns(self) -> dict[str, list[float]]:
    """Returns the returns of each level's last 100 episodes, oldest first."""
    with self._lock:
      return {name: list(values) for name, values in self._returns.items()}

  def count(self, level_name: str | None = None) -> int:
    """Returns the number of finished episodes of a level, or (None) of all."""
    with self._lock:
      if level_name is None:
        return self._counts.total()
      return self._counts[level_name]


class Logger:
  """Writes scalars to a TensorBoard event file and to `metrics.jsonl`.

  Each line of `metrics.jsonl` is one JSON object:
    num_environment_frames: int, also the step in TensorBoard.
    wall_time: float, seconds since 1970. It never decreases: if the clock is
      behind the earlier lines, as on another machine, it counts on from them.
    train_secs: float, seconds trained so far, including earlier starts with
      the same log directory.
    <tag>: float, or null if the value is NaN or infinite.

  A log directory may be used by one Logger at a time, and a Logger by one
  thread.
  """

  def __init__(
    self,
    logdir: str | os.PathLike,
    first_frame: int = 0,
    monotonic: Callable[[], float] = time.monotonic,
  ):
    """Opens the files; removes what was logged after the last checkpoint.

    A run resumes from its last checkpoint, which is older than its last log
    line. Lines after `first_frame` are deleted, and TensorBoard is told to
    ignore the points (they stay in the old event file).

    Args:
      logdir: the log directory; made if it does not exist.
      first_frame: environment frames trained before, from the checkpoint.
      monotonic: the clock, in seconds.

    Raises:
      OSError: the directory cannot be written to. Later failures only cause
        warnings.
    """
    logdir = pathlib.Path(logdir)
    logdir.mkdir(parents=True, exist_ok=True)
    self._monotonic = monotonic
    self._start = monotonic()
    self._failing = False
    self._described = set()

    lines_path = logdir / 'metrics.jsonl'
    self._earlier_secs, last_time = _rewind(lines_path, first_frame)
    last_time = max(last_time, _find_newest_start(logdir))
    now = time.time()
    # How far the clock is behind what was logged before.
    self._behind_secs = last_time + 1 - now if last_time >= now else 0.0
    self._last_time = last_time
    self._lines = _AppendFile(lines_path)
    # TensorBoard reads the files in the order of their names: microseconds keep
    # quick restarts in order.
    start = self._wall_time()
    self._events = _AppendFile(
      logdir / f'events.out.tfevents.{start:.6f}.{socket.gethostname()}'
    )
    self._events.append(
      _event_record(wall_time=start, file_version='brain.Event:2')
    )
    self._events.append(
      _event_record(
        wall_time=start,
        step=first_frame + 1,  # The first step to ignore.
        session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START),
      )
    )

  def write(
    self, scalars: Mapping[str, float], num_environment_frames: int
  ) -> None:
    """Writes one point of each curve, without buffering.

    If the disk fails, it warns once, drops the point and retries at the next
    call: training matters more than its curves.

    Args:
      scalars: value by tag; any type that `float` accepts.
      num_environment_frames: environment frames trained so far.
    """
    frames = int(num_environment_frames)
    scalars = {tag: float(value) for tag, value in scalars.items()}
    now = self._wall_time()
    train_secs = self._earlier_secs + self._monotonic() - self._start
    try:
      self._lines.append(_json_line(scalars, frames, now, train_secs))
      self._events.append(
        _event_record(
          wall_time=now, step=frames, summary=self._summary(scalars)
        )
      )
    except OSError as error:
      if not self._failing:
        console.warn(
          f'cannot write metrics ({error}). Training goes on; points are lost '
          'until writing works again.'
        )
      self._failing = True
    else:
      self._failing = False

  def _wall_time(self) -> float:
    """Returns seconds since 1970, never less than before."""
    now = time.time() + self._behind_secs
    self._last_time = max(self._last_time, now)
    return self._last_time

  def close(self) -> None:
    """Closes the files. No data is lost without it."""
    self._lines.close()
    self._events.close()

  def _summary(self, scalars: Mapping[str, float]) -> summary_pb2.Summary:
    """Returns the scalars in TensorBoard's format."""
    summary = summary_pb2.Summary()
    for tag, scalar in scalars.items():
      value = summary.value.add(tag=tag, simple_value=scalar)
      # TensorBoard takes the metadata of a curve from its first point.
      if tag not in self._described:
        value.metadata.CopyFrom(_METADATA)
        self._described.add(tag)
    return summary


class _AppendFile:
  """A file of complete records, even if the disk fails while writing one."""

  def __init__(self, path: pathlib.Path):
    # Unbuffered: when `append` returns, the record is written, and a failure
    # appears here and not at some later flush.
    self._file = open(path, 'ab', buffering=0)

  def append(self, record: bytes) -> None:
    """Appends a record, or raises OSError and leaves the file as it was."""
    end = self._file.seek(0, os.SEEK_END)
    rest = memoryview(record)
    try:
      while rest:
        rest = rest[self._file.write(rest) :]
    except OSError:
      with contextlib.suppress(OSError):
        self._file.truncate(end)
      raise

  def close(self) -> None:
    self._file.close()


def _rewind(path: pathlib.Path, first_frame: int) -> tuple[float, float]:
  """Deletes broken lines of a metrics file, and those after `first_frame`.

  Args:
    path: a `metrics.jsonl`; nothing happens if it does not exist.
    first_frame: environment frames of the last line to keep.

  Returns:
    Seconds trained up to the last line kept, and the latest wall time of all
    lines, deleted ones included; 0 if there are none.
  """
  train_secs = last_time = 0.0
  if not path.exists():
    return train_secs, last_time
  with open(path, 'rb') as old, run_folder.replacing(path) as new:
    for line in old:
      try:
        frames, secs, wall_time = _read_times(line)
      except (ValueError, KeyError, TypeError, OverflowError):
        continue  # Incomplete: the process was killed while writing it.
      last_time = max(last_time, wall_time)
      if frames <= first_frame:
        train_secs = secs
        new.write(line.rstrip(b'\n') + b'\n')
  return train_secs, last_time


def _read_times(line: bytes) -> list[float]:
  """Returns frames, seconds trained and wall time of a line; or raises."""
  row = json.loads(line)
  names = ('num_environment_frames', 'train_secs', 'wall_time')
  times = [row[name] for name in names]
  if not all(map(math.isfinite, times)):
    raise ValueError(f'Not finite: {times}.')
  return times


def _find_newest_start(logdir: pathlib.Path) -> float:
  """Returns the latest time in the names of event files; 0 if there are none.

  Args:
    logdir: the log directory.
  """
  matches = (_EVENT_FILE.match(path.name) for path in logdir.iterdir())
  return max((float(match[1]) for match in matches if match), default=0.0)


def _json_line(
  scalars: Mapping[str, float],
  num_environment_frames: int,
  wall_time: float,
  train_secs: float,
) -> bytes:
  """Returns a line of `metrics.jsonl`."""
  row = {
    'num_environment_frames': num_environment_frames,
    'wall_time': round(wall_time, 3),
    'train_secs': round(train_secs, 3),
  }
  for tag, value in scalars.items():
    row[tag] = value if math.isfinite(value) else None
  return (json.dumps(row, allow_nan=False) + '\n').encode()


def _event_record(**fields) -> bytes:
  """Returns an `Event` as a record of an event file."""
  record = io.BytesIO()
  record_writer.RecordWriter(record).write(
    event_pb2.Event(**fields).SerializeToString()
  )
  return record.getvalue()


def _mean(values: Iterable[float]) -> float | None:
  """Returns the mean, None if there are no values."""
  values = list(values)
  return math.fsum(values) / len(values) if values else None
