"""Every flag, and the frozen dataclasses made from their values.

Each flag is one field below. The field gives the flag's name, type, default,
help text and bounds, and four properties:

  path         a folder of this machine; `~` is expanded
  agreed       learners and actors of one run must have the same value
  may_change   a resumed run may have another value
  of_run       the test mode takes the value from the tested run

In addition, the learners of one run must have the same `UpdateConfig`.

A config is made from flags, with `from_flags`, or in Python, with
`make(level_name=...)`. Configs are immutable: `Config.replace` and
`Config.completed` return new ones.
"""

from collections.abc import Mapping
import dataclasses
import difflib
import functools
import math
import os
import typing
from typing import Any

from absl import flags

from runtime import errors
from runtime import run_folder

FLAGS = flags.FLAGS

JOB_NAMES = ('local', 'learner', 'actor')
REWARD_CLIPPINGS = ('abs_one', 'soft_asymmetric', 'none')
TORSOS = ('shallow', 'deep', 'vector')


def _flag(
  default: Any,
  help_text: str,
  *,
  low: float | None = None,
  high: float | None = None,
  choices: tuple[str, ...] | None = None,
  path: bool = False,
  agreed: bool = False,
  may_change: bool = False,
  of_run: bool = False,
) -> Any:
  """Describes a flag as a dataclass field; see the module's docstring."""
  return dataclasses.field(default=default, metadata=dict(locals()))


_TYPES = {
  bool: ((bool,), 'True or False'),
  float: ((float, int), 'a finite number'),
  int: ((int,), 'an integer'),
  str: ((str,), 'a string'),
  tuple: ((tuple,), 'a tuple of strings'),
}


def _find_type(field: dataclasses.Field) -> type:
  """Returns a key of `_TYPES`: the type of a flag's values other than None."""
  if field.default is None:
    return typing.get_args(field.type)[0]
  return type(field.default)


class _Section:
  """The settings of one topic, checked against their flags' bounds."""

  def __post_init__(self):
    """Checks each field, and expands `~` in paths.

    Raises:
      errors.SettingError: a value is invalid. The message names the first such
        flag, and what its value must be.
    """
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if value is None and field.default is None:
        continue
      if field.metadata['path'] and isinstance(value, str):
        value = run_folder.parse_path(value, field.name)
        object.__setattr__(self, field.name, value)
      problem = _find_problem(field, value)
      if problem:
        raise errors.SettingError(f'--{field.name}={value} {problem}.')


def _find_problem(field: dataclasses.Field, value: Any) -> str | None:
  """Returns what the value must be, or None if it is valid."""
  types, expected = _TYPES[_find_type(field)]
  low, high = field.metadata['low'], field.metadata['high']
  choices = field.metadata['choices']
  if type(value) not in types or value != value:
    return f'must be {expected}'
  if choices and value not in choices:
    return f'must be one of {", ".join(choices)}'
  if low is not None and value < low:
    return f'must be at least {low}'
  if high is not None and value > high:
    return f'must be at most {high}'
  return 'must be a finite number' if value == math.inf else None


@dataclasses.dataclass(frozen=True)
class RunConfig(_Section):
  """What to run, where to save it, and how often to report."""

  mode: str = _flag(
    'train',
    'Train or test an agent.',
    choices=('train', 'test'),
    may_change=True,
  )
  logdir: str | None = _flag(
    None,
    'The run folder. Defaults to runs/<level_name>.',
    path=True,
    may_change=True,
  )
  seed: int = _flag(
    1, 'Seed for environments, weights and actions.', low=0, agreed=True
  )
  save_checkpoint_secs: int = _flag(
    300, 'Seconds between saves.', low=0, may_change=True
  )
  log_every_secs: float = _flag(
    10.0, 'Seconds between progress lines.', low=0, may_change=True
  )
  allow_changed_settings: bool = _flag(
    False, 'Resume a run even if its settings were different.', may_change=True
  )
  test_num_episodes: int = _flag(
    10, 'With --mode=test: full episodes per level.', low=1, may_change=True
  )
  video: str | None = _flag(
    None,
    'With --mode=test: a folder for films (mp4).',
    path=True,
    may_change=True,
  )


