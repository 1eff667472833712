"""Tests of networks.py, in eager mode."""

import numpy as np
import pytest
import tensorflow as tf

import environments
from envs import instructions
import networks

_IMAGE = environments.EnvironmentSpec(
  (84, 84), np.dtype(np.uint8), num_actions=6, frames_per_step=4, stack=4,
  action_meanings=None,
)  # fmt: skip
_SMALL_IMAGE = environments.EnvironmentSpec(
  (36, 36), np.dtype(np.uint8), num_actions=3, frames_per_step=4, stack=4,
  action_meanings=None,
)  # fmt: skip
_COLOURS = environments.EnvironmentSpec(
  (36, 40, 3), np.dtype(np.uint8), num_actions=3, frames_per_step=1, stack=1,
  action_meanings=None,
)  # fmt: skip
_VECTOR = environments.EnvironmentSpec(
  (5,), np.dtype(np.float32), num_actions=4, frames_per_step=1, stack=1,
  action_meanings=None,
)  # fmt: skip
_LANGUAGE = environments.EnvironmentSpec(
  (36, 40, 3), np.dtype(np.uint8), num_actions=3, frames_per_step=1, stack=1,
  action_meanings=None, has_instruction=True,
)  # fmt: skip
_AGENTS = pytest.mark.parametrize(
  ('spec', 'torso', 'use_lstm'),
  [
    (spec, torso, use_lstm)
    for use_lstm in (False, True)
    for spec, torso in (
      (_SMALL_IMAGE, 'shallow'),
      (_SMALL_IMAGE, 'deep'),
      (_COLOURS, 'shallow'),
      (_LANGUAGE, 'shallow'),
      (_VECTOR, 'vector'),
    )
  ],
)


def _inputs(spec, T, B, seed=0, done=0.0):
  """Returns last actions and env outputs, [T, B, ...], at random."""
  generator = np.random.default_rng(seed)
  shape = (T, B, *spec.observation_shape)
  if spec.frame_dtype == np.uint8:
    frame = generator.random(shape).astype(np.float32)  # Scaled.
  else:
    frame = generator.normal(size=shape).astype(np.float32)
  instruction = ()
  if spec.has_instruction:
    lengths = generator.integers(0, 9, [T, B, 1])
    words = generator.integers(1, 1001, [T, B, instructions.MAX_WORDS])
    words *= np.arange(instructions.MAX_WORDS) < lengths
    instruction = tf.constant(words, tf.int16)
  return (
    tf.constant(generator.integers(0, spec.num_actions, [T, B]), tf.int32),
    environments.StepOutput(
      reward=tf.constant(generator.normal(size=[T, B]), tf.float32),
      info=(),
      done=tf.constant(generator.random([T, B]) < done),
      observation=environments.Observation(tf.constant(frame), instruction),
    ),
  )


def _slice(nest, *index):
  return tf.nest.map_structure(lambda t: t[index], nest)


def _assert_close(actual, expected, tolerance=1e-5):
  tf.nest.map_structure(
    lambda a, b: np.testing.assert_allclose(a, b, tolerance, tolerance),
    actual,
    expected,
  )


def _unroll_in_parts(agent, inputs, state, length):
  """Unrolls `length` steps at a time, passing on the state."""
  parts = []
  for start in range(0, len(inputs[0]), length):
    part = _slice(inputs, slice(start, start + length))
    *outputs, state = agent.unroll(*part, state)
    parts.append(outputs)
  return (*(tf.concat(p, axis=0) for p in zip(*parts, strict=True)), state)


def _num_weights(agent):
  return sum(w.shape.num_elements() for w in agent.trainable_variables)


