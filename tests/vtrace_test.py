"""Tests of vtrace.py: literal reference, hand-computed numbers, properties."""

from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf

import vtrace

# XLA compiles once for each shape: the random inputs share these.
_SHAPES = (
  *((T, B) for T in (1, 2, 5, 20, 100, 200) for B in (1, 32, 64)),
  *((3, 7), (11, 13), (37, 2), (64, 48), (123, 17), (177, 31)),
)
_THRESHOLDS = (None, 0.0, 0.3, 1.0, 3.7, 10.0)
_NUM_RANDOM_INPUTS = 1000
# Relative to the largest magnitude in a trace, or to 1 where that is smaller.
_TOLERANCE = 1e-4


class _Inputs(NamedTuple):
  """Arguments of `from_importance_weights`, as NumPy arrays."""

  log_rhos: np.ndarray
  discounts: np.ndarray
  rewards: np.ndarray
  values: np.ndarray
  bootstrap_value: np.ndarray


def _reference(
  inputs: _Inputs, rho_bar: float | None, pg_rho_bar: float | None
) -> tuple[np.ndarray, np.ndarray]:
  """Returns vs and advantages in float64, as the paper's sums define them."""
  log_rhos, discounts, rewards, values, bootstrap_value = (
    np.asarray(array, np.float64) for array in inputs
  )
  T = len(log_rhos)
  ratios = np.exp(log_rhos)
  rhos = np.minimum(ratios, np.inf if rho_bar is None else rho_bar)
  pg_rhos = np.minimum(ratios, np.inf if pg_rho_bar is None else pg_rho_bar)
  cs = np.minimum(ratios, 1.0)
  V = np.concatenate([values, bootstrap_value[np.newaxis]])
  deltas = rhos * (rewards + discounts * V[1:] - V[:-1])
  vs = V.copy()  # The last one stays: v_T = V(x_T).
  for s in range(T):
    # gamma^(t-s) c_s ... c_(t-1), for t = s to T-1.
    factors = np.cumprod([np.ones_like(deltas[s]), *(discounts * cs)[s:-1]], 0)
    vs[s] += (factors * deltas[s:]).sum(axis=0)
  advantages = pg_rhos * (rewards + discounts * vs[1:] - V[:-1])
  return vs[:-1], advantages


def _random_inputs(rng: np.random.Generator, shape: tuple[int, ...]) -> _Inputs:
  """Draws a trace in which about one step in ten ends an episode."""

  def normal(shape: tuple[int, ...], scale: float) -> np.ndarray:
    return rng.normal(0.0, scale, shape).astype(np.float32)

  discounts = rng.choice((0.0, 0.9, 0.99, 1.0), shape, p=(0.1, 0.2, 0.6, 0.1))
  return _Inputs(
    log_rhos=normal(shape, rng.choice((0.0, 0.1, 1.0, 3.0))),
    discounts=discounts.astype(np.float32),
    rewards=normal(shape, rng.choice((0.1, 1.0, 10.0))),
    values=normal(shape, rng.choice((0.1, 1.0, 10.0))),
    bootstrap_value=normal(shape[1:], 1.0),
  )


def _one_column(log_rhos, discounts, rewards, values, bootstrap) -> _Inputs:
  """Returns the inputs of a trace with B = 1."""
  columns = (log_rhos, discounts, rewards, values)
  return _Inputs(
    *(np.array(column, np.float32)[:, np.newaxis] for column in columns),
    bootstrap_value=np.array([bootstrap], np.float32),
  )


def _run(inputs: _Inputs, *thresholds) -> tuple[np.ndarray, np.ndarray]:
  returns = vtrace.from_importance_weights(*inputs, *thresholds)
  return returns.vs.numpy(), returns.pg_advantages.numpy()


def _error(actual: np.ndarray, expected: np.ndarray) -> float:
  """Returns the largest error, relative to each trace's largest magnitude."""
  scale = np.maximum(np.abs(expected).max(axis=0), 1.0)
  return float((np.abs(actual - expected) / scale).max())


# The sum that defines V-trace.


