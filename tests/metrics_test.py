"""Tests of metrics.py: files read back with the tools that users have."""

import json
import math
import os
import resource
import subprocess
import sys
import threading

import numpy as np
import pytest
from tensorboard.backend.event_processing import event_accumulator

from runtime import metrics


def read_lines(logdir):
  """Reads metrics.jsonl with no mercy for NaN, Infinity or broken lines."""

  def refuse(constant):
    raise ValueError(f'{constant} is not JSON.')

  text = (logdir / 'metrics.jsonl').read_text()
  assert not text or text.endswith('\n')
  return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def read_events(logdir):
  """Reads all event files of the directory as TensorBoard does."""
  accumulator = event_accumulator.EventAccumulator(str(logdir))
  accumulator.Reload()
  return accumulator


def read_curve(logdir, tag):
  """Reads one curve as [(step, value)]."""
  return [(e.step, e.value) for e in read_events(logdir).Scalars(tag)]


class Clock:
  """A clock that moves when told."""

  def __init__(self):
    self.now = 1000.0

  def __call__(self):
    return self.now


# Episodes.


def test_episodes_reports_means_of_what_finished_since_the_last_call():
  episodes = metrics.Episodes()
  episodes.add('pong', -21.0, 4000)
  episodes.add('pong', -19.0, 6000)
  episodes.add('breakout', 3.0, 800)
  assert episodes.scalars() == {
    'pong/episode_return': -20.0,
    'pong/episode_frames': 5000.0,
    'pong/episodes': 2,
    'pong/episode_return_mean_100': -20.0,
    'breakout/episode_return': 3.0,
    'breakout/episode_frames': 800.0,
    'breakout/episodes': 1,
    'breakout/episode_return_mean_100': 3.0,
    'episode_return_mean_100': pytest.approx(-37 / 3),
  }
  assert episodes.scalars() == {}

  episodes.add('pong', -10.0, 2000)
  scalars = episodes.scalars()
  assert scalars['pong/episode_return'] == -10.0
  assert scalars['pong/episode_return_mean_100'] == pytest.approx(-50 / 3)
  assert scalars['episode_return_mean_100'] == pytest.approx(-47 / 4)
  assert not any(tag.startswith('breakout/') for tag in scalars)


def test_episodes_keeps_the_last_hundred_of_each_level():
  episodes = metrics.Episodes()
  for i in range(150):
    episodes.add('a', i, 1)
  episodes.add('b', 1000.0, 1)
  assert episodes.mean_return('a') == np.mean(range(50, 150))
  assert episodes.mean_return('b') == 1000.0
  assert episodes.mean_return() == np.mean([*range(51, 150), 1000])
  assert episodes.last_returns() == {'a': list(range(50, 150)), 'b': [1000.0]}
  assert episodes.count('a') == 150
  assert episodes.count('b') == 1
  assert episodes.count() == 151


def test_episodes_before_any_has_finished():
  episodes = metrics.Episodes()
  assert episodes.mean_return() is None
  assert episodes.mean_return('pong') is None
  assert episodes.count() == episodes.count('pong') == 0
  assert episodes.last_returns() == {}
  assert episodes.scalars() == {}


def test_episodes_loses_none_when_many_threads_add():
  episodes = metrics.Episodes()
  threads_left = 4
  reported = []

  def add():
    for i in range(2000):
      episodes.add(f'level{i % 3}', 1.0, 4)

  threads = [threading.Thread(target=add) for _ in range(threads_left)]
  for thread in threads:
    thread.start()
  while any(thread.is_alive() for thread in threads):
    reported.append(episodes.scalars())
  reported.append(episodes.scalars())
  for thread in threads:
    thread.join()

  assert episodes.count() == 8000
  total = sum(
    value
    for scalars in reported
    for tag, value in scalars.items()
    if tag.endswith('/episodes')
  )
  assert total == 8000


# Logger.


def test_logger_writes_the_same_to_both_files(tmp_path):
  clock = Clock()
  logger = metrics.Logger(tmp_path / 'made' / 'here', monotonic=clock)
  clock.now += 2.5
  logger.write({'losses/total': 4.5, 'entropy': np.float32(0.25)}, 2560)
  clock.now += 1.0
  logger.write({'losses/total': np.float64(3.5)}, np.int64(5120))

  # Not closed: a run can be watched, and killed, at any time.
  logdir = tmp_path / 'made' / 'here'
  first, second = read_lines(logdir)
  assert abs(first.pop('wall_time') - second.pop('wall_time')) < 60
  assert first == {
    'num_environment_frames': 2560,
    'train_secs': 2.5,
    'losses/total': 4.5,
    'entropy': 0.25,
  }
  assert second == {
    'num_environment_frames': 5120,
    'train_secs': 3.5,
    'losses/total': 3.5,
  }
  assert read_curve(logdir, 'losses/total') == [(2560, 4.5), (5120, 3.5)]
  assert read_curve(logdir, 'entropy') == [(2560, 0.25)]
  logger.close()


