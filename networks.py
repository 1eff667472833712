"""The agent: torso, recurrent core, policy and baseline heads (paper, fig. 3).

The learner runs the agent over whole unrolls, an actor over one step at a time.
Both call `Agent.unroll`, so the learner recomputes what the actor computed with
the same ops.

All tensors are time-major: `[T, B, ...]`.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import sonnet as snt
import tensorflow as tf

import config as config_lib
import environments
from envs import instructions
import levels
import torsos

# Sonnet checks once per process, at the first module, that TensorFlow 2 is in
# eager mode. Doing it here lets every later module be built in a `tf.Graph`.
snt.Module()

_HIDDEN_SIZE = 256
_WORD_SIZE = 20
_INSTRUCTION_SIZE = 64
_VECTOR_SIZE = 64


class AgentOutput(NamedTuple):
  """What the agent says about one step, or `[T, B]` of them.

  Attributes:
    action: int32 [...], drawn from the policy.
    policy_logits: float32 [..., A].
  """

  action: tf.Tensor
  policy_logits: tf.Tensor


def make_agent(
  config: config_lib.Config,
  spec: environments.EnvironmentSpec,
  name: str = 'agent',
) -> 'Agent':
  """Makes the agent that a completed config asks for.

  Args:
    config: of the run.
    spec: of the environments.
    name: see `Agent`.

  Raises:
    ValueError: the torso does not fit the observations.
  """
  popart_levels = None
  if config.agent.popart:
    # The levels as named, not as played: a test may play a few at a time, or
    # all where a training with few environments did not.
    popart_levels = len(levels.parse(config.envs.level_name, training=False))
  return Agent(
    spec, config.agent.agent, config.agent.use_lstm, popart_levels, name
  )


class InstructionReader(snt.Module):
  """Reads instructions word by word (paper, fig. 3; sizes: released code)."""

  def __init__(self, name: str = 'instruction_reader'):
    super().__init__(name=name)
    # Row 0 is the padding after the last word; it is never read.
    self._embed = snt.Embed(instructions.NUM_BUCKETS + 1, _WORD_SIZE)
    self._lstm = snt.LSTM(_INSTRUCTION_SIZE)

  def __call__(self, words: tf.Tensor) -> tf.Tensor:
    """Reads N instructions, independently of each other.

    Args:
      words: int16 [N, MAX_WORDS], see `instructions.hash_words`.

    Returns:
      float32 [N, 64], the LSTM's output at the last word; zeros without one.
    """
    # An instruction lasts a whole episode, so few of the N differ.
    words, rows = tf.raw_ops.UniqueV2(x=words, axis=[0])
    lengths = tf.math.count_nonzero(words, axis=1, dtype=tf.int32)
    longest = tf.maximum(tf.reduce_max(lengths), 1)
    words = tf.cast(words[:, :longest], tf.int32)
    embedded = self._embed(tf.transpose(words))  # [words, N, 20]

    # Not `snt.dynamic_unroll`: AutoGraph would write its source to the disk.
    def step(t, state):
      _, new_state = self._lstm(embedded[t], state)
      is_word = (t < lengths)[:, tf.newaxis]
      return t + 1, tf.nest.map_structure(
        lambda new, old: tf.where(is_word, new, old), new_state, state
      )

    # The first step outside the loop, where variables can be made.
    first = step(0, self._lstm.initial_state(tf.shape(words)[0]))
    _, state = tf.while_loop(lambda t, _: t < longest, step, first)
    return tf.gather(state.hidden, rows)


class Recurrence(snt.Linear):
  """The linear layer from each step of an LSTM to the next.

  The gradient of `snt.Linear`, called T times, multiplies T small matrices for
  the weights, and transposes the weights T times. Here it multiplies two large
  matrices for the weights, and transposes once.
  """

  def unroll(
    self, gates: tf.Tensor, hidden: tf.Tensor
  ) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    """Prepares T steps.

    Args:
      gates: float32 [T, B, E]; the caller adds the layer's outputs to them.
      hidden: float32 [B, D], whose size is that of the layer's inputs.

    Returns:
      `gates`, through which the gradient reaches the weights, and the layer as
      a function from [B, D] to [B, E], to be called once for each step.
    """
    self._initialize(hidden)
    weights = tf.convert_to_tensor(self.w)
    # As a batch of one, or the graph optimiser would undo it: it would fold the
    # transpose into the T products.
    transposed = tf.linalg.matrix_transpose(weights[tf.newaxis])[0]
    inputs = []

    @tf.custom_gradient
    def learn(gates, weights):
      def gradient(d_gates):
        d_products = tf.reshape(d_gates, [-1, self.output_size])
        return d_gates, tf.matmul(
          tf.concat(inputs, axis=0), d_products, transpose_a=True
        )

      return tf.identity(gates), gradient

    @tf.custom_gradient
    def multiply(step, weights, transposed):
      def gradient(d_products):
        return tf.matmul(d_products, transposed), None, None

      return tf.matmul(step, weights), gradient

    def apply(step):
      inputs.append(step)
      return multiply(step, weights, transposed)

    return learn(gates, weights), apply


class Core(snt.Module):
  """An LSTM over time, reset wherever an episode begins.

  The inputs of all steps go through one matrix product before the recurrence;
  inside it, only the products with the hidden state are left.
  """

  def __init__(self, name: str = 'core'):
    super().__init__(name=name)
    self._from_inputs = snt.Linear(4 * _HIDDEN_SIZE, name='from_inputs')
    self._from_hidden = Recurrence(
      4 * _HIDDEN_SIZE, with_bias=False, name='from_hidden'
    )

  def initial_state(self, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns `(hidden, cell)`, zeros of shape [B, 256]."""
    # Two arrays, not the same one twice: actors write into them.
    shape = [batch_size, _HIDDEN_SIZE]
    return np.zeros(shape, np.float32), np.zeros(shape, np.float32)

  def __call__(self, inputs: tf.Tensor, done: tf.Tensor, state: tuple):
    """Unrolls the core.

    Args:
      inputs: float32 [T, B, D].
      done: bool [T, B]; where true, the state is zeroed before the step.
      state: `(hidden, cell)` before step 0, each float32 [B, 256].

    Returns:
      The outputs, float32 [T, B, 256], and the state after the last step.
    """
    hidden, cell = state
    projected = snt.BatchApply(self._from_inputs)(inputs)
    projected, from_hidden = self._from_hidden.unroll(projected, hidden)
    keep = tf.unstack(1.0 - tf.cast(done, tf.float32)[..., None])
    outputs = []
    for inputs_t, keep_t in zip(tf.unstack(projected), keep, strict=True):
      gates = inputs_t + from_hidden(hidden * keep_t)
      i, g, f, o = tf.split(gates, 4, axis=-1)
      # The forget gate starts open (Jozefowicz et al., 2015).
      cell = cell * keep_t * tf.sigmoid(f + 1.0) + tf.sigmoid(i) * tf.tanh(g)
      hidden = tf.tanh(cell) * tf.sigmoid(o)
      outputs.append(hidden)
    return tf.stack(outputs), (hidden, cell)


