"""Starts learners and actors on this machine, to try a cluster out.

  python local_cluster.py --num_learners=1 --num_actors=4 -- --level_name=pong

What stands behind -- goes to all processes. Each has its output in a file of
`--output_dir`; what the first learner prints is shown. Ctrl-C ends them all.
"""

import argparse
import pathlib
import signal
import socket
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent


def find_free_ports(count: int) -> list[int]:
  """Returns different ports that nobody listens to."""
  sockets = [socket.socket() for _ in range(count)]
  for one in sockets:
    one.bind(('', 0))
  ports = [one.getsockname()[1] for one in sockets]
  for one in sockets:
    one.close()
  return ports


def start(job_name: str, task: int, folder: str, flags: list[str]):
  """Starts a process; in a session of its own, Ctrl-C does not reach it."""
  name = f'{job_name}{task}'
  with open(pathlib.Path(folder) / f'{name}.txt', 'w') as output:
    return subprocess.Popen(
      [
        sys.executable,
        str(ROOT / 'experiment.py'),
        f'--job_name={job_name}',
        f'--task={task}',
        *flags,
      ],
      stdout=None if name == 'learner0' else output,
      stderr=output,
      start_new_session=True,
    )


def main() -> int:
  """Runs the cluster to its end; returns 1 if a process has failed."""
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  parser.add_argument('--num_learners', type=int, default=1)
  parser.add_argument('--num_actors', type=int, default=2)
  parser.add_argument('--output_dir', default='runs/local_cluster')
  parser.add_argument('flags', nargs='*', help='of experiment.py, behind --')
  args = parser.parse_args()
  pathlib.Path(args.output_dir).mkdir(parents=True, exist_ok=True)
  ports = find_free_ports(args.num_learners)
  hosts = ','.join(f'localhost:{port}' for port in ports)
  flags = [f'--learner_hosts={hosts}', f'--num_actors={args.num_actors}']
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  processes = [
    start(job, task, args.output_dir, flags + args.flags)
    for job, n in (('learner', args.num_learners), ('actor', args.num_actors))
    for task in range(n)
  ]
  try:
    is_over = processes[0].wait() == 0
  except KeyboardInterrupt:
    is_over = False
  if not is_over:
    for process in processes:
      process.terminate()
  return int(any([process.wait() for process in processes]))


if __name__ == '__main__':
  sys.exit(main())
