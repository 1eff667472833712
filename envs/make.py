"""Makes environments from the names of their levels."""

from collections.abc import Sequence
import dataclasses
from typing import Any

import config as config_lib
import environments
import levels
from runtime import errors

_MAX_RESTARTS = 3


def from_config(
  config: config_lib.Config,
  level_names: Sequence[str],
  *,
  training: bool,
  num_envs: int,
  actor: int = 0,
) -> environments.Environments:
  """Makes the environments that a config asks for.

  Args:
    config: seed, job, and how environments are played.
    level_names: see make_environments.
    training: see make_environments.
    num_envs: see make_environments.
    actor: the number of the actor among those of all machines. Its first
      environment takes the level after the last one of the actor before.

  Raises: see make_environments.
  """
  first = actor * num_envs % len(level_names)
  seed = config.run.seed
  return make_environments(
    [*level_names[first:], *level_names[:first]],
    num_envs,
    # Different ones for each actor; and not the episodes that were trained on.
    [seed, 0, actor] if training else [seed, 1],
    training=training,
    # While the policy of one actor works, others on its machine play.
    max_batch=num_envs if config.cluster.job_name == 'actor' else None,
    **family_settings(config, level_names),
  )


def family_settings(
  config: config_lib.Config, level_names: Sequence[str]
) -> dict[str, Any]:
  """Returns the settings of the levels' family, as make_environments' argument.

  Those that the family shares with the config, by their flags' names; the
  paper's for the rest.
  """
  family = _find_family(level_names)
  if family == 'gym':
    from envs import gym

    kind = gym.GymSettings
  elif family == 'lab':
    from envs import lab

    kind = lab.LabSettings
  else:
    from envs import atari

    kind = atari.AtariSettings
  values = config.values()
  names = [f.name for f in dataclasses.fields(kind) if f.name in values]
  return {f'{family}_settings': kind(**{name: values[name] for name in names})}


def make_environments(
  level_names: Sequence[str],
  num_envs: int,
  seed: int | Sequence[int],
  *,
  training: bool,
  max_batch: int | None = None,
  atari_settings: Any = None,
  lab_settings: Any = None,
  gym_settings: Any = None,
) -> environments.Environments:
  """Makes environments from the names of their levels.

  Args:
    level_names: Atari games (see levels.find_game), levels of DeepMind Lab
      ('lab:<path>', or the bare name for DMLab-30) or Gymnasium environments
      ('gym:<id>', 'gym:<module>:<id>', perhaps with arguments, see
      levels.gym_arguments). Environments take them round robin.
    num_envs: number of environments.
    seed: the environments' own seeds are derived from it. Actors of one run
      need different ones, such as [seed, actor].
    training: whether the agent learns from them. If so, a lost life ends an
      episode of an Atari game; a Lab or Gymnasium environment that fails is
      made anew, at most 3 times in a row without a completed episode; and
      levels that DeepMind Lab holds out for testing cannot be played.
    max_batch: the most environments that one `recv` returns; None for half of
      them, so that one half steps while the policy works on the other.
    atari_settings: an atari.AtariSettings; None for the paper's.
    lab_settings: a lab.LabSettings; None for the paper's.
    gym_settings: a gym.GymSettings; None for its defaults.

  Returns:
    The environments. Close them after use.

  Raises:
    errors.SettingError: a level is unknown, cannot be trained on, or cannot be
      combined with the others; or there are more environments than the system
      allows processes or open files for.
    py_process.EnvironmentFailed: an environment could not be made.
  """
  family = _find_family(level_names)
  # A score must not depend on which episodes failed.
  max_restarts = _MAX_RESTARTS if training else 0
  # Each family is imported only where it is used.
  if family != 'atari':
    if family == 'gym':
      from envs import gym

      kind, settings = gym.GymEnvironments, gym_settings
    else:
      from envs import lab

      kind, settings = lab.LabEnvironments, lab_settings
    return kind(
      level_names,
      num_envs,
      seed,
      training=training,
      max_batch=max_batch,
      max_restarts=max_restarts,
      settings=settings,
    )
  from envs import atari

  return atari.AtariEnvironments(
    level_names,
    num_envs,
    seed,
    training=training,
    max_batch=max_batch,
    settings=atari_settings,
  )


def find_spec(
  level_names: Sequence[str],
  atari_settings: Any = None,
  lab_settings: Any = None,
  gym_settings: Any = None,
) -> tuple[environments.EnvironmentSpec, dict[str, Any]]:
  """Returns what environments for training would be like, without playing.

  Makes no environment of DeepMind Lab or Atari. Makes one of Gymnasium, of the
  first level, and closes it: nothing else can tell its spaces.

  Args:
    level_names: see make_environments.
    atari_settings: see make_environments.
    lab_settings: see make_environments.
    gym_settings: see make_environments; changes nothing about the spec.

  Returns:
    The spec, and what `Environments.settings` would return, as far as it is
    known without making all environments.

  Raises:
    errors.SettingError: as in make_environments, but a level that DeepMind Lab
      does not have goes unnoticed.
    py_process.EnvironmentFailed: an environment could not be made.
  """
  del gym_settings
  family = _find_family(level_names)
  if family == 'gym':
    from envs import gym

    return gym.find_spec(level_names[0]), {}
  if family == 'lab':
    from envs import lab

    return lab.find_spec(level_names, lab_settings)
  from envs import atari

  return atari.find_spec(level_names, atari_settings)


def _find_family(level_names: Sequence[str]) -> levels.Family:
  """Returns the one family that all levels are of."""
  if not level_names:
    raise ValueError('level_names is empty: name at least one level.')
  families = {levels.find_family(name) for name in level_names}
  if len(families) > 1:
    raise errors.SettingError(
      f'Atari games, levels of DeepMind Lab and Gymnasium environments cannot '
      f'share a run: {", ".join(level_names)}.'
    )
  return families.pop()
