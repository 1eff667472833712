"""Makes environments from the names of their levels."""

from collections.abc import Sequence
from typing import Any

import environments
import levels

_MAX_RESTARTS = 3


def make_environments(
  level_names: Sequence[str],
  num_envs: int,
  seed: int | Sequence[int],
  *,
  training: bool,
  max_batch: int | None = None,
  atari_settings: Any = None,
  lab_settings: Any = None,
) -> environments.Environments:
  """Makes environments from the names of their levels.

  Args:
    level_names: an Atari game in any spelling ('up_n_down', 'UpNDown',
      'ALE/UpNDown-v5'), or one or more levels of DeepMind Lab ('lab:<path>', or
      the bare name for DMLab-30) or Gymnasium environments ('gym:<id>',
      'gym:<module>:<id>'), which environments take round robin.
    num_envs: how many.
    seed: what the environments' own seeds are derived from. Give different
      actors of one run different ones, such as [seed, actor].
    training: whether the agent learns from them. A lost life then ends an
      episode of an Atari game, and another environment that fails is made anew,
      at most 3 times in a row without an episode that came to its end. Levels
      that DeepMind Lab holds out for testing cannot be played.
    max_batch: the most environments that one `recv` returns; None for half of
      them, so that one half steps while the policy works on the other.
    atari_settings: an atari.AtariSettings; None for the paper's.
    lab_settings: a lab.LabSettings; None for the paper's.

  Returns:
    The environments. Close them after use.

  Raises:
    ValueError: a level is unknown, cannot be trained on, or does not go
      together with the others.
    py_process.EnvironmentFailed: an environment could not be made.
  """
  families = {levels.find_family(name) for name in level_names}
  if len(families) > 1:
    raise ValueError(
      f'Atari games, levels of DeepMind Lab and Gymnasium environments cannot '
      f'share a run: {", ".join(level_names)}.'
    )
  # A score must not depend on which episodes failed.
  max_restarts = _MAX_RESTARTS if training else 0
  # Only what a run needs is imported.
  if 'gym' in families:
    from envs import gym

    return gym.GymEnvironments(
      level_names, num_envs, seed, max_batch, max_restarts
    )
  if 'lab' in families:
    from envs import lab

    return lab.LabEnvironments(
      level_names,
      num_envs,
      seed,
      training=training,
      max_batch=max_batch,
      max_restarts=max_restarts,
      settings=lab_settings,
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
