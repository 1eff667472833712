"""Signals that ask the program to stop.

SIGINT (Ctrl-C), SIGTERM, SIGHUP (a closed terminal), SIGUSR1 and SIGUSR2 (the
warnings of batch queues) all mean the same: save and end. A thread receives
them, since the main thread may be busy in TensorFlow for minutes. What was
ignored when the program began, such as SIGHUP after `nohup`, stays ignored.

Nothing here may import what is slow: this is the first thing that the main
program does.
"""

from collections.abc import Callable, Iterator
import contextlib
import os
import signal
import socket
import threading
import time

# The program was stopped, and is not done: start it again to go on.
EXIT_STOPPED = os.EX_TEMPFAIL  # 75

# All of them mean the same.
NUMBERS = (
  signal.SIGINT,
  signal.SIGTERM,
  signal.SIGHUP,
  signal.SIGUSR1,
  signal.SIGUSR2,
)
# `timeout`, for example, signals its child and then all of its group.
_SAME_REQUEST_SECS = 2.0
# Before there is anything to save, the program may take so long to end.
_EXIT_SECS = 5.0


class _Listener:
  """A thread that handles the signals.

  Attributes:
    stop: asks the program to stop; None while there is nothing to save.
    force: what to do before the program ends at once.
  """

  def __init__(self):
    """Replaces the handlers of all signals that are not ignored."""
    self.stop: Callable[[], None] | None = None
    self.force: Callable[[], None] = lambda: None
    self._stopped_at = None
    self._is_exiting = False
    self._receiver, self._sender = socket.socketpair()
    self._sender.setblocking(False)
    self._wakeup_fd_before = signal.set_wakeup_fd(self._sender.fileno())
    self._before = {}
    for number in NUMBERS:
      if signal.getsignal(number) != signal.SIG_IGN:
        self._before[number] = signal.signal(number, self._exit)
    threading.Thread(target=self._listen, daemon=True).start()

  def close(self) -> None:
    """Restores the handlers; ends the thread."""
    for number, handler in self._before.items():
      signal.signal(number, handler)
    signal.set_wakeup_fd(self._wakeup_fd_before)
    self._sender.close()

  def _listen(self) -> None:
    while numbers := self._receiver.recv(64):
      for number in numbers:
        if number in self._before:
          self._handle(number)

  def _exit(self, *_) -> None:
    """Ends the program, as soon as the main thread is free to do so."""
    if self.stop is None and not self._is_exiting:
      self._is_exiting = True
      raise SystemExit(EXIT_STOPPED)

  def _handle(self, number: int) -> None:
    """Handles a signal, in the listener's thread."""
    now = time.monotonic()
    if self.stop is None:
      time.sleep(_EXIT_SECS)
      os._exit(EXIT_STOPPED)  # The main thread is busy, or has not got it.
    if self._stopped_at is None:
      self._stopped_at = now
      _write('\nStopping; a second signal ends at once.\n')
      self.stop()
    elif now - self._stopped_at > _SAME_REQUEST_SECS:
      self.force()
      os._exit(128 + number)


_main_listener: _Listener | None = None


def install() -> None:
  """Makes signals end the program cleanly; the main program calls it first."""
  global _main_listener
  _main_listener = _Listener()


@contextlib.contextmanager
def stopping(
  stop: Callable[[], None], force: Callable[[], None] = lambda: None
) -> Iterator[None]:
  """Makes the first signal call `stop`; a later one ends the process.

  Without `install`, the handlers are the earlier ones again afterwards. With
  it, signals change nothing from then on: only the end of the program remains.

  Args:
    stop: called by another thread.
    force: called before the process ends at once.
  """
  listener = _main_listener
  if listener is None:
    if threading.current_thread() is not threading.main_thread():
      yield  # Only the main thread may have handlers.
      return
    listener = _Listener()
  listener.stop, listener.force = stop, force
  try:
    yield
  finally:
    listener.stop = lambda: None
    if listener is not _main_listener:
      listener.close()


def _write(text: str) -> None:
  # Not print: the main thread may be in the middle of one.
  with contextlib.suppress(OSError):
    os.write(1, text.encode())
