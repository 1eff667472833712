"""What the agent sees of an observation of any Gymnasium space.

An observation becomes at most three arrays:

  an image       a Box [H, W, C] or [C, H, W], or uint8 [H, W]; at most one
  an instruction a text; at most one
  a vector       everything else, flattened and joined

Without an image, the vector takes its place as the frame.
"""

from collections.abc import Callable, Iterator, Sequence
import math
from typing import Any

import gymnasium
from gymnasium import spaces
import numpy as np

from envs import instructions
from runtime import errors

# A Box of integers with a wider range counts as unbounded.
_MAX_INTEGER_RANGE = 2**16
_CHANNELS = (1, 3, 4)


class UnsupportedSpaceError(errors.SettingError):
  """The agent cannot see observations of this space; one line says why."""


class MisfitError(errors.UserError, ValueError):
  """An observation is not of its space; one line says how."""


class Encoder:
  """Turns observations of one space into arrays.

  Attributes:
    frame_shape: of the image, [H, W, C] or [H, W], or else of the vector, [D].
    frame_dtype: np.uint8 for images of 256 levels or of two, else np.float32.
    vector_size: D of the vector beside an image; 0 if there is none.
    has_instruction: whether there is a text.
  """

  def __init__(self, space: gymnasium.Space):
    """Checks the space.

    Raises:
      UnsupportedSpaceError: it has two images or two texts, nothing but a text,
        an axis of length 0, or a part that is neither of the three.
    """
    self._image = self._text = None
    self._vectors = []
    for path, part in _find_parts(space):
      _check_part(path, part)
      if _is_text(part):
        self._text = _only_one('text', self._text, (path, _encode_text))
      elif _is_image(part):
        self._image = _only_one('image', self._image, (path, _Image(part)))
      else:
        make = _Vector if isinstance(part, spaces.Box) else _Flattened
        self._vectors.append((path, make(part)))
    self.has_instruction = self._text is not None
    size = sum(encode.size for _, encode in self._vectors)
    if self._image:
      _, image = self._image
      self.frame_shape, self.frame_dtype = image.shape, image.dtype
      self.vector_size = size
    else:
      self.frame_shape, self.frame_dtype = (size,), np.dtype(np.float32)
      self.vector_size = 0
    if not size and not self._image:
      raise UnsupportedSpaceError(f'{space} has neither numbers nor an image')

  def __call__(self, observation: Any) -> Sequence[np.ndarray]:
    """Returns the frame, the instruction if there is one, and the vector.

    Raises:
      MisfitError: the observation is not of the space.
    """
    arrays = []
    vector = None
    if self._vectors:
      parts = [_encode(observation, *part) for part in self._vectors]
      vector = parts[0] if len(parts) == 1 else np.concatenate(parts)
    if self._image:
      arrays.append(_encode(observation, *self._image))
    else:
      arrays.append(vector)
    if self._text:
      arrays.append(_encode(observation, *self._text))
    if self._image and self._vectors:
      arrays.append(vector)
    return arrays


def _find_parts(
  space: gymnasium.Space, path: tuple = ()
) -> Iterator[tuple[tuple, gymnasium.Space]]:
  """Yields each part of a space, with the keys that lead to it."""
  if isinstance(space, spaces.Dict):
    items = space.spaces.items()
  elif isinstance(space, spaces.Tuple):
    items = enumerate(space.spaces)
  else:
    yield path, space
    return
  for key, part in items:
    yield from _find_parts(part, (*path, key))


def _check_part(path: tuple, part: gymnasium.Space) -> None:
  """Raises UnsupportedSpaceError unless this is an image, text or vector."""
  if _is_text(part):
    return
  problem = None
  if not part.is_np_flattenable:
    problem = 'does not have a fixed size'
  elif 0 in (part.shape or ()):
    problem = 'has an axis of length 0'
  elif len(part.shape or ()) > 3 and isinstance(part, spaces.Box):
    problem = 'has more than three axes'
  if problem:
    raise UnsupportedSpaceError(f'{_name(path)}{part} {problem}')


def _only_one(kind: str, before: Any, part: tuple) -> tuple:
  if before is not None:
    names = [_name(path).strip() for path, _ in (before, part)]
    raise UnsupportedSpaceError(f'there are two {kind}s, {" and ".join(names)}')
  return part


def _is_text(space: gymnasium.Space) -> bool:
  # A sample tells: MiniGrid's missions have a space of their own, not Text.
  if isinstance(space, spaces.Text):
    return True
  known = (spaces.Box, spaces.Discrete, spaces.MultiBinary)
  known += (spaces.MultiDiscrete, spaces.Sequence, spaces.Graph)
  return not isinstance(space, known) and isinstance(space.sample(), str)


def _is_image(space: gymnasium.Space) -> bool:
  if not isinstance(space, spaces.Box):
    return False
  num_axes = len(space.shape)
  return num_axes == 3 or (num_axes == 2 and space.dtype == np.uint8)


