"""Tests what the container files say of each other, which no linter sees."""

import pathlib
import re

import yaml

_CHECKOUT = pathlib.Path(__file__).resolve().parent.parent
_DOCKERFILE = (_CHECKOUT / 'Dockerfile').read_text()
_COMPOSE = yaml.safe_load((_CHECKOUT / 'compose.yaml').read_text())
_JOBS = {
  name: service
  for name, service in _COMPOSE['services'].items()
  if 'command' in service
}
_RUN_FLAGS = _CHECKOUT / 'kubernetes' / 'run.flags'


def _flags(arguments):
  """Returns the value of each flag by its name."""
  return dict(word.removeprefix('--').split('=', 1) for word in arguments)


def _kubernetes(kind):
  """Returns the resources of a kind, by name."""
  return {
    resource['metadata']['name']: resource
    for path in (_CHECKOUT / 'kubernetes').glob('*.yaml')
    for resource in yaml.safe_load_all(path.read_text())
    if resource.get('kind') == kind
  }


def _pod(stateful_set):
  return stateful_set['spec']['template']['spec']


def test_compose_gives_each_job_its_task():
  tasks = {'learner': [], 'actor': []}
  for service in _JOBS.values():
    own = _flags(service['command'])
    tasks[own['job_name']].append(own['task'])
  shared = _flags(_JOBS['learner']['entrypoint'][2:])
  assert shared['learner_hosts'] == 'learner:2222'
  assert tasks['learner'] == ['0']
  num_actors = int(shared['num_actors'])
  assert tasks['actor'] == [str(task) for task in range(num_actors)]


def test_compose_shuts_the_jobs_in_and_tensorboard_off_from_them():
  for service in _JOBS.values():
    assert 'ports' not in service
    for network in service['networks']:
      assert _COMPOSE['networks'][network]['internal']
  tensorboard = _COMPOSE['services']['tensorboard']
  assert not set(tensorboard['networks']) & set(_JOBS['learner']['networks'])
  assert all(port.startswith('127.0.0.1:') for port in tensorboard['ports'])


def test_kubernetes_gives_each_pod_its_task():
  lines = _RUN_FLAGS.read_text().splitlines()
  shared = _flags(line for line in lines if line.startswith('--'))
  sets = _kubernetes('StatefulSet')
  assert shared['num_actors'] == str(sets['actor']['spec']['replicas'])
  assert sets['learner']['spec']['replicas'] == 1
  [service] = _kubernetes('Service')
  assert shared['learner_hosts'] == f'learner-0.{service}:2222'
  for job, stateful_set in sets.items():
    assert stateful_set['spec']['serviceName'] == service
    [container] = _pod(stateful_set)['containers']
    own = _flags(container['args'])
    assert own['job_name'] == job
    assert own['task'] == f'$({container["env"][0]["name"]})'


def test_kubernetes_lets_only_its_own_pods_reach_grpc():
  [policy] = _kubernetes('NetworkPolicy').values()
  selector = policy['spec']['podSelector']
  assert policy['spec']['ingress'] == [
    {
      'from': [{'podSelector': selector}],
      'ports': [{'port': 2222, 'protocol': 'TCP'}],
    }
  ]
  for stateful_set in _kubernetes('StatefulSet').values():
    labels = stateful_set['spec']['template']['metadata']['labels']
    assert selector['matchLabels'].items() <= labels.items()


def test_kubernetes_takes_all_its_files():
  folder = _CHECKOUT / 'kubernetes'
  top = yaml.safe_load((folder / 'kustomization.yaml').read_text())
  files = [*top['resources'], *top['configMapGenerator'][0]['files']]
  present = {path.name for path in folder.iterdir()} - {'kustomization.yaml'}
  assert sorted(files) == sorted(present)


def test_runs_are_kept_where_the_program_writes_and_may():
  folder = re.search(r'^WORKDIR (.+)', _DOCKERFILE, re.M)[1] + '/runs'
  user = int(re.search(r'^USER (\d+):0$', _DOCKERFILE, re.M)[1])
  assert f'install --directory --owner={user} runs' in _DOCKERFILE
  assert _JOBS['learner']['volumes'] == [f'runs:{folder}']
  learner = _kubernetes('StatefulSet')['learner']
  assert _pod(learner)['securityContext']['runAsUser'] == user
  assert _pod(learner)['securityContext']['fsGroup'] == user
  [claim] = learner['spec']['volumeClaimTemplates']
  mounts = _pod(learner)['containers'][0]['volumeMounts']
  assert {'name': claim['metadata']['name'], 'mountPath': folder} in mounts


def test_any_user_of_group_0_may_write():
  home = re.search(r'^ENV HOME=(.+)', _DOCKERFILE, re.M)[1]
  assert home.startswith('/home/')
  for change in ('chgrp -R 0', 'chmod -R g=u'):
    assert f'{change} "$HOME" runs' in _DOCKERFILE
  for name, stateful_set in _kubernetes('StatefulSet').items():
    assert _pod(stateful_set)['securityContext']['runAsGroup'] == 0, name


def test_kubernetes_says_what_openshift_chooses_itself():
  for name in ('learner', 'actors'):
    text = (_CHECKOUT / 'kubernetes' / f'{name}.yaml').read_text()
    assert re.search(
      r'# OpenShift .* drop them there\.\n'
      r' *runAsUser: .*\n *runAsGroup: .*\n *fsGroup: ',
      text,
    ), name


def test_signals_reach_the_program():
  # The shell form would put a shell in between, which passes none on.
  entrypoint = re.search(r'^ENTRYPOINT (.+)', _DOCKERFILE, re.M)[1]
  assert yaml.safe_load(entrypoint) == ['python', 'experiment.py']
  for service in _JOBS.values():
    assert service['entrypoint'][:2] == ['python', 'experiment.py']


def test_builder_gets_what_the_image_takes():
  ignored = (_CHECKOUT / '.dockerignore').read_text().splitlines()
  given = {line[1:] for line in ignored if line.startswith('!')}
  taken = set(re.findall(r'^COPY (\S+) ', _DOCKERFILE, re.M))
  assert given == taken
  packages = {path.parent.name for path in _CHECKOUT.glob('*/__init__.py')}
  assert packages <= taken
  for name in taken:  # A folder without a file would not be in a checkout.
    assert any(_CHECKOUT.glob(name))


def test_flag_files_exist():
  for line in [*_JOBS['learner']['entrypoint'], *_RUN_FLAGS.open()]:
    if line.startswith('--flagfile='):
      assert (_CHECKOUT / line.split('=')[1].strip()).is_file()
