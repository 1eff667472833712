"""The contract of all families of environments, whose tests inherit it."""

import numpy as np
import pytest

import environments
from envs import make as make_lib


def make(*level_names, num_envs=1, seed=1, training=True, **kwargs):
  return make_lib.make_environments(
    level_names, num_envs, seed, training=training, **kwargs
  )


def step_all(envs, num_steps, action=None):
  """Steps until there are num_steps outputs; yields (env_id, its output)."""
  generator = np.random.default_rng(0)
  count = 0
  while count < num_steps:
    env_ids, outputs = envs.recv(timeout_secs=20)
    assert len(env_ids), 'no environment became ready'
    for row, env_id in enumerate(env_ids):
      yield (
        int(env_id),
        environments.StepOutput(
          outputs.reward[row],
          environments.StepOutputInfo(*(x[row] for x in outputs.info)),
          outputs.done[row],
          environments.Observation(
            *(part[row] if len(part) else () for part in outputs.observation)
          ),
        ),
      )
      count += 1
    actions = generator.integers(0, envs.spec.num_actions, len(env_ids))
    if action is not None:
      actions = np.full(len(env_ids), action)
    envs.send(actions.astype(np.int32), env_ids)


def finished(rows):
  """Returns (return, length) of all full episodes that end in these rows."""
  return [
    (float(row.info.episode_return), int(row.info.episode_step))
    for _, row in rows
    if row.info.episode_done
  ]


class EnvironmentsContract:
  """What holds for every family.

  Episodes of the level last more than 3 steps.
  """

  level_name = ''

  @pytest.fixture
  def envs(self):
    envs = make(self.level_name, num_envs=3, max_batch=2)
    yield envs
    envs.close()

  def test_types_and_shapes(self, envs):
    for _ in range(8):
      env_ids, outputs = envs.recv(timeout_secs=20)
      n = len(env_ids)
      assert 1 <= n <= 2
      assert env_ids.dtype == np.int32
      assert outputs.reward.dtype == np.float32
      assert outputs.done.dtype == bool
      assert outputs.info.episode_return.dtype == np.float32
      assert outputs.info.episode_step.dtype == np.int32
      assert outputs.info.episode_done.dtype == bool
      assert outputs.observation.frame.dtype == envs.spec.frame_dtype
      assert outputs.observation.frame.shape == (
        n,
        *envs.spec.observation_shape,
      )
      if envs.spec.has_instruction:
        assert outputs.observation.instruction.dtype == np.int16
        assert outputs.observation.instruction.shape == (n, 64)
      else:
        assert outputs.observation.instruction == ()
      for field in (outputs.reward, *outputs.info, outputs.done):
        assert field.shape == (n,)
      envs.send(np.zeros(n, np.int32), env_ids)

  def test_first_output_of_each_environment(self, envs):
    seen = set()
    for env_id, row in step_all(envs, 40):
      if env_id not in seen:
        assert row.done
        assert not row.info.episode_done
        assert row.reward == row.info.episode_return == 0
        assert row.info.episode_step == 0
      seen.add(env_id)
    assert seen == {0, 1, 2}

  def test_info_adds_up(self, envs):
    returns, steps = np.zeros(3), np.full(3, -1)
    for env_id, row in step_all(envs, 200):
      returns[env_id] += row.reward
      steps[env_id] += 1
      assert row.info.episode_return == pytest.approx(returns[env_id])
      assert row.info.episode_step == steps[env_id]
      if row.info.episode_done:
        assert row.done
        returns[env_id] = steps[env_id] = 0

  def test_outputs_are_the_callers_own(self, envs):
    kept = []
    for _ in range(10):
      env_ids, outputs = envs.recv(timeout_secs=20)
      kept.append(
        (outputs, [np.copy(outputs.observation.frame), *outputs.reward])
      )
      envs.send(np.zeros(len(env_ids), np.int32), env_ids)
    for outputs, (frame, *reward) in kept:
      np.testing.assert_array_equal(outputs.observation.frame, frame)
      np.testing.assert_array_equal(outputs.reward, reward)
      outputs.observation.frame[...] = 0  # Writable.

  def test_refuses_actions_out_of_range(self, envs):
    env_ids, _ = envs.recv(timeout_secs=20)
    for wrong in (-1, envs.spec.num_actions):
      actions = np.zeros(len(env_ids), np.int32)
      actions[-1] = wrong
      with pytest.raises(ValueError, match='from 0 to') as e:
        envs.send(actions, env_ids)
      name = envs.level_names[env_ids[-1]]
      assert str(e.value).endswith(
        f'got {wrong} for environment {env_ids[-1]} ({name}).'
      )
    with pytest.raises(ValueError, match='integers'):
      envs.send(np.zeros(len(env_ids), np.float32), env_ids)
    with pytest.raises(ValueError, match='one action'):
      envs.send(np.zeros(len(env_ids) + 1, np.int32), env_ids)
    envs.send(np.zeros(len(env_ids), np.int32), env_ids)

  def test_refuses_a_second_action(self, envs):
    env_ids, _ = envs.recv(timeout_secs=20)
    envs.send(np.zeros(len(env_ids), np.int32), env_ids)
    with pytest.raises(ValueError, match='recv'):
      envs.send(np.zeros(len(env_ids), np.int32), env_ids)

  def test_refuses_to_wait_for_nothing(self, envs):
    received = 0
    while received < 3:
      received += len(envs.recv(timeout_secs=20)[0])
    with pytest.raises(RuntimeError, match='send actions first'):
      envs.recv()

  def test_close_twice(self, envs):
    envs.close()
    envs.close()

  def test_batch_of_one(self):
    envs = make(self.level_name, num_envs=1)
    ids = [env_id for env_id, _ in step_all(envs, 10)]
    assert ids == [0] * 10
    envs.close()

  def test_seeds(self):
    def first_observations(seed):
      envs = make(self.level_name, num_envs=2, max_batch=2, seed=seed)
      frames = [[], []]
      # Always the same action: which environment is ready first is chance.
      for env_id, row in step_all(envs, 10_000, action=0):
        frames[env_id].append(row.observation.frame)
        if min(map(len, frames)) >= 15:
          break
      envs.close()
      return envs.seeds, [np.stack(f[:15]).tobytes() for f in frames]

    seeds, frames = first_observations(3)
    assert len(set(seeds)) == 2
    assert all(type(seed) is int for seed in seeds)
    assert frames[0] != frames[1]
    assert first_observations(3) == (seeds, frames)
    # Two actors of one run.
    assert not set(first_observations([3, 0])[0]) & set(
      first_observations([3, 1])[0]
    )

  def test_refuses_bad_numbers(self):
    with pytest.raises(ValueError, match='num_envs'):
      make(self.level_name, num_envs=0)
    with pytest.raises(ValueError, match='max_batch'):
      make(self.level_name, num_envs=2, max_batch=3)
