"""Tests of py_process.py: real processes, some of them killed."""

import functools
import glob
import os
import pickle
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from envs import gym
import py_process
import py_process_worker
from runtime import errors

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def start(*gym_ids, first_episodes=True, restarted=None, **kwargs):
  names = [f'gym:tests.count_env:{gym_id}-v0' for gym_id in gym_ids]
  processes = py_process.EnvironmentProcesses(
    [functools.partial(gym.GymEnvironment, n, 1) for n in names],
    names,
    **kwargs,
  )
  try:
    processes.find_specs()
  except BaseException:
    processes.close()
    raise
  if first_episodes:
    processes.start_episodes([([1], np.dtype(np.float32))])
  if restarted is not None:
    restart = processes._restart

    def note(number, kind):
      restarted.extend(processes._groups[number])
      restart(number, kind)

    processes._restart = note
  return processes


def step(processes, num_batches):
  for _ in range(num_batches):
    env_ids = processes.recv(8, timeout_secs=20)
    assert len(env_ids)
    processes.send(np.zeros(len(env_ids), np.int32), env_ids)


def descendants(process_id):
  """Returns the process ids of all children, and of their children."""
  path = f'/proc/{process_id}/task/{process_id}/children'
  try:
    with open(path) as file:
      children = [int(word) for word in file.read().split()]
  except OSError:
    return []
  return children + [d for child in children for d in descendants(child)]


def is_running(process_id):
  try:
    with open(f'/proc/{process_id}/stat') as file:
      return file.read().rsplit(')', 1)[1].split()[0] != 'Z'
  except OSError:
    return False


def environment_process(processes):
  (process_id,) = descendants(processes._supervisor.pid)
  return process_id


def wait_until(condition, timeout_secs):
  deadline = time.monotonic() + timeout_secs
  while time.monotonic() < deadline:
    if condition():
      return True
    time.sleep(0.05)
  return condition()


@pytest.fixture
def closing():
  """A list; what is appended to it is closed at the end of the test."""
  opened = []
  yield opened
  for processes in opened:
    processes.close()


def test_batches_contain_the_environments_that_are_ready(closing):
  processes = start('Count3', 'Count3', 'Count3')
  closing.append(processes)
  ready = set()
  while ready != {0, 1, 2}:
    env_ids = processes.recv(2, timeout_secs=20)
    assert 1 <= len(env_ids) <= 2
    assert not ready & set(env_ids.tolist())
    ready |= set(env_ids.tolist())


def test_raising_environment(closing):
  processes = start('Count100', 'CountRaise')
  closing.append(processes)
  with pytest.raises(py_process.EnvironmentFailed) as caught:
    step(processes, 500)
  lines = str(caught.value).splitlines()
  assert lines[0] == (
    'gym:tests.count_env:CountRaise-v0: environment 1 failed at step 50'
  )
  assert lines[-1] == 'OSError: The level is broken.'
  assert 'in step' in str(caught.value)
  copy = pickle.loads(pickle.dumps(caught.value))
  assert str(copy) == str(caught.value)


def test_raising_reset(closing):
  processes = start('CountRaiseAtReset')
  closing.append(processes)
  with pytest.raises(py_process.EnvironmentFailed, match='at step 0\n'):
    step(processes, 1)


def test_errors_are_for_the_user_to_mend():
  assert issubclass(py_process.EnvironmentFailed, errors.UserError)
  assert issubclass(py_process.EnvironmentFailed, RuntimeError)
  assert issubclass(py_process_worker.UnusableLevelError, errors.SettingError)


def test_raising_maker():
  processes = py_process.EnvironmentProcesses(
    [functools.partial(gym.GymEnvironment, 'gym:X-v0', -1)], ['broken']
  )
  with pytest.raises(py_process.EnvironmentFailed, match='at step 0\n') as e:
    processes.find_specs()
  processes.close()
  assert str(e.value).startswith('broken: environment 0')
  assert 'ValueError' in str(e.value)
  assert not descendants(os.getpid())


def test_unusable_level():
  with pytest.raises(py_process_worker.UnusableLevelError):
    start('Missing')
  assert not descendants(os.getpid())


def test_environment_that_exits(closing):
  processes = start('CountExit')
  closing.append(processes)
  with pytest.raises(py_process.EnvironmentFailed) as caught:
    step(processes, 10)
  assert caught.value.step == 5
  assert caught.value.details == 'Its process ended with exit code 7.'


@pytest.mark.parametrize('gym_id', ['Count100', 'CountSlowReset'])
def test_killed_environment(closing, gym_id):
  processes = start(gym_id)
  closing.append(processes)
  if gym_id == 'Count100':
    step(processes, 3)
  os.kill(environment_process(processes), signal.SIGKILL)
  with pytest.raises(py_process.EnvironmentFailed, match='SIGKILL') as caught:
    step(processes, 3)
  assert caught.value.env_id == 0


