"""Tests of actor.py: what goes to the learner is what happened."""

import contextlib
import re
import threading

import numpy as np
import pytest
import tensorflow as tf

import actor
import config
import environments
import networks
from runtime import threads
from tests import contract
import training
import unrolls as unrolls_lib

tf1 = tf.compat.v1

_COUNT = 'gym:tests.count_env:Count{}-v0'
_T = 5


class ScriptedEnvironments(environments.Environments):
  """Ready at random, in random order, and sometimes not at all.

  A life is lost now and then, which ends an episode for learning but no game.

  Attributes:
    outputs: [E], what each environment has given, a StepOutput of arrays [1]
      for each step.
    actions: [E], the actions each has taken.
    on_recv: called with the number of each `recv`.
  """

  def __init__(self, lengths, stack=1, seed=0):
    """Takes the length of every episode of each environment."""
    self.spec = environments.EnvironmentSpec(
      (4, 4) if stack > 1 else (3,),
      np.dtype(np.uint8 if stack > 1 else np.float32),
      num_actions=4,
      frames_per_step=1,
      stack=stack,
      action_meanings=None,
    )
    super().__init__([f'level{i}' for i in range(len(lengths))], len(lengths),
                     seed)  # fmt: skip
    self._episodes = environments.EpisodeTotals(len(lengths))
    self._lengths = np.array(lengths)
    self._frames = np.zeros(
      [len(lengths), stack, *self.spec.frame_shape], self.spec.frame_dtype
    )
    self._generator = np.random.default_rng(seed)
    self._count = 0
    self.outputs = [[] for _ in lengths]
    self.actions = [[] for _ in lengths]
    self.on_recv = lambda count: None

  def recv(self, timeout_secs=None):
    assert timeout_secs is not None
    for outputs, actions in zip(self.outputs, self.actions, strict=True):
      assert len(outputs) == len(actions)  # All have had their action.
    self.on_recv(self._count)
    self._count += 1
    size = self._generator.integers(0, self.num_envs + 1)
    ids = self._generator.permutation(self.num_envs)[:size].astype(np.int32)
    steps = np.array([len(self.outputs[i]) for i in ids], int)
    rewards = self._generator.normal(size=size).astype(np.float32)
    rewards[steps == 0] = 0
    over = (steps > 0) & (steps % self._lengths[ids] == 0)
    info, first = self._episodes.add(ids, rewards, over)
    lost = self._generator.random(size) < 0.1
    self._frames[ids[over]] = 0
    self._frames[ids] = np.roll(self._frames[ids], -1, axis=1)
    self._frames[ids, -1] = self._generator.integers(
      1, 256, [size, *self.spec.frame_shape]
    )
    frames = self._frames[ids].reshape([size, *self.spec.observation_shape])
    output = environments.StepOutput(
      rewards,
      info,
      over | first | lost,
      environments.Observation(frames, ()),
    )
    for row, i in enumerate(ids):
      self.outputs[i].append(
        tf.nest.map_structure(lambda x, row=row: x[row].copy(), output)
      )
    return ids, output

  def send(self, actions, env_ids):
    self._check_actions(actions, env_ids)
    for action, i in zip(actions, env_ids, strict=True):
      self.actions[i].append(action)

  def close(self):
    pass


