"""Learns: dequeues unrolls, corrects for policy lag, updates the weights.

The data flow is that of the paper's figure 1: `FIFOQueue` -> `dequeue_many` ->
time-major -> `StagingArea` (the next batch moves while this one trains) ->
unroll -> V-trace -> three losses -> RMSProp.
"""

from collections.abc import Callable
import re
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from cluster import collectives
import config as config_lib
import environments
import networks
import popart
import unrolls
import vtrace

tf1 = tf.compat.v1


class UpdateResult(NamedTuple):
  """What one update of n learners reports.

  Attributes:
    num_environment_frames: int64 [], frames trained on, including this update.
    scalars: name -> float32 [], see `compute_loss` and `Learner`.
    level_index: int32 [n * B], the level of each unroll.
    info: `environments.StepOutputInfo`, `[T + 1, n * B]`: which episodes ended,
      with their returns and lengths.
  """

  num_environment_frames: tf.Tensor
  scalars: dict[str, tf.Tensor]
  level_index: tf.Tensor
  info: environments.StepOutputInfo


def clip_rewards(rewards: tf.Tensor, reward_clipping: str) -> tf.Tensor:
  """Clips rewards, for learning only: logged returns stay unclipped.

  Args:
    rewards: float32 [T, B].
    reward_clipping: `abs_one`, the interval [-1, 1] (table G.1);
      `soft_asymmetric`, the released code's 5 * tanh(r / 5), times 0.3 if
      negative (the paper's figure D.1 shows a different curve); or `none`.

  Returns:
    float32 [T, B].
  """
  if reward_clipping == 'abs_one':
    return tf.clip_by_value(rewards, -1.0, 1.0)
  if reward_clipping == 'soft_asymmetric':
    squeezed = tf.tanh(rewards / 5.0)
    return tf.where(rewards < 0, 0.3 * squeezed, squeezed) * 5.0
  if reward_clipping == 'none':
    return rewards
  names = ', '.join(config_lib.REWARD_CLIPPINGS)
  raise ValueError(f'reward_clipping {reward_clipping!r} is not one of {names}')


def compute_baseline_loss(advantages: tf.Tensor) -> tf.Tensor:
  """Computes half the sum of squares of `vs - baseline` (section 4.2).

  Args:
    advantages: float32 [T, B].

  Returns:
    A float32 scalar.
  """
  return 0.5 * tf.reduce_sum(tf.square(advantages))


def compute_entropy_loss(
  logits: tf.Tensor, played: tf.Tensor | None = None
) -> tf.Tensor:
  """Computes the negative entropy of the policy, summed (section 4.2).

  Args:
    logits: float32 [T, B, A], the target policy.
    played: bool [T, B], which steps count, see `Targets`; None for all.

  Returns:
    A float32 scalar; minimising it keeps the policy from converging too early.
  """
  log_policy = tf.nn.log_softmax(logits)
  entropies = tf.exp(log_policy) * log_policy
  if played is not None:
    entropies *= tf.cast(played, tf.float32)[..., tf.newaxis]
  return tf.reduce_sum(entropies)


def compute_policy_gradient_loss(
  logits: tf.Tensor, actions: tf.Tensor, advantages: tf.Tensor
) -> tf.Tensor:
  """Computes the policy-gradient loss (paper, section 4.2).

  It is summed over time and batch, not averaged: the paper's learning rates
  depend on this.

  Args:
    logits: float32 [T, B, A], the target policy pi.
    actions: int32 [T, B], drawn from the behaviour policy mu.
    advantages: float32 [T, B], V-trace advantages; no gradient flows into them.

  Returns:
    A float32 scalar.
  """
  cross_entropy = tf.nn.sparse_softmax_cross_entropy_with_logits(
    labels=actions, logits=logits
  )
  return tf.reduce_sum(cross_entropy * tf.stop_gradient(advantages))


