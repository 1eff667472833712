"""Several learners that update as one (paper, figure 1, right)."""

from collections.abc import Iterator, Sequence
import contextlib

import tensorflow as tf

# TensorFlow's key for the group of learners; any number will do.
_GROUP_KEY = 1


class Group:
  """A group of learners, each with a part of the batch.

  All of them build the same graph and run the same ops. Collectives in one
  session call run in the order in which they were built. A collective ends when
  all learners have joined it, or with an error: `UnavailableError` if one has
  died, `DeadlineExceededError` if one did not join in time.

  Attributes:
    size: the number of learners. If it is 1, collectives do nothing.
  """

  def __init__(
    self,
    size: int = 1,
    task: int = 0,
    device: str = '',
    timeout_secs: float = 0.0,
  ):
    """Makes this learner's side of the group.

    Args:
      size: the number of learners.
      task: the index of this learner.
      device: the device of its collectives.
      timeout_secs: how long a collective waits for the others; 0 means forever.
    """
    self.size = size
    self._task = task
    self._device = device
    self._timeout_secs = timeout_secs
    self._num_ops = 0
    self._last = []

  def all_reduce(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Sums each tensor over all learners, in one collective on one vector.

    Args:
      tensors: tensors of one dtype, with static shapes.
    """
    if self.size == 1:
      return list(tensors)
    with tf.device(self._device):
      vector = self._run(
        tf.raw_ops.CollectiveReduceV2, tensors, merge_op='Add', final_op='Id'
      )
      return [
        tf.reshape(part, tensor.shape)
        for part, tensor in zip(_split(vector, tensors), tensors, strict=True)
      ]

  def all_gather(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Concatenates each tensor over all learners, in one collective.

    Args:
      tensors: bool, int32 or float32, with static shapes [..., B].

    Returns:
      Tensors [..., n * B]: the exact values of the n learners, in their order.
    """
    if self.size == 1:
      return list(tensors)
    with tf.device(self._device):
      vector = self._run(
        tf.raw_ops.CollectiveGatherV2, [_to_int32(t) for t in tensors]
      )
      parts = _split(tf.reshape(vector, [self.size, -1]), tensors)
      return [
        _from_int32(
          tf.concat(tf.unstack(tf.reshape(part, [-1, *t.shape])), axis=-1),
          t.dtype,
        )
        for part, t in zip(parts, tensors, strict=True)
      ]

  def _run(self, collective, tensors, **arguments):
    """Applies `collective` to one vector of all tensors."""
    vector = tf.concat([tf.reshape(t, [-1]) for t in tensors], axis=0)
    self._num_ops += 1
    with tf.control_dependencies(self._last):
      result = collective(
        input=vector,
        group_size=self.size,
        group_key=_GROUP_KEY,
        instance_key=self._num_ops,
        ordering_token=[],
        communication_hint='ring',
        timeout_seconds=self._timeout_secs,
        **arguments,
      )
    self._last = [result.op]
    return result

  @contextlib.contextmanager
  def apart(self) -> Iterator[None]:
    """Makes the collectives built inside independent of those built outside."""
    others, self._last = self._last, []
    yield
    self._last = others

  def broadcast(self, variables: Sequence[tf.Variable]) -> tf.Operation:
    """Sets the variables of all learners to the first learner's values."""
    if self.size == 1:
      return tf.no_op()
    copies = []
    with self.apart():
      for dtype in dict.fromkeys(variable.dtype for variable in variables):
        same = [variable for variable in variables if variable.dtype == dtype]
        values = [variable.read_value() for variable in same]
        if self._task:
          values = [tf.zeros_like(value) for value in values]
        copies += [
          variable.assign(value)
          for variable, value in zip(same, self.all_reduce(values), strict=True)
        ]
    return tf.group(*copies)


ALONE = Group()


def _split(vector, tensors):
  """Splits the last axis into the sizes of the tensors."""
  return tf.split(vector, [t.shape.num_elements() for t in tensors], axis=-1)


def _to_int32(tensor):
  # Floats are cast bit by bit, which preserves their values.
  is_float = tensor.dtype == tf.float32
  return tf.bitcast(tensor, tf.int32) if is_float else tf.cast(tensor, tf.int32)


def _from_int32(tensor, dtype):
  is_float = dtype == tf.float32
  return tf.bitcast(tensor, dtype) if is_float else tf.cast(tensor, dtype)
