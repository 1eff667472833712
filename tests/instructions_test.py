"""Tests of envs/instructions.py."""

import subprocess
import sys

import numpy as np
import pytest

from envs import instructions


def test_empty_text_has_no_words():
  for text in ('', '  \n\t '):
    assert not instructions.hash_words(text).any()


def test_words_become_numbers_and_the_rest_zeros():
  ids = instructions.hash_words('go to  the\tred door')
  assert ids.shape == (64,) and ids.dtype == np.int16
  assert (ids[:5] > 0).all() and (ids[:5] <= 1000).all()
  assert not ids[5:].any()
  assert len(set(ids[:5].tolist())) == 5


def test_same_word_same_number_wherever_it_stands():
  first = instructions.hash_words('red door')
  second = instructions.hash_words('the red')
  assert first[0] == second[1]


@pytest.mark.parametrize(
  'text', ['gehe zur Tür', '走到红门', '🚪 ok', '\ud800 x']
)
def test_any_script(text):
  assert (instructions.hash_words(text) > 0).sum() == len(text.split())


def test_words_beyond_the_last_place_are_dropped():
  words = [f'word{i}' for i in range(80)]
  np.testing.assert_array_equal(
    instructions.hash_words(' '.join(words)),
    instructions.hash_words(' '.join(words[:64])),
  )


def test_all_buckets_are_in_use():
  ids = {int(instructions.hash_words(f'w{i}')[0]) for i in range(20_000)}
  assert ids == set(range(1, 1001))


def test_other_processes_agree():
  code = (
    'from envs import instructions; '
    'print(instructions.hash_words("red door")[:2])'
  )
  printed = [
    subprocess.check_output(
      [sys.executable, '-c', code], env={'PYTHONHASHSEED': seed}, text=True
    )
    for seed in ('1', '2')
  ]
  assert (
    printed[0] == printed[1] == f'{instructions.hash_words("red door")[:2]}\n'
  )
