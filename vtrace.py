"""V-trace off-policy actor-critic targets (paper, section 4.1).

The V-trace target of state x_s, with horizon T, is (paper, equation 1)

  v_s = V(x_s) + sum_{t=s}^{T-1} gamma^{t-s} (prod_{i=s}^{t-1} c_i) delta_t
  delta_t = rho_t (r_t + gamma V(x_{t+1}) - V(x_t))
  rho_t = min(rho_bar, pi(a_t|x_t) / mu(a_t|x_t))
  c_i = min(1, pi(a_i|x_i) / mu(a_i|x_i))

and is computed backwards with (paper, remark 1)

  v_s - V(x_s) = delta_s + gamma c_s (v_{s+1} - V(x_{s+1})).

The advantage that multiplies the policy's gradient is (paper, section 4.2)

  min(pg_rho_bar, pi(a_s|x_s) / mu(a_s|x_s)) (r_s + gamma v_{s+1} - V(x_s)).

XLA compiles both, once for each new shape, for the device they run on. gamma is
given per step, as `discounts`: zero where an episode ends, so that nothing of
the next episode enters.

IMPALA: Scalable Distributed Deep-RL with Importance Weighted Actor-Learner
Architectures, Espeholt et al. 2018, arXiv:1802.01561.
"""

import math
from typing import Any, NamedTuple

import tensorflow as tf

# A larger log-rho counts as 88, so that no weight is infinite: in float32,
# exp(88) is finite and exp(89) is not.
_MAX_LOG_RHO = 88.0
# Weighted terms saturate here, well under float32's 3.4e38, so that a sum of
# up to a million of them stays finite and no inf - inf or 0 * inf arises.
_MAX_TERM = 1e32


class VTraceFromLogitsReturns(NamedTuple):
  """V-trace targets of `from_logits`, with what they were computed from.

  `vs` and `pg_advantages` carry no gradient; the other fields carry the
  gradient of the logits they come from.

  Attributes:
    vs: float32 [T, B], V-trace targets for the baseline.
    pg_advantages: float32 [T, B], advantages for the policy gradient.
    log_rhos: float32 [T, B], log(pi(a|x) / mu(a|x)), not clipped.
    behaviour_action_log_probs: float32 [T, B], log mu(a|x).
    target_action_log_probs: float32 [T, B], log pi(a|x).
  """

  vs: tf.Tensor
  pg_advantages: tf.Tensor
  log_rhos: tf.Tensor
  behaviour_action_log_probs: tf.Tensor
  target_action_log_probs: tf.Tensor


class VTraceReturns(NamedTuple):
  """V-trace targets of `from_importance_weights`; neither carries a gradient.

  Attributes:
    vs: float32 [T, B, ...], V-trace targets for the baseline.
    pg_advantages: float32 [T, B, ...], advantages for the policy gradient.
  """

  vs: tf.Tensor
  pg_advantages: tf.Tensor


def log_probs_from_logits_and_actions(
  policy_logits: tf.Tensor, actions: tf.Tensor
) -> tf.Tensor:
  """Computes the log-probabilities of actions under softmax policies.

  Unchanged by a constant added to all of a step's logits.

  Args:
    policy_logits: float32 [T, B, A], unnormalised log-probabilities.
    actions: int32 [T, B], each in [0, A).

  Returns:
    float32 [T, B], the log-probability of each action.

  Raises:
    ValueError: an argument has the wrong dtype or shape.
    tf.errors.InvalidArgumentError: as `from_importance_weights`.
  """
  policy_logits = _to_tensor('policy_logits', policy_logits, tf.float32)
  actions = _to_tensor('actions', actions, tf.int32)
  _check_rank('policy_logits', policy_logits, 3)
  actions = _check_shape('actions', actions, _dimensions(policy_logits)[:2])
  return tf.gather(tf.nn.log_softmax(policy_logits), actions, batch_dims=2)


