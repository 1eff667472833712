"""Kills the program again and again: every restart must find its way."""

import json
import pathlib
import random
import re
import time

import pytest

from tests import program

_KILLS = 20


def _newest(logdir):
  """Returns the frames of the newest checkpoint that was named, -1 if none."""
  try:
    text = (pathlib.Path(logdir) / 'checkpoints' / 'checkpoint').read_text()
  except FileNotFoundError:
    return -1
  return int(
    re.search(r'^model_checkpoint_path: "frames-(\d+)"', text, re.M)[1]
  )


def _has_leftovers(logdir):
  """Returns whether a file belongs to no checkpoint that was named."""
  folder = pathlib.Path(logdir) / 'checkpoints'
  if _newest(logdir) == -1:
    return folder.exists()
  named = (folder / 'checkpoint').read_text()
  return any(
    f'"{path.name.partition(".")[0]}"' not in named or 'tempstate' in path.name
    for path in folder.glob('frames-*')
  )


@pytest.mark.slow
@pytest.mark.parametrize('save_checkpoint_secs', [0, 1])
def test_kills_never_lose_a_checkpoint(tmp_path, save_checkpoint_secs):
  """Kills at random moments, with saves all the time or now and then."""
  chance = random.Random(1)
  logdir = tmp_path / 'run'
  settings = {
    'level_name': 'gym:CartPole-v1',
    'logdir': logdir,
    'use_lstm': True,
    'save_checkpoint_secs': save_checkpoint_secs,
  }
  cut_saves, starts = 0, []
  for kill in range(_KILLS):
    before = _newest(logdir)
    with program.Program(
      tmp_path / f'program{kill}', total_environment_frames=10**9, **settings
    ) as running:
      # The first kill comes before the first checkpoint.
      if kill:
        running.wait_for_training()
        running.wait_until(lambda before=before: _newest(logdir) > before)
      else:
        running.wait_until(lambda: 'seeds:' in running.out)
      time.sleep(chance.random())
      running.process.kill()
      running.process.wait()
      cut_saves += _has_leftovers(logdir)
      # The environments see to their own end.
      end = time.monotonic() + 5
      while running.processes():
        assert time.monotonic() < end
        time.sleep(0.05)
    assert running.error_lines() == []
    match = re.search(r'continuing from ([\d,]+)', running.out)
    starts.append(int(match[1].replace(',', '')) if match else 0)
    assert starts[-1] == before or before == -1
  with program.Program(
    tmp_path / 'last', total_environment_frames=_newest(logdir) + 20, **settings
  ) as last:
    assert last.finish() == 0
  assert last.error_lines() == []
  rows = [
    json.loads(line)
    for line in (logdir / 'metrics.jsonl').read_text().splitlines()
  ]
  frames = [row['num_environment_frames'] for row in rows]
  assert frames == sorted(frames)
  # Three of two files, and their list.
  assert len(list(logdir.glob('checkpoints/*'))) == 7
  size = sum(p.stat().st_size for p in logdir.glob('checkpoints/*'))
  print(
    f'{_KILLS} kills, {cut_saves} of them during a save; starts at {starts}; '
    f'{size:,} bytes of checkpoints'
  )