def compute_learning_rate(
  num_environment_frames: tf.Tensor, hyperparameters: config_lib.UpdateConfig
) -> tf.Tensor:
  """Decays the learning rate linearly to 0 (table G.1), and keeps it there.

  Args:
    num_environment_frames: int64 scalar.
    hyperparameters: gives the initial learning rate and the number of frames.

  Returns:
    A float32 scalar. It is computed in float64, since float32 cannot represent
    large frame counts exactly.
  """
  total = hyperparameters.total_environment_frames
  left = tf.cast(tf.maximum(total - num_environment_frames, 0), tf.float64)
  return tf.cast(hyperparameters.learning_rate * left / total, tf.float32)


class Targets(NamedTuple):
  """The learning targets of one batch; see `compute_targets`.

  Attributes:
    vs: float32 [T, B], V-trace targets for the baseline.
    pg_advantages: float32 [T, B], advantages for the policy gradient.
    values: float32 [T, B], baseline V(x_t).
    target_policy_logits: float32 [T, B, A], pi.
    actions: int32 [T, B], drawn from mu.
    log_rhos: float32 [T, B], log(pi(a|x) / mu(a|x)).
    played: bool [T, B], false where the environment ignored the action, because
      a time limit had cut the episode: nothing is learnt from these steps.
  """

  vs: tf.Tensor
  pg_advantages: tf.Tensor
  values: tf.Tensor
  target_policy_logits: tf.Tensor
  actions: tf.Tensor
  log_rhos: tf.Tensor
  played: tf.Tensor


def compute_targets(
  agent: networks.Agent,
  batch: unrolls.ActorOutput,
  hyperparameters: config_lib.UpdateConfig,
  statistics: popart.Statistics | None = None,
) -> Targets:
  """Evaluates a batch of unrolls under the target policy, with V-trace.

  Args:
    agent: the target policy.
    batch: time-major, `[T + 1, B, ...]`, with frames as the agent sees them.
    hyperparameters: discounting and reward clipping.
    statistics: with PopArt, the levels' statistics: the agent's baseline is
      then normalised.

  Returns:
    The targets. Gradients flow into `values` and `target_policy_logits`.
  """
  logits, baseline, _ = agent.unroll(
    batch.agent_outputs.action, batch.env_outputs, batch.agent_state
  )
  if statistics is not None:
    baseline = popart.unnormalise(baseline, batch.level_index, statistics)
  # See "Time" in the README: the learner's last output is only the bootstrap,
  # and the actor's first output belongs to the previous unroll. From here on,
  # index t pairs pi and mu at x[t], the action, and the reward it led to.
  bootstrap_value = baseline[-1]
  target_policy_logits, values = logits[:-1], baseline[:-1]
  behaviour = tf.nest.map_structure(lambda t: t[1:], batch.agent_outputs)
  rewards = clip_rewards(
    batch.env_outputs.reward[1:], hyperparameters.reward_clipping
  )
  # The last observation of a truncated episode is worth what the baseline says:
  # the step after it, which is no part of any episode, "earns" just that. So
  # its own error is 0, and the step before it sees an ordinary next state.
  truncated = batch.env_outputs.info.truncated[:-1]
  rewards = tf.where(truncated, values, rewards)
  not_done = tf.cast(~(batch.env_outputs.done[1:] | truncated), tf.float32)
  corrected = vtrace.from_logits(
    behaviour_policy_logits=behaviour.policy_logits,
    target_policy_logits=target_policy_logits,
    actions=behaviour.action,
    discounts=not_done * hyperparameters.discounting,
    rewards=rewards,
    values=values,
    bootstrap_value=bootstrap_value,
  )
  return Targets(
    vs=corrected.vs,
    pg_advantages=corrected.pg_advantages,
    values=values,
    target_policy_logits=target_policy_logits,
    actions=behaviour.action,
    log_rhos=corrected.log_rhos,
    played=~truncated,
  )


