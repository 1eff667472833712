"""The torsos: from one observation to features (paper, fig. 3)."""

from collections.abc import Sequence
import math

import sonnet as snt
import tensorflow as tf

import environments
from runtime import errors

TORSOS = ('shallow', 'deep', 'vector')

_NUM_FEATURES = 256
# Two convolutions without padding leave nothing of a smaller image.
_MIN_SIDE = 20
_VECTOR_HIDDEN_SIZE = 64


def zero_mean_kernels(shape: Sequence[int], dtype: tf.DType) -> tf.Tensor:
  """Initialises kernels of the first convolution: each sums to 0.

  Pixels are never negative, and most of an image is nearly uniform. A kernel
  that does not sum to 0 answers to that uniform part, and so do the layers
  after it. Of a shallow network trained on Pong with the default initialiser,
  10 of 16 channels, 12 of 32 channels and 120 of 256 units were never active,
  and nearly all others always were: almost a linear network.

  Args:
    shape: of the kernels; the output channels come last.
    dtype: float32.

  Returns:
    The kernels. They map a constant image to zero; their variance is 2 / fan-in
    before the mean is subtracted (He et al., 2015).
  """
  stddev = math.sqrt(2 / math.prod(shape[:-1]))
  kernels = tf.random.truncated_normal(shape, stddev=stddev, dtype=dtype)
  axes = range(len(shape) - 1)
  return kernels - tf.reduce_mean(kernels, axis=axes, keepdims=True)


class ShallowTorso(snt.Module):
  """Two convolutions: the feed-forward network of Mnih et al. (2016)."""

  def __init__(self, stack: int = 1, name: str = 'shallow_torso'):
    """Makes the layers.

    Args:
      stack: how many frames an observation has; with 1, observations have no
        stack dimension.
      name: the scope of the variables.
    """
    super().__init__(name=name)
    if stack > 1:
      # Equal to a 2D convolution with the frames as channels, but without the
      # transpose, which costs half as much as the convolution.
      self._first = snt.Conv3D(
        16,
        [stack, 8, 8],
        [1, 4, 4],
        padding='VALID',
        w_init=zero_mean_kernels,
      )
    else:
      self._first = snt.Conv2D(
        16, 8, 4, padding='VALID', w_init=zero_mean_kernels
      )
    self._second = snt.Conv2D(32, 4, 2, padding='VALID')
    self._linear = snt.Linear(_NUM_FEATURES)

  def __call__(self, frames: tf.Tensor) -> tf.Tensor:
    """Maps float32 [N, H, W, C] or [N, S, H, W, 1] to float32 [N, 256]."""
    features = tf.nn.relu(self._first(frames))
    if frames.shape.rank == 5:
      features = tf.squeeze(features, axis=1)
    features = tf.nn.relu(self._second(features))
    return tf.nn.relu(self._linear(snt.flatten(features)))


class ResidualBlock(snt.Module):
  """Two 3x3 convolutions and a skip connection around them."""

  def __init__(self, num_channels: int, name: str = 'residual_block'):
    super().__init__(name=name)
    self._first = snt.Conv2D(num_channels, 3)
    self._second = snt.Conv2D(num_channels, 3)

  def __call__(self, inputs: tf.Tensor) -> tf.Tensor:
    """Maps float32 [N, H, W, C] to the same shape."""
    return inputs + self._second(tf.nn.relu(self._first(tf.nn.relu(inputs))))


class DeepTorso(snt.Module):
  """Fifteen convolutions in three residual sections (paper, fig. 3, right)."""

  def __init__(self, name: str = 'deep_torso'):
    super().__init__(name=name)
    self._sections = [
      (snt.Conv2D(n, 3, w_init=w_init), ResidualBlock(n), ResidualBlock(n))
      for n, w_init in ((16, zero_mean_kernels), (32, None), (32, None))
    ]
    self._linear = snt.Linear(_NUM_FEATURES)

  def __call__(self, frames: tf.Tensor) -> tf.Tensor:
    """Maps float32 [N, H, W, C] or [N, S, H, W, 1] to float32 [N, 256]."""
    features = frames
    if frames.shape.rank == 5:  # Stacked frames become channels.
      features = tf.transpose(frames[..., 0], [0, 2, 3, 1])
    for convolution, first, second in self._sections:
      features = tf.nn.max_pool2d(convolution(features), 3, 2, 'SAME')
      features = second(first(features))
    features = snt.flatten(tf.nn.relu(features))
    return tf.nn.relu(self._linear(features))


class VectorTorso(snt.Module):
  """A small multi-layer perceptron, for observations that are vectors."""

  def __init__(self, name: str = 'vector_torso'):
    super().__init__(name=name)
    self._network = snt.nets.MLP(
      [_VECTOR_HIDDEN_SIZE] * 2, activation=tf.nn.tanh, activate_final=True
    )

  def __call__(self, observations: tf.Tensor) -> tf.Tensor:
    """Maps float32 [N, D] to features, float32 [N, 64]."""
    return self._network(observations)


def default_torso(spec: environments.EnvironmentSpec) -> str:
  """Returns the name of the torso to use where the user names none.

  Returns:
    'vector' for float32 observations; 'shallow' for images that are large
    enough for it; else 'deep', which takes images of any size.
  """
  if not _is_image(spec):
    return 'vector'
  return 'shallow' if _fits_shallow(spec) else 'deep'


def make_torso(torso: str, spec: environments.EnvironmentSpec) -> snt.Module:
  """Makes a torso.

  Args:
    torso: one of `TORSOS`.
    spec: says which observations the torso is for.

  Returns:
    The module.

  Raises:
    errors.SettingError: there is no such torso, or it does not fit the
      observations.
  """
  if torso not in TORSOS:
    raise errors.SettingError(
      f'agent {torso!r} is not one of {", ".join(TORSOS)}'
    )
  if _is_image(spec) == (torso == 'vector'):
    kind = 'images' if _is_image(spec) else 'vectors'
    fitting = '"shallow" or "deep"' if _is_image(spec) else '"vector"'
    raise errors.SettingError(
      f'agent {torso!r} does not fit observations that are {kind} '
      f'(shape {spec.frame_shape}): use {fitting}'
    )
  if torso == 'vector':
    return VectorTorso()
  if torso == 'deep':
    return DeepTorso()
  if not _fits_shallow(spec):
    raise errors.SettingError(
      f'agent "shallow" needs images of at least {_MIN_SIDE} x {_MIN_SIDE} '
      f'pixels (shape {spec.frame_shape}): use "deep"'
    )
  return ShallowTorso(spec.stack)


def _is_image(spec: environments.EnvironmentSpec) -> bool:
  return len(spec.frame_shape) >= 2


def _fits_shallow(spec: environments.EnvironmentSpec) -> bool:
  return min(spec.frame_shape[:2]) >= _MIN_SIDE