class Run:
  """An actor, the agent it copies and their queue, in a graph of their own."""

  def __init__(self, envs, make_agent, T=_T, capacity=1000):
    with tf.Graph().as_default():
      tf1.set_random_seed(1)
      self.agent = make_agent()
      self.T = T
      specs = unrolls_lib.unroll_specs(self.agent, envs.spec, T)
      queue = unrolls_lib.make_queue(specs, capacity)
      # The learner's side: from an unroll, what the agent says of it.
      self._unroll = tf.nest.map_structure(
        lambda s: tf1.placeholder(s.dtype, [1, *s.shape]), specs
      )
      batch = unrolls_lib.restore_frames(unrolls_lib.time_major(self._unroll))
      self._outputs = self.agent.unroll(
        *tf.nest.map_structure(
          lambda t: t[:T], (batch.agent_outputs.action, batch.env_outputs)
        ),
        self._unroll.agent_state,
      )
      self.num_updates = tf1.get_variable(
        'updates', initializer=np.int64(0), use_resource=True, trainable=False
      )
      self.policy = actor.Policy(make_agent(), envs.spec)
      refresh = actor.copy_weights(
        self.policy.agent, self.agent, self.num_updates
      )
      enqueue = unrolls_lib.make_enqueue(queue, specs)
      self._actor = actor.Actor(
        envs,
        np.arange(envs.num_envs, dtype=np.int32),  # Tells whose unroll it is.
        self.policy,
        specs,
        T,
      )
      bias = next(
        w for w in self.agent.variables if 'policy_logits/b' in w.name
      )
      # The same policy: what is added to all logits does not matter.
      self.learn = tf.group(
        self.num_updates.assign_add(1),
        bias.assign_add(1000.0 * tf.ones_like(bias)),
      )
      self.spoil = bias.assign(np.nan * bias)
      self._size = queue.size()
      self._dequeue = tf.nest.pack_sequence_as(specs, queue.dequeue())
      self._close = queue.close(cancel_pending_enqueues=True)
      self.session = tf1.Session()
      self.session.run(tf1.global_variables_initializer())
      self._refresh = self.session.make_callable(refresh)
      self._enqueue = self.session.make_callable(*enqueue)
      self.session.graph.finalize()

  def play(self, should_stop=lambda: False):
    self._actor.run(self.session, self._refresh, self._enqueue, should_stop)

  def close_queue(self):
    self.session.run(self._close)

  def size(self):
    return self.session.run(self._size)

  def play_unrolls(self, num_unrolls):
    """Returns the unrolls of each environment, at least `num_unrolls`."""
    self.play(lambda: self.size() >= num_unrolls)
    unrolls = {}
    for _ in range(self.size()):
      unroll = self.session.run(self._dequeue)
      unrolls.setdefault(int(unroll.level_index), []).append(unroll)
    return unrolls

  def recompute(self, unroll, state):
    """Returns logits, baseline and the state after T steps from `state`."""
    feeds = unroll._replace(agent_state=state)
    feeds = zip(
      tf.nest.flatten(self._unroll), tf.nest.flatten(feeds), strict=True
    )
    return self.session.run(
      self._outputs, {key: np.asarray(value)[None] for key, value in feeds}
    )


def _agent_maker(envs, torso='vector', use_lstm=True):
  return lambda: networks.Agent(envs.spec, torso, use_lstm)


def _assert_equal(a, b, tolerance=0.0):
  tf.nest.map_structure(
    lambda x, y: np.testing.assert_allclose(x, y, tolerance, tolerance), a, b
  )


@pytest.fixture(scope='module')
def played():
  """Environments of odd lengths, and the unrolls that came of them."""
  envs = ScriptedEnvironments([1, 2, 5, 7, 13, 1000])
  run = Run(envs, _agent_maker(envs))
  return envs, run, run.play_unrolls(60)


class TestUnrolls:
  def test_step_0_is_the_last_step_of_the_unroll_before(self, played):
    _, _, unrolls = played
    assert len(unrolls) == 6
    for own in unrolls.values():
      assert len(own) > 4
      for before, after in zip(own[:-1], own[1:], strict=True):
        for part in ('env_outputs', 'agent_outputs'):
          tf.nest.map_structure(
            lambda x, y: np.testing.assert_array_equal(x[-1], y[0]),
            getattr(before, part),
            getattr(after, part),
          )

  def test_no_step_is_dropped_or_doubled(self, played):
    envs, run, unrolls = played
    for i, own in unrolls.items():
      # All that is missing is the unroll under way.
      assert len(own) == (len(envs.outputs[i]) - 1) // run.T
      for k, unroll in enumerate(own):
        for t in range(run.T + 1):
          _assert_equal(
            tf.nest.map_structure(lambda x, t=t: x[t], unroll.env_outputs),
            envs.outputs[i][k * run.T + t],
          )

  def test_actions_recorded_are_those_sent(self, played):
    envs, run, unrolls = played
    for i, own in unrolls.items():
      assert own[0].agent_outputs.action[0] == 0
      for k, unroll in enumerate(own):
        np.testing.assert_array_equal(
          unroll.agent_outputs.action[1:],
          envs.actions[i][k * run.T : (k + 1) * run.T],
        )
    assert len(set(np.concatenate(envs.actions))) == 4

  @pytest.mark.parametrize(
    ('stack', 'torso', 'use_lstm'),
    [(1, 'vector', True), (1, 'vector', False), (4, 'deep', True)],
  )
  def test_state_and_logits_are_those_of_one_long_unroll(
    self, stack, torso, use_lstm
  ):
    envs = ScriptedEnvironments([1, 3, 5, 7, 1000], stack)
    run = Run(envs, _agent_maker(envs, torso, use_lstm))
    for own in run.play_unrolls(25).values():
      zeros = run.agent.initial_state(1)
      state = tf.nest.map_structure(lambda x: x[0], zeros)
      for unroll in own:
        _assert_equal(unroll.agent_state, state, 1e-5)
        logits, _, state = run.recompute(unroll, state)
        state = tf.nest.map_structure(lambda x: x[0], state)
        behaviour = unroll.agent_outputs
        _assert_equal(behaviour.policy_logits[1:], logits[:, 0], 1e-5)

  def test_policy_version_says_which_weights_acted_first(self):
    envs = ScriptedEnvironments([7, 20, 33])
    run = Run(envs, _agent_maker(envs))
    # Each adds 1000 to all logits.
    envs.on_recv = lambda _: run.session.run(run.learn)
    for own in run.play_unrolls(20).values():
      versions = [int(unroll.policy_version) for unroll in own]
      logits = [unroll.agent_outputs.policy_logits[1] for unroll in own]
      assert versions == [round(row.mean() / 1000) for row in logits]
      assert versions == sorted(versions) and versions[-1] > versions[0] > 0

  def test_weights_are_copied_about_once_per_unroll(self):
    envs = ScriptedEnvironments([10, 10])
    run = Run(envs, _agent_maker(envs))
    envs.on_recv = lambda _: run.session.run(run.learn)
    own = run.play_unrolls(20)[0]
    logits = np.concatenate([u.agent_outputs.policy_logits[1:] for u in own])
    seen = np.unique(np.round(logits.mean(axis=-1) / 1000))
    # Some steps are without environment 0: it takes more than T batches to T
    # steps, but not twice as many again.
    assert len(logits) / _T <= len(seen) <= 4 * len(logits) / _T