def test_failing_environment_is_restarted_max_restarts_times(closing, capfd):
  restarted = []
  processes = start(
    'Count100', 'CountRaise', max_restarts=3, restarted=restarted
  )
  closing.append(processes)
  with pytest.raises(py_process.EnvironmentFailed) as caught:
    # That the other environment is always ready must not delay this.
    step(processes, 2000)
  assert restarted == [1, 1, 1]
  assert (caught.value.env_id, caught.value.step) == (1, 50)
  printed = capfd.readouterr().err
  # Told once.
  assert printed.count('Traceback') == 1
  assert 'CountRaise-v0: environment 1 failed at step 50' in printed
  assert '(1 of 3 times in a row)' in printed
  assert caught.value.details == 'As before: OSError: The level is broken.'


def test_complete_episodes_reset_the_count_of_restarts(closing, capfd):
  restarted = []
  processes = start('SecondEpisodeRaises', max_restarts=2, restarted=restarted)
  closing.append(processes)
  while len(restarted) < 5:
    step(processes, 1)
  assert '(2 of 2' not in capfd.readouterr().err


def test_what_fails_before_its_first_observation_is_told_once(closing, capfd):
  restarted = []
  processes = start('CountRaiseAtReset', max_restarts=3, restarted=restarted)
  closing.append(processes)
  with pytest.raises(py_process.EnvironmentFailed, match='Traceback'):
    step(processes, 10)
  assert not restarted
  assert capfd.readouterr().err == ''


def test_the_same_failure_is_counted(closing, capfd):
  restarted = []
  processes = start(
    'SecondEpisodeRaises',
    'SecondEpisodeRaises',
    max_restarts=2,
    restarted=restarted,
  )
  closing.append(processes)
  while len(restarted) < 11:
    step(processes, 1)
  printed = capfd.readouterr().err
  assert printed.count('Traceback') == 1
  assert printed.count('OSError: The level is broken.') == 2
  assert 'has failed in the same way 10 times: OSError' in printed
  assert len(printed.splitlines()) < 30


class TestGroups:
  """Environments that share a process."""

  def test_who_failed_is_known(self, closing, capfd):
    restarted = []
    processes = start(
      'Count100',
      'CountExit',
      'Count100',
      max_restarts=1,
      restarted=restarted,
      envs_per_process=2,
    )
    closing.append(processes)
    with pytest.raises(py_process.EnvironmentFailed) as caught:
      step(processes, 100)
    assert caught.value.env_id == 1
    assert caught.value.step == 5
    # Both in the process start anew.
    assert restarted == [0, 1]
    told = 'CountExit-v0: environment 1 failed at step 5\n'
    assert told in capfd.readouterr().err

  def test_all_are_restarted_after_a_kill(self, closing):
    restarted = []
    processes = start(
      'Count3',
      'Count7',
      max_restarts=1,
      restarted=restarted,
      envs_per_process=2,
    )
    closing.append(processes)
    step(processes, 4)
    os.kill(environment_process(processes), signal.SIGKILL)
    while not restarted:
      step(processes, 1)
    assert restarted == [0, 1]
    ready = set()
    while ready != {0, 1}:
      env_ids = processes.recv(2, timeout_secs=20)
      ready |= set(env_ids.tolist())
      processes.send(np.zeros(len(env_ids), np.int32), env_ids)

  def test_an_action_for_a_restarted_environment_is_ignored(self, closing):
    processes = start(
      'Count100', 'CountExit', max_restarts=9, envs_per_process=2
    )
    closing.append(processes)
    action, ready = np.zeros(1, np.int32), []
    while True:
      ready = processes.recv(2, timeout_secs=20).tolist()
      if processes._num_restarts[0]:
        break
      if 1 in ready:  # The other waits for its action when this one fails.
        processes.send(action, np.array([1], np.int32))
    if 0 not in ready:
      processes.send(action, np.array([0], np.int32))
      while 0 not in ready:
        ready = processes.recv(2, timeout_secs=20).tolist()
    assert processes._arrays.observation[0][0] == 0
    processes.send(action, np.array([0], np.int32))
    ready = []
    while 0 not in ready:
      ready = processes.recv(1, timeout_secs=20).tolist()
    assert processes._arrays.observation[0][0] == 1

  def test_close_ends_all(self, closing):
    processes = start('Count3', 'Count3', 'Count3', envs_per_process=2)
    closing.append(processes)
    step(processes, 2)
    children = descendants(os.getpid())
    assert len(children) == 3
    processes.close()
    assert not any(is_running(process_id) for process_id in children)


