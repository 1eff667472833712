"""Tests of console.py."""

import os
import subprocess
import sys

import pytest

from runtime import console
from tests import program


class Clock:
  """A clock that moves when told."""

  def __init__(self):
    self.now = 1000.0

  def __call__(self):
    return self.now


def test_frame_rate_since_last_call_recent_and_overall():
  clock = Clock()
  rate = console.FrameRate(10_000, recent_secs=30, monotonic=clock)
  for _ in range(10):  # A slow start: 100 frames/s.
    clock.now += 1
    last = rate.update(10_000 + int(clock.now - 1000) * 100)
  assert last == 100.0
  assert rate.recent == rate.overall == 100.0

  frames = 11_000
  for _ in range(60):
    clock.now += 1
    frames += 400
    assert rate.update(frames) == 400.0
  assert rate.recent == 400.0
  assert rate.overall == pytest.approx(25_000 / 70)
  assert rate.seconds_left(frames + 8000) == 20.0


def test_frame_rate_looks_back_past_a_long_pause():
  clock = Clock()
  rate = console.FrameRate(0, recent_secs=30, monotonic=clock)
  clock.now += 1000
  assert rate.update(5000) == 5.0
  assert rate.recent == 5.0
  clock.now += 100
  assert rate.update(5000) == 0.0
  assert rate.recent == 0.0


def test_frame_rate_before_anything_moves():
  rate = console.FrameRate(500, monotonic=Clock())
  assert rate.recent == rate.overall == 0.0
  assert rate.update(500) == 0.0
  assert rate.seconds_left(1000) is None
  assert rate.seconds_left(500) == 0.0
  assert rate.seconds_left(400) == 0.0


def test_frame_rate_does_not_grow():
  clock = Clock()
  rate = console.FrameRate(0, recent_secs=30, monotonic=clock)
  for i in range(10_000):
    clock.now += 0.5
    rate.update(i)
  assert len(rate._marks) <= 62


@pytest.mark.parametrize(
  ('queue_size', 'text'),
  [
    (0, 'the actors are the limit'),
    (9.9, 'the actors are the limit'),
    (10, 'balanced'),
    (20, 'balanced'),
    (20.1, 'the learner is the limit'),
    (30, 'the learner is the limit'),
  ],
)
def test_bottleneck(queue_size, text):
  assert console.bottleneck(queue_size, 30) == text


def test_bottleneck_of_a_queue_of_one():
  assert console.bottleneck(0.1, 1) == 'the actors are the limit'
  assert console.bottleneck(0.9, 1) == 'the learner is the limit'


def test_bottleneck_refuses_a_queue_that_holds_nothing():
  with pytest.raises(ValueError, match='queue_capacity'):
    console.bottleneck(0, 0)


def test_say_needs_no_reader(capfd):
  console.say('a')
  console.warn('b')
  assert capfd.readouterr() == ('a\n', 'Warning: b\n')
  with open('/dev/full', 'w') as full:
    console.say('c', full)
    with pytest.raises(OSError, match='No space'):
      full.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())
  reader, writer = os.pipe()
  os.close(reader)
  with open(writer, 'w') as pipe:
    console.say('d', pipe)
    pipe.flush()


def _exit_code(code, **streams):
  """Runs code after `keep_exit_code`; sees to what it says."""
  code = (
    'import os, sys; from runtime import console; console.keep_exit_code(); '
    + code
  )
  # -E: without PYTHONUNBUFFERED.
  result = subprocess.run(
    [sys.executable, '-E', '-c', code],
    cwd=program.ROOT,
    text=True,
    **{'stderr': subprocess.PIPE} | streams,
  )
  assert 'Exception ignored' not in (result.stderr or '')
  return result.returncode


@pytest.mark.parametrize('lost', ['full', 'gone'])
@pytest.mark.parametrize(
  ('code', 'exit_code'),
  [
    ('print(1); console.warn("2")', 0),
    ('print(1); sys.exit("Error: 2")', 1),
    ('print(1); sys.exit(3)', 3),
    ('print(1); 1 / 0', 1),
    ('sys.stdout.close(); sys.exit(3)', 3),
  ],
)
def test_the_exit_code_is_kept(code, exit_code, lost):
  if lost == 'full':
    file = os.open('/dev/full', os.O_WRONLY)
  else:
    reader, file = os.pipe()
    os.close(reader)
  try:
    assert _exit_code(code, stdout=file) == exit_code
    assert _exit_code(code, stdout=file, stderr=file) == exit_code
  finally:
    os.close(file)


