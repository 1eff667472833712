"""Films an episode: plays its actions again and renders them in colour.

An agent sees small grey images or vectors. So its environment is made a second
time, with the same seed, takes the same actions, and renders.

An environment of Gymnasium runs in a process of its own, as in training. So
nothing here may import TensorFlow.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import functools
import os
import pathlib
import random
from typing import Any

import gymnasium
import imageio_ffmpeg
import numpy as np

from envs import gym
import levels
import py_process
import py_process_worker
from runtime import console

_ATARI_FRAMES_PER_SECOND = 60
_LAB_FRAMES_PER_SECOND = 60
_DEFAULT_GYM_FRAMES_PER_SECOND = 30
# Smaller images are enlarged a whole number of times, up to this width.
_WIDTH = 480

# An image for each action, its reward, and whether it ended the episode.
_Steps = Iterator[tuple[np.ndarray, float, bool]]


def film(
  level_name: str,
  seed: int,
  actions: Sequence[int],
  path: str | os.PathLike,
  expected_return: float,
  atari_settings: Any = None,
  lab_settings: Any = None,
) -> float:
  """Plays the first episode of an environment again and writes an mp4 file.

  There is one image for each action: the one on which it was chosen. The film
  has the speed of the game. Warns on stderr if the replay is not the same
  episode. That happens if a Gymnasium environment draws random numbers that do
  not depend on its seed.

  Args:
    level_name: see make.make_environments.
    seed: of the environment, see environments.Environments.seeds.
    actions: int [steps], of the whole episode.
    path: the file, replaced if it exists; its directory must exist.
    expected_return: the episode's return, to compare with.
    atari_settings: how an Atari game was played, an atari.AtariSettings; None
      for the paper's.
    lab_settings: the same for a level of DeepMind Lab, a lab.LabSettings.

  Returns:
    The return of the replay.

  Raises:
    ValueError: there are no actions.
    py_process_worker.UnusableLevelError: the environment cannot render.
    py_process.EnvironmentFailed: the environment failed.
    OSError: the file cannot be written; an older one is untouched then.
  """
  if not len(actions):
    raise ValueError(f'There are no actions of {level_name} to film.')
  family = levels.find_family(level_name)
  if family == 'gym':
    replay = _replay_gym(level_name, seed, actions)
  elif family == 'lab':
    replay = _replay_lab(level_name, seed, actions, lab_settings)
  else:
    replay = _replay_atari(level_name, seed, actions, atari_settings)
  replayed_return, num_steps, done = 0.0, 0, False
  with replay as (rate, steps), _mp4(pathlib.Path(path), rate) as write:
    while not done and num_steps < len(actions):
      image, reward, done = next(steps)
      write(image)
      replayed_return += reward
      num_steps += 1
  same = np.isclose(replayed_return, expected_return, rtol=1e-4, atol=1e-4)
  if not (same and done and num_steps == len(actions)):
    end = '' if done else ' and had not ended'
    console.warn(
      f'{path} shows another episode of {level_name}: it scored '
      f'{replayed_return:g} in {num_steps} steps{end}, not '
      f'{expected_return:g} in {len(actions)}.'
    )
  return replayed_return


@contextlib.contextmanager
def _replay_atari(
  level_name: str, seed: int, actions: Sequence[int], settings: Any
) -> Iterator[tuple[float, _Steps]]:
  """Yields images per second, and the steps."""
  from envs import atari  # Only what a film needs is imported.

  settings = settings or atari.AtariSettings()
  rate = _ATARI_FRAMES_PER_SECOND / settings.frames_per_step
  with contextlib.closing(
    atari.replay(level_name, seed, actions, settings)
  ) as steps:
    yield rate, steps


@contextlib.contextmanager
def _replay_lab(
  level_name: str, seed: int, actions: Sequence[int], settings: Any
) -> Iterator[tuple[float, _Steps]]:
  """Yields images per second, and the steps."""
  from envs import lab

  settings = settings or lab.LabSettings()
  rate = _LAB_FRAMES_PER_SECOND / settings.frames_per_step
  with contextlib.closing(
    lab.replay(level_name, seed, actions, settings)
  ) as steps:
    yield rate, steps


@contextlib.contextmanager
def _replay_gym(
  level_name: str, seed: int, actions: Sequence[int]
) -> Iterator[tuple[float, _Steps]]:
  """Yields images per second, and the steps."""
  make_environment = functools.partial(_RenderedEnvironment, level_name, seed)
  with contextlib.closing(
    py_process.EnvironmentProcesses([make_environment], [level_name])
  ) as processes:
    rate, image_shape = processes.find_specs()[0]
    yield rate, _play(processes, image_shape, actions)


def _play(
  processes: py_process.EnvironmentProcesses,
  image_shape: tuple[int, ...],
  actions: Sequence[int],
) -> _Steps:
  """Yields the steps of one environment that shows images."""
  arrays = processes.start_episodes([(image_shape, np.dtype(np.uint8))])
  env_ids = processes.recv(1)
  for action in actions:
    image = arrays.observation[0][0].copy()
    processes.send(np.array([action], np.int32), env_ids)
    processes.recv(1)
    yield image, float(arrays.rewards[0]), bool(arrays.dones[0])


class _RenderedEnvironment:
  """A Gymnasium environment that shows its images; it plays one episode.

  Attributes:
    spec: images per second, and the shape of an image.
  """

  def __init__(self, level_name: str, seed: int, num_restarts: int = 0):
    """Makes it in its own process, see py_process.EnvironmentProcesses.

    Args:
      level_name: see make.make_environments.
      seed: see `film`.
      num_restarts: not used: a film is not worth a second attempt.

    Raises:
      py_process_worker.UnusableLevelError: it cannot render.
    """
    del num_restarts
    # In the order of envs.gym.GymEnvironment.
    random.seed(seed)
    np.random.seed(seed)
    self._level_name = level_name
    # For pygame, which complains where there is no screen.
    os.environ.setdefault('SDL_VIDEODRIVER', 'dummy')
    with _renders(level_name):
      self._env = gym.make(level_name, render_mode='rgb_array')
    self._env.reset(seed=seed)
    self._image = None
    self._image = self._render()
    rate = self._env.metadata.get('render_fps')
    self.spec = (rate or _DEFAULT_GYM_FRAMES_PER_SECOND, self._image.shape)

  def _render(self) -> np.ndarray:
    with _renders(self._level_name):
      image = self._env.render()
      if np.ndim(image) != 3 or image.shape[2] != 3:
        raise TypeError(f'it gives no colour image but {type(image)}')
      if self._image is not None and image.shape != self._image.shape:
        raise TypeError('the size of its images changes')
      return image

  def reset(self) -> Sequence[np.ndarray]:
    """Returns the first image; after the episode's end, the last one again."""
    return (self._image,)

  def step(self, action: int) -> tuple[Sequence[np.ndarray], float, bool, bool]:
    """Takes one step."""
    _, reward, terminated, truncated, _ = self._env.step(
      action + int(self._env.action_space.start)
    )
    done = terminated or truncated
    if not done:
      self._image = self._render()
    return (self._image,), np.asarray(reward).item(), done, False

  def close(self) -> None:
    """Closes the environment."""
    self._env.close()


