"""The side of `py_process` that runs outside the main program.

The supervisor is a small process that imports the environments' modules once
and forks the environments' processes. `multiprocessing` has such a server
too, but it runs the main program's file again in every process (which imports
TensorFlow: 5 s, 490 MB, and the renderer of DeepMind Lab crashes next to it),
and leaves a temporary folder behind when the main program is killed.

An environment may be a user's. In its process, imports find the user's modules
and not ours; see `_OwnModules`.

Nothing here, nor what is imported from here, may import TensorFlow.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import functools
from importlib import machinery
import math
import mmap
from multiprocessing import connection
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from typing import Any, NamedTuple, Protocol

import numpy as np

from runtime import console
from runtime import errors
from runtime import signals

# How long environments may take to close, and then to obey SIGTERM.
GRACE_SECS = 1.0
# More than the numbers of all environments of one process.
_MAX_BYTES = 2**16

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

  def step(self, action: int) -> tuple[Sequence[np.ndarray], float, bool, bool]:
    """Takes one step.

    Returns:
      The observation, the reward, whether the episode has ended, and whether a
      time limit has cut it instead. After an end, the observation is not used.
    """

  def close(self) -> None:
    """Frees the environment's resources."""


class SharedArrays(NamedTuple):
  """The arrays that all processes share: one row for each of E environments.

  Attributes:
    actions: int32 [E], written by the caller.
    rewards: float32 [E], of the last step; 0 after a reset that was a step of
      its own: the very first one, and the one after a cut.
    dones: bool [E], whether the last step ended an episode.
    cuts: bool [E], whether a time limit cut it instead.
    steps: int32 [E], of the episode; after its end, of all of it. 0 after a
      reset that was a step of its own; -1 before.
    returns: float32 [E], the sum of its rewards.
    running: int32 [E], row p is the environment that process p runs, or ran.
    observation: arrays [E, ...]; after an end, of the next episode already;
      after a cut, the last one of the episode.
  """

  actions: np.ndarray
  rewards: np.ndarray
  dones: np.ndarray
  cuts: np.ndarray
  steps: np.ndarray
  returns: np.ndarray
  running: np.ndarray
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
      ((), np.dtype(np.bool_)),
      ((), np.dtype(np.int32)),
      ((), np.dtype(np.float32)),
      ((), np.dtype(np.int32)),
      *self.observation,
    ]
    offsets = [0]
    for shape, dtype in fields:
      num_bytes = self.num_envs * math.prod(shape) * dtype.itemsize
      offsets.append(offsets[-1] + -(-num_bytes // 64) * 64)  # Cache lines.
    os.ftruncate(memory_fd, offsets[-1])
    memory = mmap.mmap(memory_fd, offsets[-1])
    arrays = [
      np.ndarray((self.num_envs, *shape), dtype, memory, offset)
      for (shape, dtype), offset in zip(fields, offsets, strict=False)
    ]
    num_others = len(fields) - len(self.observation)
    return SharedArrays(*arrays[:num_others], arrays[num_others:])


def supervise(control_fd: int) -> None:
  """Forks the environments' processes and waits for their ends.

  Runs in the supervisor. Over `control_fd`, the caller first sends what to
  make, and then which processes to restart. When the caller closes it, all
  processes are ended. In a forked process this returns when its environments
  have ended.
  """
  console.keep_exit_code()  # Environments may print.
  # All are for the caller to handle, even if sent to all processes.
  for number in signals.NUMBERS:
    signal.signal(number, signal.SIG_IGN)
  control = connection.Connection(control_fd)
  makers, groups, link_fds, ready_fd, memory_fd, scratch = control.recv()
  links = [connection.Connection(fd) for fd in link_fds]
  processes = {}  # Numbers of the groups by process number.
  with _removing(scratch), _woken_by_children() as woken:
    mine = _fork([(i, 0) for i in range(len(groups))], processes)
    while mine is None:
      wanted = _supervise_processes(control, woken, processes, links)
      if wanted is None:
        return
      mine = _fork([wanted], processes)
  number, num_restarts = mine
  for link in [control, *links[:number], *links[number + 1 :]]:
    link.close()
  _run_environments(
    number,
    {i: functools.partial(makers[i], num_restarts) for i in groups[number]},
    links[number],
    ready_fd,
    memory_fd,
    os.path.join(scratch, str(number)),
  )


@contextlib.contextmanager
def _removing(folder: str) -> Iterator[None]:
  """Removes a folder at the end of this process, but not of a forked one."""
  process_id = os.getpid()
  try:
    yield
  finally:
    if os.getpid() == process_id:
      shutil.rmtree(folder, ignore_errors=True)


def _fork(
  starts: Sequence[tuple[int, int]], processes: dict[int, int]
) -> tuple[int, int] | None:
  """Forks a process for each start; returns its start in each of them."""
  for start in starts:
    process_id = os.fork()
    with contextlib.suppress(OSError):  # In both: neither waits for the other.
      os.setpgid(process_id, process_id or os.getpid())
    if not process_id:
      return start
    processes[process_id] = start[0]
  return None


def _kill_group(process_id: int) -> None:
  """Kills a process and all that it started, such as compilers of maps."""
  with contextlib.suppress(ProcessLookupError):
    os.killpg(process_id, signal.SIGKILL)


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
    The number of the process to restart and the number of the restart; None if
    the caller is gone: then all processes have been ended.
  """
  while True:
    _reap(processes, links)
    readable, _, _ = select.select([control, woken], [], [])
    if woken in readable:
      woken.recv(4096)
    if control in readable:
      try:
        wanted, num_restarts = control.recv()
      except (EOFError, OSError):  # The caller has closed it, or died.
        _end_all(woken, processes, links)
        return None
      for process_id, number in list(processes.items()):
        if number == wanted:  # It has failed, but its process still runs.
          _kill_group(process_id)
          os.waitpid(process_id, 0)
          del processes[process_id]
      return wanted, num_restarts


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
    process_id, _ = os.wait()
    _kill_group(process_id)
    processes.pop(process_id)


def _reap(
  processes: dict[int, int], links: Sequence[connection.Connection]
) -> bool:
  """Reports processes that have ended to the caller; False if none is left."""
  while processes:
    process_id, status = os.waitpid(-1, os.WNOHANG)
    if not process_id:
      break
    _kill_group(process_id)
    link = links[processes.pop(process_id)]
    _tell(link, 'died', None, os.waitstatus_to_exitcode(status))
  return bool(processes)


def _tell(
  link: connection.Connection, kind: str, env_id: int | None, value: Any
) -> None:
  with contextlib.suppress(OSError):  # The caller may be gone.
    link.send((kind, env_id, value))


def _run_environments(
  number: int,
  makers: Mapping[int, Callable[[], EnvironmentProtocol]],
  link: connection.Connection,
  ready_fd: int,
  memory_fd: int,
  scratch: str,
) -> None:
  """Makes and steps environments until the caller is gone.

  Args:
    number: the number of this process.
    makers: by the environments' numbers.
    link: to the caller.
    ready_fd: where to write the numbers of those that are ready.
    memory_fd: the shared memory.
    scratch: the working folder, also for temporary files.
  """

  def exit_once(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit

  signal.signal(signal.SIGTERM, exit_once)
  made = {}
  env_id = None
  try:
    own_modules = _OwnModules()  # Notes the working folder.
    _enter(scratch)
    _drain(link.fileno())
    for env_id, maker in makers.items():
      made[env_id] = maker()
      with own_modules.importable():
        link.send(('spec', env_id, made[env_id].spec))
    arrays = Layout(*link.recv()).map(memory_fd)
    group = _Group(made, arrays, number)
    # If one fails, `env_id` says which.
    for env_id in group.run(link.fileno(), ready_fd):  # noqa: B007
      pass
  except UnusableLevelError as error:
    _tell(link, 'unusable', env_id, str(error))
  except errors.UserError as error:
    _tell(link, 'failed', env_id, str(error))
  except Exception:
    _tell(link, 'failed', env_id, traceback.format_exc())
  finally:
    for environment in made.values():
      environment.close()
    # From here on, only the interpreter's shutdown remains.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _enter(folder: str) -> None:
  """Makes a folder the working folder, and that of temporary files."""
  os.makedirs(folder, exist_ok=True)
  os.chdir(folder)
  os.environ['TMPDIR'] = folder
  tempfile.tempdir = None  # Until it is asked for.


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
  with contextlib.suppress(FileNotFoundError):  # The working folder is deleted.
    # Absolute, since the working folder will be another.
    users = [os.path.abspath(path) for path in users]
    # Python's own switch for whether to search the working folder.
    if not os.environ.get('PYTHONSAFEPATH') and not _is_root('.'):
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


class _Group:
  """The environments of one process, which take turns."""

  def __init__(
    self,
    made: Mapping[int, EnvironmentProtocol],
    arrays: SharedArrays,
    number: int,
  ):
    """Takes the environments, by their numbers, and this process's number."""
    self._made = made
    self._arrays = arrays
    self._number = number
    self._waiting = set(made)  # For a reset that is a step of its own.
    self._steps = dict.fromkeys(made, 0)  # Of the episodes so far.
    self._returns = dict.fromkeys(made, 0.0)

  def run(self, link_fd: int, ready_fd: int) -> Iterator[int]:
    """Steps those whose numbers come over the link, until it is closed.

    Yields:
      The number of the environment that is next.
    """
    env_ids = np.array(list(self._made), np.int32)
    while env_ids.size:
      for env_id in env_ids.tolist():
        yield env_id
        self._arrays.running[self._number] = env_id
        self._advance(env_id)
      # One message for all of them: waking the caller takes longer than a step
      # of a small environment.
      os.write(ready_fd, env_ids.tobytes())
      env_ids = np.frombuffer(os.read(link_fd, _MAX_BYTES), np.int32)

  def _advance(self, env_id: int) -> None:
    """Takes one step of an environment, or begins its next episode."""
    arrays, environment = self._arrays, self._made[env_id]
    reward, done, is_cut = 0.0, False, False
    if env_id in self._waiting:
      self._waiting.remove(env_id)
      observation = environment.reset()
    else:
      observation, reward, done, is_cut = environment.step(
        int(arrays.actions[env_id])
      )
      self._steps[env_id] += 1
      self._returns[env_id] += reward
    if done:
      observation = environment.reset()
    elif is_cut:
      self._waiting.add(env_id)
    arrays.write_observation(env_id, observation)
    arrays.rewards[env_id] = reward
    arrays.dones[env_id] = done
    arrays.cuts[env_id] = is_cut
    arrays.steps[env_id] = self._steps[env_id]
    arrays.returns[env_id] = self._returns[env_id]
    if done or is_cut:
      self._steps[env_id], self._returns[env_id] = 0, 0.0
