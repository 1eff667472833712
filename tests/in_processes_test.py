"""Tests of envs/in_processes.py, with Gymnasium environments.

What holds for every family is in contract.py.
"""

import tempfile
import time

import numpy as np
import pytest

from envs import in_processes
import py_process
from tests import contract


def test_reset_takes_no_step():
  envs = contract.make('gym:tests.count_env:Count3-v0')
  rows = [row for _, row in contract.step_all(envs, 301)]
  envs.close()
  assert contract.finished(enumerate(rows)) == [(3.0, 3)] * 100
  shown = [row.observation.frame[0] for row in rows[:7]]
  assert shown == [0, 1, 2, 0, 1, 2, 0]
  assert [row.done for row in rows[:7]] == [True, False, False] * 2 + [True]
  assert sum(row.reward for row in rows) == 300


def test_last_reward_belongs_to_the_ending_episode():
  envs = contract.make('gym:tests.count_env:CountLastReward-v0')
  rows = [row for _, row in contract.step_all(envs, 5)]
  envs.close()
  assert [row.reward for row in rows] == [0, 0, 0, 5, 0]
  assert [row.info.episode_return for row in rows] == [0, 0, 0, 5, 0]
  assert [row.info.episode_step for row in rows] == [0, 1, 2, 3, 1]


def test_levels_of_different_lengths_take_turns():
  lengths = [1, 7, 20, 33]
  envs = contract.make(
    *(f'gym:tests.count_env:Count{n}-v0' for n in lengths), num_envs=8
  )
  episodes = {env_id: [] for env_id in range(8)}
  rewards = []
  for env_id, row in contract.step_all(envs, 800):
    episodes[env_id] += contract.finished([(env_id, row)])
    rewards.append(row.reward)
  envs.close()
  assert sum(rewards) == len(rewards) - 8  # First outputs have none.
  for env_id, totals in episodes.items():
    length = lengths[env_id % 4]
    assert totals
    assert set(totals) == {(float(length), length)}


def test_nobody_waits_for_slow_resets():
  start = time.monotonic()
  envs = contract.make(
    'gym:tests.count_env:CountSlowReset-v0',
    'gym:tests.count_env:Count3-v0',
    num_envs=4,
  )
  assert {env_id for env_id, _ in contract.step_all(envs, 200)} == {1, 3}
  closing = time.monotonic()
  envs.close()
  assert closing - start < 5
  assert time.monotonic() - closing < 3


def test_timeout_gives_an_empty_batch():
  envs = contract.make('gym:tests.count_env:CountSlowReset-v0')
  env_ids, outputs = envs.recv(timeout_secs=0.1)
  assert env_ids.shape == outputs.reward.shape == (0,)
  assert outputs.observation.frame.shape == (0, 1)
  envs.send(np.zeros([0], np.int32), env_ids)
  envs.close()


@pytest.mark.parametrize(
  ('name', 'step', 'what'),
  [
    ('CountNan', 7, 'the reward nan.'),
    ('CountHuge', 7, 'the reward -2e+19.'),
    ('NanVector', 3, 'an observation that contains nan.'),
    ('HugeVector', 3, 'an observation that contains -3e+38.'),
  ],
)
def test_refuses_values_that_overflow(name, step, what):
  level_name = f'gym:tests.count_env:{name}-v0'
  envs = contract.make(level_name)
  with pytest.raises(py_process.EnvironmentFailed) as e:
    list(contract.step_all(envs, 100))
  envs.close()
  first_line, details = str(e.value).split('\n')
  assert first_line == f'{level_name}: environment 0 failed at step {step}'
  assert details.startswith(f'It gave {what}')
  assert 'at most 1e+19 in magnitude' in details
  assert 'normalise them' in details