class Agent(snt.Module):
  """Policy and baseline from observations, last actions and last rewards.

  Attributes:
    popart_levels: N, the number of levels, with PopArt; else None.
  """

  def __init__(
    self,
    spec: environments.EnvironmentSpec,
    torso: str,
    use_lstm: bool,
    popart_levels: int | None = None,
    name: str = 'agent',
  ):
    """Makes the agent.

    Args:
      spec: of the environments, their observations and actions.
      torso: one of `torsos.TORSOS`.
      use_lstm: whether there is an LSTM between torso and heads.
      popart_levels: with PopArt, the number of levels, each of which has its
        own baseline; None for a single baseline.
      name: the scope of the agent's variables.

    Raises:
      errors.SettingError: the torso does not fit the observations.
    """
    super().__init__(name=name)
    self._spec = spec
    self._torso = torsos.make_torso(torso, spec)
    self._reader = InstructionReader() if spec.has_instruction else None
    self._vector = None
    if spec.vector_size:
      self._vector = snt.Linear(_VECTOR_SIZE, name='vector')
    self._core = Core() if use_lstm else None
    self._policy_logits = snt.Linear(spec.num_actions, name='policy_logits')
    self._baseline = snt.Linear(popart_levels or 1, name='baseline')
    self.popart_levels = popart_levels

  @property
  def baseline_head(self) -> snt.Linear:
    """The layer that gives the baseline; has weights after the first call."""
    return self._baseline

  def initial_state(self, batch_size: int) -> tuple:
    """Returns the state before any episode, see `Core`; `()` without LSTM."""
    return self._core.initial_state(batch_size) if self._core else ()

  def unroll(
    self,
    last_actions: tf.Tensor,
    env_outputs: environments.StepOutput,
    state: tuple,
  ) -> tuple[tf.Tensor, tf.Tensor, tuple]:
    """Runs the agent over T steps.

    Args:
      last_actions: int32 [T, B], the action that led to each observation.
      env_outputs: `[T, B, ...]`, frames as float32 (see
        `unrolls.scale_frames`); where `done`, an episode begins.
      state: before step 0.

    Returns:
      policy_logits, float32 [T, B, A]; baseline V(x), float32 [T, B], with
      PopArt [T, B, N], for each of the N levels, normalised; and the state
      after the last step.
    """
    frame, instruction, vector = env_outputs.observation
    if len(self._spec.frame_shape) == 2:  # Grey.
      frame = frame[..., tf.newaxis]
    features = [
      snt.BatchApply(self._torso)(frame),
      tf.clip_by_value(env_outputs.reward, -1.0, 1.0)[..., None],
      tf.one_hot(last_actions, self._spec.num_actions),
    ]
    if self._reader:
      features.append(snt.BatchApply(self._reader)(instruction))
    if self._vector:
      features.append(tf.nn.relu(snt.BatchApply(self._vector)(vector)))
    features = tf.concat(features, axis=-1)
    if self._core:
      features, state = self._core(features, env_outputs.done, state)
    policy_logits = snt.BatchApply(self._policy_logits)(features)
    baseline = snt.BatchApply(self._baseline)(features)
    if self.popart_levels is None:
      baseline = tf.squeeze(baseline, axis=-1)
    return policy_logits, baseline, state

  def step(
    self,
    last_actions: tf.Tensor,
    env_outputs: environments.StepOutput,
    state: tuple,
  ) -> tuple[AgentOutput, tuple]:
    """Acts: one step of `unroll`, with an action drawn from the policy.

    Args:
      last_actions: int32 [B].
      env_outputs: `[B, ...]`.
      state: before this step.

    Returns:
      The output, `[B, ...]`, and the state after this step.
    """
    inputs = tf.nest.map_structure(
      lambda t: tf.expand_dims(t, 0), (last_actions, env_outputs)
    )
    policy_logits, _, state = self.unroll(*inputs, state)
    action = tf.random.categorical(policy_logits[0], 1, dtype=tf.int32)[:, 0]
    return AgentOutput(action, policy_logits[0]), state
