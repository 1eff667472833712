"""Tests of torsos.py against literal references in NumPy."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

import environments
from runtime import errors
import torsos

_GREY = environments.EnvironmentSpec(
  (84, 84), np.dtype(np.uint8), num_actions=6, frames_per_step=4, stack=4,
  action_meanings=None,
)  # fmt: skip
_COLOURS = environments.EnvironmentSpec(
  (36, 40, 3), np.dtype(np.uint8), num_actions=3, frames_per_step=1, stack=1,
  action_meanings=None,
)  # fmt: skip
_VECTOR = environments.EnvironmentSpec(
  (5,), np.dtype(np.float32), num_actions=4, frames_per_step=1, stack=1,
  action_meanings=None,
)  # fmt: skip


# The references: definitions, spelt out in float64.


def _relu(x):
  return np.maximum(x, 0.0)


def _pad_same(images, size, stride, value):
  """Pads so that ceil(H / stride) windows fit; an odd pixel goes to the end."""
  padding = [(0, 0)]
  for length in images.shape[1:3]:
    total = max((-(-length // stride) - 1) * stride + size - length, 0)
    padding.append((total // 2, total - total // 2))
  return np.pad(images, [*padding, (0, 0)], constant_values=value)


def _windows(images, size, stride):
  """Cuts [N, H, W, C] into windows, [N, rows, columns, size, size, C]."""
  _, H, W, _ = images.shape
  return np.stack(
    [
      np.stack(
        [
          images[:, top : top + size, left : left + size]
          for left in range(0, W - size + 1, stride)
        ],
        axis=1,
      )
      for top in range(0, H - size + 1, stride)
    ],
    axis=1,
  )


def _convolve(images, layer, stride=1):
  """Convolves without padding: a product with the kernels at each window."""
  kernels, bias = np.float64(layer.w), np.float64(layer.b)
  windows = _windows(images, len(kernels), stride)
  return np.einsum('nhwijc,ijcd->nhwd', windows, kernels) + bias


def _convolve_same(images, layer):
  return _convolve(_pad_same(images, 3, 1, 0.0), layer)


def _max_pool(images):
  padded = _pad_same(images, 3, 2, -np.inf)
  return _windows(padded, 3, 2).max(axis=(3, 4))


def _linear(features, layer):
  return features @ np.float64(layer.w) + np.float64(layer.b)


def _residual_block(images, block):
  branch = _convolve_same(_relu(images), block._first)
  return images + _convolve_same(_relu(branch), block._second)


def _shallow(frames, torso):
  if frames.ndim == 5:
    # A 3D kernel over S frames, added up, is S 2D kernels.
    kernels = np.float64(torso._first.w)  # [S, 8, 8, 1, 16]
    features = np.float64(torso._first.b) + sum(
      np.einsum('nhwij,ijd->nhwd', _windows(frame, 8, 4)[..., 0], kernel)
      for frame, kernel in zip(
        np.moveaxis(frames, 1, 0), kernels[..., 0, :], strict=True
      )
    )
  else:
    features = _convolve(frames, torso._first, stride=4)
  features = _relu(_convolve(_relu(features), torso._second, stride=2))
  return _relu(_linear(features.reshape([len(frames), -1]), torso._linear))


def _deep(frames, torso):
  features = np.float64(frames)
  if frames.ndim == 5:
    features = np.moveaxis(features[..., 0], 1, -1)
  assert len(torso._sections) == 3
  for convolution, first, second in torso._sections:
    features = _max_pool(_convolve_same(features, convolution))
    features = _residual_block(_residual_block(features, first), second)
  features = _relu(features).reshape([len(frames), -1])
  return _relu(_linear(features, torso._linear))


def _vector(observations, torso):
  features = np.float64(observations)
  for layer in torso._network._layers:
    features = np.tanh(_linear(features, layer))
  return features


def _draw_weights(module, generator):
  """Redraws all weights, so that biases are not 0 and units are not alike."""
  for variable in module.trainable_variables:
    is_bias = variable.shape.rank == 1
    fan_in = 1 if is_bias else np.prod(variable.shape[:-1])
    variable.assign(generator.normal(size=variable.shape) / np.sqrt(fan_in))


class TestReferences:
  @pytest.mark.parametrize(
    ('make', 'reference', 'shape'),
    [
      # H and W odd and even, where SAME pads differently.
      (lambda: torsos.ResidualBlock(5), _residual_block, [2, 6, 7, 5]),
      (torsos.ShallowTorso, _shallow, [3, 20, 20, 3]),
      (torsos.ShallowTorso, _shallow, [2, 30, 41, 1]),
      (lambda: torsos.ShallowTorso(stack=4), _shallow, [2, 4, 29, 36, 1]),
      (torsos.DeepTorso, _deep, [2, 13, 20, 3]),
      (torsos.DeepTorso, _deep, [2, 16, 7, 1]),
      (torsos.DeepTorso, _deep, [2, 4, 9, 14, 1]),
      (torsos.VectorTorso, _vector, [3, 5]),
    ],
  )
  def test_equals_the_reference(self, make, reference, shape):
    generator = np.random.default_rng(0)
    module = make()
    module(tf.zeros(shape))
    _draw_weights(module, generator)
    inputs = np.float32(generator.normal(size=shape))
    expected = reference(inputs, module)
    assert (expected > 0.1).any()
    actual = module(tf.constant(inputs))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


class TestZeroMeanKernels:
  @pytest.mark.parametrize('torso', ['shallow', 'deep'])
  @pytest.mark.parametrize('spec', [_GREY, _COLOURS])
  def test_a_new_torso_starts_with_them(self, torso, spec):
    shape = [1, *spec.observation_shape]
    if len(spec.frame_shape) == 2:
      shape.append(1)
    torso = torsos.make_torso(torso, spec)
    torso(tf.zeros(shape))
    kernels = next(w for w in torso.trainable_variables if w.shape.rank > 3)
    kernels = kernels.numpy().reshape([-1, 16])
    np.testing.assert_allclose(kernels.sum(axis=0), 0, atol=1e-5)
    stddev = np.sqrt(2 / len(kernels))
    # Truncation at two standard deviations leaves 0.88 of one.
    assert kernels.std() == pytest.approx(0.88 * stddev, rel=0.1)

  def test_map_constant_images_to_zero(self):
    kernels = torsos.zero_mean_kernels([8, 8, 3, 16], tf.float32)
    image = tf.fill([1, 20, 20, 3], 0.7)
    outputs = tf.nn.conv2d(image, kernels, strides=4, padding='VALID')
    np.testing.assert_allclose(outputs, np.zeros([1, 4, 4, 16]), atol=1e-5)


class TestStacks:
  def test_frames_of_a_stack_are_channels(self):
    frames = tf.random.uniform([3, 36, 36, 4])
    stacks = tf.transpose(frames, [0, 3, 1, 2])[..., tf.newaxis]
    for of_stacks, of_channels in (
      (torsos.ShallowTorso(stack=4), torsos.ShallowTorso()),
      (torsos.DeepTorso(), torsos.DeepTorso()),
    ):
      one, other = of_stacks(stacks), of_channels(frames)
      assert not np.allclose(one, other)
      for mine, theirs in zip(
        of_channels.variables, of_stacks.variables, strict=True
      ):
        if mine.shape != theirs.shape:  # [4, 8, 8, 1, 16]
          theirs = tf.transpose(theirs[..., 0, :], [1, 2, 0, 3])
        mine.assign(theirs)
      np.testing.assert_allclose(one, of_channels(frames), atol=1e-5)


class TestSizes:
  @pytest.mark.parametrize(('torso', 'count'), [('shallow', 2), ('deep', 15)])
  def test_number_of_convolutions(self, torso, count):
    torso = torsos.make_torso(torso, _COLOURS)
    torso(tf.zeros([1, 36, 40, 3]))
    ranks = [w.shape.rank for w in torso.trainable_variables]
    assert ranks.count(4) == count


class TestMakeTorso:
  @pytest.mark.parametrize(
    ('torso', 'spec', 'message'),
    [
      ('vector', _GREY, '\'vector\' does not fit.*images.*use "shallow"'),
      ('deep', _VECTOR, '\'deep\' does not fit.*vectors.*use "vector"'),
      ('shallow', _VECTOR, 'does not fit'),
      (
        'shallow',
        dataclasses.replace(_GREY, frame_shape=(7, 84)),
        '"shallow" needs images of at least 20 x 20 .*use "deep"',
      ),
      ('resnet', _GREY, "'resnet' is not one of shallow, deep, vector"),
    ],
  )
  def test_refuses_what_does_not_fit(self, torso, spec, message):
    with pytest.raises(errors.SettingError, match=message):
      torsos.make_torso(torso, spec)


class TestDefaultTorso:
  @pytest.mark.parametrize(
    ('shape', 'dtype', 'torso'),
    [
      ([4], np.float32, 'vector'),
      ([84, 84], np.uint8, 'shallow'),
      ([20, 20, 3], np.uint8, 'shallow'),
      ([19, 20, 3], np.uint8, 'deep'),
      ([20, 19], np.uint8, 'deep'),
      ([7, 7, 3], np.uint8, 'deep'),
    ],
  )
  def test_fits_the_observations(self, shape, dtype, torso):
    spec = dataclasses.replace(
      _COLOURS, frame_shape=tuple(shape), frame_dtype=np.dtype(dtype)
    )
    assert torsos.default_torso(spec) == torso
    if len(shape) == 2:
      shape = [*shape, 1]
    features = torsos.make_torso(torso, spec)(tf.zeros([2, *shape]))
    assert features.shape == [2, 64 if torso == 'vector' else 256]
