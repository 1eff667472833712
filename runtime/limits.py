"""Limits of the system: raised where possible, else named before they are hit.

Nothing here may import TensorFlow: what makes environments asks here.
"""

from collections.abc import Iterable, Iterator
import contextlib
import math
import os
import pathlib
import re
import resource
from typing import Any

from runtime import errors

# What this process opens or starts besides its environments: TensorFlow, logs.
_OTHER_FILES = 100
_OTHER_PROCESSES = 100
# While environments start, each has both ends of a pipe in this process.
_FILES_PER_PROCESS = 2
_CGROUPS = '/sys/fs/cgroup'


def raise_soft_limits() -> None:
  """Raises this process's limits of files and processes as far as it may."""
  for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC):
    _, hard = resource.getrlimit(kind)
    with contextlib.suppress(OSError, ValueError):
      resource.setrlimit(kind, (hard, hard))


def check_processes(count: int) -> None:
  """Checks that this process may start so many environments' processes.

  Raises:
    errors.SettingError: the system does not allow as many files or processes.
  """
  files = len(os.listdir('/dev/fd')) + _OTHER_FILES
  files += _FILES_PER_PROCESS * count
  soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
  if soft != resource.RLIM_INFINITY and files > soft:
    raise errors.SettingError(
      f'{count:,} processes of environments need {files:,} open files, but '
      f'the limit is {soft:,}: raise it (ulimit -n {files}), or lower '
      '--num_actors or --envs_per_actor.'
    )
  needed = count + _OTHER_PROCESSES
  left = _count_processes_left()
  if needed > left:
    raise errors.SettingError(
      f'{count:,} processes of environments need {needed:,} processes, but '
      f'only {max(left, 0):,} more are allowed: raise the limit (ulimit -u, or '
      "the container's pids limit), or lower --num_actors or --envs_per_actor."
    )


def _count_processes_left() -> float:
  """Returns how many processes may still start; infinity if any number may."""
  lefts = [math.inf]
  soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
  # It does not bind root.
  if soft != resource.RLIM_INFINITY and os.geteuid():
    lefts.append(soft - _count_own_threads())
  for folder in _find_cgroups('pids'):
    limit = _read_number(folder / 'pids.max')
    used = _read_number(folder / 'pids.current')
    if limit is not None and used is not None:
      lefts.append(limit - used)
  return min(lefts)


def _count_own_threads() -> int:
  """Returns how many threads this user has: the limit counts these."""
  count = 0
  for status in pathlib.Path('/proc').glob('[0-9]*/status'):
    with contextlib.suppress(OSError):
      if status.stat().st_uid == os.geteuid():
        match = re.search(r'^Threads:\s*(\d+)', status.read_text(), re.M)
        count += int(match[1]) if match else 1
  return count


def check_memory(specs: Iterable[Any], count: int, what: str) -> None:
  """Checks that what a process keeps can fit in memory.

  Other things need memory as well, so that less than all of it may still be too
  much.

  Args:
    specs: the `tf.TensorSpec`s of one item.
    count: the number of items.
    what: what they are, and which flags say how many.

  Raises:
    errors.SettingError: they are larger than this machine's memory, or than
      what the process may use of it.
  """
  size = count * sum(math.prod(s.shape) * s.dtype.size for s in specs)
  available = find_memory()
  if size > available:
    raise errors.SettingError(
      f'{what} take {size / 1e9:,.1f} GB, but there are '
      f'{available / 1e9:,.1f} GB of memory. Lower one of these flags.'
    )


def find_memory() -> int:
  """Returns the bytes of memory that this process and its group may use."""
  sizes = [os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')]
  for folder in _find_cgroups('memory'):
    for name in ('memory.max', 'memory.limit_in_bytes'):
      limit = _read_number(folder / name)
      if limit is not None:
        sizes.append(limit)
  return min(sizes)


def _find_cgroups(controller: str) -> Iterator[pathlib.Path]:
  """Yields the folders of this process's control groups, of both versions.

  A group is bound by the limits of those that it is in. In a container, paths
  may be those of the host, and only the top folder exists.
  """
  try:
    lines = pathlib.Path('/proc/self/cgroup').read_text().splitlines()
  except OSError:
    return
  for line in lines:
    _, controllers, path = line.split(':', 2)
    if not controllers:
      top = pathlib.Path(_CGROUPS)
    elif controller in controllers.split(','):
      top = pathlib.Path(_CGROUPS, controller)
    else:
      continue
    folder = top / path.lstrip('/')
    while folder != top:
      yield folder
      folder = folder.parent
    yield top


def _read_number(path: pathlib.Path) -> int | None:
  """Returns the number in a file; None if there is none, or it says 'max'."""
  try:
    return int(path.read_text())
  except (OSError, ValueError):
    return None
