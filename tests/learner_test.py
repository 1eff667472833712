"""Tests of learner.py: hand numbers, and whole updates in plain NumPy."""

import dataclasses
import re

import numpy as np
import pytest
import tensorflow as tf

import config
import environments
import learner
import networks
import popart
import unrolls as unrolls_lib

tf1 = tf.compat.v1

_SPEC = environments.EnvironmentSpec(
  (5,), np.dtype(np.float32), num_actions=4, frames_per_step=3, stack=1,
  action_meanings=None,
)  # fmt: skip
_HYPERPARAMETERS = config.UpdateConfig(
  batch_size=2,
  unroll_length=6,
  discounting=0.9,
  baseline_cost=0.5,
  entropy_cost=0.01,
  reward_clipping='abs_one',
  learning_rate=6e-4,
  decay=0.99,
  momentum=0.0,
  epsilon=0.01,
  max_gradient_norm=40.0,
  total_environment_frames=200_000_000,
)


class StubAgent(tf.Module):
  """Says what it is told, whatever it sees."""

  popart_levels = None

  def __init__(self, logits, baseline, weights=()):
    """Takes logits [T + 1, B, A] and baseline [T + 1, B] or [T + 1, B, N]."""
    super().__init__()
    self._outputs = tf.cast(logits, tf.float32), tf.cast(baseline, tf.float32)
    self._weights = weights

  def initial_state(self, batch_size):
    return ()

  def unroll(self, last_actions, env_outputs, state):
    return *self._outputs, state


def _hyperparameters(**changes):
  return dataclasses.replace(_HYPERPARAMETERS, **changes)


def _batch(rewards, done, logits, actions, level_index=None, truncated=None):
  """Returns a batch, time-major; rewards and done are [T, B]: what follows.

  `truncated` is [T + 1, B]: whether an observation is the last one before a
  time limit.
  """
  rewards, done, actions = (
    np.concatenate([first, np.asarray(array)])
    for first, array in (
      # All of index 0 belongs to the unroll before and must not matter.
      (np.full([1, np.shape(rewards)[1]], 99.0), rewards),
      (np.ones([1, np.shape(rewards)[1]], bool), done),
      (np.ones([1, np.shape(rewards)[1]], int), actions),
    )
  )
  logits = np.concatenate([np.full_like(logits[:1], 7.0), logits])
  return unrolls_lib.ActorOutput(
    level_index=level_index,
    policy_version=None,
    agent_state=(),
    earlier_frames=(),
    env_outputs=environments.StepOutput(
      reward=tf.constant(rewards, tf.float32),
      info=environments.StepOutputInfo(
        None,
        None,
        None,
        tf.zeros(done.shape, tf.bool) if truncated is None else truncated,
      ),
      done=tf.constant(done),
      observation=None,
    ),
    agent_outputs=networks.AgentOutput(
      action=tf.constant(actions, tf.int32),
      policy_logits=tf.constant(logits, tf.float32),
    ),
  )


def _compute_loss(agent, batch, hyperparameters):
  """Returns the loss of a batch and its scalars, without PopArt."""
  targets = learner.compute_targets(agent, batch, hyperparameters)
  return learner.compute_loss(targets, hyperparameters)


