"""Plots the learning curves of runs from their metrics.jsonl.

  python benchmarks/plot.py RUN_DIR... --out=FILE.png

It plots the mean return of the last 100 episodes, on the left against
environment frames, on the right against hours of training, with one line per
run. It needs matplotlib.
"""

import argparse
from collections.abc import Sequence
import json
import pathlib

import matplotlib

matplotlib.use('Agg')  # No display needed.
from matplotlib import pyplot as plt  # noqa: E402

# Okabe and Ito's colours, which colour-blind readers can tell apart too.
_COLOURS = (
  '#0072B2',
  '#D55E00',
  '#009E73',
  '#CC79A7',
  '#E69F00',
  '#56B4E9',
  '#000000',
)


def read_curve(
  run_dir: pathlib.Path, tag: str
) -> tuple[list[float], list[float], list[float]]:
  """Reads one curve of a run.

  Args:
    run_dir: the log directory of a run.
    tag: the curve, a key of `metrics.jsonl`.

  Returns:
    Millions of environment frames, hours of training, and values: three lists
    of the same length.

  Raises:
    FileNotFoundError: the directory has no `metrics.jsonl`.
    ValueError: no line has the tag.
  """
  frames, hours, values = [], [], []
  with open(run_dir / 'metrics.jsonl', encoding='utf-8') as file:
    for line in file:
      if not line.endswith('\n'):
        break  # It is being written right now.
      row = json.loads(line)
      if row.get(tag) is not None:
        frames.append(row['num_environment_frames'] / 1e6)
        hours.append(row['train_secs'] / 3600)
        values.append(row[tag])
  if not values:
    raise ValueError(f'No {tag} in {run_dir / "metrics.jsonl"}.')
  return frames, hours, values


def smooth(values: Sequence[float], window: int) -> list[float]:
  """Returns the mean of each value and up to `window - 1` before it."""
  means, total = [], 0.0
  for i, value in enumerate(values):
    total += value - (values[i - window] if i >= window else 0.0)
    means.append(total / min(i + 1, window))
  return means


def make_labels(run_dirs: Sequence[pathlib.Path]) -> list[str]:
  """Returns the shortest path suffixes that tell the runs apart."""
  parts = [run_dir.resolve().parts for run_dir in run_dirs]
  longest = max(len(part) for part in parts)
  for length in range(1, longest + 1):
    labels = ['/'.join(part[-length:]) for part in parts]
    if len(set(labels)) == len(set(parts)):
      break
  return labels


def plot(
  run_dirs: Sequence[pathlib.Path],
  out: pathlib.Path,
  tag: str = 'episode_return_mean_100',
  window: int = 1,
  title: str = '',
) -> None:
  """Plots the runs into an image file.

  Args:
    run_dirs: log directories of runs.
    out: the image file; its extension gives the format.
    tag: the curve to plot, a key of `metrics.jsonl`.
    window: the number of log lines that each point averages.
    title: the title above both plots; '' for none.
  """
  figure, axes = plt.subplots(
    1, 2, figsize=(10, 4), sharey=True, layout='constrained'
  )
  for i, (run_dir, label) in enumerate(
    zip(run_dirs, make_labels(run_dirs), strict=True)
  ):
    frames, hours, values = read_curve(run_dir, tag)
    values = smooth(values, window)
    style = {'color': _COLOURS[i % len(_COLOURS)], 'linewidth': 1.6}
    axes[0].plot(frames, values, label=label, **style)
    axes[1].plot(hours, values, **style)

  axes[0].set_xlabel('Environment frames (millions)')
  axes[1].set_xlabel('Training time (hours)')
  axes[0].set_ylabel(
    'Mean return, last 100 episodes'
    if tag == 'episode_return_mean_100'
    else tag
  )
  for axis in axes:
    axis.set_xlim(left=0)
    axis.grid(color='0.9')
    axis.set_axisbelow(True)
    axis.spines[['top', 'right']].set_visible(False)
  if title:
    figure.suptitle(title)
  # Below the plots, the legend covers no curve, however many runs there are.
  figure.legend(
    loc='outside lower center', ncols=min(len(run_dirs), 4), frameon=False
  )
  figure.savefig(out, dpi=150)
  plt.close(figure)


def main() -> None:
  """Parses the command line and plots."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('run_dirs', nargs='+', type=pathlib.Path)
  parser.add_argument('--out', required=True, type=pathlib.Path)
  parser.add_argument(
    '--tag',
    default='episode_return_mean_100',
    help='the curve to plot, a key of metrics.jsonl (default: %(default)s)',
  )
  parser.add_argument(
    '--smooth',
    default=1,
    type=int,
    metavar='LINES',
    help='average each point over this many log lines (default: %(default)s)',
  )
  parser.add_argument('--title', default='')
  arguments = parser.parse_args()
  if arguments.smooth < 1:
    parser.error('--smooth must be at least 1.')
  try:
    plot(
      arguments.run_dirs,
      arguments.out,
      arguments.tag,
      arguments.smooth,
      arguments.title,
    )
  except (OSError, ValueError) as error:
    parser.exit(1, f'{error}\n')


if __name__ == '__main__':
  main()
