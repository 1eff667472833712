"""The flags of `experiment.py`, and what is made from their values.

Only `experiment` and `testing` read flags too: all others get values.
"""

from collections.abc import Sequence
import dataclasses
import math
import os
import sys
from typing import Any

from absl import flags

from cluster import membership
import environments
from envs import atari
from envs import lab
from envs import make
import learner
import levels
import networks
from runtime import checkpoint
import torsos

FLAGS = flags.FLAGS

flags.DEFINE_enum('mode', 'train', ['train', 'test'], 'Train, or play.')
flags.DEFINE_string(
  'level_name',
  'pong',
  'What to play: a suite (dmlab30, atari57), an Atari game (pong), a level of '
  'DMLab-30 (rooms_watermaze) or any other of DeepMind Lab (lab:<path>), a '
  'Gymnasium environment (gym:CartPole-v1, gym:module:Id-v0), or several of '
  'one kind, separated by commas.',
)
flags.DEFINE_string(
  'logdir', None, 'The run folder. If not given, runs/<level_name>.'
)
flags.DEFINE_integer(
  'seed', 1, 'Seed of environments, weights and actions.', lower_bound=0
)

flags.DEFINE_integer(
  'total_environment_frames',
  30_000_000,
  'Environment frames (agent steps times action repeats) to train for.',
  lower_bound=1,
)
flags.DEFINE_enum(
  'job_name',
  'local',
  membership.JOB_NAMES,
  'What this process does: all (local), learn, or act. See "More than one '
  'machine" in the README.',
)
flags.DEFINE_integer(
  'task', 0, 'Its number among the learners or actors.', lower_bound=0
)
flags.DEFINE_list(
  'learner_hosts', [], 'host:port of each learner, the same everywhere.'
)
flags.DEFINE_integer(
  'connect_timeout_secs',
  300,
  'Seconds that an actor does without its learner, or a learner waits for the '
  'others in an update, before it ends.',
  lower_bound=1,
)

flags.DEFINE_integer(
  'num_actors',
  2,
  'Actors, of all machines; locally they act as one batch.',
  lower_bound=1,
)
flags.DEFINE_integer(
  'envs_per_actor', 16, 'Environments of each actor.', lower_bound=1
)
flags.DEFINE_integer('batch_size', 8, 'Unrolls in a batch.', lower_bound=1)
flags.DEFINE_integer(
  'unroll_length', 20, 'Agent steps in an unroll.', lower_bound=1
)
flags.DEFINE_integer(
  'queue_capacity',
  None,
  'Unrolls that may wait for the learner: bounds the policy lag. If not given, '
  'one batch.',
  lower_bound=1,
)

flags.DEFINE_enum(
  'agent',
  None,
  torsos.TORSOS,
  'The network. If not given, shallow for images, deep where they have fewer '
  'than 20 pixels a side, vector for what is no image.',
)
flags.DEFINE_boolean('use_lstm', False, 'Whether the agent has a memory.')
flags.DEFINE_boolean(
  'popart',
  False,
  'PopArt: values normalised for each level. Goes with --reward_clipping=none.',
)

flags.DEFINE_float('entropy_cost', 0.01, 'Entropy cost.', lower_bound=0)
flags.DEFINE_float('baseline_cost', 0.5, 'Baseline cost.', lower_bound=0)
flags.DEFINE_float(
  'discounting',
  0.99,
  'Discounting factor, gamma.',
  lower_bound=0,
  upper_bound=1,
)
flags.DEFINE_enum(
  'reward_clipping',
  'abs_one',
  learner.REWARD_CLIPPINGS,
  'Reward clipping for learning; logged returns are never clipped.',
)

