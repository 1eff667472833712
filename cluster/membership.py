"""The processes of a cluster, and the learners' servers.

A learner runs a TensorFlow server, which holds its queue and its weights.
Actors are clients of it. They open no port. Each acts with its own copy of the
weights in its own session, fetches new weights and sends unrolls. A learner
needs no list of its actors' addresses. Either side can start first, leave and
come back.

Everything else that they tell each other is in `registry`. The actor's side is
in `learner_client`.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import ipaddress
import json
import os
import socket
import time
from typing import Any

import tensorflow as tf

import config as config_lib
import environments
from runtime import console
from runtime import errors

tf1 = tf.compat.v1


# Our job names, and Kubeflow's names for the same jobs.
_TF_CONFIG_JOBS = {
  'actor': 'actor',
  'chief': 'learner',
  'learner': 'learner',
  'master': 'learner',
  'worker': 'actor',
}
_CONNECT_SECS = 5.0


class LearnerLost(errors.UserError):  # noqa: N818 (says it better)
  """A learner was away for too long, or has ended; the message says which."""


@dataclasses.dataclass(frozen=True)
class Cluster:
  """The processes of a run, and which of them this one is.

  Attributes:
    job_name: 'local', 'learner' or 'actor'.
    task: this process's index within its job.
    learner_hosts: 'host:port' of each learner; empty in local training.
    num_actors: the number of actors of all learners together.
  """

  job_name: str
  task: int
  learner_hosts: tuple[str, ...]
  num_actors: int

  def __post_init__(self):
    """Checks that the attributes are consistent.

    Raises:
      errors.SettingError: they are not.
    """
    if self.job_name == 'local':
      if self.task or self.learner_hosts:
        raise errors.SettingError(
          '--task and --learner_hosts need --job_name=learner or actor.'
        )
      return
    if not self.learner_hosts:
      raise errors.SettingError(
        f'--job_name={self.job_name} needs --learner_hosts=host:port.'
      )
    for host in self.learner_hosts:
      _split(host)
    if len(set(self.learner_hosts)) < len(self.learner_hosts):
      raise errors.SettingError(
        f'--learner_hosts names one twice: {",".join(self.learner_hosts)}.'
      )
    num_learners = len(self.learner_hosts)
    if self.num_actors < num_learners:
      raise errors.SettingError(
        f'--num_actors={self.num_actors} leaves some of the {num_learners} '
        'learners without an actor.'
      )
    count = self.num_actors if self.job_name == 'actor' else num_learners
    if not 0 <= self.task < count:
      raise errors.SettingError(
        f'task {self.task} is outside 0..{count - 1}: there are {count} '
        f'{self.job_name}s.'
      )

  @property
  def learner_task(self) -> int:
    """The index of this learner, or of the one that this actor plays for."""
    if self.job_name == 'actor':
      return self.task % len(self.learner_hosts)
    return self.task

  @property
  def learner_host(self) -> str:
    """The 'host:port' of that learner."""
    return self.learner_hosts[self.learner_task]

  @property
  def learner_device(self) -> str:
    """The CPU device of that learner, which holds the queue and variables."""
    return f'/job:learner/task:{self.learner_task}/cpu:0'


def from_config(config: config_lib.ClusterConfig) -> Cluster:
  """Returns the cluster that a config describes.

  Raises:
    errors.SettingError: see `Cluster`.
  """
  return Cluster(
    config.job_name, config.task, config.learner_hosts, config.num_actors
  )


def agreed_settings(
  config: config_lib.Config,
  spec: environments.EnvironmentSpec,
  level_names: Sequence[str],
) -> Mapping[str, Any]:
  """Returns the settings that learner and actors must agree on, by name."""
  values = config.values()
  return {
    'levels': list(level_names),
    'frames': f'{spec.frame_dtype} {list(spec.frame_shape)}',
    'frames_per_step': spec.frames_per_step,
    'stack': spec.stack,
    'num_actions': spec.num_actions,
    'action_meanings': spec.action_meanings,
    'has_instruction': spec.has_instruction,
    'vector_size': spec.vector_size,
    'num_learners': len(config.cluster.learner_hosts),
    **{name: values[name] for name in config_lib.names(agreed=True)},
  }


def read_tf_config() -> dict[str, Any]:
  """Returns what the environment variable TF_CONFIG says, if it is set.

  Returns: see `parse_tf_config`; nothing if it is not set.

  Raises: see `parse_tf_config`.
  """
  text = os.environ.get('TF_CONFIG')
  return parse_tf_config(text) if text else {}


def parse_tf_config(text: str) -> dict[str, Any]:
  """Parses the environment variable TF_CONFIG.

  Args:
    text: JSON, `{"cluster": {<job>: [<host:port>, ...]}, "task": {"type":
      <job>, "index": <n>}}`. A job is learner (chief and master mean the same)
      or actor (worker means the same). Platforms also set it where a process
      is alone: then there is no cluster, or one process of any job in it.

  Returns:
    The arguments of `Cluster`, by name; nothing if the process is alone.

  Raises:
    errors.SettingError: the text does not have this form.
  """
  try:
    config = json.loads(text)
    cluster = config.get('cluster') or {}
    hosts = {job: _check_hosts(cluster[job]) for job in cluster}
    if sum(map(len, hosts.values())) <= 1:
      return {}
    job, task = config['task']['type'], int(config['task']['index'])
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise errors.SettingError(
      'TF_CONFIG is not {"cluster": {"learner": ["host:port"], "actor": [...]},'
      f' "task": {{"type": "actor", "index": 0}}}}: {text!r}'
    ) from error
  by_job = {}
  for name in [*hosts, job]:
    if name not in _TF_CONFIG_JOBS:
      raise errors.SettingError(
        f'TF_CONFIG has a job {name!r}: jobs are learner (also chief, master)'
        ' and actor (also worker).'
      )
  for name in hosts:
    if _TF_CONFIG_JOBS[name] in by_job:
      raise errors.SettingError(
        f'TF_CONFIG names the {_TF_CONFIG_JOBS[name]}s twice: '
        f'{", ".join(hosts)}.'
      )
    by_job[_TF_CONFIG_JOBS[name]] = hosts[name]
  return {
    'job_name': _TF_CONFIG_JOBS[job],
    'task': task,
    'learner_hosts': tuple(by_job.get('learner', ())),
    'num_actors': len(by_job.get('actor', ())),
  }


def _check_hosts(hosts: Any) -> Sequence[str]:
  if isinstance(hosts, list) and all(isinstance(host, str) for host in hosts):
    return hosts
  raise TypeError(f'{hosts!r} is no list of strings.')


def bypass_proxies(cluster: Cluster) -> None:
  """Makes gRPC connect to the learners directly.

  Otherwise it would ask the proxy that `http_proxy` or `https_proxy` names,
  which has no way to a private network. Call it before TensorFlow connects.
  """
  names = [_split(host)[0] for host in cluster.learner_hosts]
  # If the first is set, gRPC ignores the second.
  others = os.environ.get('no_grpc_proxy') or os.environ.get('no_proxy', '')
  os.environ['no_grpc_proxy'] = ','.join([*filter(None, [others]), *names])


def start_server(cluster: Cluster) -> tf.distribute.Server:
  """Starts this learner's server, which listens on its port.

  Raises:
    errors.SettingError: the port is taken.
  """
  check_port(cluster.learner_host)
  if not all(is_loopback(host) for host in cluster.learner_hosts):
    console.say(
      f'The port of {cluster.learner_host} is open on all network interfaces, '
      'without password or encryption: anyone who can reach it can run any '
      'program here. Keep it on a private network.'
    )
  return tf.distribute.Server(
    tf.train.ClusterSpec({'learner': cluster.learner_hosts}),
    job_name='learner',
    task_index=cluster.task,
    config=session_config(cluster),
  )


def check_port(host: str) -> None:
  """Checks that the port of 'host:port' is free on this machine.

  TensorFlow's server would otherwise share the port with another process.

  Raises:
    errors.SettingError: the port is taken.
  """
  with socket.socket() as probe:
    # Closed connections that linger on the port do not matter.
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
      probe.bind(('', _split(host)[1]))
    except OSError as error:
      raise errors.SettingError(
        f'cannot listen at {host}: {error.strerror}. Is another learner '
        'running? If not, choose another port in --learner_hosts or TF_CONFIG.'
      ) from error


def is_loopback(host: str) -> bool:
  """Returns whether 'host:port' is a loopback address of this machine."""
  name, _ = _split(host)
  try:
    return ipaddress.ip_address(name).is_loopback
  except ValueError:
    return name == 'localhost'


def can_connect(host: str) -> str | None:
  """Returns why 'host:port' cannot be reached, or None if it can."""
  try:
    socket.create_connection(_split(host), _CONNECT_SECS).close()
  except OSError as error:
    return error.strerror or str(error)
  return None


def _split(host: str) -> tuple[str, int]:
  name, _, port = host.rpartition(':')
  if not name or not port.isdecimal() or not 0 < int(port) < 65536:
    raise errors.SettingError(f'{host!r} in --learner_hosts is not host:port.')
  if ':' in name and not (name[0] == '[' and name[-1] == ']'):
    raise errors.SettingError(
      f'{host!r} in --learner_hosts: an IPv6 address stands in brackets, as in '
      '[::1]:2222.'
    )
  return name.strip('[]'), int(port)


@contextlib.contextmanager
def on_learner(cluster: Cluster) -> Iterator[None]:
  """Places ops on this learner, and variables on its CPU."""

  def place(op):
    # Actors look for variables there.
    return cluster.learner_device if op.type == 'VarHandleOp' else ''

  with (
    tf1.device(f'/job:learner/task:{cluster.learner_task}'),
    tf1.device(place),
  ):
    yield


def session_config(cluster: Cluster) -> tf1.ConfigProto | None:
  """Returns the configuration of a learner's server and session."""
  if len(cluster.learner_hosts) == 1:
    return None
  result = tf1.ConfigProto()
  result.experimental.collective_group_leader = '/job:learner/replica:0/task:0'
  # Neither the session nor a save needs the other learners.
  result.device_filters.append(f'/job:learner/task:{cluster.task}')
  return result


def wait_for_learners(cluster: Cluster, timeout_secs: float) -> None:
  """Waits until all learners have started.

  Raises:
    LearnerLost: one has not started within `timeout_secs`.
  """
  deadline = time.monotonic() + timeout_secs
  for host in cluster.learner_hosts:
    is_told = False
    while problem := can_connect(host):
      if time.monotonic() >= deadline:
        raise LearnerLost(
          f'no learner at {host} for {timeout_secs:g} s '
          f'(--connect_timeout_secs): {problem}'
        )
      if not is_told:
        console.say(f'Waiting for the learner at {host}: {problem}')
        is_told = True
      time.sleep(1.0)


def describe_actors(cluster: Cluster) -> str:
  """Returns how many actors are expected, and by which learners."""
  if len(cluster.learner_hosts) == 1:
    return f'{cluster.num_actors}, for {cluster.learner_host}'
  return (
    f'{cluster.num_actors}, for {len(cluster.learner_hosts)} learners: '
    f'{", ".join(cluster.learner_hosts)}'
  )
