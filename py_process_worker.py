"""What runs outside the main program for `py_process`: nothing but steps.

The supervisor is a small process that has imported the environments' modules
once and forks off one process for each environment. `multiprocessing` has such
a server too, but it runs the main program's file again in every process (which
imports TensorFlow: 5 s, 490 MB, and a renderer that crashes beside it), and
leaves a temporary folder behind when the main program is killed.

Nothing here, nor what is imported from here, may import TensorFlow.
"""

from collections.abc import Callable, Sequence
import contextlib
import math
import mmap
from multiprocessing import connection
import os
import pickle
import select
import signal
import socket
import sys
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


def supervise() -> None:
  """Forks off the environments' processes and sees to their ends.

  Runs in the supervisor, whose standard input brings the makers and then stays
  open for as long as the caller wants the environments. In a forked process it
  returns when the environment has ended.
  """
  # Ctrl-C is the caller's affair.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  makers, link_fds, ready_fd, memory_fd = pickle.load(sys.stdin.buffer)
  links = [connection.Connection(fd) for fd in link_fds]
  processes = {}
  for env_id, maker in enumerate(makers):
    process_id = os.fork()
    if process_id:
      processes[process_id] = links[env_id]
      continue
    for link in links[:env_id] + links[env_id + 1 :]:
      link.close()
    with open(os.devnull) as nothing:
      os.dup2(nothing.fileno(), sys.stdin.fileno())
    _run_environment(env_id, maker, links[env_id], ready_fd, memory_fd)
    return
  # ready_fd stays open: a caller that finds it closed could not tell why.
  os.close(memory_fd)
  _supervise_processes(processes)


def _supervise_processes(processes: dict[int, connection.Connection]) -> None:
  """Tells of ends, and ends all that outlive the caller's interest."""
  woken, waker = socket.socketpair()
  waker.setblocking(False)
  signal.set_wakeup_fd(waker.fileno())
  signal.signal(signal.SIGCHLD, lambda *_: None)
  watched = [sys.stdin, woken]
  escalation = []
  while _reap(processes):
    now = time.monotonic()
    timeout = max(0.0, escalation[0][0] - now) if escalation else None
    readable, _, _ = select.select(watched, [], [], timeout)
    if woken in readable:
      woken.recv(4096)
    if sys.stdin in readable:  # The caller has closed it, or died.
      watched.remove(sys.stdin)
      escalation = [
        (now + GRACE_SECS, signal.SIGTERM),
        (now + 2 * GRACE_SECS, signal.SIGKILL),
      ]
    if escalation and time.monotonic() >= escalation[0][0]:
      for process_id in processes:
        os.kill(process_id, escalation[0][1])
      del escalation[0]


def _reap(processes: dict[int, connection.Connection]) -> bool:
  """Tells the caller of processes that have ended; False if none is left."""
  while processes:
    process_id, status = os.waitpid(-1, os.WNOHANG)
    if not process_id:
      break
    link = processes.pop(process_id)
    _tell(link, 'died', os.waitstatus_to_exitcode(status))
    link.close()
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


def _step_until_closed(
  environment: EnvironmentProtocol,
  env_id: int,
  arrays: SharedArrays,
  link_fd: int,
  ready_fd: int,
) -> None:
  actions, rewards, dones, _ = arrays
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