def test_random_inputs_match_the_papers_sum():
  rng = np.random.default_rng(1)
  largest = 0.0
  for index in range(_NUM_RANDOM_INPUTS):
    inputs = _random_inputs(rng, _SHAPES[index % len(_SHAPES)])
    thresholds = tuple(
      _THRESHOLDS[i] for i in rng.integers(len(_THRESHOLDS), size=2)
    )
    actual = _run(inputs, *thresholds)
    for result, expected in zip(
      actual, _reference(inputs, *thresholds), strict=True
    ):
      largest = max(largest, _error(result, expected))
  print(f'largest relative error of {_NUM_RANDOM_INPUTS} inputs: {largest:.2g}')
  assert largest < _TOLERANCE


@pytest.mark.parametrize('trailing', [(3,), (2, 4)])
def test_trailing_dimensions(trailing):
  inputs = _random_inputs(np.random.default_rng(2), (5, 4, *trailing))
  expected = _reference(inputs, 1.0, 1.0)
  np.testing.assert_allclose(_run(inputs), expected, rtol=1e-4, atol=1e-4)


def test_trailing_dimension_of_one_serves_all_rewards():
  inputs = _random_inputs(np.random.default_rng(3), (5, 4, 3))
  inputs = inputs._replace(
    log_rhos=inputs.log_rhos[..., :1], discounts=inputs.discounts[..., :1]
  )
  actual = _run(inputs)
  for channel in range(3):
    expected = _run(
      _Inputs(
        log_rhos=inputs.log_rhos[..., 0],
        discounts=inputs.discounts[..., 0],
        rewards=inputs.rewards[..., channel],
        values=inputs.values[..., channel],
        bootstrap_value=inputs.bootstrap_value[..., channel],
      )
    )
    for result, result_of_channel in zip(actual, expected, strict=True):
      np.testing.assert_allclose(
        result[..., channel], result_of_channel, rtol=1e-6, atol=1e-6
      )


# Numbers computed by hand.

_LN2 = np.log(2.0)
_OFF_POLICY = _one_column(
  [_LN2, -_LN2, 0], [0.9] * 3, [1, 2, 3], [0.5, 1, 1.5], 2
)


