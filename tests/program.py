"""Starts the program as a user does, and sees to what it leaves behind."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import uuid

# What a shell runs in the background ignores the first, and after `nohup` the
# second; programs would inherit this.
for _number, _handler in (
  (signal.SIGINT, signal.default_int_handler),
  (signal.SIGHUP, signal.SIG_DFL),
):
  if signal.getsignal(_number) == signal.SIG_IGN:
    signal.signal(_number, _handler)

ROOT = pathlib.Path(__file__).parent.parent
COMMAND = (sys.executable, str(ROOT / 'experiment.py'))
COUNT = 'gym:tests.count_env:Count{}-v0'


class Program:
  """`python experiment.py`, in a process group of its own.

  Attributes:
    out: all that it has printed; `err` likewise.
  """

  def __init__(
    self, folder, variables=None, command=COMMAND, cwd=ROOT, **settings
  ):
    """Starts it.

    Args:
      folder: for its output and its temporary files; need not exist.
      variables: environment variables, by name.
      command: what the flags follow.
      cwd: the working folder.
      **settings: flags, over those of a tiny run; None leaves one out.
    """
    settings = {
      'num_actors': 1,
      'envs_per_actor': 2,
      'batch_size': 4,
      'unroll_length': 5,
      'log_every_secs': 0.2,
    } | settings
    # What comes after a flag file wins over it.
    ordered = sorted(settings.items(), key=lambda item: item[0] != 'flagfile')
    self._folder = pathlib.Path(folder)
    self._temporary = self._folder / 'tmp'
    self._temporary.mkdir(parents=True)
    self._token = f'PROGRAM_TOKEN={uuid.uuid4()}'
    name, value = self._token.split('=')
    environ = {name: value, 'TMPDIR': str(self._temporary)}
    environ |= variables or {}
    # Where these are set, they hide what users would see.
    hiding = ('PYTHONDONTWRITEBYTECODE', 'PYTHONUNBUFFERED')
    inherited = {k: v for k, v in os.environ.items() if k not in hiding}
    with (
      open(self._folder / 'out', 'w') as out,
      open(self._folder / 'err', 'w') as err,
    ):
      self.process = subprocess.Popen(
        [
          *command,
          *(f'--{k}={v}' for k, v in ordered if v is not None),
        ],
        cwd=cwd,
        stdout=out,
        stderr=err,
        env=inherited | environ,
        start_new_session=True,
      )

  @property
  def out(self):
    return (self._folder / 'out').read_text()

  @property
  def err(self):
    return (self._folder / 'err').read_text()

  def __enter__(self):
    return self

  def __exit__(self, *_):
    for process_id in self.processes():
      os.kill(process_id, signal.SIGKILL)
    self.process.wait()

  def processes(self):
    """Returns the numbers of its processes, environments' included."""
    found = []
    for path in pathlib.Path('/proc').glob('[0-9]*/environ'):
      try:
        if self._token.encode() in path.read_bytes().split(b'\0'):
          found.append(int(path.parent.name))
      except OSError:
        continue  # It has just ended, or is another user's.
    return found

  def wait_until(self, condition, timeout_secs=240.0):
    """Waits until `condition()` is true."""
    end = time.monotonic() + timeout_secs
    while not condition():
      assert self.process.poll() is None, self.out + self.err
      assert time.monotonic() < end, self.out + self.err
      time.sleep(0.02)

  def wait_for_training(self):
    """Waits for a progress line that shows frames."""
    self.wait_until(lambda: re.search(r'^ +[1-9].* frames/s', self.out, re.M))

  def handles(self, signum):
    """Returns whether it has a handler for a signal."""
    status = pathlib.Path(f'/proc/{self.process.pid}/status').read_text()
    mask = int(re.search(r'^SigCgt:\s*(\w+)', status, re.M)[1], 16)
    return bool(mask >> (signum - 1) & 1)

  def finish(self, timeout_secs=240.0):
    """Waits for its end and checks that nothing is left of it.

    Returns:
      The exit code.
    """
    code = self.process.wait(timeout_secs)
    assert self.processes() == []
    assert list(self._temporary.iterdir()) == []
    assert 'Traceback' not in self.out
    return code

  def error_lines(self):
    """Returns standard error without what TensorFlow says at its import."""
    lines = self.err.splitlines()
    noise = re.compile(r'[IWE]0*\d+[ .]|WARNING: All log messages')
    return [line for line in lines if line and not noise.match(line)]