class TestLosses:
  def test_policy_gradient_is_summed_over_time_and_batch(self):
    for B in (2, 4):
      loss = learner.compute_policy_gradient_loss(
        tf.zeros([2, B, 2]), tf.zeros([2, B], tf.int32), tf.ones([2, B])
      )
      assert float(loss) == pytest.approx(2.772589 * B / 2, abs=1e-5)

  def test_no_gradient_through_advantages(self):
    advantages = tf.ones([2, 2])
    with tf.GradientTape() as tape:
      tape.watch(advantages)
      loss = learner.compute_policy_gradient_loss(
        tf.zeros([2, 2, 2]), tf.zeros([2, 2], tf.int32), advantages
      )
    assert tape.gradient(loss, advantages) is None

  def test_entropy_is_negative_and_summed(self):
    loss = learner.compute_entropy_loss(tf.zeros([1, 1, 9]))
    assert float(loss) == pytest.approx(-2.197225, abs=1e-5)
    loss = learner.compute_entropy_loss(tf.zeros([20, 32, 18]))
    assert float(loss) == pytest.approx(-1849.83793, abs=1e-2)

  def test_entropy_of_a_certain_action_is_0(self):
    loss = learner.compute_entropy_loss(tf.constant([[[1e4, 0.0, -1e4]]]))
    assert float(loss) == 0

  def test_baseline_is_half_the_sum_of_squares(self):
    loss = learner.compute_baseline_loss(tf.constant([[1.0, 2.0], [3.0, 4.0]]))
    assert float(loss) == 15

  def test_weighs_each_step_by_its_own_action(self):
    """Where pi is not mu, a shift of actions or policies would show."""
    mu = np.array([[[0.5, 0.5]], [[0.2, 0.8]], [[0.6, 0.4]]])
    pi = np.array([[[0.25, 0.75]], [[0.9, 0.1]], [[0.3, 0.7]]])
    actions = [[0], [1], [1]]
    last = np.full([1, 1, 2], 5.0)
    agent = StubAgent(np.concatenate([np.log(pi), last]), np.zeros([4, 1]))
    batch = _batch([[0.0]] * 3, [[False]] * 3, np.log(mu), actions)
    targets = learner.compute_targets(agent, batch, _hyperparameters())
    np.testing.assert_allclose(
      np.exp(targets.log_rhos[:, 0]), [0.5, 0.125, 1.75], rtol=1e-5
    )
    np.testing.assert_array_equal(targets.actions, actions)

  def test_more_entropy_lowers_the_total(self):
    def total(peak):
      logits = np.zeros([2, 1, 3])
      logits[..., 0] = peak
      batch = _batch([[0.0]], [[False]], logits[:1], [[0]])
      agent = StubAgent(logits, np.zeros([2, 1]))
      return float(_compute_loss(agent, batch, _hyperparameters())[0])

    totals = [total(peak) for peak in (0.0, 1.0, 2.0, 5.0)]
    assert totals == sorted(totals) and totals[0] < totals[-1]

  @pytest.mark.parametrize(
    ('done', 'baseline_loss', 'advantages'),
    [
      # vs = [1 + .5 * 2 + .25 * 40, 2 + .5 * 40] = [12, 22].
      ([[False], [False]], 4.0, [2.0, 2.0]),
      # The first action ends the episode: vs = [1, 22].
      ([[True], [False]], 0.5 * (81 + 4), [-9.0, 2.0]),
      # The second does: vs = [1 + .5 * 2, 2] = [2, 2].
      ([[False], [True]], 0.5 * (64 + 18**2), [-8.0, -18.0]),
    ],
  )
  def test_pairs_pi_mu_action_and_reward(self, done, baseline_loss, advantages):
    # pi = mu, so the targets are n-step returns. The policies differ by step:
    # any shift of logits or actions shows.
    policy = np.array([[[0.5, 0.5]], [[0.25, 0.75]]])
    actions = [[0], [1]]
    last = np.full([1, 1, 2], 5.0)
    agent = StubAgent(
      np.concatenate([np.log(policy), last]), [[10.0], [20.0], [40.0]]
    )
    batch = _batch([[1.0], [2.0]], done, np.log(policy), actions)
    total, scalars = _compute_loss(
      agent,
      batch,
      _hyperparameters(
        batch_size=1,
        unroll_length=2,
        discounting=0.5,
        reward_clipping='none',
        entropy_cost=0.1,
        baseline_cost=0.25,
      ),
    )
    entropy_loss = np.sum(policy * np.log(policy))
    policy_gradient_loss = -np.dot(np.log([0.5, 0.75]), advantages)
    expected = {
      'losses/policy_gradient': policy_gradient_loss,
      'losses/baseline': baseline_loss,
      'losses/entropy': entropy_loss,
      'losses/total': (
        policy_gradient_loss + 0.25 * baseline_loss + 0.1 * entropy_loss
      ),
      'entropy': -entropy_loss / 2,
      'mean_clipped_rho': 1.0,
      'max_abs_log_rho': 0.0,
    }
    assert {k: float(v) for k, v in scalars.items()} == pytest.approx(
      expected, rel=1e-5, abs=1e-6
    )
    assert float(total) == float(scalars['losses/total'])


