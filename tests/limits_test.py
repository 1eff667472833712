"""Tests of limits.py."""

import os
import resource
import subprocess
import sys

import pytest
import tensorflow as tf

import config
from envs import make
import learner
from runtime import errors
from runtime import limits
from tests import program
import training
import unrolls

_COUNT = program.COUNT.format(3)
_MAKE = """
import resource, sys
from envs import make
from runtime import errors, limits

soft, hard, num_envs = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
limits.raise_soft_limits()
try:
  envs = make.make_environments(
    ['gym:tests.count_env:Count3-v0'], num_envs, 1, training=True
  )
except errors.SettingError as error:
  sys.exit(f'Error: {error}')
envs.recv()
envs.close()
"""


def _make_with(soft, hard, num_envs):
  """Makes environments where so many files may be open."""
  return subprocess.run(
    [sys.executable, '-c', _MAKE, *map(str, (soft, hard, num_envs))],
    cwd=program.ROOT,
    capture_output=True,
    text=True,
    timeout=120,
  )


def test_the_soft_limit_of_files_is_raised_to_the_hard_one():
  result = _make_with(64, 400, 100)
  assert result.returncode == 0, result.stderr


def test_too_few_files_are_named_before_anything_starts():
  result = _make_with(64, 256, 600)
  assert result.returncode == 1
  (line,) = result.stderr.splitlines()
  assert line.startswith('Error: 600 processes of environments need 1,3')
  assert 'open files, but the limit is 256: raise it (ulimit -n 13' in line


def test_games_of_the_emulator_need_no_processes(monkeypatch):
  monkeypatch.setattr(limits.resource, 'getrlimit', lambda _: (3, 3))
  make.make_environments(['pong'], 2, 1, training=True).close()
  with pytest.raises(errors.SettingError, match='need .* open files'):
    make.make_environments([_COUNT], 2, 1, training=True)


def test_too_few_processes_are_named(monkeypatch, tmp_path):
  def get_limit(kind):
    limit = 500 if kind == resource.RLIMIT_NPROC else resource.RLIM_INFINITY
    return limit, limit

  monkeypatch.setattr(limits, '_CGROUPS', str(tmp_path))
  monkeypatch.setattr(limits.resource, 'getrlimit', get_limit)
  monkeypatch.setattr(limits.os, 'geteuid', lambda: 12345)  # Has no processes.
  limits.check_processes(400)
  with pytest.raises(
    errors.SettingError,
    match='401 processes .* need 501 processes, but only 500 more .*ulimit',
  ):
    limits.check_processes(401)
  monkeypatch.setattr(limits.os, 'geteuid', lambda: 0)
  limits.check_processes(10**6)
  # The container's limit binds root too.
  for folder in (tmp_path, tmp_path / 'pids'):
    folder.mkdir(exist_ok=True)
    (folder / 'pids.max').write_text('300\n')
    (folder / 'pids.current').write_text('100\n')
  limits.check_processes(100)
  with pytest.raises(errors.SettingError, match='only 200 more are allowed'):
    limits.check_processes(101)


def test_threads_of_this_user_are_counted():
  assert limits._count_own_threads() >= 1


def test_the_groups_memory_counts(monkeypatch, tmp_path):
  machine = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
  monkeypatch.setattr(limits, '_CGROUPS', str(tmp_path))
  assert limits.find_memory() == machine
  for path in ('memory.max', 'memory/memory.limit_in_bytes'):
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / path).write_text('max\n')
  assert limits.find_memory() == machine
  for path in ('memory.max', 'memory/memory.limit_in_bytes'):
    (tmp_path / path).write_text('1000000\n')
  assert limits.find_memory() == 1_000_000


@pytest.mark.parametrize(
  'settings',
  [
    {'batch_size': 10**9},
    {'batch_size': 10**25},
    {'queue_capacity': 10**10},
    {'unroll_length': 10**9},
    {'unroll_length': 10**20},
  ],
)
def test_what_cannot_fit_in_memory_is_named_by_its_flag(settings, monkeypatch):
  def build(*_):
    raise AssertionError('It was built.')

  monkeypatch.setattr(unrolls, 'make_queue', build)
  monkeypatch.setattr(learner, 'Learner', build)
  made = config.make(
    level_name=_COUNT, num_actors=1, envs_per_actor=1, **settings
  )
  ((name, value),) = settings.items()
  with (
    pytest.raises(errors.SettingError, match=f'--{name}={value}') as error,
    training.LocalTraining(made, [_COUNT]),
  ):
    pass
  assert ' GB of memory. Lower one of these flags.' in str(error.value)


def test_an_actors_unrolls_have_to_fit_too(monkeypatch):
  for name in ('CUDA_VISIBLE_DEVICES', 'no_grpc_proxy'):
    monkeypatch.setenv(name, '')  # To be restored: an actor sets them.
  monkeypatch.setattr(limits, 'find_memory', lambda: 10_000)
  made = config.make(
    level_name=_COUNT, job_name='actor', learner_hosts=('a:1',),
    envs_per_actor=2, unroll_length=1000,
  )  # fmt: skip
  with (
    pytest.raises(errors.SettingError, match='--unroll_length=1000.* of 2 env'),
    training.RemoteActor(made, [_COUNT]),
  ):
    pass


def test_what_fits_is_let_through(monkeypatch):
  monkeypatch.setattr(limits, 'find_memory', lambda: 1000)
  specs = [tf.TensorSpec([3, 5], tf.int64), tf.TensorSpec([5], tf.bool)]
  limits.check_memory(specs, 8, 'they')
  with pytest.raises(errors.SettingError, match='^they take 0.0 GB'):
    limits.check_memory(specs, 9, 'they')
