"""PopArt: normalised values, so that levels with large rewards do not dominate.

Each level i has its own output n_i of the baseline head, and statistics of its
V-trace targets: the mean mu_i and the scale sigma_i. Its value is
sigma_i n_i + mu_i; the network learns n_i. The order within an update is that
of van Hasselt et al. (2016, arXiv:1602.07714), algorithm 1:

1. compute V-trace, with values under the old statistics;
2. compute the new statistics, from the V-trace targets `vs`;
3. rescale the head, so that all values stay the same;
4. compute the loss under the new statistics, and take one step on all weights,
   including those of the rescaled head.

From Hessel et al. (2018), "Multi-task Deep Reinforcement Learning with PopArt",
arXiv:1809.04474.
"""

from collections.abc import Sequence
from typing import NamedTuple

import sonnet as snt
import tensorflow as tf

# The paper's values: how far one target moves the moments, and sigma's bounds.
STEP_SIZE = 3e-4
MIN_SCALE = 1e-4
MAX_SCALE = 1e6


class Statistics(NamedTuple):
  """Moments of each level's V-trace targets; N is the number of levels.

  They are in float64: if targets vary little, the variance is the small
  difference of two large numbers.

  Attributes:
    mean: float64 [N], mu.
    second_moment: float64 [N], nu, the mean of the squared targets.
  """

  mean: tf.Tensor
  second_moment: tf.Tensor

  @property
  def scale(self) -> tf.Tensor:
    """sigma, float32 [N], the standard deviation, clipped to its bounds."""
    variance = self.second_moment - tf.square(self.mean)
    variance = tf.clip_by_value(variance, MIN_SCALE**2, MAX_SCALE**2)
    return tf.cast(tf.sqrt(variance), tf.float32)


def initial_statistics(num_levels: int) -> Statistics:
  """Returns mean 0 and scale 1 for each level, which leave values unchanged."""
  return Statistics(
    tf.zeros([num_levels], tf.float64), tf.ones([num_levels], tf.float64)
  )


def unnormalise(
  outputs: tf.Tensor, level_index: tf.Tensor, statistics: Statistics
) -> tf.Tensor:
  """Computes values from the outputs of the head.

  Args:
    outputs: float32 [T, B, N], the outputs n of all levels.
    level_index: int32 [B], the level of each unroll.
    statistics: the statistics of the levels.

  Returns:
    float32 [T, B], the values for the level of each unroll.
  """
  values = outputs * statistics.scale + tf.cast(statistics.mean, tf.float32)
  is_own = tf.one_hot(level_index, values.shape[-1])  # [B, N]
  return tf.reduce_sum(values * is_own, axis=-1)


def update_statistics(
  statistics: Statistics,
  targets: tf.Tensor,
  level_index: tf.Tensor,
  played: tf.Tensor | None = None,
) -> Statistics:
  """Moves the statistics of each level in the batch towards its targets.

  The k targets of a level count as k steps of `STEP_SIZE` towards their mean.
  Their order then does not matter, and no batch is so large that it overshoots.

  Args:
    statistics: the statistics before the update.
    targets: float32 [T, B], `vs`.
    level_index: int32 [B], the level of each unroll.
    played: bool [T, B], which targets count; None for all.

  Returns:
    The updated statistics. Those of a level without targets are unchanged.
  """
  num_levels = statistics.mean.shape[0]
  is_own = tf.one_hot(level_index, num_levels, dtype=tf.float64)  # [B, N]
  counts = tf.ones_like(targets, tf.float64)
  if played is not None:
    counts = tf.cast(played, tf.float64)

  def add_up(samples):
    return tf.linalg.matvec(is_own, tf.reduce_sum(samples, 0), True)

  count = add_up(counts)  # [N]
  weight = 1.0 - (1.0 - STEP_SIZE) ** count

  def follow(moment, samples):
    mean = add_up(samples * counts) / tf.maximum(count, 1.0)
    return moment + weight * (mean - moment)

  targets = tf.cast(targets, tf.float64)
  return Statistics(
    follow(statistics.mean, targets),
    follow(statistics.second_moment, tf.square(targets)),
  )


def rescale_head(
  w: tf.Tensor, b: tf.Tensor, old: Statistics, new: Statistics
) -> tuple[tf.Tensor, tf.Tensor]:
  """Computes weights of the head that give the same values under `new`.

  Args:
    w: float32 [D, N], the head's matrix under `old`.
    b: float32 [N], its bias under `old`.
    old: the statistics before the update.
    new: the statistics after the update.

  Returns:
    The matrix and the bias under `new`.
  """
  shift = tf.cast(old.mean - new.mean, tf.float32)
  return w * old.scale / new.scale, (b * old.scale + shift) / new.scale


class PopArt:
  """The statistics as variables, and their part in an update.

  Attributes:
    variables: `Statistics` of variables, for the checkpoint. Only the learner
      has them, since actors need no values.
    statistics: the variables' values before the update.
  """

  def __init__(self, head: snt.Linear):
    """Makes the variables in the current graph.

    Args:
      head: the baseline head, with an output for each level; its weights may
        be made later.
    """
    self._head = head
    initial = initial_statistics(head.output_size)
    self.variables = Statistics(
      *(
        tf.Variable(value, trainable=False, name=f'popart/{name}')
        for name, value in zip(Statistics._fields, initial, strict=True)
      )
    )
    # Read once, since all parts of an update must see the same values.
    self.statistics = Statistics(*(v.read_value() for v in self.variables))

  def rescale_gradients(
    self,
    gradients: Sequence[tf.Tensor],
    weights: Sequence[tf.Variable],
    new: Statistics,
  ) -> list[tf.Tensor]:
    """Converts gradients for the current head into those for the rescaled head.

    Rescaling changes no values, and therefore only the gradients of the head:
    its weights are multiplied by old scale / new scale, so their gradients are
    multiplied by new scale / old scale.

    Args:
      gradients: the gradients of the loss under `new` for each of `weights`.
      weights: the agent's weights.
      new: the statistics after this update.

    Returns:
      The gradients, in the same order.
    """
    growth = new.scale / self.statistics.scale
    head = self._head.trainable_variables
    return [
      gradient * growth if any(weight is w for w in head) else gradient
      for gradient, weight in zip(gradients, weights, strict=True)
    ]

  def apply(self, new: Statistics) -> tf.Operation:
    """Sets the statistics to `new` and rescales the head, in one op."""
    w, b = self._head.w, self._head.b
    rescaled = rescale_head(
      w.read_value(), b.read_value(), self.statistics, new
    )
    pairs = zip((w, b, *self.variables), (*rescaled, *new), strict=True)
    return tf.group(*(variable.assign(value) for variable, value in pairs))
