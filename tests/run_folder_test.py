"""Tests of run_folder.py."""

import json
import math
import os
import re
import sys

import numpy as np
import pytest

from runtime import run_folder


def test_the_folder_is_tried_at_the_start(tmp_path):
  with run_folder.claim_folder(str(tmp_path / 'new' / 'run')):
    pass
  names = sorted(f.name for f in (tmp_path / 'new' / 'run').iterdir())
  assert names == ['.lock', 'checkpoints']
  (tmp_path / 'file').write_text('')
  (tmp_path / 'half').mkdir()
  (tmp_path / 'half' / 'checkpoints').write_text('')
  for logdir in (
    tmp_path / 'file',
    tmp_path / 'file' / 'run',
    tmp_path / 'half',
    '/proc/run',
  ):
    with pytest.raises(run_folder.RunFolderError, match='cannot write'):
      run_folder.claim_folder(str(logdir))


_SETTINGS = {
  'batch_size': 32,
  'level_name': 'pong',
  'logdir': 'a',
  'total_environment_frames': 100,
  'video': None,
}


def _check(logdir, settings, allow_changes):
  run_folder.check_settings(
    str(logdir), settings, {'logdir', 'total_environment_frames'}, allow_changes
  )


def test_a_folder_belongs_to_one_training_at_a_time(tmp_path):
  with run_folder.claim_folder(str(tmp_path)):
    with pytest.raises(
      run_folder.RunFolderError,
      match=f'another training .*{re.escape(str(tmp_path))}',
    ):
      run_folder.claim_folder(str(tmp_path))
  run_folder.claim_folder(str(tmp_path)).close()


def test_changed_settings_are_refused_by_name(tmp_path, capsys):
  run_folder.write_settings(str(tmp_path), _SETTINGS)
  _check(tmp_path, _SETTINGS, False)
  changed = _SETTINGS | {'level_name': 'breakout', 'batch_size': 16}
  with pytest.raises(run_folder.RunFolderError) as error:
    _check(tmp_path, changed, False)
  message = str(error.value)
  assert "level_name was 'pong' and is now 'breakout'" in message
  assert 'batch_size was 32 and is now 16' in message
  assert 'total' not in message
  assert capsys.readouterr().err == ''

  _check(tmp_path, changed, True)
  assert 'Warning: the run in' in capsys.readouterr().err


def test_some_settings_are_free(tmp_path, capsys):
  run_folder.write_settings(str(tmp_path), _SETTINGS)
  changed = _SETTINGS | {'total_environment_frames': 200, 'logdir': 'b'}
  # Of a newer version, which knows a flag more.
  changed['new'] = 1
  _check(tmp_path, changed, False)
  assert capsys.readouterr().err == ''


def test_settings_that_cannot_be_read_are_refused(tmp_path):
  with pytest.raises(run_folder.RunFolderError, match='no run .*config.json'):
    _check(tmp_path, _SETTINGS, False)
  for content in (
    *('', '{', '{}', '[1]', 'null', '\xff'),
    *('{"settings": 1}', '{"settings": [["seed", 1]]}'),
  ):
    (tmp_path / 'config.json').write_bytes(content.encode('latin-1'))
    with pytest.raises(run_folder.RunFolderError) as error:
      _check(tmp_path, _SETTINGS, False)
    message = f'{tmp_path}/config.json is damaged: '
    assert str(error.value).startswith(message)


def test_keeps_settings_and_versions(tmp_path):
  path = tmp_path / 'config.json'
  run_folder.write_settings(
    str(tmp_path),
    {
      'seed': 1,
      'levels': ('pong', 'breakout'),
      'max_gradient_norm': math.inf,
      'logdir': tmp_path,
      'discounting': 0.99,
      'use_lstm': True,
      'resume': None,
    },
  )
  config = json.loads(path.read_text())
  assert config['settings'] == {
    'seed': 1,
    'levels': ['pong', 'breakout'],
    'max_gradient_norm': 'inf',
    'logdir': str(tmp_path),
    'discounting': 0.99,
    'use_lstm': True,
    'resume': None,
  }
  assert config['versions']['python'] == sys.version.split()[0]
  assert config['versions']['numpy'] == np.__version__
  assert 'dm-sonnet' in config['versions']


def test_settings_are_replaced_all_or_nothing(tmp_path, monkeypatch):
  path = tmp_path / 'config.json'
  run_folder.write_settings(str(tmp_path), {'seed': 1})
  run_folder.write_settings(str(tmp_path), {'seed': 2})
  assert json.loads(path.read_text())['settings'] == {'seed': 2}

  def fail(descriptor):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(os, 'fsync', fail)
  with pytest.raises(OSError, match='No space'):
    run_folder.write_settings(str(tmp_path), {'seed': 3})
  assert json.loads(path.read_text())['settings'] == {'seed': 2}
  assert os.listdir(tmp_path) == ['config.json']


def test_json_is_strict(tmp_path):
  path = tmp_path / 'values.json'
  run_folder.write_json(path, {'number': np.float32(1.5), 'path': tmp_path})
  values = json.loads(path.read_text())
  assert values == {'number': 1.5, 'path': str(tmp_path)}
  with pytest.raises(ValueError, match='not JSON compliant'):
    run_folder.write_json(path, {'number': math.nan})
  assert json.loads(path.read_text()) == values
