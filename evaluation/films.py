"""Films an episode: plays its actions again where they can be seen in colour.

An agent sees small grey images or plain numbers. Its environment is started a
second time with the same seed and takes the same actions, and this one renders.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import os
import pathlib
import random
from typing import Any

import gymnasium
import imageio_ffmpeg
import numpy as np

import levels
from runtime import console

_GYM_PREFIX = 'gym:'
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
  """Plays the first episode of an environment again, into an mp4 file.

  There is one image for each action: what it was chosen on. The speed is that
  of the game. Says so on stderr if the replay is not the same episode, which
  happens where a Gymnasium environment draws numbers outside its seed.

  Args:
    level_name: see make.make_environments.
    seed: of the environment, see environments.Environments.seeds.
    actions: of the whole episode.
    path: the file, replaced if it exists; its directory must exist.
    expected_return: of the episode, to compare with.
    atari_settings: how a game was played, an atari.AtariSettings;
      None for the paper's.
    lab_settings: the same for a level of DeepMind Lab, a
      lab.LabSettings.

  Returns:
    The return of the replay.

  Raises:
    ValueError: there are no actions, or the environment cannot render.
    OSError: the file cannot be written; an older one is untouched then.
  """
  if not len(actions):
    raise ValueError(f'There are no actions of {level_name} to film.')
  family = levels.find_family(level_name)
  if family == 'gym':
    rate, steps = _replay_gym(level_name, seed, actions)
  elif family == 'lab':
    rate, steps = _replay_lab(level_name, seed, actions, lab_settings)
  else:
    rate, steps = _replay_atari(level_name, seed, actions, atari_settings)
  replayed_return, num_steps, over = 0.0, 0, False
  with contextlib.closing(steps), _mp4(pathlib.Path(path), rate) as write:
    while not over and num_steps < len(actions):
      image, reward, over = next(steps)
      write(image)
      replayed_return += reward
      num_steps += 1
  same = np.isclose(replayed_return, expected_return, rtol=1e-4, atol=1e-4)
  if not (same and over and num_steps == len(actions)):
    end = '' if over else ' and had not ended'
    console.warn(
      f'{path} shows another episode of {level_name}: it scored '
      f'{replayed_return:g} in {num_steps} steps{end}, not '
      f'{expected_return:g} in {len(actions)}.'
    )
  return replayed_return


def _replay_atari(
  level_name: str, seed: int, actions: Sequence[int], settings: Any
) -> tuple[float, _Steps]:
  """Returns images per second, and the steps."""
  from envs import atari  # Only what a film needs is imported.

  settings = settings or atari.AtariSettings()
  return (
    _ATARI_FRAMES_PER_SECOND / settings.frames_per_step,
    atari.replay(level_name, seed, actions, settings),
  )


def _replay_lab(
  level_name: str, seed: int, actions: Sequence[int], settings: Any
) -> tuple[float, _Steps]:
  """Returns images per second, and the steps."""
  from envs import lab

  settings = settings or lab.LabSettings()
  return (
    _LAB_FRAMES_PER_SECOND / settings.frames_per_step,
    lab.replay(level_name, seed, actions, settings),
  )


def _replay_gym(
  level_name: str, seed: int, actions: Sequence[int]
) -> tuple[float, _Steps]:
  """Returns images per second, and the steps."""
  # In the order of envs.gym.GymEnvironment.
  random.seed(seed)
  np.random.seed(seed)
  with _renders(level_name):
    env = gymnasium.make(
      level_name.removeprefix(_GYM_PREFIX),
      render_mode='rgb_array',
      disable_env_checker=True,
    )
  rate = env.metadata.get('render_fps') or _DEFAULT_GYM_FRAMES_PER_SECOND
  return rate, _play_gym(env, level_name, seed, actions)


def _play_gym(
  env: gymnasium.Env, level_name: str, seed: int, actions: Sequence[int]
) -> _Steps:
  """Yields the steps."""
  with contextlib.closing(env):
    env.reset(seed=seed)
    for action in actions:
      with _renders(level_name):
        image = env.render()
        if np.ndim(image) != 3 or image.shape[2] != 3:
          raise TypeError(f'it gives no colour image but {type(image)}')
      _, reward, terminated, truncated, _ = env.step(
        int(action) + int(env.action_space.start)
      )
      yield image, float(reward), terminated or truncated


@contextlib.contextmanager
def _renders(level_name: str) -> Iterator[None]:
  """Turns what an environment that cannot render raises into a ValueError."""
  try:
    yield
  except (gymnasium.error.Error, TypeError, NotImplementedError) as error:
    message = ' '.join(str(error).split())
    raise ValueError(f'{level_name} cannot be filmed: {message}') from error


@contextlib.contextmanager
def _mp4(
  path: pathlib.Path, rate: float
) -> Iterator[Callable[[np.ndarray], None]]:
  """Opens a film that takes the place of `path` once it is complete.

  Args:
    path: the film.
    rate: images per second.

  Yields:
    What takes the images, uint8 [H, W, 3], all of one size.
  """
  new_path = path.with_name(path.name + '.new')
  new_path.touch()  # Says what is wrong in one line; the encoder does not.
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
    pix_fmt_out='yuv420p',  # What every player shows.
    macro_block_size=2,
    quality=None,
    ffmpeg_log_level='error',
    # The index at the front: a browser plays while it loads.
    output_params=[
      *('-preset', 'veryfast', '-crf', '20'),
      *('-movflags', '+faststart', '-f', 'mp4'),
    ],
  )
  encoder.send(None)
  return encoder


def _enlarge(image: np.ndarray) -> np.ndarray:
  """Returns the image in even height and width, small ones enlarged."""
  factor = max(1, _WIDTH // image.shape[1])
  image = image.repeat(factor, axis=0).repeat(factor, axis=1)
  odd_rows, odd_columns = image.shape[0] % 2, image.shape[1] % 2
  image = np.pad(image, [(0, odd_rows), (0, odd_columns), (0, 0)], 'edge')
  return np.ascontiguousarray(image)