class TestTruncation:
  """A time limit cuts an episode after x_1; x_2 is its last observation."""

  def _compute(self, rho=1.0, done=((False,), (False,), (True,), (False,))):
    truncated = tf.constant([[False], [False], [True], [False], [False]])
    policy = np.log(np.full([4, 1, 2], [0.25, 0.75]))
    behaviour = policy.copy()
    behaviour[1] = np.log([0.25 / rho, 1 - 0.25 / rho])
    rewards = [[1.0], [1.0], [0.0], [1.0]]
    # The last is that of the next episode, whose first value is 50.
    baseline = [[2.0], [3.0], [5.0], [50.0], [7.0]]
    agent = StubAgent(np.concatenate([policy, policy[:1]]), baseline)
    actions = [[0]] * 4
    batch = _batch(rewards, done, behaviour, actions, truncated=truncated)
    return learner.compute_targets(agent, batch, _hyperparameters())

  def test_bootstraps_from_the_last_observation(self):
    targets = self._compute()
    np.testing.assert_allclose(targets.vs[:3, 0], [5.95, 5.5, 5], rtol=1e-6)
    np.testing.assert_allclose(
      targets.pg_advantages[:3, 0], [3.95, 2.5, 0], rtol=1e-6
    )
    # The next episode is as if it stood alone.
    assert float(targets.vs[3, 0]) == pytest.approx(1 + 0.9 * 7)
    # Exactly 0: nothing is learnt from the step of the reset.
    assert targets.pg_advantages[2, 0] == 0
    assert targets.vs[2, 0] == targets.values[2, 0]

  def test_corrects_the_truncated_step(self):
    targets = self._compute(rho=0.5)
    assert float(targets.vs[1, 0]) == pytest.approx(3 + 0.5 * 2.5)

  def test_the_step_of_the_reset_counts_for_nothing(self):
    targets = self._compute()
    _, scalars = learner.compute_loss(targets, _hyperparameters())
    one = 0.25 * np.log(0.25) + 0.75 * np.log(0.75)
    assert float(scalars['losses/entropy']) == pytest.approx(3 * one)
    assert float(scalars['entropy']) == pytest.approx(-one)
    assert float(scalars['mean_clipped_rho']) == pytest.approx(1)
    played = targets.played.numpy()[:, 0].tolist()
    assert played == [True, True, False, True]


class TestClipRewards:
  def test_abs_one_is_an_interval_and_not_a_sign(self):
    rewards = tf.constant([[-5, -0.5, 0, 0.5, 7]])
    np.testing.assert_array_equal(
      learner.clip_rewards(rewards, 'abs_one'), [[-1, -0.5, 0, 0.5, 1]]
    )

  def test_soft_asymmetric(self):
    rewards = tf.constant([[1.0, -1, 10, -10, 0]])
    np.testing.assert_allclose(
      learner.clip_rewards(rewards, 'soft_asymmetric'),
      [[0.98688, -0.29606, 4.82014, -1.44604, 0]],
      atol=1e-5,
    )

  def test_none(self):
    rewards = tf.constant([[-5.0, 7.0]])
    np.testing.assert_array_equal(
      learner.clip_rewards(rewards, 'none'), [[-5, 7]]
    )

  def test_names_the_choices(self):
    with pytest.raises(ValueError, match="'sign' is not one of abs_one, soft"):
      learner.clip_rewards(tf.zeros([1, 1]), 'sign')


class TestLearningRate:
  @pytest.mark.parametrize(
    ('frames', 'expected'),
    [
      (0, 6e-4),
      (100_000_000, 3e-4),
      (199_999_999, 3e-12),
      (200_000_000, 0),
      (200_000_001, 0),
      (10**12, 0),
    ],
  )
  def test_falls_to_0_and_stays(self, frames, expected):
    rate = learner.compute_learning_rate(
      tf.constant(frames, tf.int64), _hyperparameters()
    )
    assert rate.dtype == tf.float32
    assert float(rate) == pytest.approx(expected, rel=1e-6, abs=0)

  def test_counts_every_frame(self):
    # float32 takes 11.4e9 and 11.4e9 - 500 for one number.
    total = 11_400_000_000
    rate = learner.compute_learning_rate(
      tf.constant(total - 100, tf.int64),
      _hyperparameters(total_environment_frames=total, learning_rate=1.0),
    )
    assert float(rate) == pytest.approx(100 / total, rel=1e-6)


class Run:
  """A learner with a queue to fill, in a graph and a session of its own."""

  def __init__(
    self, make_agent=None, frames_per_step=3, popart_levels=None, **changes
  ):
    self.hyperparameters = _hyperparameters(**changes)
    length = self.hyperparameters.unroll_length
    with tf.Graph().as_default():
      tf1.set_random_seed(1)
      if make_agent is None:
        self.agent = networks.Agent(_SPEC, 'vector', False, popart_levels)
      else:
        self.agent = make_agent()
      self.specs = unrolls_lib.unroll_specs(self.agent, _SPEC, length)
      queue = unrolls_lib.make_queue(self.specs, capacity=64)
      self.learner = learner.Learner(
        self.agent, queue, self.specs, frames_per_step, self.hyperparameters
      )
      self._feeds = [
        tf1.placeholder(s.dtype, s.shape) for s in tf.nest.flatten(self.specs)
      ]
      self._enqueue = queue.enqueue(self._feeds)
      self._close = queue.close(cancel_pending_enqueues=True)
      counter = self.learner.num_environment_frames
      self._frames = tf1.placeholder(tf.int64, [])
      self._set_frames = counter.assign(self._frames)
      self.session = tf1.Session()
      self.session.run(tf1.global_variables_initializer())
      self.session.graph.finalize()

  def put(self, *unrolls):
    for unroll in unrolls:
      feeds = zip(self._feeds, tf.nest.flatten(unroll), strict=True)
      self.session.run(self._enqueue, dict(feeds))

  def close_queue(self):
    self.session.run(self._close)

  def set_frames(self, frames):
    self.session.run(self._set_frames, {self._frames: frames})

  def update(self, num_updates):
    """Returns the results; needs the unrolls of one update more."""
    results = []
    self.learner.run(
      self.session, results.append, lambda: len(results) == num_updates
    )
    return results

  def values(self):
    return self.session.run(list(self.learner.variables))

  def statistics(self):
    """Returns mu and nu of PopArt."""
    variables = self.learner.variables
    return self.session.run(
      [v for v in variables if v.name.startswith('popart/')]
    )

  def weights(self):
    """Returns the agent's weights in float64, by name."""
    weights = self.agent.trainable_variables
    values = self.session.run(list(weights))
    return {
      weight.name.split(':')[0]: np.float64(value)
      for weight, value in zip(weights, values, strict=True)
    }


