"""Tests of evaluation/films.py: films are read back frame by frame."""

import os
import pathlib

import imageio_ffmpeg
import numpy as np
import pytest

from envs import atari
from evaluation import films
from runtime import errors
from tests import contract

_SHORT = atari.AtariSettings(max_episode_frames=400)


def play(level_name, action=None, **kwargs):
  """Plays the first full episode of environment 1 of 3.

  Returns:
    The environment's seed, the episode's actions, and its return.
  """
  envs = contract.make(
    level_name, num_envs=3, max_batch=3, training=False, **kwargs
  )
  actions, generator = [], np.random.default_rng(0)
  try:
    while True:
      env_ids, outputs = envs.recv(timeout_secs=20)
      for row in np.flatnonzero(env_ids == 1):
        if outputs.info.episode_done[row]:
          return envs.seeds[1], actions, outputs.info.episode_return[row]
      new = generator.integers(0, envs.spec.num_actions, len(env_ids))
      actions += new[env_ids == 1].tolist()
      envs.send(new.astype(np.int32), env_ids)
  finally:
    envs.close()


def read(path):
  """Returns the film's metadata, and its frames, uint8 [N, H, W, 3]."""
  reader = imageio_ffmpeg.read_frames(str(path))
  meta = next(reader)
  width, height = meta['size']
  frames = [np.frombuffer(f, np.uint8) for f in reader]
  return meta, np.stack(frames).reshape([-1, height, width, 3])


def test_films_a_game(tmp_path, capfd):
  path = tmp_path / 'pong.mp4'
  settings = atari.AtariSettings(max_episode_frames=1200)
  seed, actions, expected = play('pong', atari_settings=settings)
  assert len(actions) == 300
  assert expected < 0
  replayed = films.film('pong', seed, actions, path, expected, settings)
  assert replayed == expected
  assert capfd.readouterr().err == ''
  meta, frames = read(path)
  assert frames.shape == (300, 630, 480, 3)
  assert meta['fps'] == 15
  assert meta['codec'] == 'h264'
  assert meta['pix_fmt'].startswith('yuv420p')
  # The court is brown, and the ball and the paddles move.
  court = np.median(frames[200], axis=(0, 1))
  assert court == pytest.approx([144, 72, 17], abs=12)
  assert np.abs(np.diff(frames[::40].astype(int), axis=0)).max() > 50
  assert [p.name for p in tmp_path.iterdir()] == ['pong.mp4']


def test_replay_shows_the_agents_game():
  seed, actions, _ = play('breakout', atari_settings=_SHORT)
  replay = atari.replay('breakout', seed, actions, _SHORT)
  frames = np.stack([frame for frame, _, _ in replay])
  envs = contract.make(
    'breakout', num_envs=3, max_batch=3, training=False, atari_settings=_SHORT
  )
  for action, frame in zip(actions, frames, strict=True):
    env_ids, outputs = envs.recv()
    # As the agent saw it: both sizes are divided into the same 7 x 4 blocks.
    grey = frame @ [0.299, 0.587, 0.114]
    mine = grey.reshape(7, 30, 4, 40).mean(axis=(1, 3))
    newest = outputs.observation.frame[1, -1]
    theirs = newest.reshape(7, 12, 4, 21).mean(axis=(1, 3))
    np.testing.assert_allclose(mine, theirs, atol=1.0)
    envs.send(np.full([3], action, np.int32), env_ids)


def test_sticky_actions_replay(tmp_path, capfd):
  settings = atari.AtariSettings(
    max_episode_frames=800, repeat_action_probability=0.25
  )
  seed, actions, expected = play('pong', atari_settings=settings)
  films.film('pong', seed, actions, tmp_path / 'a.mp4', expected, settings)
  assert capfd.readouterr().err == ''


def test_films_any_environment_in_even_sizes(tmp_path, capfd):
  level_name = 'gym:tests.film_env:Film-v0'
  seed, actions, expected = play(level_name)
  path = tmp_path / 'film.mp4'
  replayed = films.film(level_name, seed, actions, path, expected)
  assert replayed == pytest.approx(expected)
  assert capfd.readouterr().err == ''
  meta, frames = read(path)
  assert frames.shape == (6, 606, 450, 3)
  assert meta['fps'] == 30
  assert frames.mean(axis=(1, 2, 3)) == pytest.approx(
    np.arange(0, 240, 40), abs=4
  )


