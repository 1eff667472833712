"""Runs Python environments in processes of their own.

Nobody waits for a slow one: each environment steps and starts its next episode
in its own process, and the caller takes whichever are ready. Actions, rewards,
episode ends and observations are in one block of anonymous shared memory. All
that a step sends is one byte to the environment and four bytes back.
`py_process_worker` is the side of the environments.
"""

from collections.abc import Callable, Sequence
import contextlib
from multiprocessing import connection
import os
import select
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
  """E environments, each in a process of its own.

  `start_episodes` starts them; then `recv` and `send` take turns.

  Attributes:
    specs: what each environment reports about itself (its `spec`).
  """

  def __init__(
    self,
    makers: Sequence[Callable[[int], py_process_worker.EnvironmentProtocol]],
    level_names: Sequence[str],
    max_restarts: int = 0,
    on_restart: Callable[[int], None] | None = None,
  ):
    """Starts the processes and makes all environments at the same time.

    Args:
      makers: one for each environment. They must pickle. Each is called in the
        environment's process with the number of the restart, 0 at first. What
        it imports then is the user's: our modules are hidden, see
        py_process_worker.
      level_names: their levels, for messages.
      max_restarts: how many times in a row, with no complete episode between,
        an environment that fails is restarted, with a warning.
      on_restart: called with the environment's number. Its episode is lost.

    Raises:
      EnvironmentFailed: one could not be made.
      py_process_worker.UnusableLevelError: a maker raised it.
    """
    self._level_names = list(level_names)
    self._max_restarts = max_restarts
    self._on_restart = on_restart
    self._restarts = np.zeros([len(makers)], int)  # In a row.
    self._num_restarts = np.zeros([len(makers)], int)  # In all.
    self._ready = []  # Numbers read from the pipe, not returned yet.
    self._steps = np.full([len(makers)], -1)  # -1: not reset yet.
    self._in_flight = np.zeros([len(makers)], bool)
    self._layout = None
    self._arrays = None
    self._supervisor = None
    self._control, their_control = connection.Pipe()
    self._memory_fd = _open_anonymous_memory()
    pairs = [connection.Pipe() for _ in makers]
    self._links = [ours for ours, _ in pairs]
    self._ready_fd, ready_writer = os.pipe()
    os.set_blocking(self._ready_fd, False)
    theirs = [link.fileno() for _, link in pairs]
    self._poller = select.poll()
    self._poller.register(self._ready_fd, select.POLLIN)
    for link in self._links:
      self._poller.register(link.fileno(), select.POLLIN)
    try:
      try:
        self._start_supervisor(
          their_control.fileno(), list(makers), theirs, ready_writer
        )
      finally:
        for link in [their_control, *(link for _, link in pairs)]:
          link.close()
        os.close(ready_writer)
      self.specs = [self._receive_spec(i) for i in range(len(makers))]
    except BaseException:
      self.close()
      raise

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
      self._control.send((makers, links, ready_fd, self._memory_fd))

  def _receive_spec(self, env_id: int) -> Any:
    kind, value = self._receive(env_id)
    if kind == 'spec':
      return value
    if kind == 'unusable':
      raise py_process_worker.UnusableLevelError(value)
    raise self._failure(env_id, kind, value)

  def _receive(self, env_id: int) -> tuple[str, Any]:
    try:
      return self._links[env_id].recv()
    except (EOFError, OSError):
      return 'died', None

  def start_episodes(
    self, observation: Sequence[tuple[tuple[int, ...], np.dtype]]
  ) -> py_process_worker.SharedArrays:
    """Starts the first episodes of all environments; does not wait.

    Args:
      observation: the shape and type of each array of an observation.

    Returns:
      The arrays. Rows of environments in flight may change at any time.
    """
    layout = py_process_worker.Layout(len(self._links), observation)
    self._arrays = layout.map(self._memory_fd)
    # Sent as a tuple: to unpickle a class, a process imports its module.
    self._layout = tuple(layout)
    for link in self._links:
      # `recv` reports an environment that has died meanwhile.
      with contextlib.suppress(OSError):
        link.send(self._layout)
    self._in_flight[:] = True
    return self._arrays

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
    wanted = min(max_batch, np.count_nonzero(self._in_flight))
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
    env_ids = np.array(self._ready[:wanted], np.int32)
    del self._ready[:wanted]
    self._in_flight[env_ids] = False
    dones = self._arrays.dones[env_ids]
    self._steps[env_ids] = np.where(dones, 0, self._steps[env_ids] + 1)
    self._restarts[env_ids[dones]] = 0
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
      for env_id, link in enumerate(self._links if messages else ()):
        if link.fileno() in messages:
          self._answer(env_id, *self._receive(env_id))
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
    busy = self._in_flight[env_ids].any()
    if busy or len(set(numbers)) != len(numbers):
      raise ValueError(
        f'An environment takes one action after each recv, got actions for '
        f'{numbers} with {np.flatnonzero(self._in_flight).tolist()} in flight.'
      )
    self._arrays.actions[env_ids] = actions
    self._in_flight[env_ids] = True
    for env_id in numbers:
      with contextlib.suppress(OSError):  # It has died: `recv` reports it.
        os.write(self._links[env_id].fileno(), b'\0')

  def _answer(self, env_id: int, kind: str, value: Any) -> None:
    """Handles a message that is not a step: a failure, or a restart's spec."""
    link = self._links[env_id]
    if kind == 'spec':
      with contextlib.suppress(OSError):
        link.send(self._layout)
      return
    failure = self._failure(env_id, kind, value)
    if value is None or self._restarts[env_id] >= self._max_restarts:
      raise failure
    self._restarts[env_id] += 1
    self._num_restarts[env_id] += 1
    console.warn(
      f'{failure}\nIt starts anew ({self._restarts[env_id]} of '
      f'{self._max_restarts} times in a row).'
    )
    if kind != 'died' and link.poll(py_process_worker.GRACE_SECS):
      self._receive(env_id)  # Now it has died as well.
    # Its last step may still be unread, and must not count as the first step
    # after the restart.
    self._read_ready(len(self._ready) + len(self._links))
    self._ready = [ready for ready in self._ready if ready != env_id]
    self._in_flight[env_id] = True
    self._steps[env_id] = -1
    if self._on_restart:
      self._on_restart(env_id)
    with contextlib.suppress(OSError):  # The supervisor has died.
      self._control.send((env_id, int(self._num_restarts[env_id])))

  def _failure(
    self, env_id: int, kind: str, value: str | int | None
  ) -> EnvironmentFailed:
    if kind != 'died':
      details = value
    elif value is None:
      details = 'Its process and the supervisor have ended.'
    elif value < 0:
      details = f'Its process was ended by {_signal_name(-value)}.'
    else:
      details = f'Its process ended with exit code {value}.'
    step = self._steps[env_id] + 1
    return EnvironmentFailed(self._level_names[env_id], env_id, step, details)

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
    self._links, self._arrays = [], None
    self._in_flight[:] = False


def _open_anonymous_memory() -> int:
  """Opens a file without a name: nothing is left behind, whoever dies first."""
  if hasattr(os, 'memfd_create'):
    return os.memfd_create('environments')
  with tempfile.TemporaryFile() as file:
    return os.dup(file.fileno())


def _signal_name(number: int) -> str:
  try:
    return signal.Signals(number).name
  except ValueError:
    return f'signal {number}'
