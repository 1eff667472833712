"""Tests of test_mode.py; the program's own test is in experiment_test.py."""

import os

import pytest

from evaluation import test_mode
from runtime import errors
from runtime import run_folder


@pytest.mark.parametrize(
  ('own', 'tested', 'name'),
  [
    ('pong', 'pong', 'test'),
    ('pong,breakout', 'Pong, breakout', 'test'),
    ('pong', 'breakout', 'test_breakout'),
    ('pong', 'PongNoFrameskip-v4,Breakout', 'test_pong,breakout'),
    ('pong,breakout', 'pong', 'test_pong'),
    ('atari57', 'atari57', 'test'),
    ('pong', 'atari57', 'test_atari57'),
    ('gym:CartPole-v1', 'gym:Acrobot-v1', 'test_gym_Acrobot-v1'),
    (
      'rooms_collect_good_objects_train',
      'rooms_collect_good_objects_test',
      'test',
    ),
  ],
)
def test_results_of_other_levels_have_a_place_of_their_own(
  tmp_path, own, tested, name
):
  run_folder.write_settings(str(tmp_path), {'level_name': own})
  assert test_mode.find_result(str(tmp_path), tested) == str(tmp_path / name)


def test_results_without_a_run_are_refused(tmp_path):
  with pytest.raises(errors.UserError, match='no run in'):
    test_mode.find_result(str(tmp_path), 'pong')


def test_file_names_are_safe_short_and_distinct():
  names = [
    'gym:CartPole-v1?gravity=5',
    'gym:CartPole-v1?gravity=6',
    'gym:CartPole-v1?gravity:5',
    'gym:' + 80 * 'a',
    'gym:' + 80 * 'a' + 'b',
    'lab:tests/empty room',
    'gym:m\u00fcll:Id-v0',
  ]
  files = [test_mode.file_name(name) for name in names]
  assert len(set(files)) == len(names)
  for file in files:
    assert file.isascii() and len(file) <= 80
    assert not set(file) & set('/:?*="\\ ')
    assert os.path.basename(file) == file
  assert test_mode.file_name('gym:ALE/Pong-v5') == 'gym_ALE_Pong-v5'
