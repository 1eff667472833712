"""Tests of unrolls.py; that unrolls hold what happened, tests/actor_test.py."""

import numpy as np
import pytest
import tensorflow as tf

import actor
import environments
import networks
import unrolls

tf1 = tf.compat.v1

_STACKED = environments.EnvironmentSpec(
  (36, 36), np.dtype(np.uint8), num_actions=3, frames_per_step=4, stack=4,
  action_meanings=None,
)  # fmt: skip
_COLOURED = environments.EnvironmentSpec(
  (36, 40, 3), np.dtype(np.uint8), num_actions=3, frames_per_step=1, stack=1,
  action_meanings=None,
)  # fmt: skip
_VECTOR = environments.EnvironmentSpec(
  (5,), np.dtype(np.float32), num_actions=3, frames_per_step=1, stack=1,
  action_meanings=None,
)  # fmt: skip


def _fill(specs, value):
  """Returns a batch of 2 unrolls, time-major, whose frames have one value."""
  batch = tf.nest.map_structure(
    lambda s: np.zeros([2, *s.shape], s.dtype.as_numpy_dtype), specs
  )
  batch.env_outputs.observation.frame[:] = value
  if not isinstance(batch.earlier_frames, tuple):
    batch.earlier_frames[:] = value
  batch.env_outputs.info.episode_step[:] = 1  # Of a game that goes on.
  return unrolls.time_major(tf.nest.map_structure(tf.constant, batch))


class TestPixels:
  """A pixel of 255 enters the network as 1, scaled once, on either side."""

  @pytest.mark.parametrize('spec', [_STACKED, _COLOURED])
  def test_the_learner_scales_them(self, spec):
    agent = networks.Agent(spec, 'shallow', use_lstm=False)
    specs = unrolls.unroll_specs(agent, spec, unroll_length=3)
    for value in (0, 51, 255):
      batch = unrolls.restore_frames(_fill(specs, value))
      frames = batch.env_outputs.observation.frame
      assert frames.shape == [4, 2, *spec.observation_shape]
      assert frames.dtype == tf.float32
      np.testing.assert_allclose(frames, value / 255, atol=1e-7)

  @pytest.mark.parametrize('spec', [_STACKED, _COLOURED])
  def test_the_actor_scales_them(self, spec):
    with tf.Graph().as_default(), tf1.Session() as session:
      agent = networks.Agent(spec, 'shallow', use_lstm=False)
      seen = []
      torso = agent._torso
      agent._torso = lambda frames: seen.append(frames) or torso(frames)
      policy = actor.Policy(agent, spec)
      placeholder = policy._env_outputs.observation.frame
      for value in (0, 51, 255):
        frames = np.full([2, *spec.observation_shape], value, np.uint8)
        scaled = session.run(seen[-1], {placeholder: frames})
        np.testing.assert_allclose(scaled, value / 255, atol=1e-7)

  def test_vectors_stay_as_they_are(self):
    agent = networks.Agent(_VECTOR, 'vector', use_lstm=False)
    specs = unrolls.unroll_specs(agent, _VECTOR, unroll_length=3)
    batch = _fill(specs, -7.5)
    frames = unrolls.restore_frames(batch).env_outputs.observation.frame
    np.testing.assert_array_equal(frames, np.full([4, 2, 5], -7.5))


def test_the_baseline_does_not_travel():
  agent = networks.Agent(_VECTOR, 'vector', False, popart_levels=57)
  specs = unrolls.unroll_specs(agent, _VECTOR, unroll_length=20)
  assert specs.agent_outputs._fields == ('action', 'policy_logits')
  shapes = [spec.shape for spec in tf.nest.flatten(specs)]
  assert not any(57 in shape for shape in shapes)