def compute_loss(
  targets: Targets,
  hyperparameters: config_lib.UpdateConfig,
  scale: tf.Tensor | float = 1.0,
) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
  """Computes the loss of one batch (paper, section 4.2).

  Args:
    targets: the targets of the batch.
    hyperparameters: the costs of the losses.
    scale: float32 [B], with PopArt the scale of each unroll's level.
      Advantages and errors are divided by it.

  Returns:
    The loss, a float32 scalar, and scalars to report, by name.
  """
  policy_gradient_loss = compute_policy_gradient_loss(
    targets.target_policy_logits,
    targets.actions,
    targets.pg_advantages / scale,
  )
  # The error of normalised values: the mean cancels out.
  baseline_loss = compute_baseline_loss((targets.vs - targets.values) / scale)
  entropy_loss = compute_entropy_loss(
    targets.target_policy_logits, targets.played
  )
  total = (
    policy_gradient_loss
    + hyperparameters.baseline_cost * baseline_loss
    + hyperparameters.entropy_cost * entropy_loss
  )
  played = tf.cast(targets.played, tf.float32)
  steps = tf.maximum(tf.reduce_sum(played), 1.0)
  rhos = tf.exp(tf.minimum(targets.log_rhos, 0.0))
  scalars = {
    'losses/total': total,
    'losses/policy_gradient': policy_gradient_loss,
    'losses/baseline': baseline_loss,
    'losses/entropy': entropy_loss,
    'entropy': -entropy_loss / steps,
    'mean_clipped_rho': tf.reduce_sum(rhos * played) / steps,
    'max_abs_log_rho': tf.reduce_max(tf.abs(targets.log_rhos) * played),
  }
  return total, scalars


def find_non_finite(error: tf.errors.OpError) -> str | None:
  """Returns 'loss' or 'gradient' if that was not finite, else None.

  Args:
    error: the error that `Learner.run` raised.
  """
  match = re.search(r'the (loss|gradient) : Tensor had ', error.message)
  return match and match[1]