class TestUnroll:
  @_AGENTS
  def test_shapes(self, spec, torso, use_lstm):
    agent = networks.Agent(spec, torso, use_lstm)
    state = agent.initial_state(2)
    logits, baseline, after = agent.unroll(*_inputs(spec, 3, 2), state)
    assert logits.shape == [3, 2, spec.num_actions]
    assert baseline.shape == [3, 2]
    tf.nest.assert_same_structure(after, state)
    for a, b in zip(
      tf.nest.flatten(after), tf.nest.flatten(state), strict=True
    ):
      assert a.shape == b.shape and a.dtype == b.dtype
    assert bool(after) == use_lstm

  @pytest.mark.parametrize('popart_levels', [1, 5])
  def test_with_popart_each_level_has_a_baseline(self, popart_levels):
    agent = networks.Agent(_VECTOR, 'vector', False, popart_levels)
    inputs, state = _inputs(_VECTOR, 3, 2), agent.initial_state(2)
    baseline = agent.unroll(*inputs, state)[1]
    assert baseline.shape == [3, 2, popart_levels]
    assert agent.baseline_head.w.shape[1] == popart_levels

  @_AGENTS
  def test_two_unrolls_equal_one(self, spec, torso, use_lstm):
    agent = networks.Agent(spec, torso, use_lstm)
    inputs = _inputs(spec, 10, 2, done=0.15)
    state = agent.initial_state(2)
    expected = agent.unroll(*inputs, state)
    for length in (5, 1):
      _assert_close(_unroll_in_parts(agent, inputs, state, length), expected)

  @_AGENTS
  def test_two_episodes_glued_equal_two_apart(self, spec, torso, use_lstm):
    agent = networks.Agent(spec, torso, use_lstm)
    last_actions, outputs = _inputs(spec, 10, 2)
    # Column 1 runs on, so that a reset of both columns is noticed too.
    done = np.zeros([10, 2], bool)
    done[5, 0] = True
    inputs = last_actions, outputs._replace(done=tf.constant(done))
    glued = agent.unroll(*inputs, agent.initial_state(2))
    for steps in (slice(0, 5), slice(5, 10)):
      part = _slice(inputs, steps, slice(0, 1))
      # `done` at step 0 makes no difference: the state before it is zero.
      apart = agent.unroll(*part, agent.initial_state(1))
      _assert_close(apart[:2], _slice(glued[:2], steps, slice(0, 1)))
    _assert_close(apart[2], _slice(glued[2], slice(0, 1)))
    alone = agent.unroll(
      *_slice(inputs, slice(None), slice(1, 2)), agent.initial_state(1)
    )
    _assert_close(alone[:2], _slice(glued[:2], slice(None), slice(1, 2)))

  @_AGENTS
  def test_state_matters_within_an_episode(self, spec, torso, use_lstm):
    agent = networks.Agent(spec, torso, use_lstm)
    before = agent.unroll(*_inputs(spec, 6, 1, 1), agent.initial_state(1))[2]
    inputs = _inputs(spec, 4, 1)
    carried, fresh = (
      agent.unroll(*inputs, state)[0]
      for state in (before, agent.initial_state(1))
    )
    assert np.allclose(carried, fresh, 1e-6, 1e-6) != use_lstm

  def test_reset_needs_no_zero_state(self):
    agent = networks.Agent(_VECTOR, 'vector', use_lstm=True)
    last_actions, outputs = _inputs(_VECTOR, 3, 2)
    done = tf.constant([[True, False], [False] * 2, [False] * 2])
    inputs = last_actions, outputs._replace(done=done)
    ones = tf.nest.map_structure(np.ones_like, agent.initial_state(2))
    zeros = agent.initial_state(2)
    from_ones = agent.unroll(*inputs, ones)[0]
    from_zeros = agent.unroll(*inputs, zeros)[0]
    _assert_close(from_ones[:, 0], from_zeros[:, 0])
    assert not np.allclose(from_ones[:, 1], from_zeros[:, 1])

  def test_step_is_an_unroll_of_one(self):
    agent = networks.Agent(_VECTOR, 'vector', use_lstm=True)
    inputs = _inputs(_VECTOR, 1, 3)
    logits, _, state = agent.unroll(*inputs, agent.initial_state(3))
    output, next_state = agent.step(*_slice(inputs, 0), agent.initial_state(3))
    _assert_close(output.policy_logits, logits[0], 1e-6)
    _assert_close(next_state, state, 1e-6)
    assert output.action.dtype == tf.int32 and output.action.shape == [3]

  def test_actions_are_drawn_from_the_policy(self):
    agent = networks.Agent(_VECTOR, 'vector', use_lstm=False)
    inputs = _slice(_inputs(_VECTOR, 1, 1), 0)
    inputs = tf.nest.map_structure(lambda t: tf.repeat(t, 20_000, 0), inputs)
    tf.random.set_seed(1)
    output, _ = agent.step(*inputs, agent.initial_state(20_000))
    shares = np.bincount(output.action, minlength=4) / 20_000
    policy = tf.nn.softmax(output.policy_logits[0])
    np.testing.assert_allclose(shares, policy, atol=0.015)

  @pytest.mark.parametrize('use_lstm', [False, True])
  def test_last_action_and_reward_enter(self, use_lstm):
    agent = networks.Agent(_VECTOR, 'vector', use_lstm)
    state = agent.initial_state(1)
    last_actions, outputs = _inputs(_VECTOR, 1, 1)

    def logits(action=0, reward=0.0):
      changed = outputs._replace(reward=tf.constant([[reward]]))
      return agent.unroll(tf.constant([[action]]), changed, state)[0]

    assert not np.allclose(logits(action=0), logits(action=1))
    assert not np.allclose(logits(reward=0.5), logits(reward=0.9))
    for reward in (7.0, -7.0):  # Clipped to [-1, 1].
      sign = np.sign(reward)
      _assert_close(logits(reward=reward), logits(reward=float(sign)), 0)
    assert not np.allclose(logits(reward=7.0), logits(reward=-7.0))


