"""What a run leaves to be looked at: event files and metrics.jsonl.

Everything is counted in environment frames, not in agent steps. Nothing here
imports TensorFlow: event files are written record by record, so that a full
disk costs a few points of a curve and not the run.
"""

import collections
from collections.abc import Callable, Iterable, Mapping
import contextlib
import io
import json
import math
import os
import pathlib
import socket
import threading
import time

from tensorboard.compat.proto import event_pb2
from tensorboard.compat.proto import summary_pb2
from tensorboard.summary.writer import record_writer

from runtime import console
from runtime import run_folder

# How many finished episodes a "mean_100" is over.
WINDOW = 100

# TensorBoard shows the description behind the "i" of every plot: "step", as it
# calls the axis, could be anything.
_METADATA = summary_pb2.SummaryMetadata(
  summary_description='The horizontal axis (step) counts environment frames.',
  plugin_data=summary_pb2.SummaryMetadata.PluginData(plugin_name='scalars'),
  data_class=summary_pb2.DATA_CLASS_SCALAR,
)


class Episodes:
  """Finished episodes by level; any thread may add, any may read."""

  def __init__(self):
    self._lock = threading.Lock()
    self._all_returns = collections.deque(maxlen=WINDOW)
    self._returns = collections.defaultdict(
      lambda: collections.deque(maxlen=WINDOW)
    )
    self._counts = collections.Counter()
    # Level: [episodes, sum of returns, sum of frames] since `scalars`. Sums,
    # not lists: they stay small in a process where nobody asks for them.
    self._news = {}

  def add(
    self, level_name: str, episode_return: float, episode_frames: int
  ) -> None:
    """Adds a finished episode.

    Args:
      level_name: the first part of the tags, e.g. 'pong'.
      episode_return: undiscounted sum of the rewards before any clipping.
      episode_frames: length in environment frames.
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
    """Returns the scalars of what finished since the last call, by tag.

    A level with nothing new has no tags. For the others:
      <level>/episode_return, <level>/episode_frames: means of the new ones.
      <level>/episodes: how many are new, the weight of these means.
      <level>/episode_return_mean_100: mean of the level's last 100.
      episode_return_mean_100: mean of the last 100 of all levels.
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
    """Returns the mean return of the last 100 episodes, None before any.

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
    """Returns how many episodes finished, of one level or (None) of all."""
    with self._lock:
      if level_name is None:
        return self._counts.total()
      return self._counts[level_name]


class Logger:
  """Writes scalars to a TensorBoard event file and to `metrics.jsonl`.

  Each line of `metrics.jsonl` is one JSON object:
    num_environment_frames: int, also the step in TensorBoard.
    wall_time: float, seconds since 1970.
    train_secs: float, seconds trained so far, by earlier runs of the same
      log directory too.
    <tag>: float, or null where the value is NaN or infinite.

  A log directory belongs to one Logger at a time, and that to one thread.
  """

  def __init__(
    self,
    logdir: str | os.PathLike,
    first_frame: int = 0,
    monotonic: Callable[[], float] = time.monotonic,
  ):
    """Opens the files; takes back what an earlier run logged too much.

    A run continues from its last checkpoint, which is older than its last log
    line. Lines beyond `first_frame` are deleted, and TensorBoard is told to
    forget the points (they stay in the old event file).

    Args:
      logdir: made if it does not exist.
      first_frame: environment frames trained before, from the checkpoint.
      monotonic: the clock, seconds.

    Raises:
      OSError: if the directory cannot be written. After the start this only
        warns.
    """
    logdir = pathlib.Path(logdir)
    logdir.mkdir(parents=True, exist_ok=True)
    self._monotonic = monotonic
    self._start = monotonic()
    self._failing = False
    self._described = set()

    lines_path = logdir / 'metrics.jsonl'
    self._earlier_secs = _rewind(lines_path, first_frame)
    self._lines = _AppendFile(lines_path)
    # Read in the order of the names: microseconds keep quick restarts in order.
    self._events = _AppendFile(
      logdir / f'events.out.tfevents.{time.time():.6f}.{socket.gethostname()}'
    )
    self._events.append(
      _event_record(wall_time=time.time(), file_version='brain.Event:2')
    )
    self._events.append(
      _event_record(
        wall_time=time.time(),
        step=first_frame + 1,  # The first step to forget.
        session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START),
      )
    )

  def write(
    self, scalars: Mapping[str, float], num_environment_frames: int
  ) -> None:
    """Writes one point of each curve, readable at once.

    If the disk refuses, says so on stderr once, drops the point and tries again
    at the next call: training matters more than its curves.

    Args:
      scalars: value by tag; anything `float` takes.
      num_environment_frames: environment frames trained so far.
    """
    frames = int(num_environment_frames)
    scalars = {tag: float(value) for tag, value in scalars.items()}
    now = time.time()
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
          'until this works again.'
        )
      self._failing = True
    else:
      self._failing = False

  def close(self) -> None:
    """Closes the files. Nothing is lost without it."""
    self._lines.close()
    self._events.close()

  def _summary(self, scalars: Mapping[str, float]) -> summary_pb2.Summary:
    """Returns the scalars as TensorBoard wants them."""
    summary = summary_pb2.Summary()
    for tag, scalar in scalars.items():
      value = summary.value.add(tag=tag, simple_value=scalar)
      # TensorBoard keeps what the first point of a curve says.
      if tag not in self._described:
        value.metadata.CopyFrom(_METADATA)
        self._described.add(tag)
    return summary


class _AppendFile:
  """A file of whole records, even where the disk takes half of one."""

  def __init__(self, path: pathlib.Path):
    # Unbuffered: a record is on its way when `append` returns, and a failure
    # is known here and not at some later flush.
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


def _rewind(path: pathlib.Path, first_frame: int) -> float:
  """Deletes broken lines of a metrics file, and those beyond `first_frame`.

  Args:
    path: a `metrics.jsonl`; nothing happens if there is none.
    first_frame: environment frames of the last line to keep.

  Returns:
    Seconds trained up to the last line kept, 0 without any.
  """
  train_secs = 0.0
  if not path.exists():
    return train_secs
  with open(path, 'rb') as old, run_folder.replacing(path) as new:
    for line in old:
      try:
        row = json.loads(line)
        if row['num_environment_frames'] > first_frame:
          continue
        train_secs = row['train_secs']
      except (ValueError, KeyError, TypeError):
        continue  # Cut off when a process was killed.
      new.write(line.rstrip(b'\n') + b'\n')
  return train_secs


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
  """Returns the mean, None of nothing."""
  values = list(values)
  return math.fsum(values) / len(values) if values else None