def test_logger_says_what_the_axis_counts(tmp_path):
  logger = metrics.Logger(tmp_path)
  logger.write({'entropy': 1.0}, 4)
  metadata = read_events(tmp_path).SummaryMetadata('entropy')
  assert metadata.plugin_data.plugin_name == 'scalars'
  assert 'environment frames' in metadata.summary_description


@pytest.mark.parametrize('value', [math.nan, math.inf, -math.inf, 1e300])
def test_logger_keeps_json_strict(tmp_path, value):
  logger = metrics.Logger(tmp_path)
  logger.write({'bad': value, 'good': 1.0}, 4)
  (line,) = read_lines(tmp_path)
  assert line['bad'] == (value if math.isfinite(value) else None)
  assert line['good'] == 1.0
  ((step, _),) = read_curve(tmp_path, 'bad')
  assert step == 4
  assert read_curve(tmp_path, 'good') == [(4, 1.0)]


def test_logger_keeps_large_frame_counts_exact(tmp_path):
  metrics.Logger(tmp_path).write({'x': 0.0}, 10**10 + 1)
  assert read_lines(tmp_path)[0]['num_environment_frames'] == 10**10 + 1
  assert read_curve(tmp_path, 'x') == [(10**10 + 1, 0.0)]


def test_logger_continues_from_the_restored_frame(tmp_path):
  clock = Clock()
  logger = metrics.Logger(tmp_path, monotonic=clock)
  for frames in (100, 200, 300, 400):
    clock.now += 10
    logger.write({'x': float(frames)}, frames)
  # Killed here. The last checkpoint is of frame 200.
  clock.now += 5000
  logger = metrics.Logger(tmp_path, first_frame=200, monotonic=clock)
  clock.now += 7
  logger.write({'x': -1.0}, 250)
  logger.write({'x': -2.0}, 350)

  lines = read_lines(tmp_path)
  assert [line['num_environment_frames'] for line in lines] == [
    100,
    200,
    250,
    350,
  ]
  assert [line['train_secs'] for line in lines] == [10, 20, 27, 27]
  assert read_curve(tmp_path, 'x') == [
    (100, 100.0),
    (200, 200.0),
    (250, -1.0),
    (350, -2.0),
  ]
  assert not list(tmp_path.glob('*.new'))


def test_logger_forgets_old_points_before_it_writes_new_ones(tmp_path):
  logger = metrics.Logger(tmp_path)
  logger.write({'x': 1.0}, 100)
  logger.write({'x': 1.0}, 200)
  metrics.Logger(tmp_path, first_frame=100)
  assert read_curve(tmp_path, 'x') == [(100, 1.0)]


def test_logger_continues_where_the_clock_is_behind(tmp_path, monkeypatch):
  """Another machine's clock, or one that is set back while a run trains."""
  now = 1.8e9
  monkeypatch.setattr(metrics.time, 'time', lambda: now)
  logger = metrics.Logger(tmp_path)
  logger.write({'x': 1.0}, 100)
  now += 60
  logger.write({'x': 2.0}, 200)
  for first_frame, x in ((200, 3.0), (300, 4.0)):
    now -= 3600
    logger = metrics.Logger(tmp_path, first_frame=first_frame)
    now += 10
    logger.write({'x': x}, first_frame + 100)
  now -= 3600
  logger.write({'x': 5.0}, 500)

  assert read_curve(tmp_path, 'x') == [(100 * i, float(i)) for i in range(1, 6)]
  events = read_events(tmp_path).Scalars('x')
  for times in (
    [line['wall_time'] for line in read_lines(tmp_path)],
    [event.wall_time for event in events],
  ):
    assert times == sorted(times)
    # Counted on: not an hour ahead, nor at a standstill.
    assert 10 <= times[-2] - times[1] <= 30


def test_logger_continues_after_the_event_file_of_another_writer(tmp_path):
  name = 'events.out.tfevents.9000000000.host.1.0.v2'
  (tmp_path / name).touch()
  metrics.Logger(tmp_path).write({'x': 1.0}, 100)
  newest = sorted(path.name for path in tmp_path.glob('events*'))[-1]
  assert newest.startswith('events.out.tfevents.9000000001.')


def test_logger_starts_afresh_without_a_checkpoint(tmp_path):
  metrics.Logger(tmp_path).write({'x': 1.0}, 100)
  logger = metrics.Logger(tmp_path)
  assert read_lines(tmp_path) == []
  logger.write({'x': 2.0}, 50)
  assert [line['x'] for line in read_lines(tmp_path)] == [2.0]
  assert read_curve(tmp_path, 'x') == [(50, 2.0)]


