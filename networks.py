"""The agent: torso, recurrent core, policy and baseline heads (paper, fig. 3).

One agent is built twice from this module: by the learner over whole unrolls,
and by each actor one step at a time. Both call `Agent.unroll`, so what the
actor did and what the learner recomputes are the same arithmetic.

All tensors are time-major: `[T, B, ...]`.
"""

from typing import NamedTuple

import numpy as np
import sonnet as snt
import tensorflow as tf

import environments
import instructions

# Sonnet checks once per process, at the first module, that TensorFlow 2 is in
# eager mode. Doing it here lets every later module be built in a `tf.Graph`.
snt.Module()

TORSOS = ('shallow', 'deep', 'vector')

_HIDDEN_SIZE = 256
_VECTOR_HIDDEN_SIZE = 64
_WORD_SIZE = 20
_INSTRUCTION_SIZE = 64


class AgentOutput(NamedTuple):
  """What the agent says about one step, or `[T, B]` of them.

  Attributes:
    action: int32 [...], drawn from the policy.
    policy_logits: float32 [..., A].
    baseline: float32 [...], the estimated value V(x).
  """

  action: tf.Tensor
  policy_logits: tf.Tensor
  baseline: tf.Tensor


class AgentState(NamedTuple):
  """What the agent carries from one step to the next.

  Attributes:
    core: `(hidden, cell)`, each float32 [B, 256]; `()` without an LSTM.
    frames: uint8 [B, stack - 1, H, W], the frames before the next one, oldest
      first, blank before the episode's start; `()` if no frames are stacked.
  """

  core: tuple
  frames: tf.Tensor | tuple


