"""Runs Python environments in processes outside the main program.

Nobody waits for a slow one: each process steps its environments and starts
their next episodes, and the caller takes whichever are ready. Actions, rewards,
episode ends and observations are in one block of anonymous shared memory. All
that a step sends is the environment's number, there and back. By default each
environment has a process of its own; small ones are faster in groups. Each
process has a scratch folder to work in, which is removed at the end.
`py_process_worker` is the side of the environments.
"""

import array
import collections
from collections.abc import Callable, Sequence
import contextlib
from multiprocessing import connection
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np

import py_process_worker
from runtime import console
from runtime import errors
from runtime import limits

# Once one environment is ready, `recv` takes short naps to collect more, up to
# the first nap that brings none: a slow environment costs its caller one nap.
_NAP_SECS = 0.0002
_MAX_NAPS = 10
_ID_BYTES = 4


class EnvironmentFailed(errors.UserError, RuntimeError):  # noqa: N818
  """An environment raised, died, or returned a value that is not finite.

  Attributes:
    level_name: the level's name.
    env_id: the environment's number in its actor.
    step: the agent step of the episode that failed; 0 for the first reset.
    details: a traceback, or one line that says what happened.
  """

  def __init__(self, level_name: str, env_id: int, step: int, details: str):
    self.level_name = level_name
    self.env_id = int(env_id)
    self.step = int(step)
    self.details = details.strip()
    super().__init__(level_name, env_id, step, details)

  def __str__(self) -> str:
    return (
      f'{self.level_name}: environment {self.env_id} failed at step '
      f'{self.step}\n{self.details}'
    )


