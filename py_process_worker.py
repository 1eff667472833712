"""The side of `py_process` that runs outside the main program.

The supervisor is a small process that imports the environments' modules once
and forks one process for each environment. `multiprocessing` has such a server
too, but it runs the main program's file again in every process (which imports
TensorFlow: 5 s, 490 MB, and the renderer of DeepMind Lab crashes next to it),
and leaves a temporary folder behind when the main program is killed.

An environment may be a user's. In its process, imports find the user's modules
and not ours; see `_OwnModules`.

Nothing here, nor what is imported from here, may import TensorFlow.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import functools
from importlib import machinery
import math
import mmap
from multiprocessing import connection
import os
import select
import signal
import socket
import sys
import time
import traceback
from typing import Any, NamedTuple, Protocol

import numpy as np

from runtime import console
from runtime import errors

# How long environments may take to close, and then to obey SIGTERM.
GRACE_SECS = 1.0

ROOT = os.path.dirname(os.path.abspath(__file__))

# All modules and folders of this program except examples, tests and benchmarks,
# which contain environments. No environment imports these from ROOT.
OWN_NAMES = frozenset(
  'actor atari57 cluster config configs dmlab30 docs environments envs '
  'evaluation experiment kubernetes learner levels local_cluster networks '
  'popart py_process py_process_worker runtime suites torsos training '
  'unrolls vtrace wheels'.split()
)


class UnusableLevelError(errors.SettingError):
  """This level cannot be used at all; one line says why."""


class EnvironmentProtocol(Protocol):
  """What runs in a process.

  An observation is a tuple of arrays, of the shapes and types that the caller
  names in the Layout.

  Attributes:
    spec: what the environment reports about itself; anything that pickles.
  """

  spec: Any

  def reset(self) -> Sequence[np.ndarray]:
    """Starts an episode and returns its first observation."""

  def step(self, action: int) -> tuple[Sequence[np.ndarray], float, bool]:
    """Returns the observation, the reward and whether the episode has ended."""

  def close(self) -> None:
    """Frees the environment's resources."""


class SharedArrays(NamedTuple):
  """The arrays that all processes share: one row for each of E environments.

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

  def write_observation(
    self, env_id: int, observation: Sequence[np.ndarray]
  ) -> None:
    """Writes the observation of one environment."""
    for array, value in zip(self.observation, observation, strict=True):
      array[env_id] = value


class Layout(NamedTuple):
  """The number of environments, and the arrays of an observation.

  Attributes:
    num_envs: E.
    observation: the shape and type of each array.
  """

  num_envs: int
  observation: Sequence[tuple[tuple[int, ...], np.dtype]]

  def map(self, memory_fd: int) -> SharedArrays:
    """Makes the memory large enough for the arrays, and maps them."""
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
  """Forks the environments' processes and waits for their ends.

  Runs in the supervisor. Over `control_fd`, the caller first sends what to
  make, and then which environments to restart. When the caller closes it, all
  processes are ended. In a forked process this returns when the environment has
  ended.
  """
  console.keep_exit_code()  # Environments may print.
  # Both are for the caller to handle, even if sent to all processes.
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
  """Forks a process for each start; returns its start in each of them."""
  for start in starts:
    process_id = os.fork()
    if not process_id:
      return start
    processes[process_id] = start[0]
  return None


@contextlib.contextmanager
def _woken_by_children() -> Iterator[socket.socket]:
  """Yields a socket that becomes readable when a child process ends."""
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
  """Reports ended processes until the caller asks for a restart or is gone.

  Returns:
    The number of the environment to restart and the number of the restart; None
    if the caller is gone: then all processes have been ended.
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
        if number == env_id:  # It has failed, but its process still runs.
          os.kill(process_id, signal.SIGKILL)
          os.waitpid(process_id, 0)
          del processes[process_id]
      return env_id, num_restarts