def test_a_policy_of_nan_is_named_with_its_environment():
  """NaN logits would draw an action that does not exist."""
  envs = ScriptedEnvironments([3, 3])
  run = Run(envs, _agent_maker(envs))
  run.session.run(run.spoil)
  with pytest.raises(actor.PolicyNotFiniteError) as error:
    run.play()
  name = envs.level_names[0]
  assert re.match(
    rf'{name}: the policy_logits of environment [01] are not finite \(\[ *nan',
    str(error.value),
  )
  assert 'for an observation from ' in str(error.value)
  assert not any(envs.actions)


def test_copies_all_weights():
  envs = ScriptedEnvironments([3])
  run = Run(envs, _agent_maker(envs))
  session, mine = run.session, run.policy.agent
  pairs = list(zip(mine.variables, run.agent.variables, strict=True))
  assert any((np.any(a != b)) for a, b in map(session.run, pairs))
  run.play_unrolls(1)
  for pair in pairs:
    a, b = session.run(pair)
    assert pair[0] is not pair[1]
    np.testing.assert_array_equal(a, b)


class TestStackFrames:
  def test_gives_what_the_environments_gave(self):
    envs = ScriptedEnvironments([1, 2, 5, 7, 13, 1000], stack=4)
    run = Run(envs, _agent_maker(envs, 'deep'))
    for i, own in run.play_unrolls(30).items():
      for k, unroll in enumerate(own):
        batch = tf.nest.map_structure(lambda x: tf.constant(x[None]), unroll)
        batch = unrolls_lib.restore_frames(unrolls_lib.time_major(batch))
        stacks = batch.env_outputs.observation.frame
        assert stacks.shape == [_T + 1, 1, 4, 4, 4]
        for t in range(_T + 1):
          given = envs.outputs[i][k * _T + t].observation.frame
          np.testing.assert_allclose(stacks[t, 0], given / 255, atol=1e-7)

  def test_keeps_unrolls_of_a_batch_apart(self):
    envs = ScriptedEnvironments([1, 3, 7, 1000], stack=3)
    run = Run(envs, _agent_maker(envs, 'deep'))
    unrolls = [own[-1] for own in run.play_unrolls(30).values()]
    assert len(unrolls) == 4

    def stack(unrolls):
      batch = tf.nest.map_structure(
        lambda *x: tf.constant(np.stack(x)), *unrolls
      )
      batch = unrolls_lib.restore_frames(unrolls_lib.time_major(batch))
      return batch.env_outputs.observation.frame

    together = stack(unrolls)
    for column, unroll in enumerate(unrolls):
      np.testing.assert_array_equal(
        together[:, column : column + 1], stack([unroll])
      )

  def test_leaves_single_frames_alone(self, played):
    batch = played[2][0][0]
    _assert_equal(unrolls_lib.restore_frames(batch), batch)


