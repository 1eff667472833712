"""The contract of all environments.

`envs.make.make_environments` returns E environments. `recv` returns the outputs
of those that are ready, with their ids, and `send` starts their next step:

  envs = make.make_environments(['pong'], num_envs=32, seed=1, training=True)
  while True:
    env_ids, env_outputs = envs.recv()
    envs.send(choose_actions(env_ids, env_outputs), env_ids)

Each family has a module in `envs`: `atari`, `lab`, `gym`. Neither they nor this
module may import TensorFlow: environments run in processes without it.

An episode that a time limit cuts need not count as ended: if the family can
show the last observation, an environment may return it, and the first of the
next episode one step later. See `StepOutputInfo.truncated`.
"""

import abc
from collections.abc import Sequence
import dataclasses
import os
from typing import Any, NamedTuple

import numpy as np

from envs import instructions


class StepOutputInfo(NamedTuple):
  """Totals of the full episode so far; n environments are ready.

  Attributes:
    episode_return: float32 [n], the sum of all rewards, unclipped.
    episode_step: int32 [n], agent steps.
    episode_done: bool [n], whether the full episode is over: the other two are
      its totals then. It differs from `done` where a lost life ends an episode
      for learning, in an environment's very first output, and where the episode
      was truncated.
    truncated: bool [n], whether a time limit has cut the episode, whose last
      observation this is: its value tells what was still to come. `done` is
      false. Whatever the next action is, it begins the next episode, in an
      output like an environment's very first one; nothing is learnt from it.
  """

  episode_return: np.ndarray
  episode_step: np.ndarray
  episode_done: np.ndarray
  truncated: np.ndarray


class Observation(NamedTuple):
  """What the agent sees.

  Attributes:
    frame: [n, ...], the image or vector, or a stack of images, see
      EnvironmentSpec.
    instruction: int16 [n, instructions.MAX_WORDS], see instructions.hash_words;
      `()` in environments without instructions.
    vector: float32 [n, D], numbers beside an image; `()` in environments
      without them.
  """

  frame: np.ndarray
  instruction: np.ndarray | tuple
  vector: np.ndarray | tuple = ()

  def arrays(self) -> list[np.ndarray]:
    """Returns the parts that there are, as `tf.nest.flatten` does, but fast."""
    return [part for part in self if len(part)]


class StepOutput(NamedTuple):
  """The result of a step.

  Where `done` is true, the observation is the first of the next episode, while
  the reward and the info belong to the episode that has ended. The very first
  output of an environment has `done` true, reward 0 and an info of zeros.

  Attributes:
    reward: float32 [n], unclipped.
    info: a StepOutputInfo.
    done: bool [n], whether the episode ended with this reward.
    observation: an Observation.
  """

  reward: np.ndarray
  info: StepOutputInfo
  done: np.ndarray
  observation: Observation


def flatten(outputs: StepOutput) -> list[np.ndarray]:
  """Returns all arrays of a StepOutput, as `tf.nest.flatten` does, but fast."""
  observation = outputs.observation.arrays()
  return [outputs.reward, *outputs.info, outputs.done, *observation]


@dataclasses.dataclass(frozen=True)
class EnvironmentSpec:
  """What all environments of one run have in common.

  Attributes:
    frame_shape: the shape of one frame, which is an image or a vector.
    frame_dtype: np.uint8 for images with values from 0 to 255, np.float32 for
      others and for vectors.
    num_actions: actions are 0 to num_actions - 1.
    frames_per_step: environment frames in one agent step (action repeats).
    stack: S, how many successive frames the agent sees at once. If S > 1, an
      observation contains all of them: [S, *frame_shape], oldest first. Those
      from before the full episode are blank; a lost life blanks nothing.
    action_meanings: the actions' names, or None.
    has_instruction: whether observations contain an instruction in words.
    vector_size: D, how many numbers observations contain beside an image.
  """

  frame_shape: tuple[int, ...]
  frame_dtype: np.dtype
  num_actions: int
  frames_per_step: int
  stack: int
  action_meanings: tuple[str, ...] | None
  has_instruction: bool = False
  vector_size: int = 0

  @property
  def observation_shape(self) -> tuple[int, ...]:
    """The shape of an observation's frame, or stack of frames."""
    if self.stack == 1:
      return self.frame_shape
    return (self.stack, *self.frame_shape)

  @property
  def observation_arrays(self) -> list[tuple[tuple[int, ...], np.dtype]]:
    """The shape and dtype of each array of one observation."""
    arrays = [(self.observation_shape, self.frame_dtype)]
    if self.has_instruction:
      arrays.append(((instructions.MAX_WORDS,), np.dtype(np.int16)))
    if self.vector_size:
      arrays.append(((self.vector_size,), np.dtype(np.float32)))
    return arrays

  def to_observation(self, arrays: Sequence[np.ndarray]) -> Observation:
    """Returns the arrays, in the order of `observation_arrays`, by name."""
    frame, *others = arrays
    return Observation(
      frame,
      others.pop(0) if self.has_instruction else (),
      others.pop(0) if self.vector_size else (),
    )