@dataclasses.dataclass(frozen=True)
class EnvironmentConfig(_Section):
  """What is played, and how."""

  level_name: str = _flag(
    'pong',
    'What to play: a suite (dmlab30, atari57), an Atari game (pong), a level '
    'of DMLab-30 (rooms_watermaze) or any other of DeepMind Lab (lab:<path>), '
    'a Gymnasium environment (gym:CartPole-v1, gym:module:Id-v0), or several '
    'of one kind, separated by commas.',
    of_run=True,
  )
  envs_per_actor: int = _flag(16, 'Environments per actor.', low=1)
  envs_per_process: int | None = _flag(
    None,
    'Gymnasium: environments that take turns in one process. Defaults to what '
    'a trial finds best: 1 for slow ones, more for fast ones.',
    low=1,
    may_change=True,
  )
  bootstrap_at_time_limit: bool = _flag(
    True,
    'Gymnasium and Atari: learn that a time limit is not the end: the value of '
    'the last observation stands for what was still to come. If false, it is '
    'an end, as in the original.',
    agreed=True,
  )
  full_action_set: bool = _flag(
    False,
    "Atari: use all 18 actions, not the game's own. Runs with several games "
    'always do.',
    agreed=True,
    of_run=True,
  )
  repeat_action_probability: float = _flag(
    0.0,
    'Atari: probability of a sticky action.',
    low=0,
    high=1,
    agreed=True,
    of_run=True,
  )
  width: int = _flag(96, 'DeepMind Lab: frame width, pixels.', of_run=True)
  height: int = _flag(72, 'DeepMind Lab: frame height, pixels.', of_run=True)
  renderer: str = _flag(
    'software',
    'DeepMind Lab: the renderer; hardware needs a GPU and OpenGL.',
    choices=('software', 'hardware'),
    may_change=True,
  )
  dataset_path: str | None = _flag(
    None,
    'DeepMind Lab: the folder of the pictures that two levels show, or "dummy" '
    'for plain colours instead.',
    path=True,
  )
  level_cache_dir: str | None = _flag(
    None,
    'DeepMind Lab: a folder for compiled maps; processes may share it.',
    path=True,
    may_change=True,
  )
  num_maps_per_level: int = _flag(
    1000,
    'DeepMind Lab: with --level_cache_dir, the number of maps of a level; each '
    'episode takes one of them.',
    low=1,
  )


@dataclasses.dataclass(frozen=True)
class AgentConfig(_Section):
  """The network."""

  agent: str | None = _flag(
    None,
    'The network. Defaults to shallow for images, deep for images of fewer '
    'than 20 pixels a side, and vector for other observations.',
    choices=TORSOS,
    agreed=True,
    of_run=True,
  )
  use_lstm: bool = _flag(
    False, 'Whether the agent has an LSTM.', agreed=True, of_run=True
  )
  popart: bool = _flag(
    False,
    'PopArt: normalises values per level. Use with --reward_clipping=none.',
    agreed=True,
    of_run=True,
  )


@dataclasses.dataclass(frozen=True)
class UpdateConfig(_Section):
  """The settings of the update (paper, tables D.1, D.3 and G.1)."""

  total_environment_frames: int = _flag(
    30_000_000,
    'Environment frames (agent steps times action repeats) to train for.',
    low=1,
    may_change=True,
  )
  batch_size: int = _flag(8, 'Unrolls in a batch.', low=1)
  unroll_length: int = _flag(
    20, 'Agent steps in an unroll.', low=1, agreed=True
  )
  queue_capacity: int | None = _flag(
    None,
    'Maximum number of unrolls in the queue; bounds the policy lag. '
    'Defaults to one batch.',
    low=1,
    agreed=True,
    may_change=True,
  )
  entropy_cost: float = _flag(0.01, 'Entropy cost.', low=0)
  baseline_cost: float = _flag(0.5, 'Baseline cost.', low=0)
  discounting: float = _flag(0.99, 'Discounting factor, gamma.', low=0, high=1)
  reward_clipping: str = _flag(
    'abs_one',
    'How to clip rewards for learning; logged returns are never clipped.',
    choices=REWARD_CLIPPINGS,
  )
  learning_rate: float = _flag(
    0.0004, 'Initial learning rate; decays to 0.', low=0
  )
  decay: float = _flag(0.99, 'RMSProp decay.', low=0, high=1)
  momentum: float = _flag(0.0, 'RMSProp momentum.', low=0, high=1)
  epsilon: float = _flag(0.00001, 'RMSProp epsilon, inside the root.', low=0)
  max_gradient_norm: float = _flag(
    40.0, 'Clips the global norm of the gradient; 0 turns it off.', low=0
  )


@dataclasses.dataclass(frozen=True)
class ClusterConfig(_Section):
  """Which process of a run this is; see docs/many_machines.md."""

  job_name: str = _flag(
    'local',
    'What this process does: learn and act (local), only learn, or only act. '
    'See docs/many_machines.md.',
    choices=JOB_NAMES,
    may_change=True,
  )
  task: int = _flag(
    0, 'The index of this learner or actor, from 0.', low=0, may_change=True
  )
  learner_hosts: tuple[str, ...] = _flag(
    (),
    'host:port of each learner; the same list in all processes.',
    may_change=True,
  )
  num_actors: int = _flag(
    2,
    'Actors on all machines together; in local training they are one batch.',
    low=1,
    agreed=True,
  )
  connect_timeout_secs: int = _flag(
    300,
    'Seconds before an actor ends because its learner is away, or a learner '
    'ends because the others do not join an update.',
    low=1,
    may_change=True,
  )


