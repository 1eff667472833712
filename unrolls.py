"""Unrolls, and how they travel from an actor to its learner.

An actor enqueues unrolls, each an `ActorOutput`. The learner takes them in
batches: `FIFOQueue` -> `dequeue_many` -> time-major -> `StagingArea` (the next
batch moves while this one trains) -> stacked frames.
"""

from typing import NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import data_flow_ops  # StagingArea is not public.

import environments
import networks

tf1 = tf.compat.v1


class ActorOutput(NamedTuple):
  """One unroll, as it is sent to the learner.

  Attributes:
    level_index: int32 [], the index of the level that was played.
    policy_version: int64 [], the version of the weights that acted at step 0:
      the number of updates that made them.
    agent_state: the agent's state before step 0.
    earlier_frames: uint8 [S - 1, H, W], the frames below the newest one in the
      stack of step 0, oldest first; `()` if frames are not stacked.
    env_outputs: `StepOutput`, `[T + 1, ...]`. If frames are stacked, only the
      newest of each stack, [T + 1, H, W]: each frame is sent once.
    agent_outputs: `AgentOutput`, `[T + 1, ...]`; the action at index t led to
      observation t.
  """

  level_index: object
  policy_version: object
  agent_state: tuple
  earlier_frames: object
  env_outputs: environments.StepOutput
  agent_outputs: networks.AgentOutput


def unroll_specs(
  agent: networks.Agent,
  spec: environments.EnvironmentSpec,
  unroll_length: int,
) -> ActorOutput:
  """Returns the `tf.TensorSpec`s of one unroll, in an `ActorOutput`."""
  steps = unroll_length + 1

  earlier_frames = ()
  if spec.stack > 1:
    shape = [spec.stack - 1, *spec.frame_shape]
    earlier_frames = tf.TensorSpec(shape, spec.frame_dtype)
  observation = observation_specs(spec)._replace(
    frame=tf.TensorSpec(spec.frame_shape, spec.frame_dtype)
  )
  return ActorOutput(
    level_index=tf.TensorSpec([], tf.int32),
    policy_version=tf.TensorSpec([], tf.int64),
    agent_state=tf.nest.map_structure(
      lambda array: tf.TensorSpec(array.shape[1:], array.dtype),
      agent.initial_state(1),
    ),
    earlier_frames=earlier_frames,
    env_outputs=environments.StepOutput(
      reward=tf.TensorSpec([steps], tf.float32),
      info=environments.StepOutputInfo(
        episode_return=tf.TensorSpec([steps], tf.float32),
        episode_step=tf.TensorSpec([steps], tf.int32),
        episode_done=tf.TensorSpec([steps], tf.bool),
        truncated=tf.TensorSpec([steps], tf.bool),
      ),
      done=tf.TensorSpec([steps], tf.bool),
      observation=tf.nest.map_structure(
        lambda part: tf.TensorSpec([steps, *part.shape], part.dtype),
        observation,
      ),
    ),
    agent_outputs=networks.AgentOutput(
      action=tf.TensorSpec([steps], tf.int32),
      policy_logits=tf.TensorSpec([steps, spec.num_actions], tf.float32),
    ),
  )


def observation_specs(
  spec: environments.EnvironmentSpec,
) -> environments.Observation:
  """Returns the `tf.TensorSpec`s of one observation."""
  arrays = spec.observation_arrays
  return spec.to_observation([tf.TensorSpec(*array) for array in arrays])


def make_queue(specs: ActorOutput, capacity: int) -> tf.queue.FIFOQueue:
  """Makes the queue of unrolls; its capacity bounds the policy lag.

  Its shared name makes it the same queue in all sessions on one server.
  """
  flat = tf.nest.flatten(specs)
  return tf.queue.FIFOQueue(
    capacity,
    [s.dtype for s in flat],
    [s.shape for s in flat],
    shared_name='unrolls',
  )


def make_enqueue(
  queue: tf.queue.FIFOQueue, specs: ActorOutput
) -> tuple[tf.Operation, list[tf.Tensor]]:
  """Makes the op that enqueues n unrolls, and its placeholders.

  Args:
    queue: the queue of unrolls.
    specs: the result of `unroll_specs`.

  Returns:
    The op, and a placeholder [n, ...] for each array of a flat `ActorOutput`.
  """
  flat = tf.nest.flatten(specs)
  feeds = [tf1.placeholder(s.dtype, [None, *s.shape]) for s in flat]
  return queue.enqueue_many(feeds), feeds