class TestRecurrence:
  def test_gradients_are_those_of_plain_products(self):
    T, B, D, E = 5, 3, 4, 8
    generator = np.random.default_rng(0)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
      layer = networks.Recurrence(E, with_bias=False)
      gates, first, scale = (
        tf.constant(generator.normal(size=shape), tf.float32)
        for shape in ([T, B, E], [B, D], [E])
      )

      def results(gates, multiply):
        hidden, outputs = first, []
        for gates_t in tf.unstack(gates):
          outputs.append(tf.tanh(gates_t + multiply(hidden)) * scale)
          hidden = outputs[-1][:, :D] * outputs[-1][:, D:]
        return outputs

      actual = results(*layer.unroll(gates, first))
      expected = results(gates, lambda hidden: tf.matmul(hidden, layer.w))
      inputs = [gates, first, layer.w]
      pairs = [
        (outputs, tf.gradients(outputs, inputs))
        for outputs in (actual, expected)
      ]
      session.run(tf.compat.v1.global_variables_initializer())
      actual, expected = session.run(pairs)
    _assert_close(actual, expected)
    assert all(np.abs(gradient).max() > 1e-2 for gradient in actual[1])


def _sigmoid(x):
  return 1.0 / (1.0 + np.exp(-x))


def _lstm_step(i, f, g, o, cell):
  """The LSTM's equations, from input, forget, cell and output gates."""
  cell = _sigmoid(f) * cell + _sigmoid(i) * np.tanh(g)
  return _sigmoid(o) * np.tanh(cell), cell


def _draw_weights(module, generator):
  """Redraws all weights, so that biases are not 0 and units are not alike."""
  for variable in module.trainable_variables:
    is_bias = variable.shape.rank == 1
    fan_in = 1 if is_bias else variable.shape[0]
    variable.assign(generator.normal(size=variable.shape) / np.sqrt(fan_in))