@dataclasses.dataclass(frozen=True)
class Config:
  """All settings of one process, by topic."""

  run: RunConfig = RunConfig()
  envs: EnvironmentConfig = EnvironmentConfig()
  agent: AgentConfig = AgentConfig()
  update: UpdateConfig = UpdateConfig()
  cluster: ClusterConfig = ClusterConfig()

  def values(self) -> dict[str, Any]:
    """Returns all settings by flag name."""
    return {
      field.name: getattr(getattr(self, section), field.name)
      for section, field in _fields().values()
    }

  def describe(self) -> dict[str, Any]:
    """Returns what a run keeps of its settings: all, and `num_learners`."""
    # The learners' addresses may change, but not their number.
    num_learners = len(self.cluster.learner_hosts) or 1
    return self.values() | {'num_learners': num_learners}

  def replace(self, **values: Any) -> 'Config':
    """Returns a config with other values, by flag name.

    Raises:
      errors.SettingError: a name is unknown, or a value is invalid.
    """
    changes = {}
    for name, value in values.items():
      if name not in _fields():
        near = difflib.get_close_matches(name, _fields(), 1)
        hint = f': did you mean {near[0]!r}?' if near else '.'
        raise errors.SettingError(f'There is no setting {name!r}{hint}')
      changes.setdefault(_fields()[name][0], {})[name] = value
    return dataclasses.replace(
      self,
      **{
        section: dataclasses.replace(getattr(self, section), **changed)
        for section, changed in changes.items()
      },
    )

  def completed(self, num_levels: int, default_torso: str) -> 'Config':
    """Returns a config in which the settings left open have values.

    Args:
      num_levels: the number of levels of the run.
      default_torso: the default network for the run's observations.
    """
    return self.replace(
      # Set here, since the test mode may play the games one by one.
      full_action_set=self.envs.full_action_set or num_levels > 1,
      agent=self.agent.agent or default_torso,
      queue_capacity=self.update.queue_capacity or self.update.batch_size,
    )

  @property
  def num_envs(self) -> int:
    """The number of environments of all actors."""
    return self.cluster.num_actors * self.envs.envs_per_actor


def make(**values: Any) -> Config:
  """Returns a config from values by flag name; the others are defaults.

  Raises:
    errors.SettingError: see `Config.replace`.
  """
  config = Config().replace(**values)
  if config.run.logdir is not None:
    return config
  # A list of levels can be longer than a file name.
  name = config.envs.level_name.replace('/', '_')[:100]
  return config.replace(logdir=os.path.join('runs', name))


def names(**metadata: Any) -> list[str]:
  """Returns the flags with these properties, e.g. `names(may_change=True)`."""
  return [
    name
    for name, (_, field) in _fields().items()
    if metadata.items() <= field.metadata.items()
  ]


@functools.cache
def _fields() -> dict[str, tuple[str, dataclasses.Field]]:
  """Returns the section and the field of each flag, by flag name."""
  return {
    field.name: (section.name, field)
    for section in dataclasses.fields(Config)
    for field in dataclasses.fields(section.type)
  }


def define_flags() -> None:
  """Defines a flag for each field; only the main program calls it, once."""
  define = {
    bool: flags.DEFINE_boolean,
    float: flags.DEFINE_float,
    int: flags.DEFINE_integer,
    str: flags.DEFINE_string,
    tuple: flags.DEFINE_list,
  }
  for name, (_, field) in _fields().items():
    choices = field.metadata['choices']
    help_text = field.metadata['help_text'] + _describe_bounds(field)
    if choices:
      flags.DEFINE_enum(name, field.default, choices, help_text)
    else:
      define[_find_type(field)](name, field.default, help_text)


def _describe_bounds(field: dataclasses.Field) -> str:
  low, high = field.metadata['low'], field.metadata['high']
  if high is not None:
    return f' From {low} to {high}.'
  return '' if low is None else f' At least {low}.'


def from_flags(defaults: Mapping[str, Any] | None = None) -> Config:
  """Returns the config that the command line asks for.

  Args:
    defaults: values by name, for flags that the command line does not give.

  Raises:
    errors.SettingError: a value is invalid.
  """
  given = {name: FLAGS[name].value for name in _fields() if is_given(name)}
  if 'learner_hosts' in given:
    given['learner_hosts'] = tuple(given['learner_hosts'])
  return make(**dict(defaults or {}) | given)


def is_given(name: str) -> bool:
  """Returns whether the command line or a flag file names a flag."""
  return bool(FLAGS[name].present)