def stage(
  queue: tf.queue.FIFOQueue, specs: ActorOutput, batch_size: int
) -> tuple[ActorOutput, tf.Operation, tf.Operation]:
  """Takes batches from the queue, each while the one before it trains.

  Args:
    queue: the queue of unrolls.
    specs: the result of `unroll_specs`.
    batch_size: B.

  Returns:
    A batch, [T + 1, B, ...]; the op that stages the first batch; and the op
    that stages the next one, to be run with the ops that use the batch.
  """
  with tf.name_scope('stage'):
    flat = queue.dequeue_many(batch_size)
    batch = time_major(tf.nest.pack_sequence_as(specs, flat))
    tensors = tf.nest.flatten(batch)
    area = data_flow_ops.StagingArea(
      [t.dtype for t in tensors], [t.shape for t in tensors], capacity=1
    )
    put_first = area.put(tensors)
    batch = tf.nest.pack_sequence_as(specs, area.get())
    # Only once the area is empty: a blocked `put` would hold a thread that
    # other ops may need.
    with tf.control_dependencies([batch.level_index]):
      return batch, put_first, area.put(tensors)


def time_major(batch: ActorOutput) -> ActorOutput:
  """Transposes a batch from `[B, T + 1, ...]` to `[T + 1, B, ...]`."""

  def swap(tensor):
    return tf.transpose(tensor, [1, 0, *range(2, tensor.shape.rank)])

  return batch._replace(
    env_outputs=tf.nest.map_structure(swap, batch.env_outputs),
    agent_outputs=tf.nest.map_structure(swap, batch.agent_outputs),
  )


def scale_frames(frames: tf.Tensor) -> tf.Tensor:
  """Maps uint8 to float32 in [0, 1]; leaves float32 unchanged."""
  if frames.dtype == tf.uint8:
    return tf.cast(frames, tf.float32) / 255.0
  return frames


def restore_frames(batch: ActorOutput) -> ActorOutput:
  """Returns a batch with frames as the agent sees them: scaled and stacked.

  Args:
    batch: unrolls, time-major.

  Returns:
    The batch with float32 frames: [T + 1, B, ...], or, if frames are stacked,
    the stacks that the environments returned, [T + 1, B, S, H, W].
  """
  observation = batch.env_outputs.observation
  if isinstance(batch.earlier_frames, tuple):
    frames = scale_frames(observation.frame)
  else:
    frames = _stack_frames(batch)
  return batch._replace(
    env_outputs=batch.env_outputs._replace(
      observation=observation._replace(frame=frames)
    )
  )


def _stack_frames(batch: ActorOutput) -> tf.Tensor:
  """Stacks single frames; returns float32 [T + 1, B, S, H, W]."""
  frames, info = batch.env_outputs.observation.frame, batch.env_outputs.info
  length, size, *shape = frames.shape
  earlier = batch.earlier_frames.shape[1]
  # Stacks are blank before the start of a game, but not before a lost life.
  # A truncated game still shows its own last frames.
  is_next = info.episode_done & ~info.truncated
  begins = is_next | tf.equal(info.episode_step, 0)
  game = tf.cumsum(tf.cast(begins, tf.int32))  # [T + 1, B]
  game = tf.concat([tf.zeros([earlier, size], tf.int32), game], axis=0)
  steps = np.arange(length)[:, None] + np.arange(earlier + 1)  # [T + 1, S]
  same = tf.equal(tf.gather(game, steps), game[earlier:, None])
  # Row 0 of the table is the blank frame.
  rows = tf.where(same, steps[..., None] * size + np.arange(size) + 1, 0)
  table = [
    tf.zeros([1, *shape], tf.uint8),
    tf.reshape(tf.transpose(batch.earlier_frames, [1, 0, 2, 3]), [-1, *shape]),
    tf.reshape(frames, [-1, *shape]),
  ]
  # Scaled before the gather, after which each frame exists S times.
  table = scale_frames(tf.concat(table, axis=0))
  return tf.gather(table, tf.transpose(rows, [0, 2, 1]))
