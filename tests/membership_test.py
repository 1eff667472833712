"""Tests of membership.py: the cluster, and real processes on this machine."""

import contextlib
import json
import re
import socket

from absl import flags
from absl.testing import flagsaver
import pytest

from cluster import membership
import config
from envs import make
import experiment
import local_cluster
from runtime import errors
from tests import program

_HOSTS = ('a:1', 'b:2')
_LEVELS = f'{program.COUNT.format(3)},{program.COUNT.format(7)}'


def _cluster(**changes):
  arguments = {
    'job_name': 'actor',
    'task': 3,
    'learner_hosts': _HOSTS,
    'num_actors': 4,
  }
  return membership.Cluster(**arguments | changes)


def test_each_actor_has_its_learner():
  assert [_cluster(task=i).learner_host for i in range(4)] == [*_HOSTS, *_HOSTS]
  learner = _cluster(job_name='learner', task=1)
  assert learner.learner_host == 'b:2'
  assert learner.learner_device == '/job:learner/task:1/cpu:0'


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'task': 4}, r'task 4 is outside 0\.\.3: there are 4 actors'),
    ({'task': -1}, r'task -1 is outside 0\.\.3'),
    ({'job_name': 'learner'}, r'task 3 is outside 0\.\.1: .* 2 learners'),
    ({'job_name': 'local', 'learner_hosts': ()}, 'need --job_name=learner'),
    ({'job_name': 'local', 'task': 0}, 'need --job_name=learner'),
    ({'learner_hosts': ()}, 'needs --learner_hosts=host:port'),
    ({'learner_hosts': ('a:1', 'a:1')}, 'names one twice: a:1,a:1'),
    ({'num_actors': 1, 'task': 0}, '2 learners without an actor'),
    ({'learner_hosts': ('a',)}, "'a' in --learner_hosts is not host:port"),
    ({'learner_hosts': (':1',)}, "':1' in --learner_hosts"),
    ({'learner_hosts': ('a:0',)}, "'a:0' in --learner_hosts"),
    ({'learner_hosts': ('a:65536',)}, "'a:65536' in --learner_hosts"),
    ({'learner_hosts': ('a:b',)}, "'a:b' in --learner_hosts"),
    ({'learner_hosts': ('::1:2222',)}, "'::1:2222' .* stands in brackets"),
  ],
)
def test_what_does_not_fit_together_is_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    _cluster(**changes)


def _tf_config(learner='learner', actor='actor', job='actor', index=1):
  cluster = {learner: list(_HOSTS), actor: ['c:1', 'd:1', 'e:1']}
  return json.dumps({'cluster': cluster, 'task': {'type': job, 'index': index}})


@pytest.mark.parametrize(
  ('names', 'job'),
  [
    ({}, 'actor'),
    ({'learner': 'chief', 'actor': 'worker', 'job': 'worker'}, 'actor'),
    ({'learner': 'chief', 'actor': 'worker', 'job': 'chief'}, 'learner'),
    ({'learner': 'master', 'job': 'master'}, 'learner'),
  ],
)
def test_tf_config_is_read(names, job):
  assert membership.parse_tf_config(_tf_config(**names)) == {
    'job_name': job,
    'task': 1,
    'learner_hosts': _HOSTS,
    'num_actors': 3,
  }


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    (_tf_config(actor='ps'), "a job 'ps'"),
    (_tf_config(job='evaluator'), "a job 'evaluator'"),
    (_tf_config(actor='master'), 'names the learners twice: learner, master'),
    ('[]', 'TF_CONFIG is not '),
    ('1', 'TF_CONFIG is not '),
    (f'{{"cluster": {{"learner": {json.dumps(_HOSTS)}}}}}', 'TF_CONFIG is not'),
    ('learner', "'learner'"),
    ('{"cluster": {"learner": 3}, "task": {"type": 0}}', 'TF_CONFIG is not '),
  ],
)
def test_what_tf_config_does_not_say_is_refused(text, message):
  with pytest.raises(ValueError, match=message) as error:
    membership.parse_tf_config(text)
  assert '\n' not in str(error.value)


_ALONE = {
  'nothing': {},
  'no cluster': {'task': {'type': 'worker', 'index': 0}},
  'empty': {'cluster': {}, 'task': {'type': 'chief', 'index': 0}},
  'null': {'cluster': None, 'environment': 'cloud'},
  'no hosts': {'cluster': {'chief': [], 'worker': []}},
} | {
  job: {'cluster': {job: ['a:1']}, 'task': {'type': job, 'index': 0}}
  for job in ('chief', 'worker', 'learner', 'actor', 'ps', 'evaluator')
}


@pytest.mark.parametrize('tf_config', _ALONE.values(), ids=_ALONE)
def test_who_is_alone_trains_locally(tf_config, monkeypatch):
  monkeypatch.setenv('TF_CONFIG', json.dumps(tf_config))
  assert _read_cluster() == membership.Cluster('local', 0, (), 2)


@pytest.mark.parametrize(
  ('cluster', 'task', 'message'),
  [
    ({'chief': ['a', 'b:1'], 'worker': ['c', 'd']}, 0, "'a' in --learner_host"),
    ({'chief': ['a:1'], 'worker': ['c:1']}, 5, 'task 5 is outside 0'),
    ({'worker': ['c:1', 'd:1']}, 0, 'needs --learner_hosts'),
    ({'chief': ['a:1', 'b:1']}, 0, '--num_actors=0 must be at least 1'),
    ({'chief': [1], 'worker': ['a:1']}, 0, 'is not {"cluster": '),
    ({'chief': 'a:1', 'worker': ['a:1']}, 0, 'is not {"cluster": '),
  ],
)
def test_what_is_wrong_with_tf_config_names_it(
  cluster, task, message, monkeypatch
):
  task = {'type': 'worker', 'index': task}
  text = json.dumps({'cluster': cluster, 'task': task})
  monkeypatch.setenv('TF_CONFIG', text)
  with pytest.raises(errors.SettingError, match=f'^TF_CONFIG .*{message}'):
    _read_cluster()