@contextlib.contextmanager
def _renders(level_name: str) -> Iterator[None]:
  """Turns the errors of an environment that cannot render into one."""
  try:
    yield
  except (gymnasium.error.Error, TypeError, NotImplementedError) as error:
    message = ' '.join(str(error).split())
    raise py_process_worker.UnusableLevelError(
      f'{level_name} cannot be filmed: {message}'
    ) from error


@contextlib.contextmanager
def _mp4(
  path: pathlib.Path, rate: float
) -> Iterator[Callable[[np.ndarray], None]]:
  """Opens a film that replaces `path` once it is complete.

  Args:
    path: the film.
    rate: images per second.

  Yields:
    A function that appends an image, uint8 [H, W, 3], all of one size.
  """
  new_path = path.with_name(path.name + '.new')
  new_path.touch()  # Its error is one line; the encoder's is not.
  encoder = None

  def write(image: np.ndarray) -> None:
    nonlocal encoder
    image = _enlarge(image)
    if encoder is None:
      height, width, _ = image.shape
      encoder = _start_encoder(new_path, (width, height), rate)
    encoder.send(image)

  try:
    yield write
    if encoder:
      encoder.close()
    os.replace(new_path, path)
  except BaseException:
    if encoder:
      encoder.close()
    new_path.unlink(missing_ok=True)
    raise


def _start_encoder(path: pathlib.Path, size: tuple[int, int], rate: float):
  """Returns a generator that takes uint8 [H, W, 3]; `size` is (W, H)."""
  encoder = imageio_ffmpeg.write_frames(
    str(path),
    size,
    fps=rate,
    codec='libx264',
    pix_fmt_out='yuv420p',  # Every player knows it.
    macro_block_size=2,
    quality=None,
    ffmpeg_log_level='error',
    # With the index at the front, a browser plays the film while it loads.
    output_params=[
      *('-preset', 'veryfast', '-crf', '20'),
      *('-movflags', '+faststart', '-f', 'mp4'),
    ],
  )
  encoder.send(None)
  return encoder


def _enlarge(image: np.ndarray) -> np.ndarray:
  """Enlarges a small image, and makes its height and width even."""
  factor = max(1, _WIDTH // image.shape[1])
  image = image.repeat(factor, axis=0).repeat(factor, axis=1)
  odd_rows, odd_columns = image.shape[0] % 2, image.shape[1] % 2
  image = np.pad(image, [(0, odd_rows), (0, odd_columns), (0, 0)], 'edge')
  return np.ascontiguousarray(image)
