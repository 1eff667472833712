"""Acts: many environments, one batched policy, unrolls out.

An actor steps whichever of its environments are ready, as one batch: none
waits for another that renders slowly or restarts. Each environment has its own
recurrent state and its own unroll under way.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

import environments
from envs import instructions
import networks

tf1 = tf.compat.v1


class ActorOutput(NamedTuple):
  """One unroll, as it goes to the learner.

  Attributes:
    level_index: int32 [], which of the run's levels was played.
    policy_update: int64 [], the number of updates behind the weights that
      acted first.
    agent_state: before step 0.
    earlier_frames: uint8 [S - 1, H, W], the frames beneath the newest one of
      step 0, oldest first; `()` if none are stacked.
    env_outputs: `StepOutput`, `[T + 1, ...]`; of stacked frames only the
      newest, [T + 1, H, W]: each frame travels once.
    agent_outputs: `AgentOutput`, `[T + 1, ...]`; index t led to observation t.
  """

  level_index: object
  policy_update: object
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
  levels = [] if agent.popart_levels is None else [agent.popart_levels]

  def one(shape, dtype):
    return tf.TensorSpec(shape, dtype)

  earlier_frames = ()
  if spec.stack > 1:
    shape = [spec.stack - 1, *spec.frame_shape]
    earlier_frames = one(shape, spec.frame_dtype)
  observation = observation_specs(spec)._replace(
    frame=one(spec.frame_shape, spec.frame_dtype)
  )
  return ActorOutput(
    level_index=one([], tf.int32),
    policy_update=one([], tf.int64),
    agent_state=tf.nest.map_structure(
      lambda array: one(array.shape[1:], array.dtype), agent.initial_state(1)
    ),
    earlier_frames=earlier_frames,
    env_outputs=environments.StepOutput(
      reward=one([steps], tf.float32),
      info=environments.StepOutputInfo(
        episode_return=one([steps], tf.float32),
        episode_step=one([steps], tf.int32),
        episode_done=one([steps], tf.bool),
      ),
      done=one([steps], tf.bool),
      observation=tf.nest.map_structure(
        lambda part: one([steps, *part.shape], part.dtype), observation
      ),
    ),
    agent_outputs=networks.AgentOutput(
      action=one([steps], tf.int32),
      policy_logits=one([steps, spec.num_actions], tf.float32),
      baseline=one([steps, *levels], tf.float32),
    ),
  )


def observation_specs(
  spec: environments.EnvironmentSpec,
) -> environments.Observation:
  """Returns the `tf.TensorSpec`s of one observation."""
  instruction = ()
  if spec.has_instruction:
    instruction = tf.TensorSpec([instructions.MAX_WORDS], tf.int16)
  frame = tf.TensorSpec(spec.observation_shape, spec.frame_dtype)
  return environments.Observation(frame, instruction)


def make_queue(specs: ActorOutput, capacity: int) -> tf.queue.FIFOQueue:
  """Makes the queue of unrolls; `capacity` unrolls bound the policy lag.

  Its name makes it one queue for all that use one server.
  """
  flat = tf.nest.flatten(specs)
  return tf.queue.FIFOQueue(
    capacity,
    [s.dtype for s in flat],
    [s.shape for s in flat],
    shared_name='unrolls',
  )


def time_major(batch: ActorOutput) -> ActorOutput:
  """Turns a batch of unrolls, `[B, T + 1, ...]`, to `[T + 1, B, ...]`."""

  def swap(tensor):
    return tf.transpose(tensor, [1, 0, *range(2, tensor.shape.rank)])

  return batch._replace(
    env_outputs=tf.nest.map_structure(swap, batch.env_outputs),
    agent_outputs=tf.nest.map_structure(swap, batch.agent_outputs),
  )


def stack_frames(batch: ActorOutput) -> ActorOutput:
  """Stacks frames again that travelled one by one.

  Args:
    batch: unrolls, time-major.

  Returns:
    The batch with the stacks that the environments gave, as the agent sees
    them: float32 [T + 1, B, S, H, W]. As it was if no frames are stacked.
  """
  if isinstance(batch.earlier_frames, tuple):
    return batch
  observation, info = batch.env_outputs.observation, batch.env_outputs.info
  length, size, *shape = observation.frame.shape
  earlier = batch.earlier_frames.shape[1]
  # Stacks are blank before a game's start, which no lost life is.
  begins = info.episode_done | tf.equal(info.episode_step, 0)
  game = tf.cumsum(tf.cast(begins, tf.int32))  # [T + 1, B]
  game = tf.concat([tf.zeros([earlier, size], tf.int32), game], axis=0)
  steps = np.arange(length)[:, None] + np.arange(earlier + 1)  # [T + 1, S]
  same = tf.equal(tf.gather(game, steps), game[earlier:, None])
  # Row 0 of the table is the blank frame.
  rows = tf.where(same, steps[..., None] * size + np.arange(size) + 1, 0)
  table = [
    tf.zeros([1, *shape], tf.uint8),
    tf.reshape(tf.transpose(batch.earlier_frames, [1, 0, 2, 3]), [-1, *shape]),
    tf.reshape(observation.frame, [-1, *shape]),
  ]
  # Before each is there four times.
  table = networks.scale_frames(tf.concat(table, axis=0))
  stacks = tf.gather(table, tf.transpose(rows, [0, 2, 1]))
  return batch._replace(
    env_outputs=batch.env_outputs._replace(
      observation=observation._replace(frame=stacks)
    )
  )


def make_enqueue(
  queue: tf.queue.FIFOQueue, specs: ActorOutput
) -> tuple[tf.Operation, list[tf.Tensor]]:
  """Makes the op that enqueues n unrolls, and what it takes.

  Args:
    queue: takes the unrolls.
    specs: `unroll_specs`.

  Returns:
    The op, and a placeholder [n, ...] for each array of a flat `ActorOutput`.
  """
  flat = tf.nest.flatten(specs)
  feeds = [tf1.placeholder(s.dtype, [None, *s.shape]) for s in flat]
  return queue.enqueue_many(feeds), feeds


class Policy:
  """An agent's step on arrays, for whichever environments are ready."""

  def __init__(self, agent: networks.Agent, spec: environments.EnvironmentSpec):
    """Builds the ops in the current graph.

    Args:
      agent: not yet called: its weights are made here.
      spec: of the environments.
    """
    self.agent = agent
    self._state = tf.nest.map_structure(
      lambda array: tf1.placeholder(array.dtype, [None, *array.shape[1:]]),
      agent.initial_state(1),
    )
    self._last_actions = tf1.placeholder(tf.int32, [None])
    self._env_outputs = environments.StepOutput(
      reward=tf1.placeholder(tf.float32, [None]),
      info=(),
      done=tf1.placeholder(tf.bool, [None]),
      observation=tf.nest.map_structure(
        lambda part: tf1.placeholder(part.dtype, [None, *part.shape]),
        observation_specs(spec),
      ),
    )
    self._outputs = agent.step(
      self._last_actions, self._env_outputs, self._state
    )

  def bind(self, session: tf1.Session) -> Callable:
    """Returns `act(last_actions, env_outputs, state)`.

    It is `networks.Agent.step` on arrays, but takes its state flat.
    """
    inputs = (self._last_actions, self._env_outputs, self._state)
    step = session.make_callable(
      self._outputs, tf.nest.flatten(inputs), accept_options=True
    )
    # In the calling thread: handing small ops between threads only costs.
    options = tf1.RunOptions(inter_op_thread_pool=-1)

    def act(last_actions, env_outputs, state):
      reward, _, done, observation = env_outputs
      parts = tf.nest.flatten(observation)
      return step(last_actions, reward, done, *parts, *state, options=options)

    return act