@pytest.mark.parametrize('name', ['CountNearlyHuge', 'NearlyHugeVector'])
def test_takes_values_whose_squares_are_finite(name):
  envs = contract.make(f'gym:tests.count_env:{name}-v0')
  rows = [row for _, row in contract.step_all(envs, 10)]
  envs.close()
  values = [row.reward for row in rows] + [
    row.observation.frame for row in rows
  ]
  values = np.concatenate([np.ravel(value) for value in values])
  assert np.float32(-9e18) in values
  assert np.isfinite(np.square(values)).all()


def test_nan_reward_is_stopped():
  envs = contract.make(
    'gym:tests.count_env:Count100-v0',
    'gym:tests.count_env:CountNan-v0',
    num_envs=2,
  )
  with pytest.raises(py_process.EnvironmentFailed, match='reward nan') as e:
    list(contract.step_all(envs, 100))
  envs.close()
  assert (e.value.env_id, e.value.step) == (1, 7)
  assert str(e.value).startswith('gym:tests.count_env:CountNan-v0')


def test_restarted_environment_begins_anew(capfd):
  envs = contract.make('gym:tests.count_env:SecondEpisodeRaises-v0')
  rows = [row for _, row in contract.step_all(envs, 16)]
  envs.close()
  # Four steps, a step of the next episode, and the restart.
  assert [row.done for row in rows[:7]] == (
    [True] + [False] * 3 + [True, False, True]
  )
  assert [row.reward for row in rows[:7]] == [0, 1, 1, 1, 1, 1, 0]
  assert rows[6].info == (0, 0, False, False)
  assert set(contract.finished(enumerate(rows))) == {(4.0, 4)}
  assert 'OSError' in capfd.readouterr().err


def test_failure_ends_an_evaluation():
  envs = contract.make(
    'gym:tests.count_env:SecondEpisodeRaises-v0', training=False
  )
  with pytest.raises(py_process.EnvironmentFailed, match='at step 2\n'):
    list(contract.step_all(envs, 16))
  envs.close()


def test_environments_write_into_a_folder_of_their_own(tmp_path, monkeypatch):
  (tmp_path / 'temporary').mkdir()
  (tmp_path / 'read_only').mkdir(mode=0o500)
  monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path / 'temporary'))
  monkeypatch.chdir(tmp_path / 'read_only')
  envs = contract.make('gym:tests.odd_env:Writing-v0', num_envs=2)
  list(contract.step_all(envs, 20))
  written = list((tmp_path / 'temporary').rglob('written.txt'))
  assert len(written) == 2
  envs.close()
  assert not list((tmp_path / 'temporary').iterdir())
  assert not list((tmp_path / 'read_only').iterdir())


def test_a_constructor_that_hangs_is_named(monkeypatch, capfd):
  monkeypatch.setattr(in_processes, '_MAKE_SECS', 2.0)
  slow = 'gym:tests.odd_env:Odd-v0?wait=6'
  envs = contract.make('gym:tests.odd_env:Odd-v0', slow, num_envs=4)
  printed = capfd.readouterr().err
  assert f'{slow}: environment 1 is not made after 2 s' in printed
  assert '2 of 4' in printed
  assert {env_id for env_id, _ in contract.step_all(envs, 20)} == {0, 2}
  # Those that are made late play too.
  seen = set()
  for env_id, _ in contract.step_all(envs, 10**9):
    seen.add(env_id)
    if len(seen) == 4:
      break
  envs.close()


def test_a_space_that_differs_is_found_late_too(monkeypatch):
  monkeypatch.setattr(in_processes, '_MAKE_SECS', 2.0)
  envs = contract.make(
    'gym:CartPole-v1', 'gym:tests.odd_env:Odd-v0?wait=4', num_envs=2
  )
  with pytest.raises(ValueError, match='same observations'):
    list(contract.step_all(envs, 10**9))
  envs.close()


def test_refuses_levels_with_different_spaces():
  with pytest.raises(ValueError, match='same observations'):
    contract.make('gym:CartPole-v1', 'gym:Acrobot-v1', num_envs=2)