def _unroll(specs, seed, truncations=False, **fields):
  """Returns an unroll of random numbers; `fields` are the env's."""
  generator = np.random.default_rng(seed)

  def fill(s):
    dtype = s.dtype.as_numpy_dtype
    if dtype == np.bool_:
      return generator.random(s.shape) < 0.2
    if dtype in (np.int32, np.int64):
      return generator.integers(0, _SPEC.num_actions, s.shape).astype(dtype)
    return (2 * generator.normal(size=s.shape)).astype(dtype)

  unroll = tf.nest.map_structure(fill, specs)
  if not truncations:
    unroll.env_outputs.info.truncated[:] = False
  return unroll._replace(env_outputs=unroll.env_outputs._replace(**fields))


class Reference:
  """The update in float64 NumPy, step by step, for the vector agent."""

  def __init__(self, weights, hyperparameters, popart_levels=None):
    self.weights = weights
    self._hyperparameters = hyperparameters
    self._has_popart = popart_levels is not None
    # mu and nu of PopArt; without it, what changes nothing.
    self.mean = np.zeros(popart_levels or 1)
    self.second_moment = np.ones(popart_levels or 1)
    self._squares = {name: np.ones_like(w) for name, w in weights.items()}
    self._moments = {name: np.zeros_like(w) for name, w in weights.items()}

  def _weight(self, end):
    (name,) = (name for name in self.weights if name.endswith(end))
    return name

  @property
  def _scale(self):
    return np.sqrt(self.second_moment - self.mean**2)

  def _losses(self, unroll, logits, baseline):
    """Returns the loss, its gradients by the arguments, and the targets."""
    h = self._hyperparameters
    level = unroll.level_index if self._has_popart else 0
    scale = self._scale[level]
    V = baseline[:, level] * scale + self.mean[level]
    outputs, behaviour = unroll.env_outputs, unroll.agent_outputs
    pi, mu = (
      np.exp(x) / np.exp(x).sum(axis=1, keepdims=True)
      for x in (logits, np.float64(behaviour.policy_logits))
    )
    loss, targets = 0.0, []
    d_logits, d_baseline = np.zeros_like(logits), np.zeros_like(baseline)
    vs = V[-1]
    for t in reversed(range(h.unroll_length)):
      # Time in an unroll: what follows x_t stands at t + 1.
      action = behaviour.action[t + 1]
      reward = np.float64(outputs.reward[t + 1])
      if h.reward_clipping == 'abs_one':
        reward = np.clip(reward, -1, 1)
      discount = 0.0 if outputs.done[t + 1] else h.discounting
      played = not outputs.info.truncated[t]
      if not played:
        reward, discount = V[t], 0.0
      rho = min(1.0, pi[t, action] / mu[t + 1, action])
      advantage = rho * (reward + discount * vs - V[t])
      delta = rho * (reward + discount * V[t + 1] - V[t])
      vs = V[t] + delta + discount * rho * (vs - V[t + 1])
      if played:
        targets.append(vs)
      advantage /= scale
      error = (vs - V[t]) / scale
      log_pi = np.log(pi[t])
      entropy = -np.sum(pi[t] * log_pi)
      loss += -advantage * log_pi[action] - played * h.entropy_cost * entropy
      loss += h.baseline_cost * 0.5 * error**2
      d_baseline[t, level] = -h.baseline_cost * error
      d_logits[t] = advantage * (pi[t] - np.eye(len(log_pi))[action])
      d_logits[t] += played * h.entropy_cost * pi[t] * (log_pi + entropy)
    return loss, d_logits, d_baseline, targets

  def _gradients(self, unroll):
    """Returns one unroll's gradients by name, its loss and its targets."""
    gradients = {}

    def forwards(layer, inputs):
      w, b = self._weight(f'/{layer}/w'), self._weight(f'/{layer}/b')
      return inputs @ self.weights[w] + self.weights[b]

    def backwards(layer, inputs, d_outputs):
      w, b = self._weight(f'/{layer}/w'), self._weight(f'/{layer}/b')
      gradients[w] = inputs.T @ d_outputs
      gradients[b] = d_outputs.sum(axis=0)
      return d_outputs @ self.weights[w].T

    observations = np.float64(unroll.env_outputs.observation.frame)
    first = np.tanh(forwards('linear_0', observations))
    second = np.tanh(forwards('linear_1', first))
    last_rewards = np.clip(unroll.env_outputs.reward, -1, 1)[:, None]
    last_actions = np.eye(_SPEC.num_actions)[unroll.agent_outputs.action]
    features = np.concatenate([second, last_rewards, last_actions], axis=1)
    logits = forwards('policy_logits', features)
    baseline = forwards('baseline', features)
    loss, d_logits, d_baseline, targets = self._losses(unroll, logits, baseline)
    d_features = backwards('policy_logits', features, d_logits)
    d_features += backwards('baseline', features, d_baseline)
    d_second = d_features[:, : second.shape[1]] * (1 - second**2)
    d_first = backwards('linear_1', first, d_second) * (1 - first**2)
    backwards('linear_0', observations, d_first)
    return gradients, loss, targets

  def _update_statistics(self, unrolls):
    """Moves mu and nu to the targets and rescales the head."""
    targets = {}
    for unroll in unrolls:
      own = targets.setdefault(int(unroll.level_index), [])
      own += self._gradients(unroll)[2]
    scale, mean = self._scale, self.mean.copy()
    for level, own in targets.items():
      weight = 1 - (1 - popart.STEP_SIZE) ** len(own)
      self.mean[level] += weight * (np.mean(own) - mean[level])
      self.second_moment[level] += weight * (
        np.mean(np.square(own)) - self.second_moment[level]
      )
    w, b = self._weight('/baseline/w'), self._weight('/baseline/b')
    self.weights[w] = self.weights[w] * scale / self._scale
    self.weights[b] = self.weights[b] * scale + mean - self.mean
    self.weights[b] /= self._scale

  def update(self, unrolls, learning_rate):
    """Returns the loss and the norm of the gradient, unclipped."""
    h = self._hyperparameters
    if self._has_popart:
      self._update_statistics(unrolls)
    parts = [self._gradients(unroll) for unroll in unrolls]
    loss = sum(part[1] for part in parts)
    gradients = {name: sum(p[0][name] for p in parts) for name in self.weights}
    norm = np.sqrt(sum(np.sum(g**2) for g in gradients.values()))
    scale = 1.0
    if h.max_gradient_norm:
      scale = h.max_gradient_norm / max(norm, h.max_gradient_norm)
    for name, gradient in gradients.items():
      g = gradient * scale
      squares, moments = self._squares[name], self._moments[name]
      squares[:] = h.decay * squares + (1 - h.decay) * g**2
      step = learning_rate * g / np.sqrt(squares + h.epsilon)
      moments[:] = h.momentum * moments + step
      self.weights[name] = self.weights[name] - moments
    return loss, norm