def copy_weights(
  mine: networks.Agent, theirs: networks.Agent, num_updates: tf.Variable
) -> tf.Tensor:
  """Copies the learner's weights to an actor's agent, in one op.

  Acting on the learner's own variables would read them anew at every step, and
  mix two policies inside one step.

  Args:
    mine: the actor's agent.
    theirs: the learner's.
    num_updates: the learner's counter.

  Returns:
    int64 [], the number of updates behind the copied weights, at least.
  """
  updates = num_updates.read_value()
  with tf.control_dependencies([updates]):
    copies = [
      to.assign(value.read_value())
      for to, value in zip(mine.variables, theirs.variables, strict=True)
    ]
  with tf.control_dependencies(copies):
    return tf.identity(updates)


class Actor:
  """Plays `num_envs` environments and enqueues their unrolls.

  All arrays are indexed by environment first.
  """

  def __init__(
    self,
    envs: environments.Environments,
    level_indices: np.ndarray,
    policy: Policy,
    specs: ActorOutput,
    unroll_length: int,
  ):
    """Makes the actor; no environment is stepped yet.

    Args:
      envs: what to play.
      level_indices: int32 [num_envs], the level of each environment.
      policy: acts.
      specs: `unroll_specs`.
      unroll_length: T.
    """
    self._envs = envs
    self._policy = policy
    self._unroll_length = unroll_length
    self._is_stacked = envs.spec.stack > 1

    num_envs = envs.num_envs
    # The unrolls under way; agent_state is the one before their step 0.
    self._unrolls = tf.nest.map_structure(
      lambda s: np.zeros([num_envs, *s.shape], s.dtype.as_numpy_dtype), specs
    )
    self._unrolls.level_index[:] = level_indices
    # Where each unroll is, and the last output and the state of each agent.
    self._time = np.zeros([num_envs], np.int64)
    self._agent_outputs = tf.nest.map_structure(
      lambda array: array[:, 0].copy(), self._unrolls.agent_outputs
    )
    self._state = policy.agent.initial_state(num_envs)

  def run(
    self,
    session: tf1.Session,
    refresh: Callable[[], int],
    enqueue: Callable[..., None],
    should_stop: Callable[[], bool],
  ) -> None:
    """Plays until `should_stop` says so.

    Args:
      session: holds the policy's weights.
      refresh: copies the learner's weights to the policy; returns the number of
        updates behind them. See `copy_weights`.
      enqueue: sends n unrolls, a flat `ActorOutput` of arrays [n, ...]; waits
        while the queue is full. See `make_enqueue`.
      should_stop: asked once a batched step.

    Raises:
      tf.errors.CancelledError: the queue was closed.
      py_process.EnvironmentFailed: see `environments.Environments.recv`.
    """
    act = self._policy.bind(session)
    steps = 0
    while not should_stop():
      ids, env_outputs = self._envs.recv(timeout_secs=1.0)
      if not ids.size:
        continue  # All are slow: time to look at should_stop again.
      full = self._record(ids, env_outputs)
      if full.size:
        enqueue(*_take(self._unrolls, full))
        self._begin_unrolls(full)
      # After the queue, at which an actor may have waited.
      if steps % self._unroll_length == 0:
        num_updates = refresh()
      steps += 1
      self._note_beginnings(ids, env_outputs, num_updates)
      agent_outputs, state = act(
        self._agent_outputs.action[ids], env_outputs, _take(self._state, ids)
      )
      self._envs.send(agent_outputs.action, ids)
      _put(self._agent_outputs, ids, tf.nest.flatten(agent_outputs))
      _put(self._state, ids, tf.nest.flatten(state))
      self._time[ids] += 1

  def _record(self, ids, env_outputs):
    """Writes one step of each of `ids`; returns those whose unroll is full."""
    if self._is_stacked:
      observation = env_outputs.observation
      newest = observation._replace(frame=observation.frame[:, -1])
      env_outputs = env_outputs._replace(observation=newest)
    index = (ids, self._time[ids])
    _put(self._unrolls.env_outputs, index, tf.nest.flatten(env_outputs))
    _put(self._unrolls.agent_outputs, index, _take(self._agent_outputs, ids))
    return ids[self._time[ids] == self._unroll_length]

  def _begin_unrolls(self, ids):
    """Makes the last step of the unrolls of `ids` step 0 of the next."""
    last = (ids, self._unroll_length)
    for part in (self._unrolls.env_outputs, self._unrolls.agent_outputs):
      _put(part, (ids, 0), _take(part, last))
    self._time[ids] = 0

  def _note_beginnings(self, ids, env_outputs, num_updates):
    """Writes what belongs to a whole unroll, where it is at step 0."""
    rows = np.flatnonzero(self._time[ids] == 0)
    ids = ids[rows]
    self._unrolls.policy_update[ids] = num_updates
    _put(self._unrolls.agent_state, ids, _take(self._state, ids))
    if self._is_stacked:
      stacks = env_outputs.observation.frame
      self._unrolls.earlier_frames[ids] = stacks[rows, :-1]


def _take(arrays, index):
  return [array[index] for array in tf.nest.flatten(arrays)]


def _put(arrays, index, values):
  for array, value in zip(tf.nest.flatten(arrays), values, strict=True):
    array[index] = value
