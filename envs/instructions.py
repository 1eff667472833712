"""Instructions in words, hashed to arrays of a fixed size.

In this form they travel between processes and through the queue: 128 bytes per
step, however long the text is. Environments' processes import this: no
TensorFlow.
"""

import functools
import zlib

import numpy as np

MAX_WORDS = 64
NUM_BUCKETS = 1_000


@functools.lru_cache(maxsize=1024)  # Most steps repeat the text.
def hash_words(text: str) -> np.ndarray:
  """Hashes each word into one of 1,000 buckets (released code, `_instruction`).

  Args:
    text: words separated by white space, in any script; may be empty. Words
      beyond the 64th are dropped.

  Returns:
    int16 [MAX_WORDS], read-only: 1 to NUM_BUCKETS for a word, and 0 after the
    last one. The same in all processes, unlike Python's own hash.
  """
  words = text.split()[:MAX_WORDS]
  ids = np.zeros([MAX_WORDS], np.int16)
  for i, word in enumerate(words):
    checksum = zlib.crc32(word.encode('utf-8', 'surrogatepass'))
    ids[i] = 1 + checksum % NUM_BUCKETS
  ids.flags.writeable = False
  return ids
