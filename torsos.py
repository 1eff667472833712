"""The torsos: from one observation to features (paper, fig. 3)."""

from collections.abc import Sequence
import math

import numpy as np
import sonnet as snt
import tensorflow as tf

import environments

TORSOS = ('shallow', 'deep', 'vector')

_NUM_FEATURES = 256
_LEAST_SIDE = 20  # Less is nothing after two convolutions without padding.
_VECTOR_HIDDEN_SIZE = 64


def contrast_kernels(shape: Sequence[int], dtype: tf.DType) -> tf.Tensor:
  """Draws first kernels: the sum of each is 0, so that even grey means nothing.

  No pixel is negative and most are alike. Kernels with a sum answer to that,
  and what comes after them too: of the shallow network on Pong, 10 of 16 and
  12 of 32 channels and 120 of 256 units were never active, and nearly all
  others always, which is linear.

  Args:
    shape: of the kernels, the outputs last.
    dtype: float32.

  Returns:
    The kernels; what comes out is about as large as what enters (He et al.,
    2015).
  """
  stddev = math.sqrt(2 / math.prod(shape[:-1]))
  kernels = tf.random.truncated_normal(shape, stddev=stddev, dtype=dtype)
  axes = range(len(shape) - 1)
  return kernels - tf.reduce_mean(kernels, axis=axes, keepdims=True)


class ShallowTorso(snt.Module):
  """Two convolutions: the feed-forward network of Mnih et al. (2016)."""

  def __init__(self, stack: int = 1, name: str = 'shallow_torso'):
    """Makes the layers, for frames or for stacks of `stack` frames."""
    super().__init__(name=name)
    if stack > 1:
      # The same as if the frames were channels; but to transpose them first
      # costs as much as half of the convolution.
      self._first = snt.Conv3D(
        16,
        [stack, 8, 8],
        [1, 4, 4],
        padding='VALID',
        w_init=contrast_kernels,
      )
    else:
      self._first = snt.Conv2D(
        16, 8, 4, padding='VALID', w_init=contrast_kernels
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
  """Two 3x3 convolutions beside a skip connection."""

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
      for n, w_init in ((16, contrast_kernels), (32, None), (32, None))
    ]
    self._linear = snt.Linear(_NUM_FEATURES)

  def __call__(self, frames: tf.Tensor) -> tf.Tensor:
    """Maps float32 [N, H, W, C] or [N, S, H, W, 1] to float32 [N, 256]."""
    features = frames
    if frames.shape.rank == 5:  # The stack's frames are the channels.
      features = tf.transpose(frames[..., 0], [0, 2, 3, 1])
    for convolution, first, second in self._sections:
      features = tf.nn.max_pool2d(convolution(features), 3, 2, 'SAME')
      features = second(first(features))
    features = snt.flatten(tf.nn.relu(features))
    return tf.nn.relu(self._linear(features))


class VectorTorso(snt.Module):
  """A small multi-layer perceptron, for observations that are no images."""

  def __init__(self, name: str = 'vector_torso'):
    super().__init__(name=name)
    self._network = snt.nets.MLP(
      [_VECTOR_HIDDEN_SIZE] * 2, activation=tf.nn.tanh, activate_final=True
    )

  def __call__(self, observations: tf.Tensor) -> tf.Tensor:
    """Maps float32 [N, D] to features, float32 [N, 64]."""
    return self._network(observations)


def fits_shallow(spec: environments.EnvironmentSpec) -> bool:
  """Returns whether images are large enough for `ShallowTorso`."""
  return min(spec.frame_shape[:2]) >= _LEAST_SIDE


def make_torso(torso: str, spec: environments.EnvironmentSpec) -> snt.Module:
  """Makes the torso called `torso`, one of `TORSOS`.

  Raises:
    ValueError: there is no such torso, or it does not fit the observations.
  """
  if torso not in TORSOS:
    raise ValueError(f'agent {torso!r} is not one of {", ".join(TORSOS)}')
  is_image = spec.frame_dtype == np.uint8
  if is_image == (torso == 'vector'):
    kind = 'images' if is_image else 'vectors'
    fitting = '"shallow" or "deep"' if is_image else '"vector"'
    raise ValueError(
      f'agent {torso!r} does not fit observations that are {kind} '
      f'(shape {spec.frame_shape}): use {fitting}'
    )
  if torso == 'shallow':
    if not fits_shallow(spec):
      raise ValueError(
        f'agent "shallow" needs images of at least {_LEAST_SIDE} x '
        f'{_LEAST_SIDE} pixels (shape {spec.frame_shape}): use "deep"'
      )
    return ShallowTorso(spec.stack)
  return {'deep': DeepTorso, 'vector': VectorTorso}[torso]()
