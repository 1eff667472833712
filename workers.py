"""The threads of a process, and how they end together."""

from collections.abc import Callable, Iterator
import contextlib
import signal
import threading
from typing import Any


class Workers:
  """Threads that run until one of them ends, fails, or all are stopped."""

  def __init__(self, close_queue: Callable[[], Any]):
    """Keeps `close_queue`, which wakes the threads that wait at the queue."""
    self._close_queue = close_queue
    self._stopping = threading.Event()
    self._threads = []
    self.failure: Exception | None = None

  def should_stop(self) -> bool:
    """Returns whether the threads shall end."""
    return self._stopping.is_set()

  def start(self, work: Callable[[], None]) -> None:
    """Runs `work` in a thread of its own."""
    thread = threading.Thread(target=self._run, args=[work], daemon=True)
    self._threads.append(thread)
    thread.start()

  def _run(self, work):
    try:
      work()
    except Exception as error:  # Handed to the main thread.
      # Closing the queue is how the others learn of the end.
      if not self.should_stop():
        self.failure = error
    self.stop()

  def stop(self, *_: Any) -> None:
    """Asks all threads to end; also a signal handler."""
    self._stopping.set()

  def wait(self, seconds: float) -> bool:
    """Waits for the end, or for `seconds`; returns whether it has come."""
    return self._stopping.wait(seconds)

  def join(self, timeout_secs: float | None = None) -> None:
    """Ends all threads; waits for each, or for `timeout_secs`."""
    self.stop()
    self._close_queue()
    for thread in self._threads:
      thread.join(timeout_secs)


@contextlib.contextmanager
def stop_on_signals(stop: Callable[[], None]) -> Iterator[None]:
  """Lets Ctrl-C and SIGTERM end the run in good order, a second one at once."""

  def handle(signum, _):
    print('\nStopping; a second signal ends at once.', flush=True)
    for number in before:
      signal.signal(number, signal.SIG_DFL)
    stop()

  numbers = (signal.SIGINT, signal.SIGTERM)
  before = {number: signal.signal(number, handle) for number in numbers}
  try:
    yield
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)
