"""Calls of a session without the cost of `Session.run`.

With feeds, `Session.run` and the functions of `Session.make_callable` look up
all tensors again for each call. This takes 0.2 ms; the policy of a small
environment takes a fifth of that.
"""

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2

tf1 = tf.compat.v1


def make(
  session: tf1.Session,
  fetches: Sequence[tf.Tensor],
  feeds: Sequence[tf.Tensor] = (),
  targets: Sequence[tf.Operation] = (),
  in_calling_thread: bool = False,
) -> Callable[..., list[np.ndarray]]:
  """Makes a function that runs ops in a session of this process.

  Args:
    session: where to run them.
    fetches: what the function returns.
    feeds: its arguments: arrays of exactly these types.
    targets: ops to run besides.
    in_calling_thread: whether to run all ops in the thread that calls the
      function, which is faster than handing them to others.

  Returns:
    The function. It raises what `session.run` would raise.
  """
  # Neither this nor the method below is public.
  options = config_pb2.CallableOptions(
    feed=[tensor.name for tensor in feeds],
    fetch=[tensor.name for tensor in fetches],
    target=[op.name for op in targets],
  )
  if in_calling_thread:
    options.run_options.inter_op_thread_pool = -1
  return session._make_callable_from_options(options)