@pytest.mark.parametrize(
  ('inputs', 'vs', 'pg_advantages'),
  [
    pytest.param(
      _one_column([0], [0.9], [1], [2], 3), [3.7], [1.7], id='one_step'
    ),
    pytest.param(
      _one_column([-_LN2], [0.9], [1], [2], 3),
      [2.85],
      [0.85],
      id='one_step_off_policy',
    ),
    pytest.param(
      _one_column([0] * 3, [0.5] * 3, [1, 2, 3], [10, 20, 30], 40),
      [7.75, 13.5, 23],
      [-2.25, -6.5, -7],
      id='on_policy',
    ),
    pytest.param(
      _OFF_POLICY, [4.294, 3.66, 4.8], [3.794, 2.66, 3.3], id='off_policy'
    ),
    pytest.param(
      _OFF_POLICY._replace(log_rhos=np.float32([[1000], [0], [0]])),
      [6.688, 6.32, 4.8],
      [6.188, 5.32, 3.3],
      id='enormous_rho',
    ),
    pytest.param(
      _one_column([0] * 4, [0.9, 0, 0.9, 0.9], [0, 1, 0, 0], [0, 0, 5, 0], 10),
      [0.9, 1, 8.1, 9],
      [0.9, 1, 3.1, 9],
      id='terminal_in_the_middle',
    ),
    pytest.param(
      _one_column([0] * 3, [0.99, 0.99, 0], [0, 0, 1], [0] * 3, 1e6),
      [0.9801, 0.99, 1],
      [0.9801, 0.99, 1],
      id='terminal_at_the_border',
    ),
    # A time limit ends an episode like any other end, as in the original: no
    # bootstrapping from the state it was cut off in, let alone from the next
    # episode.
    pytest.param(
      _one_column([0] * 4, [1, 0, 1, 1], [0] * 4, [1, 1, 100, 100], 100),
      [0, 0, 100, 100],
      [-1, -1, 0, 0],
      id='time_limit_is_terminal',
    ),
  ],
)
def test_hand_computed(inputs, vs, pg_advantages):
  actual_vs, actual_pg_advantages = _run(inputs)
  np.testing.assert_allclose(actual_vs[:, 0], vs, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(
    actual_pg_advantages[:, 0], pg_advantages, rtol=1e-5, atol=1e-5
  )


# Extremes.


@pytest.mark.parametrize('reward', [-3.0, 3.0])
def test_vanishing_rho_leaves_the_values(reward):
  inputs = _OFF_POLICY._replace(
    log_rhos=np.full((3, 1), -1000, np.float32),
    rewards=np.full((3, 1), reward, np.float32),
  )
  vs, pg_advantages = _run(inputs)
  np.testing.assert_array_equal(vs, inputs.values)
  np.testing.assert_array_equal(pg_advantages, np.zeros((3, 1)))
  assert not np.signbit(pg_advantages).any()


@pytest.mark.parametrize('thresholds', [(1.0, 1.0), (1e30, None), (None, None)])
def test_any_finite_log_rho_gives_finite_results(thresholds):
  rng = np.random.default_rng(4)
  for scale in (30.0, 300.0, 3e37):
    inputs = _random_inputs(rng, (200, 7))
    inputs = inputs._replace(
      log_rhos=rng.normal(0.0, scale, (200, 7)).astype(np.float32)
    )
    # A weight of infinity times this error of zero would be NaN.
    inputs.rewards[5] = inputs.discounts[5] = inputs.values[5] = 0.0
    assert np.isfinite(_run(inputs, *thresholds)).all()


@pytest.mark.parametrize('log_rho', [15.0, 80.0])
def test_no_clipping_is_exact_where_float32_reaches(log_rho):
  inputs = _one_column([log_rho], [0.9], [1e-5], [0], 0)
  expected = np.exp(np.float64(log_rho)) * 1e-5
  np.testing.assert_allclose(
    _run(inputs, None, None), np.full((2, 1, 1), expected), rtol=1e-5
  )


# Properties.


def test_on_policy_is_the_n_step_return():
  inputs = _random_inputs(np.random.default_rng(5), (20, 7))
  inputs = inputs._replace(log_rhos=np.zeros((20, 7), np.float32))
  vs, _ = _run(inputs)
  expected = inputs.bootstrap_value
  for t in reversed(range(20)):
    expected = inputs.rewards[t] + inputs.discounts[t] * expected
    np.testing.assert_allclose(vs[t], expected, rtol=1e-4, atol=1e-4)


def test_two_episodes_in_a_trace_are_two_traces():
  rng = np.random.default_rng(6)
  first, second = _random_inputs(rng, (11, 3)), _random_inputs(rng, (9, 3))
  first.discounts[-1] = 0.0
  whole = _Inputs(
    *(np.concatenate(pair) for pair in zip(first[:4], second[:4], strict=True)),
    bootstrap_value=second.bootstrap_value,
  )
  for glued, *apart in zip(_run(whole), _run(first), _run(second), strict=True):
    np.testing.assert_allclose(
      glued, np.concatenate(apart), rtol=1e-5, atol=1e-5
    )


def test_batch_of_one_is_the_column_of_a_batch():
  inputs = _random_inputs(np.random.default_rng(7), (20, 8))
  column = _Inputs(*(array[..., 3:4] for array in inputs))
  for batch, single in zip(_run(inputs), _run(column), strict=True):
    np.testing.assert_allclose(batch[:, 3:4], single, rtol=1e-6, atol=1e-6)


def test_targets_carry_no_gradient():
  rng = np.random.default_rng(8)
  inputs = [tf.constant(array) for array in _random_inputs(rng, (5, 4))[1:]]
  logits = [tf.constant(rng.normal(size=(5, 4, 3)), tf.float32)] * 2
  actions = tf.constant(rng.integers(3, size=(5, 4)), tf.int32)
  with tf.GradientTape(persistent=True) as tape:
    tape.watch(logits + inputs)
    returns = vtrace.from_logits(*logits, actions, *inputs)
  for result in (returns.vs, returns.pg_advantages):
    gradients = tape.gradient(result, logits + inputs)
    assert all(gradient is None for gradient in gradients)
  assert tape.gradient(returns.target_action_log_probs, logits[1]) is not None


# Policies.


@pytest.mark.parametrize('shift', [0.0, -1e4, 1e4])
def test_log_rhos_from_logits(shift):
  target = np.log(np.float32([[[3, 1]], [[3, 1]]])) + np.float32(shift)
  returns = vtrace.from_logits(
    behaviour_policy_logits=np.zeros((2, 1, 2), np.float32) + shift,
    target_policy_logits=target,
    actions=np.int32([[0], [1]]),
    discounts=np.full((2, 1), 0.9, np.float32),
    rewards=np.ones((2, 1), np.float32),
    values=np.zeros((2, 1), np.float32),
    bootstrap_value=np.zeros(1, np.float32),
  )
  # A logit of 1e4 is itself only good to 1e-3 in float32.
  np.testing.assert_allclose(
    np.exp(returns.log_rhos), [[1.5], [0.5]], rtol=1e-3 if shift else 1e-6
  )
  np.testing.assert_allclose(
    returns.behaviour_action_log_probs, np.full((2, 1), -_LN2), rtol=1e-6
  )
  np.testing.assert_allclose(
    returns.target_action_log_probs - returns.behaviour_action_log_probs,
    returns.log_rhos,
  )


def test_from_logits_is_from_importance_weights_of_its_log_rhos():
  rng = np.random.default_rng(9)
  inputs = _random_inputs(rng, (5, 4))
  logits = rng.normal(size=(2, 5, 4, 3)).astype(np.float32)
  actions = rng.integers(3, size=(5, 4)).astype(np.int32)
  returns = vtrace.from_logits(*logits, actions, *inputs[1:], 3.7, None)
  probs = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
  taken = np.take_along_axis(probs, actions[np.newaxis, ..., np.newaxis], -1)
  log_rhos = np.log(taken[1] / taken[0])[..., 0]
  np.testing.assert_allclose(returns.log_rhos, log_rhos, rtol=1e-4, atol=1e-5)
  expected = _reference(inputs._replace(log_rhos=log_rhos), 3.7, None)
  np.testing.assert_allclose(
    (returns.vs, returns.pg_advantages), expected, rtol=1e-4, atol=1e-4
  )


# Graph mode, as in training.


def test_in_a_graph_with_a_session():
  inputs = _random_inputs(np.random.default_rng(10), (20, 7))
  with tf.Graph().as_default():
    returns = vtrace.from_importance_weights(*inputs)
    assert returns.vs.shape == returns.pg_advantages.shape == (20, 7)
    with tf.compat.v1.Session() as session:
      actual = session.run(returns)
  for result, expected in zip(actual, _reference(inputs, 1, 1), strict=True):
    assert _error(result, expected) < _TOLERANCE


def test_in_a_graph_with_unknown_dimensions():
  shapes = [[None, None]] * 4 + [[None]]
  with tf.Graph().as_default():
    placeholders = [
      tf.compat.v1.placeholder(tf.float32, shape) for shape in shapes
    ]
    returns = vtrace.from_importance_weights(*placeholders)
    with tf.compat.v1.Session() as session:
      for shape in ((3, 1), (5, 4)):
        inputs = _random_inputs(np.random.default_rng(11), shape)
        actual = session.run(
          returns, dict(zip(placeholders, inputs, strict=True))
        )
        expected = _reference(inputs, 1.0, 1.0)
        assert _error(actual.vs, expected[0]) < _TOLERANCE
        assert _error(actual.pg_advantages, expected[1]) < _TOLERANCE


# What is refused.


@pytest.mark.parametrize(
  ('name', 'shape'),
  [
    ('log_rhos', [5]),
    ('log_rhos', [5, 4, 1]),
    ('discounts', [1, 4]),
    ('discounts', [5, 1]),
    ('discounts', [5, 4, 1]),
    ('discounts', []),
    ('rewards', [5, 1]),
    ('rewards', [4]),
    ('values', [5, 4, 1]),
    ('values', [6, 4]),
    ('values', [1, 4]),
    ('bootstrap_value', [4, 1]),
    ('bootstrap_value', [1]),
    ('bootstrap_value', []),
  ],
)
def test_wrong_shape_is_refused(name, shape):
  inputs = _random_inputs(np.random.default_rng(12), (5, 4))._asdict()
  inputs[name] = np.zeros(shape, np.float32)
  # A surplus dimension of log_rhos asks for as many everywhere else.
  culprit = 'discounts' if shape == [5, 4, 1] and name == 'log_rhos' else name
  with pytest.raises(ValueError, match=f'{culprit} must have'):
    vtrace.from_importance_weights(**inputs)


def test_wrong_trailing_dimension_is_refused():
  inputs = _random_inputs(np.random.default_rng(13), (5, 4, 3))
  with pytest.raises(ValueError, match='values must have shape'):
    vtrace.from_importance_weights(
      **inputs._replace(values=inputs.values[..., :1])._asdict()
    )


@pytest.mark.parametrize(
  ('name', 'shape'),
  [
    ('behaviour_policy_logits', [5, 4]),
    ('target_policy_logits', [5, 4, 2]),
    ('target_policy_logits', [5, 4, 3, 1]),
    ('actions', [5, 4, 1]),
    ('actions', [1, 4]),
    ('discounts', [1, 4]),
    ('bootstrap_value', [4, 1]),
  ],
)
def test_wrong_shape_is_refused_by_from_logits(name, shape):
  arguments = {
    'behaviour_policy_logits': tf.zeros([5, 4, 3]),
    'target_policy_logits': tf.zeros([5, 4, 3]),
    'actions': tf.zeros([5, 4], tf.int32),
    'discounts': tf.zeros([5, 4]),
    'rewards': tf.zeros([5, 4]),
    'values': tf.zeros([5, 4]),
    'bootstrap_value': tf.zeros([4]),
  }
  arguments[name] = tf.zeros(shape, arguments[name].dtype)
  with pytest.raises(ValueError, match=f'{name} must have'):
    vtrace.from_logits(**arguments)


@pytest.mark.parametrize('name', _Inputs._fields)
def test_wrong_dtype_is_refused(name):
  inputs = _random_inputs(np.random.default_rng(14), (5, 4))._asdict()
  inputs[name] = tf.cast(inputs[name], tf.float64)
  with pytest.raises(ValueError, match=f'{name} must be float32'):
    vtrace.from_importance_weights(**inputs)


def test_wrong_dtype_of_actions_is_refused():
  with pytest.raises(ValueError, match='actions must be int32'):
    vtrace.log_probs_from_logits_and_actions(
      tf.zeros([5, 4, 3]), tf.zeros([5, 4])
    )


@pytest.mark.parametrize('threshold', [-0.1, float('nan'), [1.0]])
@pytest.mark.parametrize(
  'name', ['clip_rho_threshold', 'clip_pg_rho_threshold']
)
def test_wrong_threshold_is_refused(name, threshold):
  inputs = _random_inputs(np.random.default_rng(15), (5, 4))
  with pytest.raises(ValueError, match=f'{name} must'):
    vtrace.from_importance_weights(*inputs, **{name: threshold})


def test_no_steps_are_refused():
  inputs = _random_inputs(np.random.default_rng(16), (0, 4))
  with pytest.raises(ValueError, match='log_rhos must have at least one step'):
    vtrace.from_importance_weights(*inputs)


# What is refused at run time, where shapes are not known before.


def _call_in_function(function, arguments, shapes):
  """Calls within a `tf.function` that knows no more than `shapes`."""
  specs = {
    name: tf.TensorSpec(shapes[name], value.dtype)
    for name, value in arguments.items()
  }
  traced = tf.function(function, autograph=False).get_concrete_function(**specs)
  return traced(**{n: tf.constant(value) for n, value in arguments.items()})


def _call_in_session(function, arguments, shapes):
  """Calls within a graph whose placeholders know no more than `shapes`."""
  with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    placeholders = {
      name: tf.compat.v1.placeholder(value.dtype, shapes[name])
      for name, value in arguments.items()
    }
    feed = {placeholders[n]: value for n, value in arguments.items()}
    return session.run(function(**placeholders), feed)


_CALLS = pytest.mark.parametrize('call', [_call_in_function, _call_in_session])


def _unknown(arguments):
  return {name: [None] * value.ndim for name, value in arguments.items()}


def _arguments(function, shape):
  """Returns the arguments of either function, for trailing dimensions too."""
  arguments = _random_inputs(np.random.default_rng(17), shape)._asdict()
  if function is vtrace.from_logits:
    del arguments['log_rhos']
    arguments['behaviour_policy_logits'] = np.zeros([*shape, 3], np.float32)
    arguments['target_policy_logits'] = np.zeros([*shape, 3], np.float32)
    arguments['actions'] = np.zeros(shape, np.int32)
  return arguments


@_CALLS
@pytest.mark.parametrize(
  ('function', 'name', 'shape'),
  [
    (vtrace.from_importance_weights, 'discounts', [1, 4]),
    (vtrace.from_importance_weights, 'discounts', [5, 1]),
    (vtrace.from_importance_weights, 'rewards', [5, 1]),
    (vtrace.from_importance_weights, 'rewards', [1, 4]),
    (vtrace.from_importance_weights, 'values', [5, 1]),
    (vtrace.from_importance_weights, 'values', [6, 4]),
    (vtrace.from_importance_weights, 'values', [1, 4]),
    (vtrace.from_importance_weights, 'bootstrap_value', [1]),
    (vtrace.from_importance_weights, 'bootstrap_value', [5]),
    (vtrace.from_logits, 'target_policy_logits', [5, 4, 2]),
    (vtrace.from_logits, 'target_policy_logits', [5, 1, 3]),
    (vtrace.from_logits, 'actions', [5, 1]),
    (vtrace.from_logits, 'actions', [1, 4]),
    (vtrace.from_logits, 'rewards', [5, 1]),
  ],
)
def test_wrong_shape_is_refused_at_run_time(call, function, name, shape):
  arguments = _arguments(function, (5, 4))
  arguments[name] = np.zeros(shape, arguments[name].dtype)
  shapes = _unknown(arguments)
  with pytest.raises(
    tf.errors.InvalidArgumentError, match=f'{name} must have shape'
  ):
    call(function, arguments, shapes)


@_CALLS
@pytest.mark.parametrize('known', [['log_rhos', 'rewards'], ['values']])
def test_wrong_shape_is_refused_if_only_some_are_known(call, known):
  arguments = _arguments(vtrace.from_importance_weights, (5, 4))
  arguments['values'] = arguments['values'][:, :1]
  shapes = _unknown(arguments)
  shapes |= {name: arguments[name].shape for name in known}
  with pytest.raises(
    tf.errors.InvalidArgumentError, match='values must have shape'
  ):
    call(vtrace.from_importance_weights, arguments, shapes)


@_CALLS
@pytest.mark.parametrize(
  ('name', 'length'),
  [('values', 1), ('bootstrap_value', 1), ('log_rhos', 2), ('discounts', 4)],
)
def test_wrong_trailing_dimension_is_refused_at_run_time(call, name, length):
  arguments = _arguments(vtrace.from_importance_weights, (5, 4, 3))
  arguments[name] = np.resize(
    arguments[name], [*arguments[name].shape[:-1], length]
  )
  with pytest.raises(
    tf.errors.InvalidArgumentError, match=f'{name} must have shape'
  ):
    call(vtrace.from_importance_weights, arguments, _unknown(arguments))


@_CALLS
def test_trailing_dimension_of_one_is_allowed_at_run_time(call):
  arguments = _arguments(vtrace.from_importance_weights, (5, 4, 3))
  for name in ('log_rhos', 'discounts'):
    arguments[name] = arguments[name][..., :1]
  returns = call(vtrace.from_importance_weights, arguments, _unknown(arguments))
  expected = vtrace.from_importance_weights(**arguments)
  for result, known in zip(returns, expected, strict=True):
    np.testing.assert_allclose(result, known, rtol=1e-6, atol=1e-6)


@_CALLS
@pytest.mark.parametrize(
  'function', [vtrace.from_importance_weights, vtrace.from_logits]
)
def test_no_steps_are_refused_at_run_time(call, function):
  arguments = _arguments(function, (0, 4))
  with pytest.raises(
    tf.errors.InvalidArgumentError, match='log_rhos must have at least one step'
  ):
    call(function, arguments, _unknown(arguments))


def test_known_shapes_are_not_checked_again_at_run_time():
  arguments = _arguments(vtrace.from_logits, (5, 4))
  with tf.Graph().as_default() as graph:
    vtrace.from_logits(**arguments)
    types = {op.type for op in graph.get_operations()}
  assert not types & {'Assert', 'If', 'Shape'}
