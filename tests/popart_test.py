"""Tests of popart.py against NumPy in float64, and of its properties."""

import numpy as np
import pytest
import tensorflow as tf

import popart


def _statistics(mean, second_moment):
  return popart.Statistics(
    tf.constant(mean, tf.float64), tf.constant(second_moment, tf.float64)
  )


def _targets(generator, shape, scale, shift=0.0):
  return tf.constant(scale * (generator.normal(size=shape) + shift), tf.float32)


def _assert_scale(statistics, expected, rtol=1e-6):
  np.testing.assert_allclose(statistics.scale, expected, rtol=rtol)


class TestStatistics:
  def test_at_first_change_nothing(self):
    outputs = tf.constant([[[3.0, 5.0]]])
    statistics = popart.initial_statistics(2)
    np.testing.assert_array_equal(
      popart.unnormalise(outputs, [1], statistics), [[5.0]]
    )

  def test_scale_is_a_standard_deviation_within_bounds(self):
    _assert_scale(
      _statistics([0, 3, 5, -5, 0], [4, 25, 25, 24, 1e13]),
      [2, 4, popart.MIN_SCALE, popart.MIN_SCALE, popart.MAX_SCALE],
    )

  def test_scale_is_exact_where_targets_are_large_and_vary_little(self):
    # In float32 nothing would be left of the variance.
    _assert_scale(_statistics([1e4], [1e8 + 0.01]), [0.1], rtol=1e-4)


def _follow(statistics, targets, level_index):
  """Computes the paper's averages: a step for each target, float64."""
  means, second_moments = (np.array(moment) for moment in statistics)
  for column, level in enumerate(level_index):
    for target in np.float64(targets)[:, column]:
      means[level] += popart.STEP_SIZE * (target - means[level])
      second_moments[level] += popart.STEP_SIZE * (
        target**2 - second_moments[level]
      )
  return means, second_moments


class TestUpdateStatistics:
  def test_equals_a_step_for_each_target_where_targets_are_equal(self):
    level_index = [2, 0, 2]
    targets = tf.constant([[7.0, -3.0, 7.0]] * 5)
    before = _statistics([1, 2, 3, 4], [2, 9, 10, 30])
    after = popart.update_statistics(before, targets, level_index)
    expected = _follow(before, targets, level_index)
    np.testing.assert_allclose(after, expected, rtol=1e-12)

  def test_is_near_a_step_for_each_target(self):
    # Not equal: one by one, later targets weigh a little more.
    generator = np.random.default_rng(1)
    statistics = popart.initial_statistics(3)
    expected = statistics
    for _ in range(50):
      level_index = generator.integers(0, 3, 8)
      targets = _targets(generator, [20, 8], 50.0, shift=1.0)
      statistics = popart.update_statistics(statistics, targets, level_index)
      expected = _follow(expected, targets, level_index)
    np.testing.assert_allclose(statistics, expected, rtol=0.02)

  @pytest.mark.parametrize('scale', [1e-3, 1.0, 1e4])
  def test_equals_numpy(self, scale):
    generator = np.random.default_rng(2)
    statistics = popart.initial_statistics(3)
    mean, second_moment = np.zeros(3), np.ones(3)
    for _ in range(50):
      level_index = generator.integers(0, 3, 4)
      targets = _targets(generator, [6, 4], scale, shift=0.5)
      statistics = popart.update_statistics(statistics, targets, level_index)
      for i in set(level_index):
        own = np.float64(targets)[:, level_index == i]
        weight = 1 - (1 - popart.STEP_SIZE) ** own.size
        mean[i] += weight * (own.mean() - mean[i])
        second_moment[i] += weight * ((own**2).mean() - second_moment[i])
    assert statistics.mean.dtype == tf.float64
    np.testing.assert_allclose(statistics.mean, mean, rtol=1e-9)
    np.testing.assert_allclose(statistics.second_moment, second_moment, 1e-9)
    _assert_scale(statistics, np.sqrt(second_moment - mean**2))

  def test_leaves_an_absent_level_as_it_is(self):
    before = _statistics([1.1, 0.7, -3.3], [2.9, 0.9, 20.1])
    after = popart.update_statistics(before, tf.fill([5, 2], 1e5), [0, 0])
    for old, new in zip(before, after, strict=True):
      assert new[0] != old[0]
      np.testing.assert_array_equal(new[1:], old[1:])

  def test_does_not_overshoot(self):
    statistics = popart.initial_statistics(1)
    targets = tf.fill([100_000, 1], 8.0)
    statistics = popart.update_statistics(statistics, targets, [0])
    np.testing.assert_allclose(statistics.mean, [8.0], rtol=1e-6)

  @pytest.mark.parametrize('target', [0.0, 1e-3, -7.0, 1e4])
  def test_is_finite_where_targets_never_change(self, target):
    statistics = popart.initial_statistics(1)
    targets = tf.fill([1000, 10], target)
    for _ in range(30):
      statistics = popart.update_statistics(statistics, targets, [0] * 10)
    _assert_scale(statistics, [popart.MIN_SCALE])
    np.testing.assert_allclose(statistics.mean, [target], rtol=1e-6)


class TestUnnormalise:
  def test_takes_each_column_from_its_level(self):
    outputs = np.random.default_rng(0).normal(size=[5, 3, 4])
    statistics = _statistics([1, -2, 30, 0], [5, 13, 1000, 1])
    level_index = [2, 0, 2]
    values = popart.unnormalise(
      tf.constant(outputs, tf.float32), level_index, statistics
    )
    assert values.dtype == tf.float32
    expected = [
      outputs[:, 0, 2] * 10 + 30, outputs[:, 1, 0] * 2 + 1,
      outputs[:, 2, 2] * 10 + 30,
    ]  # fmt: skip
    np.testing.assert_allclose(values, np.transpose(expected), rtol=1e-5)


class TestRescaleHead:
  def test_preserves_values_whatever_happens_to_the_scale(self):
    generator = np.random.default_rng(3)
    features = tf.constant(generator.normal(size=[50, 16]), tf.float32)
    w = tf.constant(generator.normal(size=[16, 2]), tf.float32)
    b = tf.constant(generator.normal(size=[2]), tf.float32)
    statistics = popart.initial_statistics(2)

    def values():
      outputs = (features @ w + b)[:, None]  # [50, 1, N]
      return np.concatenate(
        [popart.unnormalise(outputs, [i], statistics) for i in (0, 1)], axis=1
      )

    scales = []
    for scale in 10 ** generator.uniform(-3, 4, 50):
      # So many that the statistics follow at once.
      targets = _targets(generator, [20_000, 2], scale, shift=1.0)
      new = popart.update_statistics(statistics, targets, [0, 1])
      before = values()
      w, b = popart.rescale_head(w, b, statistics, new)
      # Against the largest of the numbers whose sums the values are.
      parts = [*np.abs(before), np.abs(statistics.mean), np.abs(new.mean)]
      size = np.max(parts, axis=0)
      statistics = new
      scales.append(new.scale)
      np.testing.assert_array_less(np.abs(values() - before) / size, 1e-5)
    assert np.min(np.max(scales, axis=0) / np.min(scales, axis=0)) > 1e4