def _core(inputs, done, hidden, cell, core):
  """Computes `networks.Core` from the LSTM's equations, in float64."""
  from_inputs, bias, from_hidden = (
    np.float64(weights)
    for weights in (
      core._from_inputs.w,
      core._from_inputs.b,
      core._from_hidden.w,
    )
  )
  outputs = []
  for inputs_t, done_t in zip(np.float64(inputs), done, strict=True):
    hidden = np.where(done_t[:, np.newaxis], 0.0, hidden)
    cell = np.where(done_t[:, np.newaxis], 0.0, cell)
    gates = inputs_t @ from_inputs + bias + hidden @ from_hidden
    i, g, f, o = np.split(gates, 4, axis=-1)
    hidden, cell = _lstm_step(i, f + 1.0, g, o, cell)
    outputs.append(hidden)
  return np.stack(outputs), (hidden, cell)


class TestCore:
  def test_equals_the_reference(self):
    T, B, D = 6, 3, 5
    generator = np.random.default_rng(0)
    inputs = np.float32(generator.normal(size=[T, B, D]))
    state = tuple(np.float32(generator.normal(size=[2, B, 256])))
    done = np.zeros([T, B], bool)
    # The first step, two in a row, the last step; column 2 runs on.
    done[[0, 3, 4], 0] = done[5, 1] = True
    core = networks.Core()
    core(tf.zeros([1, B, D]), tf.constant(done[:1]), state)
    _draw_weights(core, generator)
    actual = core(tf.constant(inputs), tf.constant(done), state)
    _assert_close(actual, _core(inputs, done, *state, core))

  def test_starts_with_an_open_forget_gate(self):
    # With small weights, the cell keeps about sigmoid(1) of what it holds.
    core = networks.Core()
    hidden, cell = core.initial_state(1)
    _, (_, cell) = core(
      tf.zeros([1, 1, 4]), tf.zeros([1, 1], tf.bool), (hidden, cell + 1.0)
    )
    np.testing.assert_allclose(cell, np.full([1, 256], _sigmoid(1.0)), 1e-6)


class TestHeads:
  @pytest.mark.parametrize('popart_levels', [None, 3])
  def test_are_linear_in_features_reward_and_action(self, popart_levels):
    agent = networks.Agent(_VECTOR, 'vector', False, popart_levels)
    last_actions, outputs = _inputs(_VECTOR, 3, 2)
    agent.unroll(last_actions, outputs, ())
    _draw_weights(agent, np.random.default_rng(0))
    features = np.concatenate(
      [
        tf.map_fn(agent._torso, outputs.observation.frame),
        np.clip(outputs.reward, -1, 1)[..., np.newaxis],
        np.eye(4)[last_actions],
      ],
      axis=-1,
    )
    actual = agent.unroll(last_actions, outputs, ())[:2]
    policy, baseline = (
      features @ head.w.numpy() + head.b.numpy()
      for head in (agent._policy_logits, agent._baseline)
    )
    if popart_levels is None:
      baseline = baseline[..., 0]
    _assert_close(actual, (policy, baseline))


def _words(*texts):
  return tf.constant(np.stack([instructions.hash_words(t) for t in texts]))


def _read(text, reader):
  """Computes `networks.InstructionReader` word by word, in float64."""
  lstm = reader._lstm
  embeddings, from_inputs, from_hidden, bias = (
    np.float64(weights)
    for weights in (
      reader._embed.embeddings,
      lstm.input_to_hidden,
      lstm.hidden_to_hidden,
      lstm.b,
    )
  )
  hidden, cell = np.zeros([2, 64])
  for _, word in zip(text.split(), instructions.hash_words(text), strict=False):
    gates = embeddings[word] @ from_inputs + hidden @ from_hidden + bias
    i, f, g, o = np.split(gates, 4)
    hidden, cell = _lstm_step(i, f, g, o, cell)
  return hidden


