"""Code that all benchmarks share: rounds, statistics and the report.

Importing this defines the flags --rounds and --json.
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from typing import Any

from absl import flags
import psutil

FLAGS = flags.FLAGS

flags.DEFINE_integer('rounds', 5, 'The number of rounds.')
flags.DEFINE_string('json', None, 'The file to write all rounds to.')

_PACKAGES = ('tensorflow', 'dm-sonnet', 'numpy', 'ale-py', 'gymnasium')


def describe_circumstances() -> dict[str, Any]:
  """Returns the machine, date, command, commit and versions, by name."""
  versions = {'python': platform.python_version()}
  for package in _PACKAGES:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      versions[package] = importlib.metadata.version(package)
  return {
    'date': datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    'command': shlex.join(['python', *sys.orig_argv[1:]]),
    'commit': _git('describe', '--always', '--dirty'),
    'processor': _processor(),
    'cores': len(os.sched_getaffinity(0)),
    'memory_gb': round(psutil.virtual_memory().total / 1e9, 1),
    'system': f'{platform.system()} {platform.machine()}',
    'versions': versions,
  }


def summarise(rounds: Sequence[Mapping[str, float]]) -> dict[str, dict]:
  """Returns each figure's median, min and max over the rounds, by name."""
  summary = {}
  for name in rounds[0]:
    values = [one[name] for one in rounds]
    summary[name] = {
      'median': statistics.median(values),
      'min': min(values),
      'max': max(values),
    }
  return summary


def print_results(results: Mapping[str, Any]) -> None:
  """Prints all results except the individual rounds.

  Args:
    results: a 'summary' (see `summarise`) and other results, by name.
  """
  summary = results['summary']
  width = max(len(name) for name in summary)
  print(f'\n{"":{width}} {"median":>10} {"min":>10} {"max":>10}')
  for name, figures in summary.items():
    columns = (_round(figures[kind]) for kind in ('median', 'min', 'max'))
    print(f'{name:{width}} ' + ' '.join(f'{text:>10}' for text in columns))
  print()
  for name, value in results.items():
    if name not in ('summary', 'rounds', 'settings'):
      print(f'{name}: {value}')


def write_json(path: str, results: Mapping[str, Any]) -> None:
  """Writes the results to a file."""
  with open(path, 'w', encoding='utf-8') as file:
    file.write(json.dumps(results, indent=2) + '\n')


def _round(value: float) -> str:
  return f'{value:,.0f}' if value >= 1000 else f'{value:.3g}'


def _processor() -> str:
  with contextlib.suppress(OSError), open('/proc/cpuinfo') as file:
    for line in file:
      if line.startswith('model name'):
        return line.partition(':')[2].strip()
  return platform.processor()


def _git(*arguments: str) -> str | None:
  with contextlib.suppress(OSError, subprocess.CalledProcessError):
    return subprocess.check_output(
      ['git', *arguments],
      cwd=os.path.dirname(os.path.abspath(__file__)),
      stderr=subprocess.DEVNULL,
      text=True,
    ).strip()
  return None


def repeat(measure: Callable[[], dict[str, float]]) -> list[dict[str, float]]:
  """Measures --rounds rounds, and prints each.

  Args:
    measure: measures one round; returns figures by name.

  Returns:
    The figures of each round.
  """
  rounds = []
  for i in range(FLAGS.rounds):
    rounds.append(measure())
    print(f'round {i + 1} of {FLAGS.rounds}', rounds[-1], flush=True)
  return rounds


def finish(
  rounds: Sequence[Mapping[str, float]], more: Mapping[str, Any] | None = None
) -> None:
  """Prints the results, and writes them to the file of --json, if given.

  Args:
    rounds: the figures of each round, by name.
    more: other results, by name.
  """
  results = {
    **describe_circumstances(),
    **(more or {}),
    'summary': summarise(rounds),
    'rounds': rounds,
  }
  print_results(results)
  if FLAGS.json:
    write_json(FLAGS.json, results)
