"""Tests of local_cluster.py; of its signals, see faults_test.py."""

import pathlib
import re
import signal
import subprocess
import sys
import threading

import pytest

import local_cluster
from tests import program


def _run(*arguments):
  return subprocess.run(
    [sys.executable, 'local_cluster.py', *map(str, arguments)],
    cwd=program.ROOT,
    capture_output=True,
    text=True,
    timeout=300,
  )


def test_trains_and_its_own_numbers_win(tmp_path):
  result = _run(
    *('--num_actors=2', f'--output_dir={tmp_path / "out"}', '--'),
    # It has --num_actors=1.
    *('--flagfile=configs/cartpole.flags', '--envs_per_actor=1'),
    *('--batch_size=2', '--total_environment_frames=400'),
    f'--logdir={tmp_path / "run"}',
  )
  assert result.returncode == 0, result.stderr
  assert 'actors: 2, for ' in result.stdout
  assert result.stderr == ''
  for task in range(2):
    text = (tmp_path / 'out' / f'actor{task}.txt').read_text()
    assert f'Actor {task} has ended.' in text


def test_says_who_has_failed_and_why(tmp_path):
  result = _run(
    *('--num_actors=1', f'--output_dir={tmp_path}', '--'),
    '--level_name=gym:tests.nowhere:Nothing-v0',
  )
  assert result.returncode == 1
  path = re.escape(str(tmp_path / 'learner0.txt'))
  # The actor may have failed before, for the same reason.
  assert re.search(
    rf'^learner0 has failed: Error: .*tests\.nowhere.* \({path}\)$',
    result.stderr,
    re.M,
  ), result.stderr
  assert 'Traceback' not in result.stderr


def test_ends_all_even_if_nobody_reads_of_a_failure(tmp_path):
  command = [sys.executable, 'local_cluster.py', '--num_actors=1']
  script = 'set -o pipefail; "$0" "$@" 2>&1 | true'
  with program.Program(
    tmp_path / 'program',
    command=[
      *('bash', '-c', script, *command),
      *(f'--output_dir={tmp_path}', '--'),
    ],
    # Only the learner finds fault with it.
    logdir=pathlib.Path(__file__) / 'x',
    level_name=program.COUNT.format(3),
  ) as failed:
    assert failed.finish() == 1


def test_ends_with_the_learners_code_and_says_who_has_died(tmp_path, capfd):
  processes = {}
  for name in ('learner0', 'actor0', 'actor1'):
    (tmp_path / f'{name}.txt').touch()
    processes[name] = subprocess.Popen(['sleep', '100'])
  processes['actor1'].kill()
  timer = threading.Timer(1.0, processes['learner0'].kill)
  timer.start()
  code = local_cluster.watch(processes, tmp_path, threading.Event())
  assert code == 128 + signal.SIGKILL
  assert all(process.poll() is not None for process in processes.values())
  first, *others = capfd.readouterr().err.splitlines()
  assert first.startswith('actor1 has failed: ended by SIGKILL')
  assert any(
    line.startswith('learner0 has failed: ended by SIGKILL') for line in others
  )


@pytest.mark.parametrize(
  ('argument', 'message'),
  [
    ('--num_actors=0', '--num_actors must be at least 1, got 0'),
    ('--num_learners=-1', '--num_learners must be at least 1, got -1'),
    (
      f'--output_dir={pathlib.Path(__file__) / "x"}',
      'Error: cannot write to --output_dir=',
    ),
    ('--output_dir=gs://a', 'Error: --output_dir=gs://a must be a folder'),
  ],
)
def test_refuses_in_one_line(argument, message):
  result = _run(argument)
  assert result.returncode != 0
  assert message in result.stderr.splitlines()[-1]
  assert 'Traceback' not in result.stderr
