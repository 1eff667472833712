"""Acts in many environments with one batched policy, and enqueues unrolls.

An actor steps whichever of its environments are ready, as one batch: none
waits for another that renders slowly or restarts. Each environment has its own
recurrent state and its own unroll in progress.
"""

from collections.abc import Callable

import numpy as np
import tensorflow as tf

import environments
import networks
from runtime import callables
from runtime import errors
import unrolls

tf1 = tf.compat.v1


class PolicyNotFiniteError(errors.UserError, ArithmeticError):
  """No action can be sampled from the agent's policy: it is not finite."""


class Policy:
  """An agent's step on NumPy arrays, for the environments that are ready."""

  def __init__(self, agent: networks.Agent, spec: environments.EnvironmentSpec):
    """Builds the ops in the current graph.

    Args:
      agent: must not have been called yet: its weights are made here.
      spec: the environments' spec.
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
        unrolls.observation_specs(spec),
      ),
    )
    observation = self._env_outputs.observation
    scaled = observation._replace(frame=unrolls.scale_frames(observation.frame))
    self._outputs = agent.step(
      self._last_actions,
      self._env_outputs._replace(observation=scaled),
      self._state,
    )

  def bind(self, session: tf1.Session) -> Callable:
    """Returns `act(last_actions, env_outputs, state)`.

    It is `networks.Agent.step` on NumPy arrays, but takes the state as a flat
    list.
    """
    inputs = (self._last_actions, self._env_outputs, self._state)
    step = callables.make(
      session,
      tf.nest.flatten(self._outputs),
      tf.nest.flatten(inputs),
      in_calling_thread=True,
    )

    def act(last_actions, env_outputs, state):
      reward, _, done, observation = env_outputs
      action, policy_logits, *state = step(
        last_actions, reward, done, *observation.arrays(), *state
      )
      return networks.AgentOutput(action, policy_logits), state

    return act


def copy_weights(
  mine: networks.Agent, theirs: networks.Agent, policy_version: tf.Variable
) -> tf.Tensor:
  """Copies the learner's weights to an actor's agent, in one op.

  An actor that used the learner's own variables would read them at every step,
  and could mix two policies within one step.

  Args:
    mine: the actor's agent.
    theirs: the learner's agent.
    policy_version: int64 [], the learner's number of updates.

  Returns:
    int64 [], the policy version of the copy. It is a lower bound: the weights
    may already include a later update.
  """
  version = policy_version.read_value()
  with tf.control_dependencies([version]):
    copies = [
      to.assign(value.read_value())
      for to, value in zip(mine.variables, theirs.variables, strict=True)
    ]
  with tf.control_dependencies(copies):
    return tf.identity(version)


class Actor:
  """Plays `num_envs` environments and enqueues their unrolls.

  The first axis of all arrays is the environment.
  """

  def __init__(
    self,
    envs: environments.Environments,
    level_indices: np.ndarray,
    policy: Policy,
    specs: unrolls.ActorOutput,
    unroll_length: int,
  ):
    """Makes the actor; does not step the environments yet.

    Args:
      envs: the environments to play.
      level_indices: int32 [num_envs], the level of each environment.
      policy: chooses the actions.
      specs: the result of `unrolls.unroll_specs`.
      unroll_length: T.
    """
    self._envs = envs
    self._policy = policy
    self._unroll_length = unroll_length
    self._is_stacked = envs.spec.stack > 1

    num_envs = envs.num_envs
    # The unrolls in progress; agent_state is the state before their step 0.
    self._unrolls = tf.nest.map_structure(
      lambda s: np.zeros([num_envs, *s.shape], s.dtype.as_numpy_dtype), specs
    )
    self._unrolls.level_index[:] = level_indices
    # Their arrays, in lists: flattening takes longer than what follows it.
    self._all_parts = tf.nest.flatten(self._unrolls)
    self._env_parts = tf.nest.flatten(self._unrolls.env_outputs)
    self._agent_parts = tf.nest.flatten(self._unrolls.agent_outputs)
    self._state_parts = tf.nest.flatten(self._unrolls.agent_state)
    # The index of each unroll's next step, and the last output (action first)
    # and current state of each environment's agent.
    self._time = np.zeros([num_envs], np.int64)
    self._last_outputs = [array[:, 0].copy() for array in self._agent_parts]
    self._state = tf.nest.flatten(policy.agent.initial_state(num_envs))

  def run(
    self,
    session: tf1.Session,
    refresh: Callable[[], int],
    enqueue: Callable[..., None],
    should_stop: Callable[[], bool],
  ) -> None:
    """Plays until `should_stop` returns true.

    Args:
      session: holds the policy's weights.
      refresh: copies the learner's weights to the policy; returns the policy
        version. See `copy_weights`.
      enqueue: sends n unrolls, a flat `ActorOutput` of arrays [n, ...]; waits
        while the queue is full. See `unrolls.make_enqueue`.
      should_stop: called before each batched step.

    Raises:
      tf.errors.CancelledError: the queue was closed.
      py_process.EnvironmentFailed: see `environments.Environments.recv`.
      PolicyNotFiniteError: the policy for an observation is not finite.
    """
    act = self._policy.bind(session)
    steps = 0
    while not should_stop():
      ids, env_outputs = self._envs.recv(timeout_secs=1.0)
      if not ids.size:
        continue  # None was ready in time: check should_stop again.
      full = self._record(ids, env_outputs)
      if full.size:
        enqueue(*_take(self._all_parts, full))
        self._begin_unrolls(full)
      # After the enqueue, which may have waited: the weights are then fresh.
      if steps % self._unroll_length == 0:
        policy_version = refresh()
      steps += 1
      self._record_unroll_starts(ids, env_outputs, policy_version)
      agent_outputs, state = act(
        self._last_outputs[0][ids], env_outputs, _take(self._state, ids)
      )
      self._check_finite(agent_outputs.policy_logits, ids, env_outputs)
      self._envs.send(agent_outputs.action, ids)
      _put(self._last_outputs, ids, agent_outputs)
      _put(self._state, ids, state)
      self._time[ids] += 1

  def _check_finite(self, policy_logits, ids, env_outputs):
    """Raises if a policy is not finite: sampling would give invalid actions."""
    finite = np.isfinite(policy_logits)
    if finite.all():
      return
    row = np.flatnonzero(~finite.all(axis=-1))[0]
    frame = env_outputs.observation.frame[row]
    raise PolicyNotFiniteError(
      f'{self._envs.level_names[ids[row]]}: the policy_logits of environment '
      f'{ids[row]} are not finite ({policy_logits[row]}), for an observation '
      f'from {frame.min():g} to {frame.max():g}. If these values are large, '
      'scale them in the environment; if not, try a lower --learning_rate.'
    )

  def _record(self, ids, env_outputs):
    """Writes one step for each of `ids`; returns those whose unroll is full."""
    if self._is_stacked:
      observation = env_outputs.observation
      newest = observation._replace(frame=observation.frame[:, -1])
      env_outputs = env_outputs._replace(observation=newest)
    time = self._time[ids]
    index = (ids, time)
    _put(self._env_parts, index, environments.flatten(env_outputs))
    _put(self._agent_parts, index, _take(self._last_outputs, ids))
    return ids[time == self._unroll_length]

  def _begin_unrolls(self, ids):
    """Copies the last step of each unroll of `ids` to step 0 of the next."""
    last = (ids, self._unroll_length)
    for parts in (self._env_parts, self._agent_parts):
      _put(parts, (ids, 0), _take(parts, last))
    self._time[ids] = 0

  def _record_unroll_starts(self, ids, env_outputs, policy_version):
    """Writes the per-unroll fields of those unrolls that are at step 0."""
    rows = np.flatnonzero(self._time[ids] == 0)
    if not rows.size:
      return
    ids = ids[rows]
    self._unrolls.policy_version[ids] = policy_version
    _put(self._state_parts, ids, _take(self._state, ids))
    if self._is_stacked:
      stacks = env_outputs.observation.frame
      self._unrolls.earlier_frames[ids] = stacks[rows, :-1]


def _take(arrays, index):
  return [array[index] for array in arrays]


def _put(arrays, index, values):
  for array, value in zip(arrays, values, strict=True):
    array[index] = value
