"""Tests of environments.py: names, and lists of them.

The contract itself is in contract.py.
"""

import pytest

from tests import contract


def test_refuses_unknown_games_and_mixtures():
  with pytest.raises(ValueError, match='did you mean .*pong'):
    contract.make('pnog')
  with pytest.raises(ValueError, match='gym:CartPole-v1'):
    contract.make('zzzzzz')
  with pytest.raises(ValueError, match='cannot share'):
    contract.make('pong', 'gym:CartPole-v1', num_envs=2)
  with pytest.raises(ValueError, match='empty'):
    contract.make()
