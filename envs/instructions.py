"""Instructions in words, as the fixed row of numbers that the agent reads.

They cross process borders and the queue in this form: 128 bytes a step, however
long the text. No TensorFlow: environments' processes do without it.
"""

import functools
import zlib

import numpy as np

MAX_WORDS = 64
NUM_BUCKETS = 1_000


@functools.lru_cache(maxsize=1024)  # A level repeats its text at every step.
def hash_words(text: str) -> np.ndarray:
  """Hashes each word into one of 1,000 buckets (released code, `_instruction`).

  Args:
    text: words separated by white space, in any script; may be empty. Words
      beyond the 64th are dropped.

  Returns:
    int16 [MAX_WORDS], read-only: 1 to NUM_BUCKETS for a word, and 0 behind the
    last one. The same everywhere: Python's own hash differs between processes.
  """
  words = text.split()[:MAX_WORDS]
  ids = np.zeros([MAX_WORDS], np.int16)
  for i, word in enumerate(words):
    code = zlib.crc32(word.encode('utf-8', 'surrogatepass'))
    ids[i] = 1 + code % NUM_BUCKETS
  ids.flags.writeable = False
  return ids
