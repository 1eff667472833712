"""Several learners that update as one (paper, figure 1, right)."""

from collections.abc import Sequence

import tensorflow as tf

# TensorFlow's number for the learners as a group; any will do.
_GROUP_KEY = 1


class Group:
  """Learners, each with a part of the batch.

  All of them build the same graph and run the same ops in the same order. An
  op ends when all have run it, or with an error when one of them has died.

  Attributes:
    size: how many; one alone exchanges nothing.
  """

  def __init__(self, size: int = 1, task: int = 0, device: str = ''):
    """Makes this learner's part.

    Args:
      size: how many learners.
      task: which one this is.
      device: its processor.
    """
    self.size = size
    self._task = task
    self._device = device
    self._num_ops = 0

  def sum(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Sums each tensor over all learners: one vector, one exchange.

    Args:
      tensors: of one type, with static shapes.
    """
    if self.size == 1:
      return list(tensors)
    with tf.device(self._device):
      vector = tf.concat([tf.reshape(t, [-1]) for t in tensors], axis=0)
      self._num_ops += 1
      vector = tf.raw_ops.CollectiveReduceV2(
        input=vector,
        group_size=self.size,
        group_key=_GROUP_KEY,
        instance_key=self._num_ops,
        ordering_token=[],
        merge_op='Add',
        final_op='Id',
        communication_hint='ring',
      )
      sizes = [tensor.shape.num_elements() for tensor in tensors]
      return [
        tf.reshape(part, tensor.shape)
        for part, tensor in zip(tf.split(vector, sizes), tensors, strict=True)
      ]

  def copy_first(self, variables: Sequence[tf.Variable]) -> tf.Operation:
    """Sets the variables of all learners to what the first one's are."""
    if self.size == 1:
      return tf.no_op()
    copies = []
    for dtype in dict.fromkeys(variable.dtype for variable in variables):
      same = [variable for variable in variables if variable.dtype == dtype]
      values = [variable.read_value() for variable in same]
      if self._task:
        values = [tf.zeros_like(value) for value in values]
      # One after the other, in the same order everywhere.
      with tf.control_dependencies(copies):
        copies += [
          variable.assign(value)
          for variable, value in zip(same, self.sum(values), strict=True)
        ]
    return tf.group(*copies)