def from_logits(
  behaviour_policy_logits: tf.Tensor,
  target_policy_logits: tf.Tensor,
  actions: tf.Tensor,
  discounts: tf.Tensor,
  rewards: tf.Tensor,
  values: tf.Tensor,
  bootstrap_value: tf.Tensor,
  clip_rho_threshold: float | tf.Tensor | None = 1.0,
  clip_pg_rho_threshold: float | tf.Tensor | None = 1.0,
  name: str = 'vtrace_from_logits',
) -> VTraceFromLogitsReturns:
  """Computes V-trace targets for softmax policies (paper, section 4).

  Index t of every argument belongs to the step that takes action a_t in state
  x_t.

  Args:
    behaviour_policy_logits: float32 [T, B, A], mu, which chose the actions.
    target_policy_logits: float32 [T, B, A], pi, which is learnt.
    actions: int32 [T, B], drawn from mu, each in [0, A).
    discounts: float32 [T, B], gamma, or 0 where the step ended the episode.
    rewards: float32 [T, B], what the actions earned.
    values: float32 [T, B], baseline V(x_t).
    bootstrap_value: float32 [B], baseline V(x_T) of the state after the last
      step.
    clip_rho_threshold: rho_bar, a scalar >= 0; None does not clip.
    clip_pg_rho_threshold: rho_bar of the policy gradient's weights, a
      scalar >= 0; None does not clip.
    name: the scope of the ops.

  Returns:
    The targets, and the log-rhos and log-probabilities they come from.

  Raises:
    ValueError, tf.errors.InvalidArgumentError: as `from_importance_weights`.
  """
  with tf.name_scope(name):
    behaviour_policy_logits = _to_tensor(
      'behaviour_policy_logits', behaviour_policy_logits, tf.float32
    )
    target_policy_logits = _to_tensor(
      'target_policy_logits', target_policy_logits, tf.float32
    )
    _check_rank('behaviour_policy_logits', behaviour_policy_logits, 3)
    target_policy_logits = _check_shape(
      'target_policy_logits',
      target_policy_logits,
      _dimensions(behaviour_policy_logits),
    )
    behaviour_action_log_probs = log_probs_from_logits_and_actions(
      behaviour_policy_logits, actions
    )
    target_action_log_probs = log_probs_from_logits_and_actions(
      target_policy_logits, actions
    )
    log_rhos = target_action_log_probs - behaviour_action_log_probs
    returns = from_importance_weights(
      log_rhos=log_rhos,
      discounts=discounts,
      rewards=rewards,
      values=values,
      bootstrap_value=bootstrap_value,
      clip_rho_threshold=clip_rho_threshold,
      clip_pg_rho_threshold=clip_pg_rho_threshold,
    )
    return VTraceFromLogitsReturns(
      vs=returns.vs,
      pg_advantages=returns.pg_advantages,
      log_rhos=log_rhos,
      behaviour_action_log_probs=behaviour_action_log_probs,
      target_action_log_probs=target_action_log_probs,
    )