def _end_all(
  woken: socket.socket,
  processes: dict[int, int],
  links: Sequence[connection.Connection],
) -> None:
  """Waits for all processes to end; signals those that take too long."""
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
  """Reports processes that have ended to the caller; False if none is left."""
  while processes:
    process_id, status = os.waitpid(-1, os.WNOHANG)
    if not process_id:
      break
    link = links[processes.pop(process_id)]
    _tell(link, 'died', os.waitstatus_to_exitcode(status))
  return bool(processes)


def _tell(link: connection.Connection, kind: str, value: Any) -> None:
  with contextlib.suppress(OSError):  # The caller may be gone.
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
    own_modules = _OwnModules()
    environment = maker()
    _drain(link.fileno())
    with own_modules.importable():
      link.send(('spec', environment.spec))
    layout = Layout(*link.recv())
    arrays = layout.map(memory_fd)
    _step_until_closed(environment, env_id, arrays, link.fileno(), ready_fd)
  except UnusableLevelError as error:
    _tell(link, 'unusable', str(error))
  except Exception:
    _tell(link, 'failed', traceback.format_exc())
  finally:
    if environment is not None:
      environment.close()
    # From here on, only the interpreter's shutdown remains.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


class _OwnModules:
  """Our modules, hidden from the imports of an environment.

  `import config` in a user's environment must find the user's config.py, not
  ours, and fail if there is none. So our modules leave `sys.modules`. They
  still work, because they hold references to each other, but must not import
  each other any more.
  """

  def __init__(self):
    """Hides them, for good."""
    self._hidden = _pop_own_modules()
    sys.path[:] = _order_for_users(sys.path)
    sys.meta_path[:] = [
      _UserPathFinder if finder is machinery.PathFinder else finder
      for finder in sys.meta_path
    ]

  @contextlib.contextmanager
  def importable(self) -> Iterator[None]:
    """Shows them for a moment: pickle looks up classes by their modules."""
    users = _pop_own_modules()
    sys.modules.update(self._hidden)
    try:
      yield
    finally:
      _pop_own_modules()
      sys.modules.update(users)


def _pop_own_modules() -> dict[str, Any]:
  """Removes and returns all modules with our names, ours or the user's."""
  names = [n for n in sys.modules if n.partition('.')[0] in OWN_NAMES]
  return {name: sys.modules.pop(name) for name in names}


def _order_for_users(paths: Sequence[str]) -> list[str]:
  """Returns where to look for modules: the working folder first, ROOT last.

  ROOT is still needed for environments that are in it, such as those in
  examples, or a user's own next to experiment.py.
  """
  users = [path for path in paths if not _is_root(path)]
  # Python's own switch for whether to search the working folder.
  if not os.environ.get('PYTHONSAFEPATH') and not _is_root('.'):
    with contextlib.suppress(FileNotFoundError):  # It has been deleted.
      users.insert(0, os.getcwd())
  return [*users, ROOT]


def _is_root(path: str) -> bool:
  try:
    return os.path.samefile(path or '.', ROOT)
  except (OSError, ValueError):
    return False


class _UserPathFinder(machinery.PathFinder):
  """Searches `sys.path`, but does not find our own modules."""

  @classmethod
  def find_spec(cls, fullname, path=None, target=None):
    """Finds a module; see importlib.abc.MetaPathFinder."""
    if path is None and fullname in OWN_NAMES:
      path = [entry for entry in sys.path if not _is_root(entry)]
    return super().find_spec(fullname, path, target)


def _drain(link_fd: int) -> None:
  """Discards what was sent to a process that has died before this one."""
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
  arrays.write_observation(env_id, environment.reset())
  os.write(ready_fd, ready_message)
  while os.read(link_fd, 1):
    observation, reward, done = environment.step(int(actions[env_id]))
    if done:
      observation = environment.reset()
    arrays.write_observation(env_id, observation)
    rewards[env_id] = reward
    dones[env_id] = done
    os.write(ready_fd, ready_message)