class TestUpdate:
  @pytest.mark.parametrize(
    'changes',
    [
      {},
      {'max_gradient_norm': 0.0, 'reward_clipping': 'none'},
      {'max_gradient_norm': 0.5, 'momentum': 0.9, 'epsilon': 0.1},
      {'batch_size': 3, 'unroll_length': 1, 'decay': 0.5, 'epsilon': 1e-5},
      {'popart_levels': 4, 'reward_clipping': 'none'},
      {'popart_levels': 4, 'reward_clipping': 'none', 'batch_size': 5},
    ],
  )
  def test_equals_numpy(self, changes, monkeypatch):
    # So that PopArt's scales change a lot within an update.
    monkeypatch.setattr(popart, 'STEP_SIZE', 0.1)
    popart_levels = changes.get('popart_levels')
    # A large rate, short run: both the step and the decay are seen.
    run = Run(learning_rate=0.01, total_environment_frames=300, **changes)
    B, T = run.hyperparameters.batch_size, run.hyperparameters.unroll_length
    reference = Reference(run.weights(), run.hyperparameters, popart_levels)
    unrolls = [_unroll(run.specs, seed, True) for seed in range(4 * B)]
    if popart_levels:
      for unroll in unrolls:
        unroll.env_outputs.reward[:] *= 10.0**unroll.level_index
    run.put(*unrolls)
    results = run.update(3)
    frames = 0
    for i, result in enumerate(results):
      learning_rate = 0.01 * (300 - frames) / 300
      batch = unrolls[i * B : (i + 1) * B]
      loss, norm = reference.update(batch, learning_rate)
      truncated = [unroll.env_outputs.info.truncated[:-1] for unroll in batch]
      frames += 3 * (B * T - np.sum(truncated))
      scalars = result.scalars
      assert scalars['losses/total'] == pytest.approx(loss, rel=1e-4)
      assert scalars['gradient_norm'] == pytest.approx(norm, rel=1e-4)
      assert scalars['learning_rate'] == pytest.approx(learning_rate)
      assert result.num_environment_frames == frames
    for name, value in run.weights().items():
      np.testing.assert_allclose(
        value, reference.weights[name], rtol=1e-4, atol=2e-6, err_msg=name
      )
    if popart_levels:
      for value, expected in zip(
        run.statistics(),
        (reference.mean, reference.second_moment),
        strict=True,
      ):
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-6)

  @pytest.mark.parametrize(('T', 'frames'), [(20, 2560), (100, 12_800)])
  def test_counts_environment_frames(self, T, frames):
    run = Run(batch_size=32, unroll_length=T, frames_per_step=4)
    run.put(*(_unroll(run.specs, seed) for seed in range(64)))
    assert run.update(1)[0].num_environment_frames == frames

  def test_counts_beyond_float32(self):
    run = Run(batch_size=1, unroll_length=1, frames_per_step=1)
    run.set_frames(16_777_216)
    run.put(*[_unroll(run.specs, seed) for seed in range(3)])
    results = run.update(2)
    assert [int(r.num_environment_frames) for r in results] == [
      16_777_217,
      16_777_218,
    ]
    assert results[0].num_environment_frames.dtype == np.int64

  def test_trains_on_each_unroll_once_in_order(self):
    run = Run()
    run.put(
      *[
        _unroll(run.specs, i)._replace(level_index=np.int32(i))
        for i in range(10)
      ]
    )
    levels = [result.level_index.tolist() for result in run.update(4)]
    assert levels == [[0, 1], [2, 3], [4, 5], [6, 7]]

  def test_reports_what_ended(self):
    run = Run()
    unrolls = [_unroll(run.specs, seed) for seed in range(4)]
    run.put(*unrolls)
    (result,) = run.update(1)
    for field in environments.StepOutputInfo._fields:
      np.testing.assert_array_equal(
        getattr(result.info, field),
        np.stack(
          [getattr(u.env_outputs.info, field) for u in unrolls[:2]], axis=1
        ),
      )

  def test_reports_the_lag_of_the_policy(self):
    run = Run()
    # One was begun before the learner fell back to its checkpoint.
    updates = [0, 0, 0, 1, -3, 0, 9, 1, 0, 0]
    run.put(
      *[
        _unroll(run.specs, 0)._replace(policy_version=np.int64(update))
        for update in updates
      ]
    )
    lags = [result.scalars['policy_lag'] for result in run.update(4)]
    assert lags == [0.0, 0.5, 3.5, 1.0]