class Learner:
  """The update, as ops in the current graph.

  Attributes:
    agent: holds the weights that actors copy.
    broadcast_weights: op that sets the variables of all learners to those of
      the first; several learners run it once, before the first update.
    num_environment_frames: int64 variable, frames trained on.
    num_updates: int64 variable, the policy version.
    variables: all variables that a checkpoint must hold.
  """

  def __init__(
    self,
    agent: networks.Agent,
    queue: tf.queue.FIFOQueue,
    specs: unrolls.ActorOutput,
    frames_per_step: int,
    hyperparameters: config_lib.UpdateConfig,
    group: collectives.Group = collectives.ALONE,
  ):
    """Builds the ops.

    Args:
      agent: the agent to train.
      queue: holds unrolls, as flattened `unrolls.ActorOutput`s.
      specs: the shapes and dtypes of one unroll.
      frames_per_step: environment frames per agent step.
      hyperparameters: the settings of the update.
      group: the learners that update together.
    """
    self.agent = agent
    self._group = group
    self._hyperparameters = hyperparameters
    self.num_environment_frames = _make_counter('num_environment_frames')
    self.num_updates = _make_counter('num_updates')
    batch, self._stage, self._stage_next = unrolls.stage(
      queue, specs, hyperparameters.batch_size
    )
    episodes = [batch.level_index, *batch.env_outputs.info]
    level_index, *info = group.all_gather(episodes)
    info = environments.StepOutputInfo(*info)
    self._popart = before = statistics = None
    if agent.popart_levels is not None:
      self._popart = popart.PopArt(agent.baseline_head)
      before = self._popart.statistics
    batch = unrolls.restore_frames(batch)
    targets = compute_targets(agent, batch, hyperparameters, before)
    scale = 1.0
    if self._popart:
      # All learners update the statistics from the targets of all of them.
      shared = [targets.vs, batch.level_index, targets.played]
      statistics = popart.update_statistics(before, *group.all_gather(shared))
      scale = tf.gather(statistics.scale, batch.level_index)
    loss, scalars = compute_loss(targets, hyperparameters, scale)
    played = tf.math.count_nonzero(~info.truncated[:-1])
    # After a restart, unrolls may be ahead of the restored policy version.
    lag = tf.maximum(self.num_updates.read_value() - batch.policy_version, 0)
    with tf.control_dependencies([lag]):
      update, more = self._build_update(
        loss, played * frames_per_step, statistics
      )
    self.broadcast_weights = group.broadcast(self.variables)
    scalars |= more | {'policy_lag': tf.reduce_mean(tf.cast(lag, tf.float32))}
    with tf.control_dependencies([update]):
      frames = self.num_environment_frames.read_value()
    self._result = UpdateResult(
      num_environment_frames=frames,
      scalars=scalars,
      level_index=level_index,
      info=info,
    )

  def _build_update(self, loss, frames, statistics):
    """Returns the update op and its scalars.

    If the loss or the gradient is not finite, the op changes nothing.
    """
    hyperparameters = self._hyperparameters
    check_numerics = tf.debugging.check_numerics
    weights = self.agent.trainable_variables
    gradients = self._group.all_reduce(tf.gradients(loss, weights))
    if self._popart:
      gradients = self._popart.rescale_gradients(gradients, weights, statistics)
    norm = tf.linalg.global_norm(gradients)
    if hyperparameters.max_gradient_norm > 0:
      gradients, _ = tf.clip_by_global_norm(
        gradients, hyperparameters.max_gradient_norm, use_norm=norm
      )
    learning_rate = compute_learning_rate(
      self.num_environment_frames, hyperparameters
    )
    # Not Keras's or Sonnet's RMSProp: here the accumulator starts at 1 and
    # epsilon is inside the root, as the original's settings require.
    optimizer = tf1.train.RMSPropOptimizer(
      learning_rate,
      hyperparameters.decay,
      hyperparameters.momentum,
      hyperparameters.epsilon,
    )
    # In this order: if both are not finite, the error names the loss.
    with tf.control_dependencies([check_numerics(loss, 'the loss')]):
      ready = [check_numerics(norm, 'the gradient'), learning_rate]
    if self._popart:
      with tf.control_dependencies(ready):
        ready = [self._popart.apply(statistics)]
    with tf.control_dependencies(ready):
      train = optimizer.apply_gradients(zip(gradients, weights, strict=True))
    with tf.control_dependencies([train]):
      update = tf.group(
        self.num_environment_frames.assign_add(frames),
        self.num_updates.assign_add(1),
      )
    self.variables = [
      self.num_environment_frames,
      self.num_updates,
      *weights,
      *optimizer.variables(),
      *(self._popart.variables if self._popart else ()),
    ]
    return update, {'learning_rate': learning_rate, 'gradient_norm': norm}

  def run(
    self,
    session: tf1.Session,
    on_update: Callable[[UpdateResult], None],
    should_stop: Callable[[], bool],
  ) -> None:
    """Trains until the frame budget is spent or `should_stop` returns true.

    Args:
      session: holds the variables, initialised or restored.
      on_update: called after each update, with its result.
      should_stop: called before each update.

    Raises:
      tf.errors.InvalidArgumentError: for example, the loss or the gradient is
        not finite (see `find_non_finite`); weights and counters are then as
        before the update.
      tf.errors.OpError: the queue was closed.
    """
    total = self._hyperparameters.total_environment_frames
    frames = session.run(self.num_environment_frames)
    if frames >= total or should_stop():
      return
    session.run(self._stage)
    # Runs in the calling thread, which is faster than handing ops to others.
    options = tf1.RunOptions(inter_op_thread_pool=-1)
    step = session.make_callable(
      (self._result, self._stage_next), accept_options=True
    )
    while frames < total and not should_stop():
      result, _ = step(options=options)
      frames = result.num_environment_frames
      on_update(result)


def _make_counter(name):
  return tf1.get_variable(
    name, initializer=np.int64(0), trainable=False, use_resource=True
  )
