"""Tests of envs/make.py: lists of levels, and their spec.

The environments' contract is in contract.py; lab_test.py has levels of Lab.
"""

import contextlib

import numpy as np
import pytest

from envs import atari
from envs import make as make_lib
import py_process
from runtime import errors
from tests import contract


def test_refuses_unknown_games_and_mixtures():
  with pytest.raises(errors.SettingError, match='did you mean .*pong'):
    contract.make('pnog')
  with pytest.raises(errors.SettingError, match='gym:CartPole-v1'):
    contract.make('zzzzzz')
  with pytest.raises(errors.SettingError, match='cannot share'):
    contract.make('pong', 'gym:CartPole-v1', num_envs=2)
  with pytest.raises(ValueError, match='empty'):
    contract.make()


class TestFindSpec:
  @pytest.mark.parametrize(
    ('level_names', 'settings', 'num_actions'),
    [
      (['pong'], None, 6),
      (['Freeway'], atari.AtariSettings(frames_per_step=2), 3),
      (['pong'], atari.AtariSettings(full_action_set=True, num_threads=1), 18),
      (['pong', 'BreakoutNoFrameskip-v4'], None, 18),
      (['pong', 'Pong'], None, 6),  # Two names of one game.
      (['gym:CartPole-v1'], None, 2),
      (['gym:tests.count_env:Text-v0', 'gym:tests.count_env:Text-v0'], None, 2),
    ],
  )
  def test_is_that_of_environments(self, level_names, settings, num_actions):
    spec, about = make_lib.find_spec(level_names, atari_settings=settings)
    assert spec.num_actions == num_actions
    envs = contract.make(*level_names, num_envs=2, atari_settings=settings)
    with contextlib.closing(envs):
      assert spec == envs.spec
      if level_names[0].startswith('gym:'):  # A trial decides more.
        assert about == {}
      else:
        assert about == envs.settings()

  def test_does_not_reset(self):
    spec, _ = make_lib.find_spec(['gym:tests.count_env:CountRaiseAtReset-v0'])
    assert spec.frame_shape == (1,)
    assert spec.frame_dtype == np.float32

  @pytest.mark.parametrize(
    ('level_names', 'message'),
    [
      (['pnog'], 'did you mean .*pong'),
      (['pong', 'brakout'], 'did you mean .*breakout'),
      (['pong', 'gym:CartPole-v1'], 'cannot share'),
    ],
  )
  def test_refuses_what_environments_refuse(self, level_names, message):
    with pytest.raises(errors.SettingError, match=message):
      make_lib.find_spec(level_names)

  def test_refuses_gymnasium_levels_that_environments_refuse(self):
    with pytest.raises(ValueError, match='CartPole'):
      make_lib.find_spec(['gym:CartPol-v1'])
    with pytest.raises(ValueError, match='Discrete'):
      make_lib.find_spec(['gym:Pendulum-v1'])

  def test_needs_a_level(self):
    with pytest.raises(ValueError, match='empty'):
      make_lib.find_spec([])

  def test_starts_no_process_for_games(self, monkeypatch):
    monkeypatch.setattr(py_process, 'EnvironmentProcesses', None)
    monkeypatch.setattr(atari, 'AtariEnvironments', None)
    make_lib.find_spec(['pong'])
    make_lib.find_spec(['pong', 'breakout'])
