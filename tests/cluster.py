"""A cluster of real processes, for tests to do harm to."""

import contextlib
import json
import re
import time

import local_cluster
from tests import program

# With an environment each, actor i plays LEVELS[i]. They step 100 times a
# second, so that processes that start find the processor free.
LEVELS = [program.COUNT.format(f'Calm{length}') for length in (3, 7)]
# More than what waits in queues when something happens.
_MANY_FRAMES = 300
# A process that imports TensorFlow takes its time where others do too.
_START_SECS = 300.0


class Cluster(contextlib.ExitStack):
  """Starts processes of one run; at its end nothing is left of them.

  Attributes:
    logdir: the run's folder.
    hosts: 'host:port' of each learner.
  """

  def __init__(self, folder, hosts=None, num_learners=1):
    """Starts nothing yet.

    Args:
      folder: for the run, and for what the processes print.
      hosts: see above; if not given, they are on this machine.
      num_learners: how many then.
    """
    super().__init__()
    self._folder = folder
    self._count = 0
    self.logdir = folder / 'run'
    self.hosts = hosts or [
      f'localhost:{port}'
      for port in local_cluster.find_free_ports(num_learners)
    ]

  def start(self, job_name, task=0, **settings):
    """Starts a process; see `program.Program`, whose arguments it takes."""
    self._count += 1
    flags = {
      'job_name': job_name,
      'task': task,
      'learner_hosts': ','.join(self.hosts),
      'num_actors': 2,
      'envs_per_actor': 1,
      'level_name': ','.join(LEVELS),
      'logdir': self.logdir,
      'connect_timeout_secs': 300,
      'save_checkpoint_secs': 1,
      'total_environment_frames': 10**9,
    }
    folder = self._folder / f'{self._count}-{job_name}{task}'
    return self.enter_context(program.Program(folder, **flags | settings))

  def start_all(self, **settings):
    """Starts a learner and two actors, and waits until both play for it."""
    started = [self.start('learner', **settings)]
    started += [self.start('actor', task, **settings) for task in (0, 1)]
    for task in (0, 1):
      self.wait_for_actor(started[0], task)
    return started

  def rows(self):
    """Returns what was logged, oldest first."""
    try:
      lines = (self.logdir / 'metrics.jsonl').read_text().splitlines()
    except FileNotFoundError:
      return []
    return [json.loads(line) for line in lines]

  def frames(self):
    """Returns how many frames were trained on when last logged."""
    rows = self.rows()
    return rows[-1]['num_environment_frames'] if rows else 0

  def wait_for_training(self, learner):
    """Waits until the learner has trained on much that is new."""
    enough = self.frames() + _MANY_FRAMES
    learner.wait_until(lambda: self.frames() >= enough, _START_SECS)

  def wait_for_actor(self, learner, task):
    """Waits until the learner has trained on new episodes of an actor."""
    before = self.frames()

    def is_new(row):
      return (
        row['num_environment_frames'] > before + _MANY_FRAMES
        and f'{LEVELS[task]}/episodes' in row
      )

    learner.wait_until(lambda: any(map(is_new, self.rows())), _START_SECS)


@contextlib.contextmanager
def within(seconds, what):
  """Checks how long something takes, and prints it."""
  start = time.monotonic()
  yield
  took = time.monotonic() - start
  print(f'{took:.1f} s {what}')
  assert took < seconds, what


def wait_to_play(actor, times=1):
  """Waits until an actor has said so many times that it plays."""
  actor.wait_until(
    lambda: actor.out.count('Playing for the learner') >= times, _START_SECS
  )


def assert_fails(process, pattern, timeout_secs=_START_SECS):
  """Waits for an end with one line that says why."""
  assert process.finish(timeout_secs) == 1, process.err
  (line,) = process.error_lines()
  assert re.match(f'Error: .*{pattern}', line), line


def assert_ends_well(*processes, code=0):
  """Waits for ends without a word on standard error."""
  for process in processes:
    assert process.finish(_START_SECS) == code, process.err
    assert process.error_lines() == []