@pytest.mark.parametrize('gym_id', ['Count100', 'CountSlowReset'])
def test_killed_environment_is_restarted(closing, gym_id, capfd):
  restarted = []
  processes = start(gym_id, max_restarts=1, restarted=restarted)
  closing.append(processes)
  if gym_id == 'Count100':
    step(processes, 3)
  before = environment_process(processes)
  os.kill(before, signal.SIGKILL)
  while not restarted:
    ids = processes.recv(1, timeout_secs=20)
    if not restarted:
      processes.send(np.zeros(1, np.int32), ids)
  assert ids.tolist() == [0]
  # The first output of a new process.
  assert environment_process(processes) != before
  assert processes._arrays.observation[0][0] == 0
  assert processes._arrays.rewards[0] == 0
  assert 'was ended by SIGKILL' in capfd.readouterr().err
  processes.close()
  assert not descendants(os.getpid())


def test_killed_supervisor_is_not_restarted(closing):
  processes = start('Count3', max_restarts=3)
  closing.append(processes)
  step(processes, 2)
  environment = environment_process(processes)
  os.kill(processes._supervisor.pid, signal.SIGKILL)
  os.kill(environment, signal.SIGKILL)
  with pytest.raises(py_process.EnvironmentFailed, match='supervisor'):
    step(processes, 100)


def test_the_supervisor_ignores_signals_to_the_whole_group(closing):
  processes = start('Count7')
  closing.append(processes)
  for number in (signal.SIGINT, signal.SIGTERM):
    processes._supervisor.send_signal(number)
  step(processes, 5)
  with pytest.raises(subprocess.TimeoutExpired):
    processes._supervisor.wait(0.5)


def test_environments_ignore_interrupts(closing):
  processes = start('Count3')
  closing.append(processes)
  for process_id in descendants(os.getpid()):
    os.kill(process_id, signal.SIGINT)
  step(processes, 10)


def test_close_ends_all_processes_within_3_seconds(closing):
  processes = start('Count3', 'CountSlowReset', 'Count3', 'CountSlowReset')
  closing.append(processes)
  step(processes, 3)
  children = descendants(os.getpid())
  assert len(children) == 5
  before = time.monotonic()
  processes.close()
  assert time.monotonic() - before < 3
  assert not any(is_running(process_id) for process_id in children)


def test_close_before_the_first_episode():
  processes = start('Count3', first_episodes=False)
  processes.close()
  assert not descendants(os.getpid())


_MAIN = """
import sys
import tensorflow  # At the top, as in the main program.
import numpy as np
from envs import make

envs = make.make_environments(
  ['gym:tests.count_env:Seed-v0', 'gym:tests.count_env:CountSlowReset-v0'],
  num_envs=2, seed=1, training=True,
)
for _ in range(20):
  env_ids, outputs = envs.recv()
  assert not outputs.reward[env_ids == 0].any(), 'TensorFlow is loaded.'
  envs.send(np.zeros(len(env_ids), np.int32), env_ids)
print('running', flush=True)
sys.stdin.read()
"""


@pytest.fixture
def main_program(tmp_path):
  """A main program that has imported TensorFlow and plays environments."""
  script = tmp_path / 'main.py'
  script.write_text(_MAIN)
  scratch = tmp_path / 'scratch'
  scratch.mkdir()
  # A stub: the test is whether the environments' processes import it.
  (tmp_path / 'tensorflow.py').write_text('')
  process = subprocess.Popen(
    [sys.executable, str(script)],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
    env=os.environ | {'PYTHONPATH': _ROOT, 'TMPDIR': str(scratch)},
  )
  assert process.stdout.readline() == 'running\n'
  yield process, scratch
  process.kill()
  process.wait()


@pytest.mark.parametrize('end', ['kill', 'exit'])
def test_nothing_is_left_when_the_main_program_ends(main_program, end):
  process, scratch = main_program
  shared = set(glob.glob('/dev/shm/*'))
  children = descendants(process.pid)
  assert len(children) == 3
  assert all(is_running(process_id) for process_id in children)
  if end == 'kill':
    process.kill()
  else:
    process.stdin.close()
  process.wait(10)
  assert wait_until(lambda: not any(map(is_running, children)), 5)
  assert not list(scratch.iterdir())
  assert set(glob.glob('/dev/shm/*')) <= shared


def test_what_environments_import_is_free_of_tensorflow():
  code = (
    'import sys; from envs import atari, gym, lab; '
    'from evaluation import films; '
    'sys.exit("tensorflow" in sys.modules)'
  )
  subprocess.run([sys.executable, '-c', code], cwd=_ROOT, check=True)