def _read_cluster(*arguments):
  with flagsaver.flagsaver():
    flags.FLAGS(['experiment.py', *arguments])
    return membership.from_config(experiment.read_config().cluster)


def test_flags_win_over_tf_config(monkeypatch):
  assert _read_cluster().job_name == 'local'
  monkeypatch.setenv('TF_CONFIG', _tf_config())
  assert _read_cluster() == _cluster(task=1, num_actors=3)
  assert _read_cluster('--task=2', '--num_actors=5') == _cluster(
    task=2, num_actors=5
  )
  assert _read_cluster('--job_name=learner', '--learner_hosts=x:1,y:2') == (
    _cluster(
      job_name='learner', task=1, num_actors=3, learner_hosts=('x:1', 'y:2')
    )
  )
  assert _read_cluster('--job_name=local').job_name == 'local'


def test_a_port_that_is_taken_is_refused():
  with socket.socket() as taken:
    # As TensorFlow's server: it would share its port with another.
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    taken.bind(('', 0))
    taken.listen()
    host = f'localhost:{taken.getsockname()[1]}'
    with pytest.raises(ValueError, match=f'cannot listen at {host}: Address'):
      membership.start_server(
        membership.Cluster('learner', 0, (host,), num_actors=1)
      )
  membership.check_port(host)


def test_who_listens_to_the_network_is_told_so(capsys, monkeypatch):
  monkeypatch.setattr(membership.tf.distribute, 'Server', lambda *_, **__: 1)
  (port,) = local_cluster.find_free_ports(1)
  for name in ('localhost', '127.0.0.2', '[::1]'):
    membership.start_server(
      membership.Cluster('learner', 0, (f'{name}:{port}',), 1)
    )
    assert capsys.readouterr().out == ''
  for name in ('10.0.0.1', 'example.org', '0.0.0.0'):
    membership.start_server(
      membership.Cluster('learner', 0, (f'{name}:{port}',), 1)
    )
    assert 'Keep it on a private network' in capsys.readouterr().out


def test_levels_go_round_over_all_actors():
  level_names = [f'gym:tests.count_env:Count{n}-v0' for n in (1, 3, 7, 20, 33)]
  played, seeds = [], []
  for actor in range(3):
    envs = make.from_config(
      config.make(), level_names, training=True, num_envs=2, actor=actor
    )
    envs.close()
    played += envs.level_names
    seeds += envs.seeds
  assert played == [*level_names, level_names[0]]
  assert len(set(seeds)) == 6


def test_an_actor_of_a_cluster_steps_its_games_as_one():
  for job_name, size in (('local', 2), ('actor', 4)):
    envs = make.from_config(
      config.make(job_name=job_name), ['pong'], training=True, num_envs=4
    )
    with contextlib.closing(envs):
      assert len(envs.recv()[0]) == size


@pytest.mark.parametrize(
  ('variables', 'expected'),
  [
    ({}, 'a,b,::1'),
    ({'no_proxy': 'c,d'}, 'c,d,a,b,::1'),
    ({'no_proxy': 'c', 'no_grpc_proxy': 'e'}, 'e,a,b,::1'),
    ({'no_proxy': ''}, 'a,b,::1'),
  ],
)
def test_proxies_are_bypassed(variables, expected, monkeypatch):
  monkeypatch.setattr(membership.os, 'environ', dict(variables))
  cluster = _cluster(learner_hosts=(*_HOSTS, '[::1]:3'))
  membership.bypass_proxies(cluster)
  assert membership.os.environ['no_grpc_proxy'] == expected


def test_all_processes_end_in_good_order(tmp_path):
  """Also where gRPC would ask a proxy, here one that is dead."""
  proxies = ('http_proxy', 'https_proxy', 'grpc_proxy')
  cluster = {
    'chief': [f'localhost:{local_cluster.find_free_ports(1)[0]}'],
    'worker': ['elsewhere:1', 'elsewhere:2'],
  }

  def start(job, index):
    task = {'type': job, 'index': index}
    return program.Program(
      tmp_path / f'{job}{index}',
      {'TF_CONFIG': json.dumps({'cluster': cluster, 'task': task})}
      | dict.fromkeys(proxies, 'http://localhost:9'),
      level_name=_LEVELS,
      num_actors=None,
      envs_per_actor=1,
      logdir=tmp_path / 'run',
      total_environment_frames=600,
    )

  with start('worker', 0) as first, start('worker', 1) as second:
    with start('chief', 0) as learner:
      for process in (learner, first, second):
        assert process.finish() == 0, process.err
        assert process.error_lines() == []
  assert re.search(r'600 / 600 frames \(100.0%\)', learner.out)
  assert learner.out.splitlines()[-1].startswith('Saved.')
  for index, actor in enumerate((first, second)):
    assert actor.out.splitlines()[-1] == f'Actor {index} has ended.'
  seeds = [re.search('with the seeds (.*)', a.out)[1] for a in (first, second)]
  assert seeds[0] != seeds[1]
  rows = (tmp_path / 'run' / 'metrics.jsonl').read_text()
  for length in (3, 7):  # One of each actor.
    assert (
      f'"{program.COUNT.format(length)}/episode_return": {length}.0' in rows
    )