flags.DEFINE_float(
  'learning_rate', 0.0004, 'Learning rate; decays to 0.', lower_bound=0
)
flags.DEFINE_float(
  'decay', 0.99, 'RMSProp decay.', lower_bound=0, upper_bound=1
)
flags.DEFINE_float(
  'momentum', 0.0, 'RMSProp momentum.', lower_bound=0, upper_bound=1
)
flags.DEFINE_float(
  'epsilon', 0.00001, 'RMSProp epsilon, inside the root.', lower_bound=0
)
flags.DEFINE_float(
  'max_gradient_norm',
  40.0,
  'Clips the global norm of the gradient; 0: off.',
  lower_bound=0,
)

flags.DEFINE_boolean(
  'full_action_set',
  False,
  "Atari: all 18 actions, not the game's own. Several games always take all.",
)
flags.DEFINE_float(
  'repeat_action_probability',
  0.0,
  'Atari: probability of a sticky action.',
  lower_bound=0,
  upper_bound=1,
)

flags.DEFINE_integer('width', 96, 'DeepMind Lab: width of a frame, pixels.')
flags.DEFINE_integer('height', 72, 'DeepMind Lab: height of a frame, pixels.')
flags.DEFINE_enum(
  'renderer',
  'software',
  ['software', 'hardware'],
  'DeepMind Lab: what draws; hardware needs a GPU and OpenGL.',
)
flags.DEFINE_string(
  'dataset_path',
  None,
  'DeepMind Lab: the folder of the pictures that two levels show, or "dummy" '
  'for plain colours instead.',
)
flags.DEFINE_string(
  'level_cache_dir',
  None,
  'DeepMind Lab: a folder for compiled maps, which many processes may share.',
)

flags.DEFINE_integer(
  'test_num_episodes',
  10,
  'Full games to play per level, with --mode=test.',
  lower_bound=1,
)
flags.DEFINE_string(
  'video', None, 'With --mode=test: a folder to film an episode into (mp4).'
)

flags.DEFINE_integer(
  'save_checkpoint_secs', 300, 'Seconds between saves.', lower_bound=0
)
flags.DEFINE_float(
  'log_every_secs', 10.0, 'Seconds between progress lines.', lower_bound=0
)
flags.DEFINE_boolean(
  'allow_changed_settings',
  False,
  'Go on with a run whose settings were different ones.',
)

# NaN is within any bounds.
for _name in (
  'baseline_cost',
  'decay',
  'discounting',
  'entropy_cost',
  'epsilon',
  'learning_rate',
  'log_every_secs',
  'max_gradient_norm',
  'momentum',
  'repeat_action_probability',
):
  flags.register_validator(_name, math.isfinite, 'must be a finite number')


# What a test has to have in common with the training.
RUN_FLAGS = (
  'agent',
  'full_action_set',
  'height',
  'level_name',
  'popart',
  'repeat_action_probability',
  'use_lstm',
  'width',
)


def use_settings_of_run() -> None:
  """Takes what the command line leaves open from the run to be played."""
  settings = checkpoint.read_settings(FLAGS.logdir)
  for name in RUN_FLAGS:
    if not FLAGS[name].present:
      # A run may be older than a flag.
      FLAGS[name].value = settings.get(name, FLAGS[name].value)


# What decides about the unrolls: actors and learner have to agree on it.
_AGREED_FLAGS = (
  'agent',
  'full_action_set',
  'num_actors',
  'popart',
  'queue_capacity',
  'repeat_action_probability',
  'seed',
  'unroll_length',
  'use_lstm',
)


def read_cluster() -> membership.Cluster:
  """Reads the cluster from the flags and TF_CONFIG; flags win.

  The flags are set to what it says.
  """
  fields = [field.name for field in dataclasses.fields(membership.Cluster)]
  text = os.environ.get('TF_CONFIG')
  is_local = FLAGS['job_name'].present and FLAGS.job_name == 'local'
  if text and not is_local:
    for name, value in membership.parse_tf_config(text).items():
      if not FLAGS[name].present:
        FLAGS[name].value = value
  values = {name: FLAGS[name].value for name in fields}
  return membership.Cluster(
    **values | {'learner_hosts': tuple(FLAGS.learner_hosts)}
  )