def from_importance_weights(
  log_rhos: tf.Tensor,
  discounts: tf.Tensor,
  rewards: tf.Tensor,
  values: tf.Tensor,
  bootstrap_value: tf.Tensor,
  clip_rho_threshold: float | tf.Tensor | None = 1.0,
  clip_pg_rho_threshold: float | tf.Tensor | None = 1.0,
  name: str = 'vtrace_from_importance_weights',
) -> VTraceReturns:
  """Computes V-trace targets from log importance weights (paper, section 4).

  Finite for finite inputs: log-rhos above 88 count as 88, and weighted terms
  saturate at 1e32 in magnitude. Both are out of reach with thresholds, rewards
  and values of ordinary size.

  Args:
    log_rhos: float32 [T, B, ...], log(pi(a_t|x_t) / mu(a_t|x_t)). Dimensions
      after B are up to the caller (several rewards, say); each equals that of
      `rewards`, or is 1 and broadcasts.
    discounts: float32 [T, B, ...], gamma, or 0 where the step ended the
      episode. Dimensions after B as for `log_rhos`.
    rewards: float32 [T, B, ...], what the actions earned.
    values: float32, shaped as `rewards`, baseline V(x_t).
    bootstrap_value: float32, shaped as one step of `rewards`, baseline V(x_T)
      of the state after the last step.
    clip_rho_threshold: rho_bar, a scalar >= 0; None does not clip.
    clip_pg_rho_threshold: rho_bar of the policy gradient's weights, a
      scalar >= 0; None does not clip.
    name: the scope of the ops.

  Returns:
    The targets, both shaped as `rewards`.

  Raises:
    ValueError: an argument has the wrong dtype or shape, T is 0, or a threshold
      is negative.
    tf.errors.InvalidArgumentError: the same at run time, for shapes that are
      not known before; not inside functions compiled by XLA, however.
  """
  with tf.name_scope(name):
    tensors = {
      'log_rhos': log_rhos,
      'discounts': discounts,
      'rewards': rewards,
      'values': values,
      'bootstrap_value': bootstrap_value,
    }
    tensors = {
      name: _to_tensor(name, value, tf.float32)
      for name, value in tensors.items()
    }
    tensors = _check_shapes(**tensors)
    thresholds = (
      _to_threshold('clip_rho_threshold', clip_rho_threshold),
      _to_threshold('clip_pg_rho_threshold', clip_pg_rho_threshold),
    )
    # Stopped on both sides: neither a tape, which looks at the inputs, nor
    # `tf.gradients`, which starts from the outputs, enters the function.
    arguments = [tf.stop_gradient(tensor) for tensor in tensors]
    vs, pg_advantages = _compute_targets(*arguments, *thresholds)
    return VTraceReturns(
      vs=tf.stop_gradient(vs), pg_advantages=tf.stop_gradient(pg_advantages)
    )


@tf.function(jit_compile=True, autograph=False)
def _compute_targets(
  log_rhos: tf.Tensor,
  discounts: tf.Tensor,
  rewards: tf.Tensor,
  values: tf.Tensor,
  bootstrap_value: tf.Tensor,
  rho_bar: tf.Tensor,
  pg_rho_bar: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor]:
  """Computes `vs` and `pg_advantages`; the arguments are checked already."""
  weights = tf.exp(tf.minimum(log_rhos, _MAX_LOG_RHO))  # [T, B, ...]
  next_values = _shift(values, bootstrap_value)
  deltas = _weigh(
    tf.minimum(weights, rho_bar), rewards + discounts * next_values - values
  )
  coefficients = discounts * tf.minimum(weights, 1.0)  # gamma c
  vs = values + _accumulate_backwards(deltas, coefficients)
  next_vs = _shift(vs, bootstrap_value)
  # With vs, not the baseline, of the next state: better in the paper (E.3).
  pg_advantages = _weigh(
    tf.minimum(weights, pg_rho_bar), rewards + discounts * next_vs - values
  )
  return vs, pg_advantages


def _accumulate_backwards(
  deltas: tf.Tensor, coefficients: tf.Tensor
) -> tf.Tensor:
  """Solves x_t = delta_t + coefficient_t x_{t+1} with x_T = 0, all [T, ...].

  As a loop: on a CPU it runs faster than an associative scan, and it compiles
  much faster than the unrolled form.
  """
  num_steps = tf.shape(deltas)[0]
  sums = tf.TensorArray(
    tf.float32, size=num_steps, element_shape=deltas.shape[1:]
  )

  def step(t, following, sums):
    current = deltas[t] + coefficients[t] * following
    return t - 1, current, sums.write(t, current)

  _, _, sums = tf.while_loop(
    lambda t, *_: t >= 0,
    step,
    (num_steps - 1, tf.zeros_like(deltas[0]), sums),
    maximum_iterations=num_steps,
  )
  return sums.stack()


def _shift(steps: tf.Tensor, last: tf.Tensor) -> tf.Tensor:
  """Returns what follows each of `steps` [T, ...]; `last` follows the last."""
  return tf.concat([steps[1:], last[tf.newaxis]], axis=0)


def _weigh(weights: tf.Tensor, terms: tf.Tensor) -> tf.Tensor:
  """Multiplies; saturates instead of overflowing, and turns -0 into 0."""
  products = tf.clip_by_value(weights * terms, -_MAX_TERM, _MAX_TERM)
  return tf.where(tf.equal(products, 0.0), 0.0, products)


