"""The test mode: plays a trained agent, and reports its scores."""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import os
from typing import Any

from absl import flags
import tensorflow as tf

import actor
import environments
from envs import lab
from evaluation import films
from evaluation import scores as scores_lib
import levels
import networks
from runtime import checkpoint
import settings

tf1 = tf.compat.v1

FLAGS = flags.FLAGS


def test() -> None:
  """Plays a trained agent and prints and writes its scores."""
  settings.use_settings_of_run()
  checkpoint.make_folder(FLAGS.logdir, 'logdir')
  if FLAGS.video:
    checkpoint.make_folder(FLAGS.video, 'video')
  level_names = levels.parse(FLAGS.level_name, training=False)
  lab.check_levels(level_names, FLAGS.dataset_path)
  with contextlib.closing(
    settings.make_envs(level_names[:1], False, 1)
  ) as envs:
    spec = envs.spec
  with tf.Graph().as_default():
    tf1.set_random_seed(FLAGS.seed)
    policy = actor.Policy(settings.make_agent('agent', spec), spec)
    frames = tf1.get_variable(
      'num_environment_frames', [], tf.int64, use_resource=True
    )
    variables = [frames, *policy.agent.variables]
    with tf1.Session() as session:
      path = checkpoint.Checkpoints(FLAGS.logdir, variables).restore(session)
      if path is None:
        raise checkpoint.CheckpointError(f'no checkpoint in {FLAGS.logdir}')
      print(f'Playing {path}', flush=True)
      about = settings.own_settings() | {
        'checkpoint': path,
        'num_environment_frames': int(session.run(frames)),
      }
      progress = scores_lib.Progress(
        os.path.join(FLAGS.logdir, 'test_progress.json'), about
      )
      scores = play(level_names, policy.bind(session), policy.agent, progress)
  report_scores(level_names, scores, about)
  progress.finish()
  if FLAGS.video:
    film(scores)


def play(
  level_names: Sequence[str],
  act: Callable,
  agent: networks.Agent,
  progress: scores_lib.Progress,
) -> dict[str, scores_lib.LevelScore]:
  """Plays all levels, as many at one time as cores allow.

  Args:
    level_names: what to play.
    act: see `actor.Policy.bind`.
    agent: see `scores_lib.evaluate`.
    progress: what was played before, if an evaluation of the same was stopped;
      it is added to.
  """
  if progress.scores:
    print(f'{len(progress.scores)} levels were played before.')
  num_episodes = FLAGS.test_num_episodes
  left = [name for name in level_names if name not in progress.scores]
  most = min(
    FLAGS.num_actors * FLAGS.envs_per_actor, 4 * environments.count_cores()
  )
  total = num_episodes * len(level_names)
  for group, num_envs in scores_lib.share_out(left, num_episodes, most):
    played = num_episodes * len(progress.scores)

    def show(done, of, played=played, name=group[-1]):
      # A line for each tenth of these levels.
      if done * 10 // of > (done - 1) * 10 // of:
        print(f'  {played + done} / {total} episodes, {name}', flush=True)

    with contextlib.closing(settings.make_envs(group, False, num_envs)) as envs:
      progress.add(scores_lib.evaluate(act, agent, envs, num_episodes, show))
  return {name: progress.scores[name] for name in level_names}


def report_scores(
  level_names: Sequence[str],
  scores: Mapping[str, scores_lib.LevelScore],
  about: Mapping[str, Any],
) -> None:
  """Prints the scores, those of a suite too, and writes `test.json`."""
  suite = levels.find_suite(level_names)
  print(scores_lib.table(scores, suite and suite.normalize))
  suite_scores = levels.suite_scores(
    level_names, {name: score.returns for name, score in scores.items()}, 'test'
  )
  for name, value in suite_scores.items():
    print(f'{name} {value:.1f} %')
  result = os.path.join(FLAGS.logdir, 'test.json')
  scores_lib.write(result, scores, about, suite_scores)
  print(f'Written to {result}')


def film(scores: Mapping[str, scores_lib.LevelScore]) -> None:
  """Films an episode of each level into the folder `--video`."""
  for name, score in scores.items():
    file_name = name.replace('/', '_').replace(':', '_') + '.mp4'
    path = os.path.join(FLAGS.video, file_name)
    seed, actions, episode_return = score.recording
    films.film(
      name,
      seed,
      actions,
      path,
      episode_return,
      settings.atari_settings(),
      settings.lab_settings(),
    )
    print(f'Filmed an episode with return {episode_return:g}: {path}')
