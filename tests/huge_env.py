"""A toy environment whose losses overflow; see `count_env`.

Its rewards are just below what `envs.in_processes` refuses.
"""

import gymnasium

from tests import count_env

gymnasium.register(
  'CountHuge-v0',
  count_env.CountEnv,
  kwargs={'length': 400, 'reward': [1.0] * 300 + [9e18] * 100},
)