class Environments(abc.ABC):
  """E environments of one family.

  Attributes:
    spec: an EnvironmentSpec.
    num_envs: E.
    max_batch: the most environments that one `recv` returns.
    level_names: E names; environment i plays level_names[i].
    seeds: E ints, one for each environment.
  """

  spec: EnvironmentSpec

  def __init__(
    self,
    level_names: Sequence[str],
    num_envs: int,
    seed: int | Sequence[int],
    max_batch: int | None = None,
  ):
    """Checks and keeps what all families share.

    Args:
      level_names: levels, at least one; environments take them round robin.
      num_envs: E.
      seed: the environments' own seeds are derived from it. Actors of one run
        need different ones, such as [seed, actor].
      max_batch: see above; None for half the environments, so that one half
        steps while the policy works on the other.

    Raises:
      ValueError: a number is out of range.
    """
    if num_envs < 1:
      raise ValueError(f'num_envs must be at least 1, got {num_envs}.')
    if max_batch is None:
      max_batch = -(-num_envs // 2)
    if not 1 <= max_batch <= num_envs:
      raise ValueError(
        f'max_batch must be from 1 to num_envs ({num_envs}), got {max_batch}.'
      )
    self.num_envs = num_envs
    self.max_batch = max_batch
    self.level_names = [
      level_names[i % len(level_names)] for i in range(num_envs)
    ]
    # The emulator and Gymnasium take non-negative 31-bit Python ints.
    states = np.random.SeedSequence(seed).generate_state(num_envs)
    self.seeds = [int(state >> 1) for state in states]

  @abc.abstractmethod
  def recv(
    self, timeout_secs: float | None = None
  ) -> tuple[np.ndarray, StepOutput]:
    """Waits for environments that are ready for their next action.

    Args:
      timeout_secs: the longest wait, in families whose environments can be
        slow; None waits for ever.

    Returns:
      int32 [n], the environments' ids, and a StepOutput. The arrays belong to
      the caller. n is from 1 to max_batch, or 0 after a timeout.

    Raises:
      py_process.EnvironmentFailed: an environment raised, died, or returned a
        reward or an observation that is not finite or too large.
      RuntimeError: no environment is in flight.
    """

  @abc.abstractmethod
  def send(self, actions: np.ndarray, env_ids: np.ndarray) -> None:
    """Starts a step of environments; does not wait for it.

    Args:
      actions: int32 [n].
      env_ids: int32 [n], as the last `recv` returned them.

    Raises:
      ValueError: an action is out of range, or an environment is not ready.
    """

  @abc.abstractmethod
  def close(self) -> None:
    """Ends all environments; a second call does nothing.

    No other thread may be in `recv` or `send`.
    """

  def settings(self) -> dict[str, Any]:
    """Returns the settings of the underlying library, for the log of a run."""
    return {}

  def _check_actions(self, actions: np.ndarray, env_ids: np.ndarray) -> None:
    """Raises ValueError for actions that no environment may get."""
    if actions.shape != env_ids.shape or actions.ndim != 1:
      raise ValueError(
        f'Expected one action for each of {len(env_ids)} environments, got '
        f'shape {actions.shape}.'
      )
    if actions.dtype.kind not in 'iu':
      raise ValueError(f'Actions must be integers, got {actions.dtype}.')
    # An action out of range would hang the Atari emulator for ever.
    wrong = (actions < 0) | (actions >= self.spec.num_actions)
    if wrong.any():
      got = [
        f'{action} for environment {env_id} ({self.level_names[env_id]})'
        for action, env_id in zip(actions[wrong], env_ids[wrong], strict=True)
      ]
      raise ValueError(
        f'Actions must be from 0 to {self.spec.num_actions - 1}, got '
        f'{", ".join(got)}.'
      )


class EpisodeTotals:
  """Adds up each environment's return and steps over full episodes."""

  def __init__(self, num_envs: int):
    self._returns = np.zeros([num_envs], np.float64)
    self._steps = np.zeros([num_envs], np.int32)
    self._started = np.zeros([num_envs], bool)

  def add(
    self,
    env_ids: np.ndarray,
    rewards: np.ndarray,
    episode_done: np.ndarray,
    truncated: np.ndarray | None = None,
  ) -> tuple[StepOutputInfo, np.ndarray]:
    """Adds one step of each of n environments.

    Args:
      env_ids: int32 [n].
      rewards: float32 [n].
      episode_done: bool [n], whether a full episode is over.
      truncated: bool [n], see StepOutputInfo; only true where episode_done is.
        None if no time limit is shown.

    Returns:
      The totals including this step, and bool [n]: whether this output is the
      very first of the environment, or as if it were. It is not counted as a
      step.
    """
    if truncated is None:
      truncated = np.zeros([len(env_ids)], bool)
    first = ~self._started[env_ids]
    self._returns[env_ids] += rewards
    self._steps[env_ids] += ~first
    info = StepOutputInfo(
      self._returns[env_ids].astype(np.float32),
      self._steps[env_ids],
      episode_done,
      truncated,
    )
    self._started[env_ids] = ~truncated
    finished = env_ids[episode_done]
    self._returns[finished] = 0
    self._steps[finished] = 0
    return info, first


def count_cores() -> int:
  """Returns the number of CPU cores that this process may use."""
  if hasattr(os, 'sched_getaffinity'):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1