@pytest.mark.parametrize(
  ('shape', 'enlarged'),
  [
    ((210, 160, 3), (630, 480, 3)),
    ((101, 75, 3), (606, 450, 3)),
    ((401, 601, 3), (402, 602, 3)),
    ((5, 7, 3), (340, 476, 3)),
  ],
)
def test_enlarges_by_whole_numbers(shape, enlarged):
  image = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
  result = films._enlarge(image)
  assert result.shape == enlarged
  factor = enlarged[1] // shape[1]
  np.testing.assert_array_equal(
    result[::factor, ::factor][: shape[0], : shape[1]], image
  )


def test_films_cart_pole(tmp_path, capfd, monkeypatch):
  pytest.importorskip('pygame')
  for name in ('SDL_VIDEODRIVER', 'XDG_RUNTIME_DIR'):  # As without a screen.
    monkeypatch.delenv(name, raising=False)
  seed, actions, expected = play('gym:CartPole-v1')
  path = tmp_path / 'film.mp4'
  replayed = films.film('gym:CartPole-v1', seed, actions, path, expected)
  assert replayed == expected == len(actions)
  assert capfd.readouterr().err == ''
  meta, frames = read(path)
  assert frames.shape == (len(actions), 400, 600, 3)
  assert meta['fps'] == 50


# Errors.


@pytest.mark.parametrize(
  ('level_name', 'message'),
  [
    ('gym:tests.count_env:Count3-v0', 'render_mode'),
    ('gym:tests.film_env:FilmGrey-v0', 'no colour image'),
  ],
)
@pytest.mark.filterwarnings('ignore:.*render_mode')
def test_what_cannot_render(tmp_path, level_name, message):
  with pytest.raises(ValueError, match=f'{level_name} cannot.*{message}') as e:
    films.film(level_name, 1, [0, 0, 0], tmp_path / 'film.mp4', 3.0)
  assert '\n' not in str(e.value)
  assert not list(tmp_path.iterdir())


def test_warns_of_another_episode(tmp_path, capfd):
  level_name = 'gym:tests.film_env:Film-v0'
  seed, actions, expected = play(level_name)
  path = tmp_path / 'film.mp4'
  for wrong_actions, wrong_return, message in (
    (actions[:-1], expected, 'in 5 steps and had not ended, not'),
    ([*actions, 0], expected, f'in 6 steps, not {expected:g} in 7.'),
    (actions, expected + 1, f'it scored {expected:g} in 6 steps, not'),
  ):
    films.film(level_name, seed, wrong_actions, path, wrong_return)
    error = capfd.readouterr().err
    assert error.startswith('Warning: ')
    assert error.count('\n') == 1
    assert message in error
    assert path.exists()


def test_warns_of_random_numbers_that_are_not_seeded(tmp_path, capfd):
  level_name = 'gym:tests.film_env:FilmNoise-v0'
  films.film(level_name, *play(level_name)[:2], tmp_path / 'a.mp4', 99.0)
  assert 'another episode of ' + level_name in capfd.readouterr().err


def test_needs_actions(tmp_path):
  with pytest.raises(ValueError, match='no actions of pong'):
    films.film('pong', 1, [], tmp_path / 'film.mp4', 0.0)


def test_needs_a_directory(tmp_path):
  with pytest.raises(FileNotFoundError):
    films.film('pong', 1, [0], tmp_path / 'no' / 'film.mp4', 0.0)


@pytest.mark.parametrize(
  ('gym_id', 'message'),
  [
    ('FilmRaise-v0', 'ZeroDivisionError'),
    ('FilmResize-v0', 'cannot be filmed: the size of its images changes'),
  ],
)
def test_a_film_that_fails_leaves_the_older_one(tmp_path, gym_id, message):
  path = tmp_path / 'film.mp4'
  path.write_text('old')
  with pytest.raises(errors.UserError, match=message):
    films.film(f'gym:tests.film_env:{gym_id}', 1, [0, 0], path, 0.0)
  assert path.read_text() == 'old'
  assert [p.name for p in tmp_path.iterdir()] == ['film.mp4']


def test_films_a_level_of_lab(tmp_path, monkeypatch, capfd):
  fake_lab = str(pathlib.Path(__file__).parent / 'fake_lab')
  monkeypatch.syspath_prepend(fake_lab)
  monkeypatch.setenv('PATH', fake_lab, prepend=os.pathsep)
  monkeypatch.setenv('FAKE_LAB_EPISODE_FRAMES', '80')
  path = tmp_path / 'lab.mp4'
  seed, actions, expected = play('rooms_watermaze')
  assert len(actions) == 20
  replayed = films.film('rooms_watermaze', seed, actions, path, expected)
  assert replayed == pytest.approx(expected)
  assert capfd.readouterr().err == ''
  meta, frames = read(path)
  assert frames.shape == (20, 360, 480, 3)
  assert meta['fps'] == 15
