"""Threads that stop together."""

from collections.abc import Callable
import contextlib
import queue
import threading
from typing import Any


class Threads:
  """Threads that run until one of them ends or fails, or all are stopped."""

  def __init__(self, close_queue: Callable[[], Any]):
    """Takes `close_queue`, which wakes the threads that wait at the queue."""
    self._close_queue = close_queue
    self._is_stopping = False
    # Not an Event: a signal may arrive while the main thread holds its lock.
    self._woken = queue.SimpleQueue()
    self._threads = []
    self.failure: Exception | None = None

  def should_stop(self) -> bool:
    """Returns whether the threads should end."""
    return self._is_stopping

  def start(self, work: Callable[[], None]) -> None:
    """Runs `work` in a new thread."""
    thread = threading.Thread(target=self._run, args=[work], daemon=True)
    self._threads.append(thread)
    thread.start()

  def _run(self, work):
    try:
      work()
    except Exception as error:  # The main thread raises it.
      # Once the threads are stopping, errors are expected: the queue is closed
      # to wake those that wait at it.
      if not self.should_stop():
        self.failure = error
    self.stop()

  def stop(self) -> None:
    """Asks all threads to end."""
    self._is_stopping = True
    self._woken.put(None)

  def wait(self, seconds: float) -> bool:
    """Waits for a stop, for at most `seconds`; returns whether it has come."""
    if not self._is_stopping:
      with contextlib.suppress(queue.Empty):
        self._woken.get(timeout=seconds)
    return self._is_stopping

  def join(self, timeout_secs: float | None = None) -> None:
    """Stops all threads; waits for each, for at most `timeout_secs`."""
    self.stop()
    self._close_queue()
    for thread in self._threads:
      thread.join(timeout_secs)