@pytest.mark.parametrize(
  ('encoding', 'expected'),
  [('ascii', b'runs/\\xe9\\udce9\n'), ('utf-8', b'runs/\xc3\xa9\\udce9\n')],
)
def test_characters_that_the_output_lacks_are_escaped(encoding, expected):
  code = (
    'from runtime import console; console.keep_exit_code(); '
    "console.say('runs/\\xe9\\udce9')"
  )
  printed = subprocess.check_output(
    [sys.executable, '-c', code],
    cwd=program.ROOT,
    env=os.environ | {'PYTHONIOENCODING': encoding},
  )
  assert printed == expected


def test_no_file_gets_the_number_of_a_missing_stream():
  code = (
    'import os, sys; from runtime import console; console.keep_exit_code(); '
    'print(1); number = os.open("/", os.O_RDONLY); '
    # Child processes inherit them.
    'are_inherited = all(map(os.get_inheritable, range(3))); '
    'sys.exit(7 if number > 2 and are_inherited else 1)'
  )
  script = 'exec "$0" -c "$1" <&- >&- 2>&-'
  command = ['bash', '-c', script, sys.executable, code]
  assert subprocess.run(command, cwd=program.ROOT).returncode == 7


def test_progress_line():
  assert console.progress_line(
    num_environment_frames=1_230_000,
    total_environment_frames=50_000_000,
    frames_per_second=3911.7,
    seconds_left=12_467,
    score='return (last 100) -12.3',
    queue_size=1.2,
    queue_capacity=32,
  ) == (
    '  1.23M / 50.0M frames (2.5%) | 3,912 frames/s | 3h 27m left |'
    ' return (last 100) -12.3 | queue 1/32: the actors are the limit'
  )


def test_progress_line_before_anything_is_known():
  assert console.progress_line(0, 1000, 0.0, None, 'none yet', 0, 32) == (
    '      0 / 1.00k frames (0.0%) | 0 frames/s | - left |'
    ' none yet | queue 0/32: the actors are the limit'
  )


def test_progress_line_with_actors_elsewhere():
  assert console.progress_line(
    0, 1000, 0.0, None, '-', 0, 32, '3 of 4 actors play'
  ).endswith(' | queue 0/32: the actors are the limit | 3 of 4 actors play')


def test_progress_line_of_a_budget_of_nothing():
  assert '0 / 0 frames' in console.progress_line(0, 0, 0.0, 0.0, '-', 0, 1)


@pytest.mark.parametrize(
  ('count', 'text'),
  [
    (0, '0'),
    (999, '999'),
    (1000, '1.00k'),
    (12_345, '12.3k'),
    (999_499, '999k'),
    (999_500, '1.00M'),
    (9_994_000, '9.99M'),
    (9_996_000, '10.0M'),
    (99_960_000, '100M'),
    (200_000_000, '200M'),
    (11_400_000_000, '11.4B'),
  ],
)
def test_format_count(count, text):
  assert console.format_count(count) == text


@pytest.mark.parametrize(
  ('seconds', 'text'),
  [
    (0, '0s'),
    (59.4, '59s'),
    (59.6, '1m 00s'),
    (725, '12m 05s'),
    (3599.7, '1h 00m'),
    (12_467, '3h 27m'),
    (183_600, '2d 03h'),
  ],
)
def test_format_duration(seconds, text):
  assert console.format_duration(seconds) == text


def make_startup_block(**changes):
  return console.startup_block(
    **{
      'task': 'pong',
      'agent': 'shallow network with LSTM',
      'devices': 'no GPU, 2 cores',
      'total_environment_frames': 200_000_000,
      'first_frame': 0,
      'logdir': 'runs/my pong',
      'checkpoint_dir': 'runs/my pong/checkpoints',
      'environment_settings': {'action repeat': 4, 'sticky actions': 0.0},
      **changes,
    }
  )


def test_startup_block_says_what_runs_where_and_how_to_stop():
  logdir = os.path.join(os.getcwd(), 'runs', 'my pong')
  assert make_startup_block().splitlines() == [
    'IMPALA on pong',
    '  agent        shallow network with LSTM',
    '  devices      no GPU, 2 cores',
    '  budget       200,000,000 environment frames',
    f'  logs         {logdir}',
    f'  checkpoints  {logdir}/checkpoints',
    f"  watch        tensorboard --logdir='{logdir}'",
    '  stop         Ctrl-C saves and ends; the same command resumes',
    '  environment  action repeat: 4',
    '               sticky actions: 0.0',
  ]


def test_startup_block_says_where_it_continues():
  assert 'continuing from 1,230,000' in make_startup_block(
    first_frame=1_230_000
  )


def test_startup_block_without_environment_settings():
  assert make_startup_block(environment_settings={}).endswith('resumes')