def _make_stub(baseline):
  """Makes an agent of two weights, 0; the baseline is a function of them."""

  def make():
    weights = tf1.get_variable('w', initializer=[0.0, 0.0], use_resource=True)
    outputs = tf.stack([baseline(weights)] * 2)
    return StubAgent(tf.zeros([2, 2, 4]), outputs, [weights])

  return make


class TestGradientClip:
  _PLAIN = {
    # With these the step is the clipped gradient itself.
    'learning_rate': 1.0,
    'decay': 1.0,
    'epsilon': 0.0,
    'baseline_cost': 1.0,
    'reward_clipping': 'none',
    'unroll_length': 1,
  }

  def _run(self, baseline, rewards, **changes):
    run = Run(_make_stub(baseline), **self._PLAIN, **changes)
    for reward in (*rewards, *rewards):
      unroll = _unroll(
        run.specs, 0, reward=np.float32([0, reward]), done=np.ones(2, bool)
      )
      # On policy: the stub's logits are zeros too.
      unroll.agent_outputs.policy_logits[:] = 0
      run.put(unroll)
    return run

  @pytest.mark.parametrize(
    ('max_norm', 'expected'),
    [(40.0, [24, 32]), (50.0, [30, 40]), (60.0, [30, 40]), (0.0, [30, 40])],
  )
  def test_clips_the_global_norm(self, max_norm, expected):
    run = self._run(lambda w: w, [-30.0, -40.0], max_gradient_norm=max_norm)
    (result,) = run.update(1)
    assert result.scalars['gradient_norm'] == pytest.approx(50)
    (weights,) = run.weights().values()
    np.testing.assert_allclose(-weights, expected, rtol=1e-6)

  @pytest.mark.parametrize('max_norm', [40.0, 0.0])
  @pytest.mark.parametrize(
    ('baseline', 'rewards', 'what'),
    [
      (lambda w: w, [np.inf, 1.0], 'loss|gradient'),
      (lambda w: w, [1.0, np.nan], 'loss|gradient'),
      (lambda w: w, [1.0, 1e25], 'loss|gradient'),
      (tf.sqrt, [1.0, 1.0], 'gradient'),  # Infinite at 0.
      (lambda w: w * 1e25, [1.0, 1.0], 'gradient'),  # Its square is.
    ],
  )
  def test_nothing_moves_if_not_finite(self, baseline, rewards, what, max_norm):
    run = self._run(baseline, rewards, max_gradient_norm=max_norm)
    before = run.values()
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
      run.update(1)
    assert re.fullmatch(what, learner.find_non_finite(error.value))
    for a, b in zip(run.values(), before, strict=True):
      np.testing.assert_array_equal(a, b)

  def test_other_faults_are_not_taken_for_it(self):
    # In TensorFlow, an index out of range is an InvalidArgumentError as well.
    run = self._run(
      lambda w: tf.gather(w, [0, tf.cast(w[0], tf.int32) + 9]), [1.0, 1.0]
    )
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
      run.update(1)
    assert learner.find_non_finite(error.value) is None

  @pytest.mark.parametrize('popart_levels', [None, 4])
  def test_an_agents_weights_survive_an_infinite_reward(self, popart_levels):
    run = Run(reward_clipping='none', popart_levels=popart_levels)
    unrolls = [_unroll(run.specs, seed) for seed in range(6)]
    unrolls[3].env_outputs.reward[2] = np.inf
    run.put(*unrolls)
    run.close_queue()  # So that it ends in any case.
    before = []
    with pytest.raises(tf.errors.InvalidArgumentError):
      run.learner.run(
        run.session, lambda _: before.append(run.values()), lambda: False
      )
    assert len(before) == 1
    for a, b in zip(run.values(), before[0], strict=True):
      np.testing.assert_array_equal(a, b)
      assert np.isfinite(a).all()