class TestCountedSteps:
  def test_a_learner_sees_every_reward(self):
    with contextlib.closing(contract.make(_COUNT.format(20))) as envs:
      run = Run(envs, _agent_maker(envs), T=20)
      (unrolls,) = run.play_unrolls(10).values()
    rewards = np.concatenate([u.env_outputs.reward[1:] for u in unrolls])
    assert len(rewards) == 200 and rewards.sum() == 200

  def test_unrolls_cross_the_ends_of_episodes(self):
    lengths = (1, 7, 20, 33)
    levels = [_COUNT.format(length) for length in lengths]
    with contextlib.closing(contract.make(*levels, num_envs=4)) as envs:
      run = Run(envs, _agent_maker(envs), T=20)
      unrolls = run.play_unrolls(24)
    assert len(unrolls) == 4
    for i, own in unrolls.items():
      outputs = [u.env_outputs for u in own]
      steps = np.concatenate([o.info.episode_step[1:] for o in outputs])
      done = np.concatenate([o.done[1:] for o in outputs])
      rewards = np.concatenate([o.reward[1:] for o in outputs])
      number = np.arange(20 * len(own))
      np.testing.assert_array_equal(steps, number % lengths[i] + 1)
      np.testing.assert_array_equal(done, steps == lengths[i])
      assert np.all(rewards == 1)


class TestClosedQueue:
  def test_ends_an_actor_that_waits_for_room(self):
    envs = ScriptedEnvironments([3, 3])
    run = Run(envs, _agent_maker(envs), capacity=2)
    timer = threading.Timer(1.0, run.close_queue)
    timer.start()
    with pytest.raises(tf.errors.CancelledError):
      run.play()
    timer.join()

  def test_ends_an_actor_at_its_next_unroll(self):
    envs = ScriptedEnvironments([3, 3])
    run = Run(envs, _agent_maker(envs))
    run.close_queue()
    with pytest.raises(tf.errors.CancelledError):
      run.play()


def _max_abs_log_rho(
  levels, torso, use_lstm, num_updates, T, popart=False, num_envs=1
):
  """Trains with a learning rate of 0; returns the largest |log-rho|."""
  settings = config.make(
    level_name=','.join(levels),
    agent=torso,
    use_lstm=use_lstm,
    popart=popart,
    num_actors=1,
    envs_per_actor=num_envs,
    batch_size=4,
    queue_capacity=4,
    unroll_length=T,
    learning_rate=0.0,
    epsilon=0.01,
    total_environment_frames=10**9,
  )
  results = []

  def on_update(result):
    results.append(result)
    if len(results) == num_updates:
      running.stop()

  with training.LocalTraining(settings, levels) as run:
    running = threads.Threads(run.close_queue)
    run.start(running, on_update)
    while not running.wait(60.0):
      assert results
    running.join()
  assert running.failure is None
  # Without an end of an episode, half of what can go wrong could not.
  ends = sum(result.info.episode_done[1:].sum() for result in results)
  assert ends or torso != 'vector'
  return max(r.scalars['max_abs_log_rho'] for r in results)


class TestActorAndLearnerAgree:
  """With frozen weights pi = mu; anything misaligned shows."""

  @pytest.mark.parametrize(
    ('use_lstm', 'popart'), [(False, False), (True, False), (False, True)]
  )
  def test_on_episodes_of_odd_lengths(self, use_lstm, popart):
    levels = [_COUNT.format(length) for length in (1, 3, 7, 20, 33)]
    largest = _max_abs_log_rho(
      levels, 'vector', use_lstm, 8, 20, popart, num_envs=5
    )
    assert largest < 1e-5

  def test_on_instructions(self):
    largest = _max_abs_log_rho(
      ['gym:tests.count_env:Text-v0'], 'vector', True, num_updates=4, T=10,
      num_envs=3,
    )  # fmt: skip
    assert largest < 1e-5

  @pytest.mark.parametrize(
    ('level', 'use_lstm'), [('breakout', False), ('pong', True)]
  )
  def test_on_atari(self, level, use_lstm):
    largest = _max_abs_log_rho(
      [level], 'shallow', use_lstm, num_updates=4, T=10, num_envs=4
    )
    assert largest < 1e-5

  @pytest.mark.slow
  @pytest.mark.parametrize('use_lstm', [False, True])
  @pytest.mark.parametrize(
    ('levels', 'torso'),
    [
      ([_COUNT.format(length) for length in (1, 3, 7, 20, 33)], 'vector'),
      (['gym:tests.count_env:Image-v0'], 'deep'),
      (['pong'], 'shallow'),
      (['breakout'], 'deep'),
    ],
  )
  def test_over_50_batches(self, levels, torso, use_lstm, record_property):
    largest = _max_abs_log_rho(
      levels, torso, use_lstm, num_updates=50, T=20, num_envs=6
    )
    record_property('max_abs_log_rho', float(largest))
    print(f'{levels[0]} {torso} {use_lstm}: max |log-rho| {largest:.2e}')
    assert largest < 1e-5