@pytest.mark.parametrize(
  'broken',
  [
    b'{"num_environment_frames": 200, "wall_t',
    b'{"num_environment_frames": 200}',
    b'\0' * 40,
    b'\xff\xfe\xfd',
    b'[]',
    b'null',
    b'{"num_environment_frames": 2, "train_secs": null, "wall_time": 1}',
    b'{"num_environment_frames": 2, "train_secs": 1, "wall_time": null}',
    b'{"num_environment_frames": null, "train_secs": 1, "wall_time": 1}',
    b'{"num_environment_frames": 2, "train_secs": 1, "wall_time": Infinity}',
    b'\n\n',
  ],
)
def test_logger_repairs_a_broken_last_line(tmp_path, broken):
  logger = metrics.Logger(tmp_path)
  logger.write({'x': 1.0}, 100)
  with open(tmp_path / 'metrics.jsonl', 'ab') as file:
    file.write(broken)
  logger = metrics.Logger(tmp_path, first_frame=300)
  logger.write({'x': 2.0}, 400)
  assert [line['x'] for line in read_lines(tmp_path)] == [1.0, 2.0]


def test_logger_keeps_a_whole_last_line_without_line_end(tmp_path):
  metrics.Logger(tmp_path).write({'x': 1.0}, 100)
  path = tmp_path / 'metrics.jsonl'
  path.write_bytes(path.read_bytes().rstrip(b'\n'))
  metrics.Logger(tmp_path, first_frame=100).write({'x': 2.0}, 200)
  assert [line['x'] for line in read_lines(tmp_path)] == [1.0, 2.0]


def test_logger_survives_a_half_written_event(tmp_path):
  metrics.Logger(tmp_path).write({'x': 1.0}, 100)
  (events,) = tmp_path.glob('events*')
  with open(events, 'ab') as file:
    file.write(b'\x20\0\0\0\0\0\0\0\x01')
  metrics.Logger(tmp_path, first_frame=100).write({'x': 2.0}, 200)
  assert read_curve(tmp_path, 'x') == [(100, 1.0), (200, 2.0)]


@pytest.mark.parametrize('full', ['metrics.jsonl', 'events'])
def test_logger_outlives_a_full_disk(tmp_path, capsys, full):
  logger = metrics.Logger(tmp_path)
  logger.write({'x': 1.0}, 100)
  (path,) = tmp_path.glob(f'{full}*')
  if full == 'metrics.jsonl':
    # Longer than the event file, so that the limit hits this file only.
    path.write_bytes(path.read_bytes().replace(b'}', b' ' * 4000 + b'}'))
  size = path.stat().st_size

  # The system takes ten bytes more, then fails in the middle of a record.
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, limits[1]))
  try:
    logger.write({'x': 2.0}, 200)
    logger.write({'x': 3.0}, 300)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  assert path.stat().st_size == size  # No half record stays.
  logger.write({'x': 4.0}, 400)

  (warning,) = capsys.readouterr().err.splitlines()
  assert 'cannot write metrics' in warning
  in_lines = [line['x'] for line in read_lines(tmp_path)]
  in_events = [value for _, value in read_curve(tmp_path, 'x')]
  if full == 'metrics.jsonl':
    assert in_lines == [1.0, 4.0]
  else:
    assert in_events == [1.0, 4.0]
  assert in_lines[-1] == in_events[-1] == 4.0


def test_logger_warns_again_of_a_second_failure(tmp_path, capsys, monkeypatch):
  logger = metrics.Logger(tmp_path)

  def fail(self, record):
    raise OSError(28, 'No space left on device')

  for frames in (100, 300):
    with monkeypatch.context() as patch:
      patch.setattr(metrics._AppendFile, 'append', fail)
      logger.write({'x': 1.0}, frames)
      logger.write({'x': 1.0}, frames + 50)
    logger.write({'x': 1.0}, frames + 100)
  warnings = capsys.readouterr().err.splitlines()
  assert len(warnings) == 2
  assert all('No space left on device' in warning for warning in warnings)


def test_logger_refuses_a_directory_it_cannot_make(tmp_path):
  (tmp_path / 'file').touch()
  with pytest.raises(OSError, match='file'):
    metrics.Logger(tmp_path / 'file' / 'logs')


def test_metrics_needs_no_tensorflow():
  # An evaluation or a plot should not wait for TensorFlow.
  code = (
    'import sys; from runtime import metrics; '
    'sys.exit("tensorflow" in sys.modules)'
  )
  directory = os.path.dirname(os.path.dirname(metrics.__file__))
  subprocess.run([sys.executable, '-c', code], cwd=directory, check=True)
