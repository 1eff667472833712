"""Starts learners and actors on this machine, to try out a cluster.

How a learner and an actor are wired is in `training.py`.

  python local_cluster.py --num_learners=1 --num_actors=4 -- --level_name=pong

The flags after -- go to all processes. The first learner's output is shown. All
other output, including errors, is in `--output_dir`, in one file per process;
so is the run folder, unless `--logdir` names another. Ctrl-C and the other
signals of `experiment.py` save and end all processes. The exit code is the
first learner's.
"""

import argparse
import pathlib
import signal
import socket
import subprocess
import sys
import threading

from runtime import console
from runtime import errors
from runtime import run_folder
from runtime import signals

ROOT = pathlib.Path(__file__).parent


def find_free_ports(count: int) -> list[int]:
  """Returns distinct ports that no process listens on."""
  sockets = [socket.socket() for _ in range(count)]
  for one in sockets:
    one.bind(('', 0))
  ports = [one.getsockname()[1] for one in sockets]
  for one in sockets:
    one.close()
  return ports


def start(job_name: str, task: int, folder: pathlib.Path, flags: list[str]):
  """Starts a process, in its own session so that Ctrl-C does not reach it."""
  name = f'{job_name}{task}'
  with open(folder / f'{name}.txt', 'w') as output:
    return subprocess.Popen(
      [
        sys.executable,
        str(ROOT / 'experiment.py'),
        *flags,
        f'--job_name={job_name}',
        f'--task={task}',
      ],
      stdout=None if name == 'learner0' else output,
      stderr=output,
      start_new_session=True,
    )


def start_all(
  args: argparse.Namespace,
  folder: pathlib.Path,
  processes: dict[str, subprocess.Popen],
) -> None:
  """Starts all processes; adds them by name, 'learner0' first."""
  ports = find_free_ports(args.num_learners)
  hosts = ','.join(f'localhost:{port}' for port in ports)
  flags = [
    f'--logdir={folder / "run"}',
    *args.flags,
    # Last, since a flag file among the others may set the number of actors.
    f'--learner_hosts={hosts}',
    f'--num_actors={args.num_actors}',
  ]
  for job, count in (
    ('learner', args.num_learners),
    ('actor', args.num_actors),
  ):
    for task in range(count):
      processes[f'{job}{task}'] = start(job, task, folder, flags)


def tell_failures(
  processes: dict[str, subprocess.Popen], folder: pathlib.Path, told: set[str]
) -> None:
  """Prints which processes have failed, once each, and adds them to `told`."""
  for name, process in processes.items():
    code = process.poll()
    if code and code != signals.EXIT_STOPPED and name not in told:
      told.add(name)
      path = folder / f'{name}.txt'
      problem = find_problem(code, path)
      console.say(f'{name} has failed: {problem} ({path})', sys.stderr)


def find_problem(code: int, path: pathlib.Path) -> str:
  """Returns why a process has ended, from its exit code and its output."""
  if code < 0:
    return f'ended by {signal.Signals(-code).name}'
  lines = path.read_text(errors='replace').splitlines()
  errors = [line for line in lines if line.startswith('Error: ')]
  return errors[-1] if errors else f'exit code {code}'


def watch(
  processes: dict[str, subprocess.Popen],
  folder: pathlib.Path,
  stop: threading.Event,
) -> int:
  """Waits until the first learner has ended; then ends the others.

  Returns:
    The first learner's exit code; as in a shell, 128 + n for signal n.
  """
  learner = processes['learner0']
  told = set()
  while learner.poll() is None and not stop.wait(0.5):
    tell_failures(processes, folder, told)
  if learner.poll() != 0:
    tell_failures(processes, folder, told)
    for process in processes.values():
      process.terminate()
  for process in processes.values():
    process.wait()
  tell_failures(processes, folder, told)
  code = learner.returncode
  return code if code >= 0 else 128 - code


def parse_arguments() -> argparse.Namespace:
  """Parses the command line."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--num_learners', type=int, default=1, help='default: 1')
  parser.add_argument('--num_actors', type=int, default=2, help='default: 2')
  parser.add_argument(
    '--output_dir',
    default='runs/local_cluster',
    help='folder for the output of the processes; default: %(default)s',
  )
  parser.add_argument('flags', nargs='*', help='for experiment.py, after --')
  args = parser.parse_args()
  for name in ('num_learners', 'num_actors'):
    if getattr(args, name) < 1:
      parser.error(f'--{name} must be at least 1, got {getattr(args, name)}.')
  return args


def main() -> int:
  """Runs the cluster until it ends; returns the first learner's exit code."""
  args = parse_arguments()
  try:
    folder = pathlib.Path(run_folder.parse_path(args.output_dir, 'output_dir'))
    folder.mkdir(parents=True, exist_ok=True)
  except errors.SettingError as error:
    sys.exit(f'Error: {error}')
  except OSError as error:
    sys.exit(f'Error: cannot write to --output_dir={folder}: {error.strerror}')
  processes = {}
  stop = threading.Event()

  def kill_all():
    for process in list(processes.values()):
      process.kill()

  with signals.stopping(stop.set, force=kill_all):
    start_all(args, folder, processes)
    return watch(processes, folder, stop)


if __name__ == '__main__':
  console.keep_exit_code()
  signals.install()
  sys.exit(main())
