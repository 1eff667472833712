"""Tests of runtime/signals.py: whatever stops a run leaves it in good order."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

import local_cluster
from runtime import signals
from tests import program

_STOPPED = 75


def _train(folder, output='output', **flags):
  return program.Program(
    folder / output,
    logdir=folder / 'run',
    **{'level_name': program.COUNT.format(100), 'envs_per_actor': 1}
    | {'total_environment_frames': 10**9, 'log_every_secs': 0.5}
    | flags,
  )


def _frames(folder):
  text = (folder / 'run' / 'metrics.jsonl').read_text()
  return json.loads(text.splitlines()[-1])['num_environment_frames']


@pytest.mark.parametrize(
  'name', ['SIGINT', 'SIGTERM', 'SIGHUP', 'SIGUSR1', 'SIGUSR2']
)
def test_each_signal_stops(name):
  """In a small program, which ends in good order, and not twice."""
  code = """
import os, signal, sys, threading
from runtime import signals
signals.install()
stop = threading.Event()
with signals.stopping(stop.set):
  print('ready', flush=True)
  stop.wait()
  os.kill(os.getpid(), int(sys.argv[1]))  # The same request.
  print('saved', flush=True)
sys.exit(signals.EXIT_STOPPED)
"""
  number = getattr(signal, name)
  process = subprocess.Popen(
    [sys.executable, '-c', code, str(int(number))],
    cwd=program.ROOT,
    stdout=subprocess.PIPE,
    text=True,
  )
  assert process.stdout.readline() == 'ready\n'
  process.send_signal(number)
  out, _ = process.communicate(timeout=20)
  assert process.returncode == _STOPPED
  assert out.splitlines()[-1] == 'saved'
  assert out.count('a second signal ends at once') == 1


def test_a_later_second_signal_ends_at_once():
  code = """
import threading, time
from runtime import signals
signals.install()
signals._SAME_REQUEST_SECS = 0.3
with signals.stopping(lambda: None, force=lambda: print('forced', flush=True)):
  print('ready', flush=True)
  time.sleep(60)
"""
  process = subprocess.Popen(
    [sys.executable, '-c', code],
    cwd=program.ROOT,
    stdout=subprocess.PIPE,
    text=True,
  )
  assert process.stdout.readline() == 'ready\n'
  process.terminate()
  time.sleep(1)
  process.terminate()
  out, _ = process.communicate(timeout=20)
  assert process.returncode == 128 + signal.SIGTERM
  assert out.splitlines()[-1] == 'forced'


def test_handlers_are_restored_without_install():
  before = [signal.getsignal(number) for number in signals.NUMBERS]
  stopped = threading.Event()
  with signals.stopping(stopped.set):
    os.kill(os.getpid(), signal.SIGUSR1)
    assert stopped.wait(10)
  assert [signal.getsignal(number) for number in signals.NUMBERS] == before
  assert signal.set_wakeup_fd(-1) == -1


@contextlib.contextmanager
def _ignoring(number):
  before = signal.signal(number, signal.SIG_IGN)
  try:
    yield
  finally:
    signal.signal(number, before)


@pytest.mark.parametrize('wait', [0.15, 1.5])
def test_stops_during_the_imports(wait, tmp_path):
  """As the first process of a container, which has no default handlers."""
  process = subprocess.Popen(
    [
      *('unshare', '--pid', '--fork', '--mount-proc', '--kill-child'),
      *(sys.executable, 'experiment.py', f'--logdir={tmp_path}'),
    ],
    cwd=program.ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  time.sleep(wait)
  if process.poll() is not None:
    pytest.skip(f'cannot unshare here: {process.stderr.read()}')
  (child,) = _children(process.pid)
  os.kill(child, signal.SIGTERM)
  # Before the very first lines of Python, a first process ignores it.
  with contextlib.suppress(subprocess.TimeoutExpired):
    process.wait(2)
  with contextlib.suppress(ProcessLookupError):
    os.kill(child, signal.SIGTERM)
  _, err = process.communicate(timeout=20)
  assert process.returncode == _STOPPED
  assert 'Traceback' not in err


def _children(process_id):
  with open(f'/proc/{process_id}/task/{process_id}/children') as file:
    return [int(word) for word in file.read().split()]


def test_a_hang_up_after_nohup_is_ignored(tmp_path):
  with _ignoring(signal.SIGHUP):
    run = _train(tmp_path)
  with run:
    run.wait_for_training()
    for process_id in run.processes():
      os.kill(process_id, signal.SIGHUP)
    before = _frames(tmp_path)
    run.wait_until(lambda: _frames(tmp_path) > before + 1000)
    # A batch queue warns all processes.
    for process_id in run.processes():
      os.kill(process_id, signal.SIGUSR1)
    assert run.finish(timeout_secs=20) == _STOPPED, run.err
    assert run.error_lines() == []
    assert run.out.splitlines()[-1].startswith('Saved.')


def test_stopped_is_not_finished(tmp_path):
  """`until` with the program as its condition trains all frames, each once."""
  for attempt in range(20):
    with _train(tmp_path, str(attempt), total_environment_frames=12_000) as run:
      if not (tmp_path / 'run' / 'checkpoints' / 'checkpoint').exists():
        run.wait_for_training()
        run.process.send_signal(signal.SIGUSR2)
      code = run.finish()
    if code == 0:
      break
    assert code == _STOPPED, run.err
  assert code == 0
  assert _frames(tmp_path) == 12_000


def test_stops_while_it_waits(tmp_path):
  """While environments are made, or the others are not there yet."""
  (port,) = local_cluster.find_free_ports(1)
  hosts = f'localhost:{port},localhost:9'
  waiting = {
    'local': _train(
      tmp_path / 'local', level_name='gym:tests.odd_env:Odd-v0?wait=600'
    ),
    'learner': _train(
      tmp_path / 'learner',
      job_name='learner',
      learner_hosts=hosts,
      num_actors=2,
    ),
    'actor': _train(
      tmp_path / 'actor', job_name='actor', learner_hosts='localhost:9'
    ),
  }
  with contextlib.ExitStack() as stack:
    for run in waiting.values():
      stack.enter_context(run)
    waiting['local'].wait_until(lambda: len(waiting['local'].processes()) > 2)
    for name in ('learner', 'actor'):
      waiting[name].wait_until(lambda run=waiting[name]: 'Waiting' in run.out)
    for name, run in waiting.items():
      start = time.monotonic()
      run.process.send_signal(signal.SIGINT)
      assert run.process.wait(20) == _STOPPED, run.err
      took = time.monotonic() - start
      assert took < (4 if name == 'actor' else 8), name
      assert run.error_lines() == []
      assert run.finish() == _STOPPED


def test_results_are_written_though_nobody_reads(tmp_path):
  with _train(tmp_path, total_environment_frames=400) as run:
    assert run.finish() == 0, run.err
  for reader in ('| head -1', '>/dev/full'):
    command = (
      f'{sys.executable} experiment.py --mode=test --test_num_episodes=3 '
      f'--logdir={tmp_path}/run {reader}'
    )
    done = subprocess.run(
      ['bash', '-o', 'pipefail', '-c', command],
      cwd=program.ROOT,
      capture_output=True,
      text=True,
    )
    assert done.returncode == 0, done.stderr
    path = tmp_path / 'run' / 'test.json'
    result = json.loads(path.read_text())
    assert result['levels'][program.COUNT.format(100)]['mean'] == 100
    path.unlink()