class TestInstructionReader:
  def test_rows_do_not_depend_on_each_other(self):
    reader = networks.InstructionReader()
    texts = ['', 'go to the red door', 'stop', ' '.join(map(str, range(60)))]
    together = reader(_words(*texts, 'stop'))
    assert together.shape == [5, 64]
    np.testing.assert_array_equal(together[0], np.zeros([64]))
    np.testing.assert_array_equal(together[2], together[4])
    for row, text in enumerate(texts):
      np.testing.assert_allclose(
        together[row : row + 1], reader(_words(text)), atol=1e-6
      )

  def test_nothing_but_empty_text(self):
    features = networks.InstructionReader()(_words('', ''))
    np.testing.assert_array_equal(features, np.zeros([2, 64]))

  def test_order_counts(self):
    reader = networks.InstructionReader()
    a, b = reader(_words('red then blue', 'blue then red'))
    assert np.abs(a - b).max() > 1e-3

  def test_equals_the_reference(self):
    reader = networks.InstructionReader()
    texts = ['open the red door', '', 'stop', 'go to the key', 'stop']
    reader(_words(*texts))
    _draw_weights(reader, np.random.default_rng(0))
    assert reader._embed.embeddings.shape == [1001, 20]
    np.testing.assert_allclose(
      reader(_words(*texts)), [_read(text, reader) for text in texts], atol=1e-5
    )

  def test_starts_with_an_open_forget_gate(self):
    reader = networks.InstructionReader()
    reader(_words('stop'))
    bias = np.split(reader._lstm.b, 4)  # Input, forget, cell, output.
    for actual, expected in zip(bias, (0, 1, 0, 0), strict=True):
      np.testing.assert_array_equal(actual, np.full([64], expected))

  def test_gradient_reaches_the_words_that_were_read(self):
    with tf.Graph().as_default():
      reader = networks.InstructionReader()
      loss = tf.reduce_sum(reader(_words('red door', 'red', '')))
      (gradient,) = tf.gradients(loss, reader._embed.trainable_variables)
      with tf.compat.v1.Session() as session:
        session.run(tf.compat.v1.global_variables_initializer())
        gradient = session.run(tf.convert_to_tensor(gradient))
    rows = np.flatnonzero(np.abs(gradient).sum(axis=1))
    expected = instructions.hash_words('red door')[:2].tolist()
    assert sorted(rows) == sorted(expected)


class TestSizes:
  def test_are_those_of_the_paper(self):
    def size(torso, spec):
      agent = networks.Agent(spec, torso, use_lstm=True)
      agent.unroll(*_inputs(spec, 1, 1), agent.initial_state(1))
      return _num_weights(agent)

    # Figure 3 is of DeepMind Lab: 72 x 96 in colour, 9 actions. It counts the
    # LSTM that reads the instruction too: 0.04 million.
    lab = environments.EnvironmentSpec(
      (72, 96, 3), np.dtype(np.uint8), num_actions=9, frames_per_step=4,
      stack=1, action_meanings=None,
    )  # fmt: skip
    assert size('shallow', lab) / 1e6 == pytest.approx(1.2, abs=0.1)
    assert size('deep', lab) / 1e6 == pytest.approx(1.6, abs=0.1)
    assert size('shallow', _IMAGE) / 1e6 == pytest.approx(1.2, abs=0.1)
    assert size('deep', _IMAGE) / 1e6 == pytest.approx(1.6, abs=0.1)


class TestInitialState:
  def test_is_zero_and_nothing_is_shared(self):
    agent = networks.Agent(_SMALL_IMAGE, 'shallow', use_lstm=True)
    hidden, cell = agent.initial_state(3)
    assert hidden.shape == cell.shape == (3, 256)
    hidden += 1
    assert not cell.any()

  def test_is_empty_without_memory(self):
    agent = networks.Agent(_VECTOR, 'vector', use_lstm=False)
    assert agent.initial_state(3) == ()
