"""Scores a policy: plays full episodes and reports their returns.

Actions are sampled from the policy, as in training, not the most likely ones.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import json
import os
import pathlib
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

import environments
import networks
from runtime import run_folder

_SUMMARIES = ('mean', 'median', 'standard_error', 'min', 'max')


class Recording(NamedTuple):
  """What is needed to play an episode again; see `films.film`.

  Attributes:
    seed: of the environment; the episode was its first.
    actions: int32 [steps].
    episode_return: the sum of the rewards.
  """

  seed: int
  actions: np.ndarray
  episode_return: float


@dataclasses.dataclass(frozen=True)
class LevelScore:
  """The N episodes of one level, in the order in which they began.

  Attributes:
    returns: float64 [N], sums of the rewards, unclipped.
    frames: int64 [N], lengths in environment frames (agent steps times action
      repeats; without the no-ops at the start of an Atari game).
    recording: of the first episode.
  """

  returns: np.ndarray
  frames: np.ndarray
  recording: Recording

  @property
  def mean(self) -> float:
    """The mean return."""
    return float(np.mean(self.returns))

  @property
  def median(self) -> float:
    """The median return."""
    return float(np.median(self.returns))

  @property
  def standard_error(self) -> float | None:
    """The standard error of the mean; None for one episode: it is unknown.

    The sample's standard deviation (N - 1 degrees of freedom) by sqrt(N).
    """
    count = len(self.returns)
    if count == 1:
      return None
    return float(np.std(self.returns, ddof=1) / np.sqrt(count))

  @property
  def min(self) -> float:
    """The worst return."""
    return float(np.min(self.returns))

  @property
  def max(self) -> float:
    """The best return."""
    return float(np.max(self.returns))


def evaluate(
  act: Callable,
  agent: networks.Agent,
  envs: environments.Environments,
  num_episodes: int,
  on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, LevelScore]:
  """Plays N full episodes of each level and scores them.

  The first N episodes to begin count, however long they last: to take the first
  N that end would favour short ones.

  Args:
    act: see `actor.Policy.bind`.
    agent: the agent that `act` runs; it gives the initial state.
    envs: made with `training=False` and not played yet, of one or more levels.
      The caller closes them.
    num_episodes: N, for each level.
    on_progress: called after each episode with the number of episodes that have
      ended and the number to play, both over all levels.

  Returns:
    The score of each level of `envs`, by name.

  Raises:
    ValueError: N is less than 1.
    py_process.EnvironmentFailed: see `environments.Environments.recv`.
  """
  if num_episodes < 1:
    raise ValueError(f'num_episodes must be at least 1, got {num_episodes}.')
  episodes = _Episodes(envs, num_episodes)
  last_actions = np.zeros([envs.num_envs], np.int32)
  # Copies: the parts of an initial state may share one array.
  state = [
    np.array(part)
    for part in tf.nest.flatten(agent.initial_state(envs.num_envs))
  ]
  while True:
    ids, env_outputs = envs.recv()
    if episodes.add(ids, env_outputs.info) and on_progress:
      on_progress(episodes.num_ended, episodes.num_total)
    if episodes.num_ended == episodes.num_total:
      return episodes.scores()
    agent_outputs, new_state = act(
      last_actions[ids], env_outputs, [part[ids] for part in state]
    )
    last_actions[ids] = agent_outputs.action
    for part, new in zip(state, tf.nest.flatten(new_state), strict=True):
      part[ids] = new
    episodes.record(ids, agent_outputs.action)
    envs.send(agent_outputs.action, ids)


def share_out(
  level_names: Sequence[str], num_episodes: int, num_envs: int
) -> Iterator[tuple[Sequence[str], int]]:
  """Groups levels so that no environment is without an episode to play.

  Args:
    level_names: the levels to play.
    num_episodes: the episodes of each level.
    num_envs: the most environments at one time.

  Yields:
    The levels to play at one time, and the number of environments for all of
    them together.
  """
  per_level = min(num_episodes, num_envs)
  at_once = num_envs // per_level
  for start in range(0, len(level_names), at_once):
    group = level_names[start : start + at_once]
    yield group, per_level * len(group)


class _Episodes:
  """Numbers the episodes of each level as they begin; keeps the first N.

  The first episodes begin at the same time. They are numbered in the order of
  the environments, so that which of them count does not depend on timing. An
  environment whose episode has no number plays on and is ignored, because the
  Atari emulator steps its games together.
  """

  def __init__(self, envs: environments.Environments, num_episodes: int):
    self._frames_per_step = envs.spec.frames_per_step
    self._level_names = envs.level_names
    self._seeds = envs.seeds
    self._num_episodes = num_episodes
    self._num_begun = dict.fromkeys(envs.level_names, 0)
    self._returns = {name: np.zeros([num_episodes]) for name in self._num_begun}
    self._frames = {
      name: np.zeros([num_episodes], np.int64) for name in self._num_begun
    }
    self._numbers = [self._begin(name) for name in envs.level_names]
    self.num_ended = 0
    self.num_total = num_episodes * len(self._num_begun)
    # The actions of the first episode of each level, by environment.
    self._actions = {envs.level_names.index(n): [] for n in self._num_begun}
    self._recording = np.isin(np.arange(envs.num_envs), list(self._actions))

  def _begin(self, level_name: str) -> int | None:
    """Returns the number of an episode that begins; None if N have begun."""
    number = self._num_begun[level_name]
    if number == self._num_episodes:
      return None
    self._num_begun[level_name] += 1
    return number

  def add(self, ids: np.ndarray, info: environments.StepOutputInfo) -> bool:
    """Adds one output of each of `ids`; returns whether `num_ended` grew."""
    before = self.num_ended
    for row in np.flatnonzero(info.episode_done):
      env_id = ids[row]
      level_name, number = self._level_names[env_id], self._numbers[env_id]
      if number is not None:
        steps = int(info.episode_step[row])
        self._returns[level_name][number] = info.episode_return[row]
        self._frames[level_name][number] = steps * self._frames_per_step
        self.num_ended += 1
      self._recording[env_id] = False
      self._numbers[env_id] = self._begin(level_name)
    return self.num_ended > before

  def record(self, ids: np.ndarray, actions: np.ndarray) -> None:
    """Records the actions of first episodes."""
    for row in np.flatnonzero(self._recording[ids]):
      self._actions[int(ids[row])].append(actions[row])

  def scores(self) -> dict[str, LevelScore]:
    """Returns the scores, once all episodes have ended."""
    scores = {}
    for env_id, actions in self._actions.items():
      name = self._level_names[env_id]
      returns = self._returns[name]
      recording = Recording(
        self._seeds[env_id], np.array(actions, np.int32), float(returns[0])
      )
      scores[name] = LevelScore(returns, self._frames[name], recording)
    return scores


def table(
  scores: Mapping[str, LevelScore],
  normalize: Callable[[str, float], float] | None = None,
) -> str:
  """Returns the scores as a table with one line per level.

  Args:
    scores: see `evaluate`.
    normalize: returns a level's human-normalized score in percent, from its
      name and mean return; None for levels that do not belong to a suite.
  """
  rows = [('level', 'episodes', *_SUMMARIES, 'mean frames')]
  if normalize:
    rows[0] += ('human-normalized',)
  for name, score in scores.items():
    values = [getattr(score, summary) for summary in _SUMMARIES]
    values = ['-' if value is None else f'{value:,.2f}' for value in values]
    values.append(f'{np.mean(score.frames):,.0f}')
    if normalize:
      values.append(f'{normalize(name, score.mean):,.1f} %')
    rows.append((name, str(len(score.returns)), *values))
  return '\n'.join(_align(rows)).replace('standard_error', 'standard error')


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
  """Returns lines of columns, all but the first aligned to the right."""
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  lines = []
  for first, *others in rows:
    cells = [first.ljust(widths[0])]
    cells += [
      cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)
    ]
    lines.append('  '.join(cells))
  return lines


def write(
  path: str | os.PathLike,
  scores: Mapping[str, LevelScore],
  settings: Mapping[str, Any],
  suite_scores: Mapping[str, float],
) -> None:
  """Writes the scores as strict JSON, all or nothing.

  An object with `settings`, `suite_scores` and `levels`: for each its `mean`,
  `median`, `standard_error` (null for one episode), `min`, `max`, and the
  `returns` and `frames` of all episodes in the order in which they began.

  Args:
    path: the file, replaced if it exists; its directory must exist.
    scores: see `evaluate`.
    settings: values by name, such as the checkpoint, the environment frames it
      was trained for, and the seed. Types that JSON does not have (a path)
      become strings.
    suite_scores: the scores of all levels together, by name; may be empty.

  Raises:
    OSError: the file cannot be written; an older one is untouched then.
    ValueError: a setting is infinite or NaN.
  """
  levels = {
    name: {
      **{summary: getattr(score, summary) for summary in _SUMMARIES},
      'returns': score.returns.tolist(),
      'frames': score.frames.tolist(),
    }
    for name, score in scores.items()
  }
  run_folder.write_json(
    path,
    {
      'settings': dict(settings),
      'suite_scores': dict(suite_scores),
      'levels': levels,
    },
  )


class Progress:
  """The scores of an unfinished evaluation, kept on disk.

  Attributes:
    scores: the score of each level played so far, by name.
  """

  def __init__(self, path: str | os.PathLike, evaluation: Mapping[str, Any]):
    """Reads the scores of an evaluation that was stopped.

    Args:
      path: the file; it need not exist.
      evaluation: all that the scores depend on, values by name. The scores of
        an evaluation with other values are ignored.
    """
    self._path = pathlib.Path(path)
    self._evaluation = json.loads(json.dumps(evaluation, default=str))
    self.scores: dict[str, LevelScore] = {}
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
      left = json.loads(self._path.read_text(encoding='utf-8'))
      if left['evaluation'] == self._evaluation:
        self.scores = {
          name: _from_json(**score) for name, score in left['scores'].items()
        }

  def add(self, scores: Mapping[str, LevelScore]) -> None:
    """Adds the scores of levels and writes all to disk, or raises OSError."""
    self.scores |= scores
    run_folder.write_json(
      self._path,
      {
        'evaluation': self._evaluation,
        'scores': {
          name: {
            'returns': score.returns.tolist(),
            'frames': score.frames.tolist(),
            'seed': score.recording.seed,
            'actions': score.recording.actions.tolist(),
          }
          for name, score in self.scores.items()
        },
      },
    )

  def finish(self) -> None:
    """Removes the file: the evaluation is complete."""
    self._path.unlink(missing_ok=True)


def _from_json(
  returns: list[float], frames: list[int], seed: int, actions: list[int]
) -> LevelScore:
  recording = Recording(seed, np.array(actions, np.int32), returns[0])
  return LevelScore(
    np.array(returns, np.float64), np.array(frames, np.int64), recording
  )