class EnvironmentProcesses:
  """E environments in processes.

  `find_specs` and `start_episodes` start them; then `recv` and `send` take
  turns.
  """

  def __init__(
    self,
    makers: Sequence[Callable[[int], py_process_worker.EnvironmentProtocol]],
    level_names: Sequence[str],
    max_restarts: int = 0,
    envs_per_process: int = 1,
    check_spec: Callable[[int, Any], None] | None = None,
  ):
    """Starts the processes, which make all environments at the same time.

    Args:
      makers: one for each environment. They must pickle. Each is called in the
        environment's process with the number of the restart, 0 at first. What
        it imports then is the user's: our modules are hidden, see
        py_process_worker.
      level_names: their levels, for messages.
      max_restarts: how many times in a row, with no complete episode between,
        an environment that fails is restarted, with a warning. One that fails
        before its first observation is not: it would fail again.
      envs_per_process: how many environments take turns in one process. If one
        fails, all of them start anew.
      check_spec: called with each environment's number and spec once it is
        made; may raise.

    Raises:
      errors.SettingError: the system does not allow so many processes.
    """
    self._level_names = list(level_names)
    self._max_restarts = max_restarts
    self._check_spec = check_spec
    num_envs = len(makers)
    self._groups = groups = _split(num_envs, envs_per_process)
    limits.check_processes(len(groups))
    self._process = [i // envs_per_process for i in range(num_envs)]
    self._restarts = np.zeros([num_envs], int)  # In a row.
    self._num_restarts = np.zeros([len(groups)], int)  # In all.
    self._told = collections.Counter()  # Failures by their details.
    self._specs = [None] * num_envs
    self._ready = []  # Numbers read from the pipe, not returned yet.
    self._in_flight = set()
    # Restarted while the caller had them: their next actions are ignored.
    self._anew = set()
    self._layout = self._arrays = self._supervisor = None
    self._control, their_control = connection.Pipe()
    self._memory_fd = _open_anonymous_memory()
    # The supervisor removes it, in case this process is killed.
    self._scratch = tempfile.mkdtemp(prefix='environments_')
    pairs = [connection.Pipe() for _ in groups]
    self._links = [ours for ours, _ in pairs]
    self._ready_fd, ready_writer = os.pipe()
    os.set_blocking(self._ready_fd, False)
    theirs = [link.fileno() for _, link in pairs]
    self._poller = select.poll()
    self._poller.register(self._ready_fd, select.POLLIN)
    for link in self._links:
      self._poller.register(link.fileno(), select.POLLIN)
    try:
      self._start_supervisor(
        their_control.fileno(), list(makers), theirs, ready_writer
      )
    except BaseException:
      self.close()
      raise
    finally:
      for link in [their_control, *(link for _, link in pairs)]:
        link.close()
      os.close(ready_writer)

  def _start_supervisor(
    self, control_fd: int, makers: list, links: list[int], ready_fd: int
  ) -> None:
    # ROOT first, because the supervisor imports our modules.
    paths = [p for p in sys.path if isinstance(p, str)]  # As `import` does.
    paths.insert(0, py_process_worker.ROOT)
    command = (
      f'import sys; sys.path[:] = {paths!r}; '
      f'import py_process_worker; py_process_worker.supervise({control_fd})'
    )
    self._supervisor = subprocess.Popen(
      [sys.executable, '-c', command],
      stdin=subprocess.DEVNULL,
      pass_fds=[control_fd, *links, ready_fd, self._memory_fd],
      # Ctrl-C, and any other signal to the whole group, is for the caller to
      # handle: environments end when it closes them, or is gone.
      start_new_session=True,
      # The processes are the parallelism, and a process with threads cannot be
      # forked safely.
      env={'OMP_NUM_THREADS': '1', 'OPENBLAS_NUM_THREADS': '1'} | os.environ,
    )
    with contextlib.suppress(OSError):  # It has died: no spec will come.
      self._control.send(
        [makers, self._groups, links, ready_fd, self._memory_fd, self._scratch]
      )

  def find_specs(self, timeout_secs: float | None = None) -> list[Any]:
    """Waits until the environments are made.

    Args:
      timeout_secs: the longest wait; None waits for ever.

    Returns:
      What each environment reports about itself (its `spec`); None for those
      that are not made yet.

    Raises:
      EnvironmentFailed: one could not be made.
      py_process_worker.UnusableLevelError: a maker raised it.
    """
    deadline = None if timeout_secs is None else time.monotonic() + timeout_secs
    while None in self._specs:
      left = None if deadline is None else max(0, deadline - time.monotonic())
      ready = connection.wait(
        [self._links[p] for p in self._find_unmade()], left
      )
      if not ready:
        break
      for link in ready:
        self._answer(self._links.index(link), *self._receive(link))
    return list(self._specs)

  def _find_unmade(self) -> set[int]:
    """Returns the processes that have not made all their environments."""
    return {
      self._process[i] for i, spec in enumerate(self._specs) if spec is None
    }

  def start_episodes(
    self, observation: Sequence[tuple[tuple[int, ...], np.dtype]]
  ) -> py_process_worker.SharedArrays:
    """Starts the first episodes of all environments; does not wait.

    Those that are not made yet follow. All must have the same spec.

    Args:
      observation: the shape and type of each array of an observation.

    Returns:
      The arrays. Rows of environments in flight may change at any time.
    """
    layout = py_process_worker.Layout(len(self._specs), observation)
    self._arrays = layout.map(self._memory_fd)
    # Sent as a tuple: to unpickle a class, a process imports its module.
    self._layout = tuple(layout)
    self._arrays.steps.fill(-1)
    unmade = self._find_unmade()
    for number in range(len(self._links)):
      if number not in unmade:
        self._send_layout(number)
    self._in_flight.update(range(len(self._specs)))
    return self._arrays

  def _send_layout(self, number: int) -> None:
    # `recv` reports a process that has died meanwhile.
    with contextlib.suppress(OSError):
      self._links[number].send(self._layout)

  def recv(
    self, max_batch: int, timeout_secs: float | None = None
  ) -> np.ndarray:
    """Waits for one environment, and returns all that are ready by then.

    Args:
      max_batch: the most environments to return; others stay ready.
      timeout_secs: the longest wait; None waits for ever.

    Returns:
      int32 [n], their numbers, in the order in which they became ready. n is 0
      if the time ran out.

    Raises:
      EnvironmentFailed: an environment raised, or its process died, and no
        restart is left.
      RuntimeError: no environment is in flight.
    """
    wanted = min(max_batch, len(self._in_flight))
    if not wanted:
      raise RuntimeError('No environment is in flight: send actions first.')
    self._wait(timeout_secs)
    self._read_ready(wanted)
    for _ in range(_MAX_NAPS if self._ready else 0):
      before = len(self._ready)
      if before >= wanted:
        break
      time.sleep(_NAP_SECS)
      self._read_ready(wanted)
      if len(self._ready) == before:
        break
    numbers = self._ready[:wanted]
    del self._ready[:wanted]
    self._in_flight.difference_update(numbers)
    self._anew.difference_update(numbers)
    env_ids = np.array(numbers, np.int32)
    if self._told:  # There were failures.
      is_over = self._arrays.dones[env_ids] | self._arrays.cuts[env_ids]
      self._restarts[env_ids[is_over]] = 0
    return env_ids

  def _wait(self, timeout_secs: float | None) -> None:
    """Waits for a ready environment; handles failures and restarts."""
    deadline = None if timeout_secs is None else time.monotonic() + timeout_secs
    while not self._ready:
      timeout_ms = None
      if deadline is not None:
        timeout_ms = max(0.0, deadline - time.monotonic()) * 1000
      events = self._poller.poll(timeout_ms)
      messages = {fd for fd, _ in events if fd != self._ready_fd}
      for number, link in enumerate(self._links if messages else ()):
        if link.fileno() in messages:
          self._answer(number, *self._receive(link))
      # When all processes have died, the pipe is closed as well. The links say
      # why, so they are read first.
      if not messages and (
        not events or (self._ready_fd, select.POLLIN) in events
      ):
        break

  def _read_ready(self, wanted: int) -> None:
    """Reads numbers of ready environments, until there are `wanted`."""
    missing = max(0, wanted - len(self._ready))
    with contextlib.suppress(BlockingIOError):
      ids = os.read(self._ready_fd, _ID_BYTES * missing)
      self._ready += np.frombuffer(ids, np.int32).tolist()

  def send(self, actions: np.ndarray, env_ids: np.ndarray) -> None:
    """Makes environments take a step; does not wait.

    Args:
      actions: int32 [n].
      env_ids: int32 [n], numbers that `recv` returned.

    Raises:
      ValueError: an environment is named twice or in flight already.
    """
    numbers = env_ids.tolist()
    busy = self._in_flight.intersection(numbers) - self._anew
    if busy or len(set(numbers)) != len(numbers):
      raise ValueError(
        f'An environment takes one action after each recv, got actions for '
        f'{numbers} with {sorted(self._in_flight)} in flight.'
      )
    self._arrays.actions[env_ids] = actions
    self._in_flight.update(numbers)
    messages = collections.defaultdict(lambda: array.array('i'))
    for env_id in numbers:
      if env_id not in self._anew:
        messages[self._process[env_id]].append(env_id)
    self._anew.difference_update(numbers)
    for process, message in messages.items():
      with contextlib.suppress(OSError):  # It has died: `recv` reports it.
        os.write(self._links[process].fileno(), message)

  def _receive(
    self, link: connection.Connection
  ) -> tuple[str, int | None, Any]:
    try:
      return link.recv()
    except (EOFError, OSError):
      return 'died', None, None

  def _answer(
    self, number: int, kind: str, env_id: int | None, value: Any
  ) -> None:
    """Handles a message that is not a step: a spec or a failure."""
    if kind == 'unusable':
      raise py_process_worker.UnusableLevelError(value)
    if kind == 'spec':
      if self._check_spec:
        self._check_spec(env_id, value)
      self._specs[env_id] = value
      if self._layout and number not in self._find_unmade():
        self._send_layout(number)
      return
    if env_id is None:
      env_id = self._find_running(number)
    details = _describe_death(value) if kind == 'died' else value.strip()
    if value is None or not self._may_restart(env_id, value):
      if self._told[_kind_of(details)]:
        details = f'As before: {details.splitlines()[-1]}'
      raise self._failure(env_id, details)
    self._restarts[env_id] += 1
    self._warn(self._failure(env_id, details))
    self._restart(number, kind)

  def _find_running(self, number: int) -> int:
    """Returns the environment during whose work its process has died."""
    for env_id in self._groups[number]:
      if self._specs[env_id] is None:
        return env_id
    if self._arrays is None:
      return self._groups[number][0]
    return int(self._arrays.running[number])

  def _may_restart(self, env_id: int, value: str | int) -> bool:
    if self._arrays is None or self._restarts[env_id] >= self._max_restarts:
      return False
    # What fails before its first observation would fail again; unless somebody
    # killed it.
    is_killed = isinstance(value, int) and value < 0
    was_restarted = self._num_restarts[self._process[env_id]] > 0
    return is_killed or was_restarted or bool(self._arrays.steps[env_id] >= 0)

  def _failure(self, env_id: int, details: str) -> EnvironmentFailed:
    return EnvironmentFailed(
      self._level_names[env_id], env_id, self._find_step(env_id), details
    )

  def _find_step(self, env_id: int) -> int:
    """Returns the step of the episode that an environment is in; 0: a reset."""
    arrays = self._arrays
    if arrays is None or arrays.cuts[env_id]:
      return 0
    return 1 if arrays.dones[env_id] else int(arrays.steps[env_id]) + 1

  def _warn(self, failure: EnvironmentFailed) -> None:
    """Describes a failure once; the same one again is only counted."""
    kind = _kind_of(failure.details)
    self._told[kind] += 1
    count = self._told[kind]
    if count == 1:
      console.warn(
        f'{failure}\nIt starts anew ({self._restarts[failure.env_id]} of '
        f'{self._max_restarts} times in a row).'
      )
    elif str(count).strip('0') == '1':  # 10, 100, ...
      console.warn(
        f'{failure.level_name} has failed in the same way {count:,} times: '
        f'{failure.details.splitlines()[-1]}'
      )

  def _restart(self, number: int, kind: str) -> None:
    """Restarts a process whose failure was a message of this kind."""
    link, group = self._links[number], self._groups[number]
    if kind != 'died' and link.poll(py_process_worker.GRACE_SECS):
      self._receive(link)  # Now it has died as well.
    # Its last steps may still be unread, and must not count as the first steps
    # after the restart.
    self._read_ready(len(self._ready) + len(self._specs))
    self._ready = [ready for ready in self._ready if ready not in group]
    self._anew.update(set(group) - self._in_flight)
    self._in_flight.update(group)
    arrays = self._arrays
    arrays.steps[group], arrays.dones[group], arrays.cuts[group] = -1, 0, 0
    for env_id in group:
      self._specs[env_id] = None
    self._num_restarts[number] += 1
    with contextlib.suppress(OSError):  # The supervisor has died.
      self._control.send((number, int(self._num_restarts[number])))

  def close(self) -> None:
    """Ends all processes within 3 s, whatever they are doing."""
    if not self._links:
      return
    for link in self._links:
      link.close()  # An environment that waits for an action ends by itself.
    os.close(self._ready_fd)
    os.close(self._memory_fd)
    self._control.close()
    if self._supervisor is not None:
      try:
        self._supervisor.wait(2.5 * py_process_worker.GRACE_SECS)
      except subprocess.TimeoutExpired:
        self._supervisor.kill()
        self._supervisor.wait()
    shutil.rmtree(self._scratch, ignore_errors=True)
    self._links, self._arrays = [], None
    self._in_flight.clear()


def _split(count: int, size: int) -> list[list[int]]:
  """Splits the numbers from 0 to count - 1 into groups of at most `size`."""
  numbers = list(range(count))
  return [numbers[start : start + size] for start in range(0, count, size)]


def _open_anonymous_memory() -> int:
  """Opens a file without a name: nothing is left behind, whoever dies first."""
  if hasattr(os, 'memfd_create'):
    return os.memfd_create('environments')
  with tempfile.TemporaryFile() as file:
    return os.dup(file.fileno())


def _describe_death(exit_code: int | None) -> str:
  if exit_code is None:
    return 'Its process and the supervisor have ended.'
  if exit_code < 0:
    return f'Its process was ended by {_signal_name(-exit_code)}.'
  return f'Its process ended with exit code {exit_code}.'


def _kind_of(details: str) -> str:
  """Returns what failures with the same cause share: not the last message."""
  return details.rpartition('\n')[0] or details


def _signal_name(number: int) -> str:
  try:
    return signal.Signals(number).name
  except ValueError:
    return f'signal {number}'
