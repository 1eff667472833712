"""The test mode: evaluates a trained agent and reports its scores."""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import os
import re
from typing import Any
import zlib

import tensorflow as tf

import actor
import config as config_lib
import environments
from envs import lab
from envs import make
from evaluation import films
from evaluation import scores as scores_lib
import levels
import networks
from runtime import checkpoint
from runtime import console
from runtime import run_folder
import torsos

tf1 = tf.compat.v1

# The most letters of a file's name that say which levels it is about.
_MAX_LETTERS = 60


def test(config: config_lib.Config) -> None:
  """Evaluates a trained agent; prints its scores and writes them.

  Args:
    config: its agent must be that of the run in `logdir`.

  Raises:
    errors.UserError: there is no checkpoint, or it cannot be used.
  """
  logdir = config.run.logdir
  run_folder.make_folder(logdir, 'logdir')
  if config.run.video:
    run_folder.make_folder(config.run.video, 'video')
  level_names = levels.parse(config.envs.level_name, training=False)
  lab.check_levels(level_names, config.envs.dataset_path)
  first = level_names[:1]
  spec, _ = make.find_spec(first, **make.family_settings(config, first))
  config = config.completed(len(level_names), torsos.default_torso(spec))
  with tf.Graph().as_default():
    tf1.set_random_seed(config.run.seed)
    policy = actor.Policy(networks.make_agent(config, spec), spec)
    frames = tf1.get_variable(
      'num_environment_frames', [], tf.int64, use_resource=True
    )
    variables = [frames, *policy.agent.variables]
    with tf1.Session() as session:
      path = checkpoint.Checkpoints(logdir, variables).restore(session)
      if path is None:
        raise checkpoint.CheckpointError(f'no checkpoint in {logdir}')
      console.say(f'Playing {path}')
      about = config.describe() | {
        'checkpoint': path,
        'num_environment_frames': int(session.run(frames)),
      }
      result = find_result(logdir, config.envs.level_name)
      progress = scores_lib.Progress(f'{result}_progress.json', about)
      scores = play(
        config, level_names, policy.bind(session), policy.agent, progress
      )
  report_scores(f'{result}.json', level_names, scores, about)
  progress.finish()
  if config.run.video:
    film(config, scores)


def find_result(logdir: str, level_name: str) -> str:
  """Returns the path of the results, without its ending.

  Args:
    logdir: the folder of the run.
    level_name: the levels to test, see `levels.parse`.

  Returns:
    The path of 'test' for the run's own levels; otherwise that of
    'test_<levels>', so that results of other levels do not replace them.
  """
  own = run_folder.read_settings(logdir).get('level_name', level_name)
  level_names = levels.parse(level_name, training=False)
  if levels.parse(own, training=False) == level_names:
    return os.path.join(logdir, 'test')
  # All names of a suite would be too long.
  listed = ','.join(level_names)
  is_short = len(listed) <= _MAX_LETTERS
  return os.path.join(
    logdir, f'test_{file_name(listed if is_short else level_name)}'
  )


def file_name(level_name: str) -> str:
  """Returns a name for a file about levels: short, safe, and of these only."""
  plain = level_name.replace('/', '_').replace(':', '_')
  name = re.sub(r'[^\w.,-]', '_', plain, flags=re.ASCII)[:_MAX_LETTERS]
  # What was lost may be all in which two names differ.
  return name if name == plain else f'{name}_{zlib.crc32(plain.encode()):08x}'


def play(
  config: config_lib.Config,
  level_names: Sequence[str],
  act: Callable,
  agent: networks.Agent,
  progress: scores_lib.Progress,
) -> dict[str, scores_lib.LevelScore]:
  """Plays all levels, as many at a time as the cores allow.

  Args:
    config: how to play.
    level_names: the levels to play.
    act: see `actor.Policy.bind`.
    agent: see `scores.evaluate`.
    progress: the scores of an earlier evaluation that was stopped, if any. New
      scores are added to it.

  Returns:
    The scores of all levels, by name.
  """
  if progress.scores:
    console.say(f'{len(progress.scores)} levels were played before.')
  num_episodes = config.run.test_num_episodes
  left = [name for name in level_names if name not in progress.scores]
  most = min(config.num_envs, 4 * environments.count_cores())
  total = num_episodes * len(level_names)
  for group, num_envs in scores_lib.share_out(left, num_episodes, most):
    played = num_episodes * len(progress.scores)

    def show(done, of, played=played, name=group[-1]):
      # A line for each tenth of the group's episodes.
      if done * 10 // of > (done - 1) * 10 // of:
        console.say(f'  {played + done} / {total} episodes, {name}')

    envs = make.from_config(config, group, training=False, num_envs=num_envs)
    with contextlib.closing(envs):
      progress.add(scores_lib.evaluate(act, agent, envs, num_episodes, show))
  return {name: progress.scores[name] for name in level_names}


def report_scores(
  path: str,
  level_names: Sequence[str],
  scores: Mapping[str, scores_lib.LevelScore],
  about: Mapping[str, Any],
) -> None:
  """Prints the scores, including a suite's, and writes them to `path`."""
  suite_scores = levels.suite_scores(
    level_names, {name: score.returns for name, score in scores.items()}, 'test'
  )
  # Before they are printed: nobody may read it any more.
  scores_lib.write(path, scores, about, suite_scores)
  suite = levels.find_suite(level_names)
  console.say(scores_lib.table(scores, suite and suite.normalize))
  for name, value in suite_scores.items():
    console.say(f'{name} {value:.1f} %')
  console.say(f'Written to {path}')


def film(
  config: config_lib.Config, scores: Mapping[str, scores_lib.LevelScore]
) -> None:
  """Films one episode of each level, in the folder `--video`."""
  for name, score in scores.items():
    path = os.path.join(config.run.video, f'{file_name(name)}.mp4')
    seed, actions, episode_return = score.recording
    films.film(
      name,
      seed,
      actions,
      path,
      episode_return,
      **make.family_settings(config, [name]),
    )
    console.say(f'Filmed an episode with return {episode_return:g}: {path}')
