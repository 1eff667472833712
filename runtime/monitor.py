"""Monitors a run: writes metrics to disk, and progress to the screen."""

from collections.abc import Mapping, Sequence

import numpy as np

import learner
import levels
from runtime import console
from runtime import metrics


class Monitor:
  """Keeps the last update's scalars, writes metrics and prints progress."""

  def __init__(
    self,
    logdir: str,
    level_names: Sequence[str],
    frames_per_step: int,
    first_frame: int,
    total_environment_frames: int,
    queue_capacity: int,
  ):
    """Opens the metrics files.

    Args:
      logdir: where to write metrics.
      level_names: the levels of the run, by level index.
      frames_per_step: environment frames per agent step.
      first_frame: environment frames trained before.
      total_environment_frames: the budget.
      queue_capacity: the queue's capacity, in unrolls.

    Raises:
      OSError: the metrics cannot be written.
    """
    self._episodes = metrics.Episodes()
    self._logger = metrics.Logger(logdir, first_frame)
    self._rate = console.FrameRate(first_frame)
    self._levels = level_names
    self._frames_per_step = frames_per_step
    self._total = total_environment_frames
    self._queue_capacity = queue_capacity
    self._queue_sizes = []
    self._scalars = {}
    self.num_environment_frames = first_frame

  def on_update(self, result: learner.UpdateResult) -> None:
    """Records an update; called by the learner's thread."""
    self._scalars = result.scalars
    self.num_environment_frames = int(result.num_environment_frames)
    # Step 0 is the last step of the previous unroll, and was counted there.
    info = result.info
    for t, b in np.argwhere(info.episode_done[1:]):
      self._episodes.add(
        self._levels[result.level_index[b]],
        float(info.episode_return[t + 1, b]),
        int(info.episode_step[t + 1, b]) * self._frames_per_step,
      )

  def sample_queue(self, size: int) -> None:
    """Records how many unrolls are in the queue."""
    self._queue_sizes.append(size)

  def report(self, about_actors: str = '') -> None:
    """Writes metrics and prints the progress line, with `about_actors`."""
    frames = self.num_environment_frames
    queue_size = float(np.mean(self._queue_sizes or [0]))
    self._queue_sizes = []
    speed = self._rate.update(frames)
    suite_scores = levels.suite_scores(
      self._levels, self._episodes.last_returns(), 'training'
    )
    if self._scalars:
      scalars = self._scalars | self._episodes.scalars()
      scalars |= {'frames_per_second': speed, 'queue_size': queue_size}
      scalars |= suite_scores
      self._logger.write(scalars, frames)
    line = console.progress_line(
      frames,
      self._total,
      speed,
      self._rate.seconds_left(self._total),
      self._describe_score(suite_scores),
      queue_size,
      self._queue_capacity,
      about_actors,
    )
    console.say(line)

  def _describe_score(self, suite_scores: Mapping[str, float]) -> str:
    for tag, value in suite_scores.items():
      return f'{tag} {value:.1f} %'
    mean_return = self._episodes.mean_return()
    text = '-' if mean_return is None else f'{mean_return:,.1f}'
    return f'return (last 100) {text}'

  def close(self) -> None:
    """Closes the files."""
    self._logger.close()
