"""Atari games as the paper plays them (appendix G), many at once."""

import collections
from collections.abc import Iterable, Iterator, Sequence
import dataclasses
import inspect
from typing import Any

import ale_py
from ale_py import roms
from ale_py import vector_env
import gymnasium
import numpy as np

import environments
import levels
from runtime import errors

_STACK = 4
_ALL_ACTIONS = tuple(ale_py.Action.__members__)


@dataclasses.dataclass(frozen=True)
class AtariSettings:
  """How games are played; the defaults are the paper's (appendix G).

  Attributes:
    frames_per_step: frames for which an action is repeated. The observation is
      the maximum of the last two, in grey, scaled to 84 x 84, stacked with the
      images of the three steps before.
    max_noops: an episode starts with 1 to this many no-ops, each of one frame,
      drawn uniformly; 0 for none.
    max_episode_frames: an episode is cut after this many frames (the default is
      half an hour).
    repeat_action_probability: of an action being ignored and the last one taken
      again ("sticky actions").
    full_action_set: use all 18 actions of the console, not only those of the
      game. Runs of several games always do. Actions that a game does not have
      (9 of them in skiing) are no-ops there.
    bootstrap_at_time_limit: whether a game that is cut ends with its last
      observation, see environments.StepOutputInfo, in training. Otherwise it
      ends like any other.
    num_threads: threads that step games; None for one per usable core.
  """

  frames_per_step: int = 4
  max_noops: int = 30
  max_episode_frames: int = 108_000
  repeat_action_probability: float = 0.0
  full_action_set: bool = False
  bootstrap_at_time_limit: bool = True
  num_threads: int | None = None

  def __post_init__(self):
    if self.frames_per_step < 1:
      raise errors.SettingError(
        f'frames_per_step must be at least 1, got {self.frames_per_step}.'
      )
    if self.max_noops < 0:
      raise errors.SettingError(
        f'max_noops must not be negative, got {self.max_noops}.'
      )
    if self.max_episode_frames < self.frames_per_step:
      raise errors.SettingError(
        f'max_episode_frames must be at least frames_per_step '
        f'({self.frames_per_step}), got {self.max_episode_frames}.'
      )
    if not 0 <= self.repeat_action_probability < 1:
      raise errors.SettingError(
        f'repeat_action_probability must be in [0, 1), got '
        f'{self.repeat_action_probability}.'
      )


class AtariEnvironments(environments.Environments):
  """Atari games, stepped by the emulator's own threads.

  The environments form groups of at most max_batch. A whole group is stepped
  while the policy works on another, so emulation and inference overlap. (The
  emulator can also return whichever environments are ready, but then none can
  be restarted, as `_AtariGroup` must; and runs would not be reproducible.)
  """

  def __init__(
    self,
    level_names: Sequence[str],
    num_envs: int,
    seed: int | Sequence[int],
    *,
    training: bool,
    max_batch: int | None = None,
    settings: AtariSettings | None = None,
  ):
    """Loads the games; the first `recv` starts them.

    Args:
      level_names: games, see levels.find_game.
      num_envs: see Environments.
      seed: see Environments.
      training: whether a lost life ends an episode for learning. The game goes
        on, and `info` counts full episodes.
      max_batch: see Environments.
      settings: how games are played; None for the paper's protocol.

    Raises:
      errors.SettingError: there is no such game.
    """
    level_names, self._settings = _resolve(level_names, settings)
    super().__init__(level_names, num_envs, seed, max_batch)
    self._training = training
    self._episodes = environments.EpisodeTotals(num_envs)
    shows_cuts = training and self._settings.bootstrap_at_time_limit
    self._lives = np.zeros([num_envs], np.int32)
    self._groups = []
    for level_name in dict.fromkeys(self.level_names):
      env_ids = np.flatnonzero(np.array(self.level_names) == level_name)
      for start in range(0, len(env_ids), self.max_batch):
        self._groups.append(
          _AtariGroup(
            env_ids[start : start + self.max_batch].astype(np.int32),
            level_name,
            self.seeds,
            _vector_arguments(self._settings),
            shows_cuts,
          )
        )
    self.spec = _make_spec(self._groups[0].action_meanings, self._settings)
    self._in_flight = collections.deque(self._groups)
    self._received = []

  def settings(self) -> dict[str, Any]:
    """Returns the emulator's settings that are not ale-py's own defaults."""
    return _changed_arguments(self._settings)

  def recv(
    self, timeout_secs: float | None = None
  ) -> tuple[np.ndarray, environments.StepOutput]:
    """Waits for the group that was sent its actions first; see Environments.

    Adds the next groups as long as they fit in max_batch. A step takes less
    than a millisecond, so the timeout is not needed here.
    """
    del timeout_secs
    if not self._in_flight:
      raise RuntimeError('No environment is in flight: send actions first.')
    groups = [self._in_flight.popleft()]
    size = len(groups[0].env_ids)
    while self._in_flight:
      size += len(self._in_flight[0].env_ids)
      if size > self.max_batch:
        break
      groups.append(self._in_flight.popleft())
    self._received += groups
    if len(groups) == 1:
      return self._to_outputs(groups[0].env_ids.copy(), *groups[0].recv())
    columns = zip(*(group.recv() for group in groups), strict=True)
    return self._to_outputs(
      np.concatenate([group.env_ids for group in groups]),
      *(np.concatenate(column) for column in columns),
    )

  def _to_outputs(
    self,
    env_ids: np.ndarray,
    rewards: np.ndarray,
    done: np.ndarray,
    truncated: np.ndarray,
    lives: np.ndarray,
    stacks: np.ndarray,
  ) -> tuple[np.ndarray, environments.StepOutput]:
    # The emulator's rewards are integers, so they are finite.
    rewards = rewards.astype(np.float32)
    info, first = self._episodes.add(
      env_ids, rewards, done | truncated, truncated
    )
    done = done | first
    if self._training:
      # Only a decrease is a lost life: some games count up after their start.
      # And 0 lives need not be the end: bank_heist has a last life then.
      done |= lives < self._lives[env_ids]
      self._lives[env_ids] = lives
    observation = environments.Observation(stacks, ())
    return env_ids, environments.StepOutput(rewards, info, done, observation)

  def send(self, actions: np.ndarray, env_ids: np.ndarray) -> None:
    """Lets environments take a step; see Environments."""
    self._check_actions(actions, env_ids)
    start = 0
    while start < len(env_ids):
      group = self._received[0] if self._received else None
      stop = start + (len(group.env_ids) if group else 1)
      if not group or not np.array_equal(env_ids[start:stop], group.env_ids):
        raise ValueError(
          'Send the actions for all environments of a recv together, in the '
          f'order in which recv returned them; got {env_ids.tolist()}.'
        )
      group.send(actions[start:stop])
      self._in_flight.append(self._received.pop(0))
      start = stop

  def close(self) -> None:
    """Ends the emulator's threads."""
    self._groups.clear()
    self._in_flight.clear()
    self._received.clear()