def stack_frames(
  frames: tf.Tensor, done: tf.Tensor, history: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
  """Puts each frame behind those that came before it in its episode.

  Args:
    frames: uint8 [T, B, H, W], one frame a step.
    done: bool [T, B], true where a frame opens an episode.
    history: uint8 [B, S - 1, H, W], the frames before step 0.

  Returns:
    float32 [T, B, H, W, S] in [0, 1], the newest frame last, blank where the
    episode had not begun; and the history after the last step.
  """
  length, batch, height, width = frames.shape
  if batch is None:
    batch = tf.shape(frames)[1]
  earlier = history.shape[1]
  history = tf.transpose(history, [1, 0, 2, 3])
  sequence = tf.concat([history, frames], axis=0)  # [S - 1 + T, B, H, W]
  # The step each stacked frame is taken from, and whether an episode began
  # between the two. Row 0 of the table below is the blank frame.
  episode = tf.cumsum(tf.cast(done, tf.int32), axis=0)  # [T, B]
  episode = tf.concat([tf.zeros([earlier, batch], tf.int32), episode], axis=0)
  steps = np.arange(length)[:, None] + np.arange(earlier + 1)  # [T, S]
  same = tf.equal(tf.gather(episode, steps), episode[earlier:, None])
  rows = steps[..., None] * batch + tf.range(batch) + 1  # [T, S, B]
  rows = tf.transpose(tf.where(same, rows, 0), [0, 2, 1])  # [T, B, S]

  # Scaled before they are stacked: each pixel once, not four times.
  pixels = tf.cast(tf.reshape(sequence, [-1, height * width]), tf.float32)
  table = tf.pad(pixels / 255.0, [[1, 0], [0, 0]])
  stacked = tf.transpose(tf.gather(table, rows), [0, 1, 3, 2])
  stacked = tf.reshape(stacked, [length, -1, height, width, earlier + 1])

  recent = tf.cast(same[-1, 1:], tf.uint8)[..., None, None]
  history = tf.transpose(sequence[-earlier:] * recent, [1, 0, 2, 3])
  return stacked, history


class ShallowTorso(snt.Module):
  """Two convolutions: the feed-forward network of Mnih et al. (2016)."""

  def __init__(self, name: str = 'shallow_torso'):
    super().__init__(name=name)
    self._network = snt.Sequential(
      [
        snt.Conv2D(16, 8, 4, padding='VALID'),
        tf.nn.relu,
        snt.Conv2D(32, 4, 2, padding='VALID'),
        tf.nn.relu,
        snt.Flatten(),
        snt.Linear(_HIDDEN_SIZE),
        tf.nn.relu,
      ]
    )

  def __call__(self, frames: tf.Tensor) -> tf.Tensor:
    """Maps float32 [N, H, W, C] to features, float32 [N, 256]."""
    return self._network(frames)


class ResidualBlock(snt.Module):
  """Two 3x3 convolutions beside a skip connection."""

  def __init__(self, num_channels: int, name: str = 'residual_block'):
    super().__init__(name=name)
    self._first = snt.Conv2D(num_channels, 3)
    self._second = snt.Conv2D(num_channels, 3)

  def __call__(self, inputs: tf.Tensor) -> tf.Tensor:
    """Maps float32 [N, H, W, C] to the same shape."""
    return inputs + self._second(tf.nn.relu(self._first(tf.nn.relu(inputs))))


class DeepTorso(snt.Module):
  """Fifteen convolutions in three residual sections (paper, fig. 3, right)."""

  def __init__(self, name: str = 'deep_torso'):
    super().__init__(name=name)
    self._sections = [
      (snt.Conv2D(n, 3), ResidualBlock(n), ResidualBlock(n))
      for n in (16, 32, 32)
    ]
    self._linear = snt.Linear(_HIDDEN_SIZE)

  def __call__(self, frames: tf.Tensor) -> tf.Tensor:
    """Maps float32 [N, H, W, C] to features, float32 [N, 256]."""
    features = frames
    for convolution, first, second in self._sections:
      features = tf.nn.max_pool2d(convolution(features), 3, 2, 'SAME')
      features = second(first(features))
    features = snt.flatten(tf.nn.relu(features))
    return tf.nn.relu(self._linear(features))


class VectorTorso(snt.Module):
  """A small multi-layer perceptron, for observations that are no images."""

  def __init__(self, name: str = 'vector_torso'):
    super().__init__(name=name)
    self._network = snt.nets.MLP(
      [_VECTOR_HIDDEN_SIZE] * 2, activation=tf.nn.tanh, activate_final=True
    )

  def __call__(self, observations: tf.Tensor) -> tf.Tensor:
    """Maps float32 [N, D] to features, float32 [N, 64]."""
    return self._network(observations)


class InstructionReader(snt.Module):
  """Reads instructions word by word (paper, fig. 3; sizes: released code)."""

  def __init__(self, name: str = 'instruction_reader'):
    super().__init__(name=name)
    # Row 0 stands behind the last word and is never read.
    self._embed = snt.Embed(instructions.NUM_BUCKETS + 1, _WORD_SIZE)
    self._lstm = snt.LSTM(_INSTRUCTION_SIZE)

  def __call__(self, words: tf.Tensor) -> tf.Tensor:
    """Reads N instructions, each by itself.

    Args:
      words: int16 [N, MAX_WORDS], see `instructions.hash_words`.

    Returns:
      float32 [N, 64], the LSTM's output at the last word; zeros without words.
    """
    # An instruction stays for a whole episode: few of the N are different.
    words, rows = tf.raw_ops.UniqueV2(x=words, axis=[0])
    lengths = tf.math.count_nonzero(words, axis=1, dtype=tf.int32)
    longest = tf.maximum(tf.reduce_max(lengths), 1)
    words = tf.cast(words[:, :longest], tf.int32)
    embedded = self._embed(tf.transpose(words))  # [words, N, 20]
    state = self._lstm.initial_state(tf.shape(words)[0])
    _, state = snt.dynamic_unroll(self._lstm, embedded, state, lengths)
    return tf.gather(state.hidden, rows)


class Core(snt.Module):
  """An LSTM over time that starts afresh wherever an episode does.

  The inputs of all steps go through one matrix product before the recurrence:
  only what depends on the step before is left inside it.
  """

  def __init__(self, name: str = 'core'):
    super().__init__(name=name)
    self._from_inputs = snt.Linear(4 * _HIDDEN_SIZE, name='from_inputs')
    self._from_hidden = snt.Linear(
      4 * _HIDDEN_SIZE, with_bias=False, name='from_hidden'
    )

  def initial_state(self, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns `(hidden, cell)`, zeros of shape [B, 256]."""
    # Two arrays: actors write into them.
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
    projected = tf.unstack(snt.BatchApply(self._from_inputs)(inputs))
    keep = tf.unstack(1.0 - tf.cast(done, tf.float32)[..., None])
    outputs = []
    for inputs_t, keep_t in zip(projected, keep, strict=True):
      gates = inputs_t + self._from_hidden(hidden * keep_t)
      i, g, f, o = tf.split(gates, 4, axis=-1)
      # The forget gate starts open (Jozefowicz et al., 2015).
      cell = cell * keep_t * tf.sigmoid(f + 1.0) + tf.sigmoid(i) * tf.tanh(g)
      hidden = tf.tanh(cell) * tf.sigmoid(o)
      outputs.append(hidden)
    return tf.stack(outputs), (hidden, cell)


class Agent(snt.Module):
  """Policy and baseline from observations, last actions and last rewards."""

  def __init__(
    self,
    spec: environments.EnvironmentSpec,
    torso: str,
    use_lstm: bool,
    name: str = 'agent',
  ):
    """Makes the agent.

    Args:
      spec: what the environments show and which actions they take.
      torso: one of `TORSOS`.
      use_lstm: whether an LSTM stands between torso and heads.
      name: the scope of the agent's variables.

    Raises:
      ValueError: the torso does not fit the observations.
    """
    super().__init__(name=name)
    self._spec = spec
    self._torso = make_torso(torso, spec)
    self._reader = InstructionReader() if spec.has_instruction else None
    self._core = Core() if use_lstm else None
    self._policy_logits = snt.Linear(spec.num_actions, name='policy_logits')
    self._baseline = snt.Linear(1, name='baseline')

  def initial_state(self, batch_size: int) -> AgentState:
    """Returns the state before any episode, as arrays of zeros."""
    core, frames = (), ()
    if self._core:
      core = self._core.initial_state(batch_size)
    if self._spec.stack > 1:
      shape = (batch_size, self._spec.stack - 1, *self._spec.frame_shape)
      frames = np.zeros(shape, self._spec.frame_dtype)
    return AgentState(core, frames)

  def unroll(
    self,
    last_actions: tf.Tensor,
    env_outputs: environments.StepOutput,
    state: AgentState,
  ) -> tuple[tf.Tensor, tf.Tensor, AgentState]:
    """Runs the agent over T steps.

    Args:
      last_actions: int32 [T, B], the action that led to each observation.
      env_outputs: `[T, B, ...]`; where `done`, an episode begins.
      state: before step 0.

    Returns:
      policy_logits, float32 [T, B, A]; baseline, float32 [T, B]; and the state
      after the last step.
    """
    (frame, instruction), done = env_outputs.observation, env_outputs.done
    core, history = state
    if self._spec.stack > 1:
      frame, history = stack_frames(frame, done, history)
    elif frame.dtype == tf.uint8:
      frame = tf.cast(frame, tf.float32) / 255.0
      if frame.shape.rank == 4:  # Grey, [T, B, H, W].
        frame = frame[..., tf.newaxis]
    features = [
      snt.BatchApply(self._torso)(frame),
      tf.clip_by_value(env_outputs.reward, -1.0, 1.0)[..., None],
      tf.one_hot(last_actions, self._spec.num_actions),
    ]
    if self._reader:
      features.append(snt.BatchApply(self._reader)(instruction))
    features = tf.concat(features, axis=-1)
    if self._core:
      features, core = self._core(features, done, core)
    policy_logits = snt.BatchApply(self._policy_logits)(features)
    baseline = tf.squeeze(snt.BatchApply(self._baseline)(features), axis=-1)
    return policy_logits, baseline, AgentState(core, history)

  def step(
    self,
    last_actions: tf.Tensor,
    env_outputs: environments.StepOutput,
    state: AgentState,
  ) -> tuple[AgentOutput, AgentState]:
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
    policy_logits, baseline, state = self.unroll(*inputs, state)
    policy_logits, baseline = policy_logits[0], baseline[0]
    action = tf.random.categorical(policy_logits, 1, dtype=tf.int32)[:, 0]
    return AgentOutput(action, policy_logits, baseline), state


def make_torso(torso: str, spec: environments.EnvironmentSpec) -> snt.Module:
  """Makes the torso called `torso`, one of `TORSOS`.

  Raises:
    ValueError: there is no such torso, or it does not fit the observations.
  """
  if torso not in TORSOS:
    raise ValueError(f'agent {torso!r} is not one of {", ".join(TORSOS)}')
  is_image = spec.frame_dtype == np.uint8
  if is_image == (torso == 'vector'):
    kind = 'images' if is_image else 'vectors'
    fitting = '"shallow" or "deep"' if is_image else '"vector"'
    raise ValueError(
      f'agent {torso!r} does not fit observations that are {kind} '
      f'(shape {spec.frame_shape}): use {fitting}'
    )
  return {
    'shallow': ShallowTorso,
    'deep': DeepTorso,
    'vector': VectorTorso,
  }[torso]()