def _names(run):
  return {
    v.name.split(':')[0]: v.shape.as_list() for v in run.learner.variables
  }


class TestPopArt:
  # Two steps, of which the second ends the episode; pi = mu.
  _LOGITS = np.array([[[0.1, 0.7]] * 2, [[-0.3, 0.2]] * 2, [[0.0, 0.0]] * 2])

  def _loss(self, scales, level_index, statistics):
    """Returns `compute_loss`, the gradient by logits and by baseline."""
    rewards = np.array([[0.3] * 2, [-0.7] * 2]) * scales
    batch = _batch(
      rewards, [[False] * 2, [True] * 2], self._LOGITS[:-1], [[0] * 2, [1] * 2],
      tf.constant(level_index),
    )  # fmt: skip
    logits = tf.constant(self._LOGITS, tf.float32)
    baseline = tf.ones([3, 2, 2]) * [[[0.5]], [[-0.4]], [[2.0]]]
    with tf.GradientTape() as tape:
      tape.watch((logits, baseline))
      hyperparameters = _hyperparameters(
        reward_clipping='none', entropy_cost=0.0
      )
      targets = learner.compute_targets(
        StubAgent(logits, baseline), batch, hyperparameters, statistics
      )
      statistics = popart.update_statistics(
        statistics, targets.vs, batch.level_index
      )
      loss, scalars = learner.compute_loss(
        targets,
        hyperparameters,
        tf.gather(statistics.scale, batch.level_index),
      )
    return scalars, tape.gradient(loss, (logits, baseline)), statistics

  def test_levels_count_alike_whatever_their_rewards(self, monkeypatch):
    monkeypatch.setattr(popart, 'STEP_SIZE', 0.5)
    statistics = popart.initial_statistics(2)
    scales = np.array([0.01, 10.0])
    for _ in range(20):
      _, gradients, statistics = self._loss(scales, [0, 1], statistics)
    np.testing.assert_allclose(
      statistics.scale[1] / statistics.scale[0], 1000, rtol=1e-3
    )
    by_logits, by_baseline = gradients
    assert np.abs(by_logits[:-1]).min() > 1e-3
    np.testing.assert_allclose(by_logits[:, 0], by_logits[:, 1], rtol=1e-3)
    own = by_baseline[:-1, 0, 0]
    assert np.abs(own).min() > 1e-3
    np.testing.assert_allclose(own, by_baseline[:-1, 1, 1], rtol=1e-3)
    # To the outputs of the other level nothing flows.
    assert not np.any(by_baseline[:, 0, 1]) and not np.any(by_baseline[:, 1, 0])
    losses = [
      self._loss(scale, [level] * 2, statistics)[0]
      for level, scale in enumerate(scales)
    ]
    for name in ('losses/baseline', 'losses/policy_gradient'):
      first, second = (float(scalars[name]) for scalars in losses)
      assert first == pytest.approx(second, rel=1e-3)

  def test_the_first_batch_is_normalised_by_its_own_targets(self):
    # The bound holds for any target: one step of the statistics towards it.
    statistics = popart.initial_statistics(2)
    scalars, _, _ = self._loss(1e5, [0, 1], statistics)
    assert float(scalars['losses/baseline']) < 4 / popart.STEP_SIZE

  def test_is_finite_where_targets_never_change(self, monkeypatch):
    monkeypatch.setattr(popart, 'STEP_SIZE', 0.5)
    statistics = popart.initial_statistics(2)
    for _ in range(20):
      scalars, gradients, statistics = self._loss(0.0, [0, 1], statistics)
      for tensor in (*scalars.values(), *gradients):
        assert np.isfinite(tensor).all()

  def test_values_outlive_an_update_that_learns_nothing(self, monkeypatch):
    monkeypatch.setattr(popart, 'STEP_SIZE', 0.1)
    run = Run(learning_rate=0.0, reward_clipping='none', popart_levels=4)
    head = [name for name in run.weights() if '/baseline/' in name]

    def values():
      mean, second_moment = run.statistics()
      scale = np.sqrt(second_moment - mean**2)
      b, w = (run.weights()[name] * scale for name in head)
      return b + mean, w

    before, weights = values(), run.weights()
    run.put(*[_unroll(run.specs, seed) for seed in range(8)])
    run.update(3)
    for a, b in zip(values(), before, strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    for name, value in run.weights().items():
      assert np.array_equal(value, weights[name]) == (name not in head)

  def test_leaves_absent_levels_as_they_are(self):
    run = Run(popart_levels=4)
    unrolls = [_unroll(run.specs, seed) for seed in range(4)]
    run.put(*[u._replace(level_index=np.int32(2)) for u in unrolls])
    before, weights = run.statistics(), run.weights()
    run.update(1)
    for a, b in zip(run.statistics(), before, strict=True):
      assert (a != b).tolist() == [False, False, True, False]
    for name, value in run.weights().items():
      if '/baseline/' in name:
        changed = np.any(np.atleast_2d(value != weights[name]), axis=0)
        assert changed.tolist() == [False, False, True, False]

  def test_adds_variables_only_where_it_is_on(self):
    plain, normalised = _names(Run()), _names(Run(popart_levels=3))
    layers = ['vector_torso/mlp/linear_0', 'vector_torso/mlp/linear_1',
              'policy_logits', 'baseline']  # fmt: skip
    weights = {f'agent/{layer}/{w}' for layer in layers for w in 'wb'}
    slots = {f'{w}/RMSProp{n}' for w in weights for n in ('', '_1')}
    counters = {'num_environment_frames', 'num_updates'}
    assert set(plain) == weights | slots | counters
    assert set(normalised) - set(plain) == {
      'popart/mean',
      'popart/second_moment',
    }
    assert plain['agent/baseline/w'][1] == 1
    assert normalised['agent/baseline/w'][1] == 3
    assert {n for n in plain if plain[n] != normalised[n]} == {
      n for n in plain if '/baseline/' in n
    }


class TestRun:
  def test_ends_when_the_frames_are_spent(self):
    # 2 * 6 * 3 = 36 frames an update: the third goes over the end.
    run = Run(total_environment_frames=80)
    run.put(*[_unroll(run.specs, seed) for seed in range(8)])
    frames = []
    run.learner.run(
      run.session,
      lambda result: frames.append(int(result.num_environment_frames)),
      lambda: False,
    )
    assert frames == [36, 72, 108]

  def test_needs_no_unroll_if_there_is_nothing_to_do(self):
    run = Run()
    run.set_frames(200_000_000)
    run.learner.run(run.session, pytest.fail, lambda: False)
    run.set_frames(0)
    run.learner.run(run.session, pytest.fail, lambda: True)

  def test_a_closed_queue_ends_it(self):
    run = Run()
    run.put(*[_unroll(run.specs, seed) for seed in range(5)])
    run.close_queue()
    results = []
    with pytest.raises(tf.errors.OpError):
      run.learner.run(run.session, results.append, lambda: False)
    assert len(results) == 1