def _encode(observation: Any, path: tuple, encode: Callable) -> np.ndarray:
  """Encodes the part of an observation at `path`."""
  try:
    for key in path:
      observation = observation[key]
  except (KeyError, IndexError, TypeError) as error:
    raise MisfitError(
      f'an observation lacks {_name(path)}which its observation space has'
    ) from error
  return encode(observation)


def _name(path: tuple) -> str:
  return ''.join(f'[{key!r}]' for key in path) + ' ' * bool(path)


def _encode_text(text: Any) -> np.ndarray:
  """Hashes a text's words; bytes are taken as UTF-8."""
  if isinstance(text, bytes):
    text = text.decode(errors='replace')
  return instructions.hash_words(str(text))


class _Array:
  """Checks that a value fits a Box, and scales it by the Box's own bounds."""

  def __init__(self, space: spaces.Box):
    self._space = space
    self._known_dtype = space.dtype
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    self.is_bounded = bool(np.isfinite(low).all() and np.isfinite(high).all())
    if self.is_bounded and space.dtype.kind == 'i':
      self.is_bounded = bool((high - low).max() <= _MAX_INTEGER_RANGE)
    self._low = low.astype(np.float32)
    # Where a value cannot change, 0 / 1.
    self._range = np.where(high > low, high - low, 1).astype(np.float32)

  def check(self, value: Any) -> np.ndarray:
    """Returns the value as an array; refuses what must be cast or cut."""
    array = np.asarray(value)
    if array.dtype != self._known_dtype:
      if not np.can_cast(array.dtype, self._space.dtype, 'same_kind'):
        raise self._misfit(array)
      self._known_dtype = array.dtype
    if array.shape != self._space.shape:
      raise self._misfit(array)
    return array

  def _misfit(self, array: np.ndarray) -> MisfitError:
    return MisfitError(
      f'shows {array.dtype} {list(array.shape)}, but its observation space '
      f'says {self._space.dtype} {list(self._space.shape)}'
    )

  def scale(self, array: np.ndarray) -> np.ndarray:
    """Maps the bounds to 0 and 1, as float32; without bounds, only casts."""
    array = array.astype(np.float32)
    return (array - self._low) / self._range if self.is_bounded else array


class _Image(_Array):
  """An image, with its channels last.

  Where 256 levels are enough, it is uint8, a quarter of the size: the agent
  divides these by 255.

  Attributes:
    shape: [H, W, C] or [H, W].
    dtype: np.uint8 or np.float32.
  """

  def __init__(self, space: spaces.Box):
    super().__init__(space)
    shape = space.shape
    self._is_channel_first = (
      len(shape) == 3 and shape[0] in _CHANNELS and shape[0] < min(shape[1:])
    )
    self.shape = (*shape[1:], shape[0]) if self._is_channel_first else shape
    low, high = space.low, space.high
    starts_at_0 = space.dtype.kind in 'biu' and bool((low == 0).all())
    self._is_plain = (
      starts_at_0 and space.dtype == np.uint8 and bool((high == 255).all())
    )
    self._is_binary = starts_at_0 and bool((high == 1).all())
    is_uint8 = self._is_plain or self._is_binary
    self.dtype = np.dtype(np.uint8 if is_uint8 else np.float32)

  def __call__(self, value: Any) -> np.ndarray:
    """Returns the image, of `shape` and `dtype`."""
    image = self.check(value)
    if self._is_binary:
      image = _spread(image)
    elif not self._is_plain:
      image = self.scale(image)
    return np.moveaxis(image, 0, -1) if self._is_channel_first else image


def _spread(image: np.ndarray) -> np.ndarray:
  """Maps 0 and 1 to 0 and 255."""
  if image.dtype != np.bool_ and ((image < 0) | (image > 1)).any():
    raise MisfitError(
      f'shows values from {image.min()} to {image.max()}, but its observation '
      f'space says 0 to 1'
    )
  return image.astype(np.uint8) * np.uint8(255)


class _Vector(_Array):
  """A Box that is no image. Integers are scaled; floats are left alone."""

  def __init__(self, space: spaces.Box):
    super().__init__(space)
    self.size = math.prod(space.shape)
    self._is_integer = space.dtype.kind in 'biu'

  def __call__(self, value: Any) -> np.ndarray:
    """Returns float32 [size], or float64 where the environment shows it."""
    array = self.check(value)
    if self._is_integer:
      array = self.scale(array)
    return array.reshape(self.size)


class _Flattened:
  """Anything else: a number from a list becomes one-hot, and so on."""

  def __init__(self, space: gymnasium.Space):
    self._space = space
    self.size = spaces.flatdim(space)

  def __call__(self, value: Any) -> np.ndarray:
    """Returns [size], of the space's own type."""
    if not self._space.contains(value):
      raise MisfitError(
        f'shows {value!r}, but its observation space says {self._space}'
      )
    return spaces.flatten(self._space, value)