class _AtariGroup:
  """Environments of one game that are stepped together.

  An episode here is always a full one. The emulator's `episodic_life` would
  restart the game where a life is lost; in the paper the game goes on.
  """

  def __init__(
    self,
    env_ids: np.ndarray,
    level_name: str,
    seeds: Sequence[int],
    arguments: dict[str, Any],
    shows_cuts: bool = False,
  ):
    self._shows_cuts = shows_cuts
    self._cut = np.zeros([len(env_ids)], bool)  # By the last step.
    self.env_ids = env_ids
    self.level_name = level_name
    self._seeds = np.array(seeds)[env_ids]
    self._draws_noops = arguments['noop_max'] > 0
    self._started = False
    # With a group for each game of a suite, there would be too many threads.
    num_threads = min(arguments['num_threads'], len(env_ids))
    self._vector = vector_env.AtariVectorEnv(
      level_name, len(env_ids), **arguments | {'num_threads': num_threads}
    )
    own = _find_action_names(self._vector.ale.get_action_set())
    self.action_meanings = _ALL_ACTIONS
    if not arguments['full_action_space']:
      self.action_meanings = own
    # From the run's actions to the game's. An action that the game does not
    # have would hang the emulator for ever.
    self._own_actions = np.array(
      [
        own.index(name) if name in own else own.index('NOOP')
        for name in self.action_meanings
      ],
      np.int32,
    )

  def send(self, actions: np.ndarray) -> None:
    """Starts a step with int32 [n] actions, indices into `action_meanings`."""
    self._vector.send(self._own_actions[actions])

  def recv(self) -> tuple[np.ndarray, ...]:
    """Waits for the step's end.

    Returns:
      int32 [n], rewards; bool [n], whether an episode has ended and the next
      has begun; bool [n], whether a time limit has cut it, see
      environments.StepOutputInfo; int32 [n], lives; and uint8 [n, 4, 84, 84],
      stacks of frames.
    """
    anew, size = self._cut, len(self.env_ids)
    self._cut = np.zeros([size], bool)
    if not self._started:
      self._started = True
      stacks, info = self._vector.reset(seed=self._seeds)
      rewards, done = np.zeros([size], np.int32), np.zeros([size], bool)
      stacks, info = self._draw_again(~done, stacks, info)
      return rewards, done, self._cut, info['lives'], stacks
    stacks, rewards, terminated, truncated, info = self._vector.recv()
    done = terminated | truncated
    last = info.get('final_obs')
    if anew.any():
      # The emulator had begun an episode already, and has stepped it.
      stacks, info = self._vector.reset(options={'reset_mask': anew})
      rewards, done = np.where(anew, 0, rewards), done & ~anew
    if self._shows_cuts and truncated.any():
      self._cut = truncated & ~terminated & ~anew
      done &= ~self._cut
    stacks, info = self._draw_again(done | anew, stacks, info)
    if self._cut.any():
      stacks[self._cut] = last[self._cut]
    # The emulator allocates the stacks anew for each call: no copy is needed.
    return rewards, done, self._cut, info['lives'], stacks

  def _draw_again(
    self, begun: np.ndarray, stacks: np.ndarray, info: dict[str, np.ndarray]
  ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Restarts those new episodes that began without a no-op.

    The emulator draws the number of no-ops from 0 to the maximum, the paper
    from 1. Drawing again after a 0 keeps all others equally likely.
    """
    if not self._draws_noops or not begun.any():
      return stacks, info
    rejected = begun & (info['episode_frame_number'] == 0)
    while rejected.any():
      stacks, info = self._vector.reset(options={'reset_mask': rejected})
      rejected &= info['episode_frame_number'] == 0
    return stacks, info


def find_spec(
  level_names: Sequence[str], settings: AtariSettings | None = None
) -> tuple[environments.EnvironmentSpec, dict[str, Any]]:
  """Returns the spec and `settings()` of environments without making them.

  Args:
    level_names: see AtariEnvironments.
    settings: see AtariEnvironments.

  Raises:
    errors.SettingError: there is no such game.
  """
  level_names, settings = _resolve(level_names, settings)
  action_meanings = _ALL_ACTIONS
  if not settings.full_action_set:
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    ale = ale_py.ALEInterface()
    ale.loadROM(roms.get_rom_path(level_names[0]))
    action_meanings = _find_action_names(ale.getMinimalActionSet())
  return _make_spec(action_meanings, settings), _changed_arguments(settings)


def replay(
  level_name: str,
  seed: int,
  actions: Sequence[int],
  settings: AtariSettings | None = None,
) -> Iterator[tuple[np.ndarray, float, bool]]:
  """Plays an environment's first game again, in colour.

  Args:
    level_name: see levels.find_game.
    seed: the environment's own, see Environments.seeds.
    actions: of the game, from its first on.
    settings: how the game was played; None for the paper's protocol.

  Yields:
    For each action, uint8 [210, 160, 3], the maximum over the last two frames
    before it; its reward; and whether it ended the game.
  """
  arguments = _vector_arguments(settings or AtariSettings())
  arguments |= {'grayscale': False, 'img_height': 210, 'img_width': 160}
  group = _AtariGroup(
    np.zeros([1], np.int32), levels.find_game(level_name), [seed], arguments
  )
  *_, stacks = group.recv()
  for action in actions:
    frame = stacks[0, -1]
    group.send(np.array([action]))
    rewards, over, *_, stacks = group.recv()
    yield frame, float(rewards[0]), bool(over[0])


def _resolve(
  level_names: Sequence[str], settings: AtariSettings | None
) -> tuple[list[str], AtariSettings]:
  """Returns the names of the games' ROMs, and complete settings."""
  level_names = [levels.find_game(name) for name in level_names]
  settings = settings or AtariSettings()
  # All names count, even if there are too few environments for some.
  if len(set(level_names)) > 1:
    settings = dataclasses.replace(settings, full_action_set=True)
  return level_names, settings


def _make_spec(
  action_meanings: tuple[str, ...], settings: AtariSettings
) -> environments.EnvironmentSpec:
  return environments.EnvironmentSpec(
    frame_shape=(84, 84),
    frame_dtype=np.dtype(np.uint8),
    num_actions=len(action_meanings),
    frames_per_step=settings.frames_per_step,
    stack=_STACK,
    action_meanings=action_meanings,
  )


def _find_action_names(actions: Iterable[ale_py.Action]) -> tuple[str, ...]:
  return tuple(action.name for action in actions)


def _changed_arguments(settings: AtariSettings) -> dict[str, Any]:
  """Returns the emulator's arguments that differ from ale-py's defaults."""
  signature = inspect.signature(vector_env.AtariVectorEnv.__init__)
  return {
    name: value
    for name, value in _vector_arguments(settings).items()
    if value != signature.parameters[name].default
  }


def _vector_arguments(settings: AtariSettings) -> dict[str, Any]:
  """Returns the emulator's arguments."""
  return {
    'autoreset_mode': gymnasium.vector.AutoresetMode.SAME_STEP,
    'frameskip': settings.frames_per_step,
    'full_action_space': settings.full_action_set,
    'max_num_frames_per_episode': settings.max_episode_frames,
    # The emulator draws from 0 to noop_max - 1; a group draws again for 0.
    'noop_max': settings.max_noops + 1 if settings.max_noops else 0,
    'num_threads': settings.num_threads or environments.count_cores(),
    'repeat_action_probability': settings.repeat_action_probability,
    'reward_clipping': False,
    'stack_num': _STACK,
    'use_fire_reset': False,
  }