def agreed_settings(
  spec: environments.EnvironmentSpec, level_names: Sequence[str]
) -> dict[str, Any]:
  """Returns what a learner and its actors have to agree on, by name."""
  return {
    'levels': list(level_names),
    'frames': f'{spec.frame_dtype} {list(spec.frame_shape)}',
    'frames_per_step': spec.frames_per_step,
    'stack': spec.stack,
    'num_actions': spec.num_actions,
    'action_meanings': spec.action_meanings,
    'has_instruction': spec.has_instruction,
    'num_learners': len(FLAGS.learner_hosts),
    **{name: FLAGS[name].value for name in _AGREED_FLAGS},
  }


def make_envs(
  level_names: Sequence[str],
  training: bool,
  num_envs: int,
  actor: int = 0,
) -> environments.Environments:
  """Makes the environments that the flags ask for.

  Args:
    level_names: given to the environments round robin.
    training: whether the agent learns from them.
    num_envs: how many.
    actor: the number of the actor among those of all machines. Its first
      environment takes the level after that of the actor before.
  """
  first = actor * num_envs % len(level_names)
  level_names = [*level_names[first:], *level_names[:first]]
  return make.make_environments(
    level_names,
    num_envs,
    # Different ones for each actor; and not the games that were trained on.
    [FLAGS.seed, 0, actor] if training else [FLAGS.seed, 1],
    training=training,
    # While the policy of one actor works, others on its machine play.
    max_batch=num_envs if FLAGS.job_name == 'actor' else None,
    atari_settings=atari_settings(),
    lab_settings=lab_settings(),
  )


def atari_settings() -> atari.AtariSettings:
  """Reads how Atari games are played from the flags."""
  return atari.AtariSettings(
    full_action_set=FLAGS.full_action_set,
    repeat_action_probability=FLAGS.repeat_action_probability,
  )


def lab_settings() -> lab.LabSettings:
  """Reads how levels of DeepMind Lab are played from the flags."""
  return lab.LabSettings(
    width=FLAGS.width,
    height=FLAGS.height,
    renderer=FLAGS.renderer,
    dataset_path=FLAGS.dataset_path,
    level_cache_dir=FLAGS.level_cache_dir,
  )


def make_agent(name: str, spec: environments.EnvironmentSpec) -> networks.Agent:
  """Makes the agent that the flags ask for."""
  popart_levels = None
  if FLAGS.popart:
    # Of the levels as named, not as played: a test may play a few at a time, or
    # all where a training with few environments did not.
    popart_levels = len(levels.parse(FLAGS.level_name, training=False))
  return networks.Agent(
    spec, FLAGS.agent, FLAGS.use_lstm, popart_levels, name=name
  )


def fill_in_flags(
  spec: environments.EnvironmentSpec, level_names: Sequence[str]
) -> None:
  """Decides what the command line leaves open and depends on the level."""
  if len(level_names) > 1:
    FLAGS.full_action_set = True  # A test plays the games one by one.
  if FLAGS.agent is None:
    FLAGS.agent = torsos.default_torso(spec)
  if FLAGS.queue_capacity is None:
    FLAGS.queue_capacity = FLAGS.batch_size


def make_hyperparameters() -> learner.Hyperparameters:
  """Reads the update's settings from the flags of the same names."""
  return learner.Hyperparameters(
    **{
      field: getattr(FLAGS, field)
      for field in learner.Hyperparameters.__dataclass_fields__
    }
  )


def own_settings() -> dict[str, Any]:
  """Returns the flags of this file, value by name, and `num_learners`."""
  own = FLAGS.get_key_flags_for_module(sys.modules[__name__])
  # Their addresses may change, their number matters.
  num_learners = len(FLAGS.learner_hosts) or 1
  return {flag.name: flag.value for flag in own} | {
    'num_learners': num_learners
  }
