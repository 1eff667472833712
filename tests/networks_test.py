"""Tests of networks.py and torsos.py, eagerly."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

import environments
from envs import instructions
import networks
import torsos

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
    frame = generator.integers(0, 256, shape).astype(np.uint8)
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
  """Unrolls `length` steps at a time, handing on the state."""
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
    output, _ = agent.step(*_slice(inputs, 0), state)
    _assert_close(output.baseline, baseline[0], 1e-6)
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
    # Column 1 runs on, so that a reset of one column alone is seen too.
    done = np.zeros([10, 2], bool)
    done[5, 0] = True
    inputs = last_actions, outputs._replace(done=tf.constant(done))
    glued = agent.unroll(*inputs, agent.initial_state(2))
    for steps in (slice(0, 5), slice(5, 10)):
      part = _slice(inputs, steps, slice(0, 1))
      # Whatever is done at step 0, before it there is nothing.
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
    logits, baseline, state = agent.unroll(*inputs, agent.initial_state(3))
    output, next_state = agent.step(*_slice(inputs, 0), agent.initial_state(3))
    _assert_close(output[1:], (logits[0], baseline[0]), 1e-6)
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


class TestPixels:
  def test_frames_of_a_stack_are_channels(self):
    frames = tf.random.uniform([3, 36, 36, 4])
    stacks = tf.transpose(frames, [0, 3, 1, 2])[..., tf.newaxis]
    for of_stacks, of_channels in (
      (torsos.ShallowTorso(stack=4), torsos.ShallowTorso()),
      (torsos.DeepTorso(), torsos.DeepTorso()),
    ):
      one, other = of_stacks(stacks), of_channels(frames)
      assert not np.allclose(one, other)
      for mine, theirs in zip(
        of_channels.variables, of_stacks.variables, strict=True
      ):
        if mine.shape != theirs.shape:  # [4, 8, 8, 1, 16]
          theirs = tf.transpose(theirs[..., 0, :], [1, 2, 0, 3])
        mine.assign(theirs)
      np.testing.assert_allclose(one, of_channels(frames), atol=1e-5)

  @pytest.mark.parametrize('spec', [_SMALL_IMAGE, _COLOURS])
  def test_enter_as_0_to_1(self, spec):
    agent = networks.Agent(spec, 'shallow', use_lstm=False)
    seen = []
    torso = agent._torso
    agent._torso = lambda frames: seen.append(frames) or torso(frames)
    last_actions, outputs = _inputs(spec, 4, 1)
    for value in (0, 51, 255):
      frame = tf.fill(outputs.observation.frame.shape, np.uint8(value))
      agent.unroll(
        last_actions,
        outputs._replace(observation=environments.Observation(frame, ())),
        agent.initial_state(1),
      )
      last = seen[-1][-1]
      shape = [4, 36, 36, 1] if spec.stack == 4 else spec.frame_shape
      assert last.shape == shape
      assert last.dtype == tf.float32
      np.testing.assert_allclose(last, value / 255)


def _words(*texts):
  return tf.constant(np.stack([instructions.hash_words(t) for t in texts]))


class TestInstructionReader:
  def test_rows_do_not_depend_on_each_other(self):  # D06
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

  def test_is_an_lstm_over_embedded_words(self):
    reader = networks.InstructionReader()
    features = reader(_words('open the door'))[0]
    ids = instructions.hash_words('open the door')[:3]
    lstm = reader._lstm
    state = lstm.initial_state(1)
    for i in ids:
      output, state = lstm(reader._embed.embeddings[int(i)][None], state)
    np.testing.assert_allclose(features, output[0], atol=1e-6)
    assert reader._embed.embeddings.shape == [1001, 20]

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


class TestTorsos:
  def test_sizes_are_the_papers(self):
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

  @pytest.mark.parametrize('torso', ['shallow', 'deep'])
  @pytest.mark.parametrize('spec', [_IMAGE, _COLOURS])
  def test_a_new_one_does_not_see_even_grey(self, torso, spec):
    shape = [1, *spec.observation_shape]
    if len(spec.frame_shape) == 2:
      shape.append(1)
    torso = torsos.make_torso(torso, spec)
    torso(tf.zeros(shape))
    kernels = next(w for w in torso.trainable_variables if w.shape.rank > 3)
    kernels = kernels.numpy().reshape([-1, 16])
    np.testing.assert_allclose(kernels.sum(axis=0), 0, atol=1e-5)
    stddev = np.sqrt(2 / len(kernels))
    # The tails are cut off.
    assert kernels.std() == pytest.approx(0.88 * stddev, rel=0.1)

  def test_shallow_has_two_convolutions_and_deep_fifteen(self):
    for torso, count in (('shallow', 2), ('deep', 15)):
      agent = networks.Agent(_SMALL_IMAGE, torso, use_lstm=False)
      agent.unroll(*_inputs(_SMALL_IMAGE, 1, 1), agent.initial_state(1))
      ranks = [w.shape.rank for w in agent.trainable_variables]
      assert ranks.count(4) + ranks.count(5) == count

  @pytest.mark.parametrize(
    ('torso', 'spec', 'message'),
    [
      ('vector', _IMAGE, '\'vector\' does not fit.*images.*use "shallow"'),
      ('deep', _VECTOR, '\'deep\' does not fit.*vectors.*use "vector"'),
      ('shallow', _VECTOR, 'does not fit'),
      (
        'shallow',
        dataclasses.replace(_IMAGE, frame_shape=(7, 84)),
        '"shallow" needs images of at least 20 x 20 .*use "deep"',
      ),
      ('resnet', _IMAGE, "'resnet' is not one of shallow, deep, vector"),
    ],
  )
  def test_refuses_what_does_not_fit(self, torso, spec, message):
    with pytest.raises(ValueError, match=message):
      networks.Agent(spec, torso, use_lstm=False)


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