def _to_tensor(name: str, value: Any, dtype: tf.DType) -> tf.Tensor:
  """Converts an argument; raises a ValueError that names it."""
  try:
    return tf.convert_to_tensor(value, dtype=dtype)
  except (TypeError, ValueError) as error:
    raise ValueError(f'{name} must be {dtype.name}: {error}') from error


def _to_threshold(name: str, value: float | tf.Tensor | None) -> tf.Tensor:
  """Converts a clipping threshold to a float32 scalar; None to infinity."""
  threshold = _to_tensor(name, math.inf if value is None else value, tf.float32)
  _check_rank(name, threshold, 0)
  known = tf.get_static_value(threshold)
  if known is not None and not known >= 0:  # True for NaN too.
    raise ValueError(f'{name} must be None or at least 0, but is {known}')
  return threshold


def _check_shapes(
  log_rhos: tf.Tensor,
  discounts: tf.Tensor,
  rewards: tf.Tensor,
  values: tf.Tensor,
  bootstrap_value: tf.Tensor,
) -> list[tf.Tensor]:
  """Returns the arguments; refuses what would broadcast into a wrong result."""
  rank = log_rhos.shape.rank
  if rank is None or rank < 2:
    raise ValueError(
      f'log_rhos must have rank 2 or more, but has shape {log_rhos.shape}'
    )
  _check_rank('discounts', discounts, rank)
  _check_rank('rewards', rewards, rank)
  message = 'log_rhos must have at least one step'
  if log_rhos.shape[0] is None:
    check = tf.debugging.assert_positive(tf.shape(log_rhos)[0], message)
    with tf.control_dependencies([check]):
      log_rhos = tf.identity(log_rhos)
  elif log_rhos.shape[0] == 0:
    raise ValueError(f'{message}, but has shape {log_rhos.shape}')
  shape = _dimensions(log_rhos)[:2] + _dimensions(rewards)[2:]
  return [
    _check_shape('log_rhos', log_rhos, _allow_ones(log_rhos, shape)),
    _check_shape('discounts', discounts, _allow_ones(discounts, shape)),
    _check_shape('rewards', rewards, shape),
    _check_shape('values', values, shape),
    _check_shape('bootstrap_value', bootstrap_value, shape[1:]),
  ]


def _dimensions(tensor: tf.Tensor) -> list[int | tf.Tensor]:
  """Returns the shape, with an int32 scalar for each unknown dimension."""
  return [
    tf.shape(tensor)[axis] if length is None else length
    for axis, length in enumerate(tensor.shape.as_list())
  ]


def _allow_ones(
  tensor: tf.Tensor, shape: list[int | tf.Tensor]
) -> list[int | tf.Tensor]:
  """Returns `shape`, but with 1 where the tensor has 1 after T and B."""

  def choose(own, full):
    if isinstance(own, int):
      return 1 if own == 1 else full
    return tf.where(tf.equal(own, 1), 1, full)

  return shape[:2] + list(map(choose, _dimensions(tensor)[2:], shape[2:]))


def _check_rank(name: str, tensor: tf.Tensor, rank: int) -> None:
  """Raises a ValueError that names the tensor if its rank is another."""
  if tensor.shape.rank != rank:
    raise ValueError(
      f'{name} must have rank {rank}, but has shape {tensor.shape}'
    )


def _check_shape(
  name: str, tensor: tf.Tensor, shape: list[int | tf.Tensor]
) -> tf.Tensor:
  """Returns the tensor; refuses another shape with an error that names it.

  What is known now raises a `ValueError` now. What is not is checked at run
  time: reading what is returned then raises an `InvalidArgumentError`.
  """
  _check_rank(name, tensor, len(shape))
  known = tf.TensorShape([n if isinstance(n, int) else None for n in shape])
  if not tensor.shape.is_compatible_with(known):
    raise ValueError(
      f'{name} must have shape {known}, but has shape {tensor.shape}'
    )
  if tensor.shape.is_fully_defined() and known.is_fully_defined():
    return tensor
  check = tf.debugging.assert_equal(
    tf.shape(tensor), tf.stack(shape), f'{name} must have shape y, but has x'
  )
  with tf.control_dependencies([check]):
    return tf.identity(tensor)
