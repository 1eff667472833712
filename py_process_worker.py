"""What runs outside the main program for `py_process`: nothing but steps.

The supervisor is a small process that has imported the environments' modules
once and forks off one process for each environment. `multiprocessing` has such
a server too, but it runs the main program's file again in every process (which
imports TensorFlow: 5 s, 490 MB, and a renderer that crashes beside it), and
leaves a temporary folder behind when the main program is killed.

Nothing here, nor what is imported from here, may import TensorFlow.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import functools
import math
import mmap
from multiprocessing import connection
import os
import select
import signal
import socket
import time
import traceback
from typing import Any, NamedTuple, Protocol

import numpy as np

# How long environments have for closing, and after it for obeying SIGTERM.
GRACE_SECS = 1.0


class UnusableLevelError(ValueError):
  """This level cannot be trained on at all; one line says why."""


class EnvironmentProtocol(Protocol):
  """What runs in a process. `spec` may be anything that pickles.

  An observation is a tuple of arrays, of the shapes and types that the caller
  names in the Layout.
  """

  spec: Any

  def reset(self) -> Sequence[np.ndarray]:
    """Starts an episode and returns its first observation."""

  def step(self, action: int) -> tuple[Sequence[np.ndarray], float, bool]:
    """Returns the observation, the reward and whether the episode is over."""

  def close(self) -> None:
    """Frees what the environment holds."""


class SharedArrays(NamedTuple):
  """What all processes see: one row for each of E environments.

  Attributes:
    actions: int32 [E], written by the caller.
    rewards: float32 [E], of the last step; 0 after the very first reset.
    dones: bool [E], whether the last step ended an episode.
    observation: arrays [E, ...]; after an end, of the next episode already.
  """

  actions: np.ndarray
  rewards: np.ndarray
  dones: np.ndarray
  observation: Sequence[np.ndarray]

  def show(self, env_id: int, observation: Sequence[np.ndarray]) -> None:
    """Writes the observation of one environment."""
    for array, value in zip(self.observation, observation, strict=True):
      array[env_id] = value


class Layout(NamedTuple):
  """The number of environments, and what an observation is made of.

  Attributes:
    num_envs: E.
    observation: the shape and type of each of its arrays.
  """

  num_envs: int
  observation: Sequence[tuple[tuple[int, ...], np.dtype]]

  def map(self, memory_fd: int) -> SharedArrays:
    """Maps the arrays, and first makes the memory large enough for them."""
    fields = [
      ((), np.dtype(np.int32)),
      ((), np.dtype(np.float32)),
      ((), np.dtype(np.bool_)),
      *self.observation,
    ]
    offsets = [0]
    for shape, dtype in fields:
      num_bytes = self.num_envs * math.prod(shape) * dtype.itemsize
      offsets.append(offsets[-1] + -(-num_bytes // 64) * 64)  # Cache lines.
    os.ftruncate(memory_fd, offsets[-1])
    memory = mmap.mmap(memory_fd, offsets[-1])
    actions, rewards, dones, *observation = (
      np.ndarray((self.num_envs, *shape), dtype, memory, offset)
      for (shape, dtype), offset in zip(fields, offsets, strict=False)
    )
    return SharedArrays(actions, rewards, dones, observation)


def supervise(control_fd: int) -> None:
  """Forks off the environments' processes and sees to their ends.

  Runs in the supervisor, whom the caller tells over `control_fd` first what to
  make, and then which environments to make anew. Its end is the end of them
  all. In a forked process this returns when the environment has ended.
  """
  # Both are the caller's affair, even if sent to all processes.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  signal.signal(signal.SIGTERM, signal.SIG_IGN)
  control = connection.Connection(control_fd)
  makers, link_fds, ready_fd, memory_fd = control.recv()
  links = [connection.Connection(fd) for fd in link_fds]
  processes = {}  # Environments' numbers by process number.
  with _woken_by_children() as woken:
    mine = _fork([(i, 0) for i in range(len(makers))], processes)
    while mine is None:
      wanted = _supervise_processes(control, woken, processes, links)
      if wanted is None:
        return
      mine = _fork([wanted], processes)
  env_id, num_restarts = mine
  for link in [control, *links[:env_id], *links[env_id + 1 :]]:
    link.close()
  maker = functools.partial(makers[env_id], num_restarts)
  _run_environment(env_id, maker, links[env_id], ready_fd, memory_fd)


def _fork(
  starts: Sequence[tuple[int, int]], processes: dict[int, int]
) -> tuple[int, int] | None:
  """Forks a process for each start; returns its own in each of them."""
  for start in starts:
    process_id = os.fork()
    if not process_id:
      return start
    processes[process_id] = start[0]
  return None


@contextlib.contextmanager
def _woken_by_children() -> Iterator[socket.socket]:
  """Gives a socket that can be read from when a child process has ended."""
  woken, waker = socket.socketpair()
  with woken, waker:
    waker.setblocking(False)
    signal.set_wakeup_fd(waker.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    yield woken
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)


def _supervise_processes(
  control: connection.Connection,
  woken: socket.socket,
  processes: dict[int, int],
  links: Sequence[connection.Connection],
) -> tuple[int, int] | None:
  """Tells of ends until an environment is wanted anew, or nothing any more.

  Returns:
    The environment's number and which of its restarts this is; None if the
    caller has lost interest: then all processes have ended.
  """
  while True:
    _reap(processes, links)
    readable, _, _ = select.select([control, woken], [], [])
    if woken in readable:
      woken.recv(4096)
    if control in readable:
      try:
        env_id, num_restarts = control.recv()
      except (EOFError, OSError):  # The caller has closed it, or died.
        _end_all(woken, processes, links)
        return None
      for process_id, number in list(processes.items()):
        if number == env_id:  # It has failed, and hangs in its end.
          os.kill(process_id, signal.SIGKILL)
          os.waitpid(process_id, 0)
          del processes[process_id]
      return env_id, num_restarts


def _end_all(
  woken: socket.socket,
  processes: dict[int, int],
  links: Sequence[connection.Connection],
) -> None:
  """Ends all that do not end by themselves where they wait for an action."""
  for number in (signal.SIGTERM, signal.SIGKILL):
    deadline = time.monotonic() + GRACE_SECS
    while _reap(processes, links):
      left = deadline - time.monotonic()
      if left <= 0:
        break
      if select.select([woken], [], [], left)[0]:
        woken.recv(4096)
    for process_id in processes:
      os.kill(process_id, number)
  while processes:
    processes.pop(os.wait()[0])


def _reap(
  processes: dict[int, int], links: Sequence[connection.Connection]
) -> bool:
  """Tells the caller of processes that have ended; False if none is left."""
  while processes:
    process_id, status = os.waitpid(-1, os.WNOHANG)
    if not process_id:
      break
    link = links[processes.pop(process_id)]
    _tell(link, 'died', os.waitstatus_to_exitcode(status))
  return bool(processes)


def _tell(link: connection.Connection, kind: str, value: Any) -> None:
  with contextlib.suppress(OSError):  # Nobody may be left to be told.
    link.send((kind, value))


def _run_environment(
  env_id: int,
  maker: Callable[[], EnvironmentProtocol],
  link: connection.Connection,
  ready_fd: int,
  memory_fd: int,
) -> None:
  """Makes and steps one environment until the caller is gone."""

  def exit_once(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit

  signal.signal(signal.SIGTERM, exit_once)
  environment = None
  try:
    environment = maker()
    _drain(link.fileno())
    link.send(('spec', environment.spec))
    layout = link.recv()
    arrays = layout.map(memory_fd)
    _step_until_closed(environment, env_id, arrays, link.fileno(), ready_fd)
  except UnusableLevelError as error:
    _tell(link, 'unusable', str(error))
  except Exception:
    _tell(link, 'failed', traceback.format_exc())
  finally:
    if environment is not None:
      environment.close()
    # What is left is the interpreter's own end.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _drain(link_fd: int) -> None:
  """Reads what was meant for a process that has died before this one."""
  os.set_blocking(link_fd, False)
  with contextlib.suppress(BlockingIOError):
    while os.read(link_fd, 4096):
      pass
  os.set_blocking(link_fd, True)


def _step_until_closed(
  environment: EnvironmentProtocol,
  env_id: int,
  arrays: SharedArrays,
  link_fd: int,
  ready_fd: int,
) -> None:
  actions, rewards, dones, _ = arrays
  rewards[env_id], dones[env_id] = 0, False  # This may be a restart.
  ready_message = np.int32(env_id).tobytes()
  arrays.show(env_id, environment.reset())
  os.write(ready_fd, ready_message)
  while os.read(link_fd, 1):
    observation, reward, done = environment.step(int(actions[env_id]))
    if done:
      observation = environment.reset()
    arrays.show(env_id, observation)
    rewards[env_id] = reward
    dones[env_id] = done
    os.write(ready_fd, ready_message)
