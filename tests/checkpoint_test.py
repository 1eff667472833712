"""Tests of checkpoint.py."""

import pathlib
import resource
import shutil
import tempfile

import numpy as np
import pytest
import tensorflow as tf

import config
import environments
import learner
import networks
from runtime import checkpoint
import unrolls

tf1 = tf.compat.v1

_SIZE = 10_000
_T, _B = 5, 4


class Run:
  """Some variables, their checkpoints, and a session with them."""

  def __init__(self, logdir, shape=(_SIZE,)):
    self._logdir = logdir
    with tf.Graph().as_default():
      self._weights = tf1.get_variable('weights', shape, use_resource=True)
      self._value = tf1.placeholder(tf.float32, [])
      self._fill = self._weights.assign(
        tf.fill(self._weights.shape, self._value)
      )
      self._checkpoints = checkpoint.Checkpoints(str(logdir), [self._weights])
      self._session = tf1.Session()
      self._session.run(tf1.global_variables_initializer())
      # As in training: nothing may be added to the graph by a save.
      self._session.graph.finalize()

  def save(self, value, frames=None):
    _folder(self._logdir).mkdir(parents=True, exist_ok=True)
    return self.save_to_claimed(value, frames)

  def save_to_claimed(self, value, frames=None):
    self._session.run(self._fill, {self._value: value})
    return self._checkpoints.save(
      self._session, int(value) if frames is None else frames
    )

  def has_trained(self):
    return self._checkpoints.has_trained()

  def restore(self):
    """Returns the path and the value that is restored."""
    path = self._checkpoints.restore(self._session)
    weights = self._session.run(self._weights)
    assert path is None or np.all(weights == weights[0])
    return path, weights[0]


def _folder(logdir):
  return pathlib.Path(logdir) / 'checkpoints'


def _truncate(path):
  path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _overwrite(path):
  content = bytearray(path.read_bytes())
  middle = len(content) // 2
  content[middle : middle + 8] = b'\xff' * 8
  path.write_bytes(content)


def test_restores_nothing_where_there_is_nothing(tmp_path):
  assert Run(tmp_path).restore()[0] is None
  assert list(tmp_path.iterdir()) == []


def test_restores_the_newest_and_keeps_three(tmp_path):
  run = Run(tmp_path)
  # Not in the order of the names.
  assert all(run.save(value) for value in (8, 9, 10, 11))
  path, value = Run(tmp_path).restore()
  assert path == str(_folder(tmp_path) / 'frames-11')
  assert value == 11
  names = {path.stem for path in _folder(tmp_path).glob('*.index')}
  assert names == {'frames-9', 'frames-10', 'frames-11'}


def test_a_resumed_run_keeps_three_of_both(tmp_path):
  run = Run(tmp_path)
  for value in (1, 2, 3):
    run.save(value)
  run = Run(tmp_path)
  run.restore()
  run.save(4)
  names = {path.stem for path in _folder(tmp_path).glob('*.index')}
  assert names == {'frames-2', 'frames-3', 'frames-4'}


@pytest.mark.parametrize('what', ['', 'checkpoints'])
def test_a_folder_that_has_gone_is_an_error(tmp_path, what):
  run = Run(tmp_path / 'run')
  assert run.save(1)
  shutil.rmtree(tmp_path / 'run' / what)
  for value in (2, 1):
    with pytest.raises(checkpoint.CheckpointError, match='deleted or moved'):
      run.save_to_claimed(value)
  assert not _folder(tmp_path / 'run').exists()


def test_initial_weights_are_nothing_trained(tmp_path):
  run = Run(tmp_path)
  assert not run.has_trained()
  run.save(0)
  assert not Run(tmp_path).has_trained()
  # Another agent's are in its way neither.
  other = Run(tmp_path, shape=(_SIZE + 1,))
  assert other.save(0)
  assert other.save(5)
  assert Run(tmp_path).has_trained()
  assert Run(tmp_path, shape=(_SIZE + 1,)).restore()[1] == 5


def test_does_not_write_the_newest_again(tmp_path):
  run = Run(tmp_path)
  run.save(1)
  before = {path: path.stat() for path in _folder(tmp_path).iterdir()}
  assert run.save(1)
  run = Run(tmp_path)
  run.restore()
  assert run.save(1)
  assert before == {path: path.stat() for path in _folder(tmp_path).iterdir()}


@pytest.mark.parametrize(
  'name', ['a[1]', 'b*', 'c?', 'd\\e', 'f g', 'ü', '[!x]', 'not UTF-8: \udce9']
)
def test_a_folder_may_have_any_name(tmp_path, name, monkeypatch):
  """TensorFlow would take some of them for patterns, and find nothing."""
  monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path / name))  # TMPDIR.
  (tmp_path / 'c1').mkdir()  # What the pattern would fit.
  run = Run(tmp_path / name)
  assert all(run.save(value) for value in (1, 2))
  run = Run(tmp_path / name)
  path, value = run.restore()
  assert (path, value) == (str(_folder(tmp_path / name) / 'frames-2'), 2)
  assert all(run.save(value) for value in (3, 4))
  names = {path.stem for path in _folder(tmp_path / name).iterdir()}
  assert names == {'checkpoint', 'frames-2', 'frames-3', 'frames-4'}
  assert Run(tmp_path / name).restore()[1] == 4


def test_names_checkpoints_as_tensorflow_does(tmp_path):
  run = Run(tmp_path)
  assert all(run.save(value) for value in (1, 2))
  state = tf.train.get_checkpoint_state(_folder(tmp_path))
  paths = [str(_folder(tmp_path) / name) for name in ('frames-1', 'frames-2')]
  assert list(state.all_model_checkpoint_paths) == paths
  assert tf.train.latest_checkpoint(_folder(tmp_path)) == paths[-1]


def test_a_run_folder_can_be_moved(tmp_path):
  Run(tmp_path / 'run').save(1)
  shutil.move(tmp_path / 'run', tmp_path / 'run2')
  run = Run(tmp_path / 'run2')
  path, value = run.restore()
  assert (path, value) == (str(_folder(tmp_path / 'run2') / 'frames-1'), 1)
  assert run.save(2)
  assert Run(tmp_path / 'run2').restore()[1] == 2
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize('damage', [_truncate, _overwrite, pathlib.Path.unlink])
@pytest.mark.parametrize('suffix', ['index', 'data-00000-of-00001'])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(
  tmp_path, damage, suffix, capfd
):
  run = Run(tmp_path)
  for value in (1, 2, 3):
    run.save(value)
  damage(_folder(tmp_path) / f'frames-3.{suffix}')
  run = Run(tmp_path)
  path, value = run.restore()
  assert (pathlib.Path(path).name, value) == ('frames-2', 2)
  warnings = capfd.readouterr().err
  assert warnings.count('Warning: cannot restore') == 1
  assert 'frames-3' in warnings

  # Here 3 comes once more, and replaces what was damaged.
  run.save(3)
  assert Run(tmp_path).restore()[1] == 3


def test_refuses_to_start_anew_where_all_are_damaged(tmp_path):
  run = Run(tmp_path)
  for value in (1, 2):
    run.save(value)
  for path in _folder(tmp_path).glob('*.data-*'):
    _truncate(path)
  with pytest.raises(checkpoint.CheckpointError, match='damaged'):
    Run(tmp_path).restore()


@pytest.mark.parametrize('content', [None, '', 'model_check\0'])
def test_the_list_of_checkpoints_may_be_damaged(tmp_path, content):
  run = Run(tmp_path)
  for value in (9, 10):
    run.save(value)
  path = _folder(tmp_path) / 'checkpoint'
  path.unlink() if content is None else path.write_text(content)
  run = Run(tmp_path)
  assert run.restore()[1] == 10
  run.save(11)
  names = {path.stem for path in _folder(tmp_path).glob('*.index')}
  assert names == {'frames-9', 'frames-10', 'frames-11'}


def test_what_a_cut_save_leaves_is_no_checkpoint_and_goes_away(tmp_path):
  folder = _folder(tmp_path)
  folder.mkdir()
  leftovers = [
    folder / 'frames-5.data-00000-of-00001.tempstate36438153',
    folder / 'frames-6.data-00000-of-00001.tempstate16365758',
    folder / 'frames-4.data-00000-of-00001',
  ]
  for path in leftovers:
    path.write_bytes(b'half')
  run = Run(tmp_path)
  assert run.restore()[0] is None
  assert run.save(6)
  assert not any(path.exists() for path in leftovers)
  assert Run(tmp_path).restore()[1] == 6


def test_a_copy_that_a_user_keeps_is_left_alone(tmp_path):
  run = Run(tmp_path)
  assert run.save(1)
  folder = _folder(tmp_path)
  for path in list(folder.glob('frames-*')):
    stem, _, kind = path.name.partition('.')
    shutil.copy(path, folder / f'{stem}-best.{kind}')
  kept = set(folder.glob('*-best.*'))
  for value in (2, 3, 4, 5):
    assert run.save(value)
  assert set(folder.glob('*-best.*')) == kept and kept
  (folder / 'checkpoint').write_text('damaged')
  assert Run(tmp_path).restore()[1] == 5


def test_refuses_the_checkpoint_of_another_agent(tmp_path):
  Run(tmp_path).save(1)
  with pytest.raises(checkpoint.CheckpointError, match='another agent'):
    Run(tmp_path, shape=(7,)).restore()


def test_a_save_that_fails_warns_and_leaves_the_former(tmp_path, capfd):
  run = Run(tmp_path)
  assert run.save(1)
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (_SIZE, limits[1]))
  try:
    assert not run.save(2)
    assert not run.save(1.5, frames=3)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  lines = capfd.readouterr().err.splitlines()
  warnings = [line for line in lines if 'Warning: cannot save' in line]
  assert len(warnings) == 2
  assert all('File too large' in warning for warning in warnings)
  assert not list(_folder(tmp_path).glob('*.tempstate*'))
  assert Run(tmp_path).restore()[1] == 1
  assert run.save(4)
  assert Run(tmp_path).restore()[1] == 4


class Training:
  """A learner that always gets the same batch."""

  def __init__(self, logdir, total_environment_frames=1000, popart_levels=None):
    _folder(logdir).mkdir(parents=True, exist_ok=True)
    spec = environments.EnvironmentSpec(
      (3,), np.dtype(np.float32), num_actions=2, frames_per_step=1, stack=1,
      action_meanings=None,
    )  # fmt: skip
    hyperparameters = config.UpdateConfig(
      batch_size=_B, unroll_length=_T, discounting=0.99, baseline_cost=0.5,
      entropy_cost=0.01, reward_clipping='abs_one', learning_rate=6e-4,
      decay=0.99, momentum=0.9, epsilon=0.01, max_gradient_norm=40.0,
      total_environment_frames=total_environment_frames,
    )  # fmt: skip
    with tf.Graph().as_default():
      tf1.set_random_seed(1)
      agent = networks.Agent(spec, 'vector', True, popart_levels, name='agent')
      specs = unrolls.unroll_specs(agent, spec, _T)
      queue = unrolls.make_queue(specs, 30 * _B)
      self.learner = learner.Learner(agent, queue, specs, 1, hyperparameters)
      checkpoints = checkpoint.Checkpoints(str(logdir), self.learner.variables)
      enqueue = queue.enqueue_many(_make_batch(specs))
      self.session = tf1.Session()
      self.session.run(tf1.global_variables_initializer())
      self.path = checkpoints.restore(self.session)
      for _ in range(25):
        self.session.run(enqueue)
    self.save = lambda: checkpoints.save(self.session, self.frames)

  @property
  def frames(self):
    return int(self.session.run(self.learner.num_environment_frames))

  def update(self, times):
    """Updates, and returns the scalars of each update."""
    scalars = []
    self.learner.run(
      self.session,
      lambda result: scalars.append(result.scalars),
      lambda: len(scalars) == times,
    )
    return scalars


def _make_batch(specs):
  generator = np.random.default_rng(1)

  def make(spec):
    shape = [_B, *spec.shape]
    if spec.dtype == tf.float32:
      return np.float32(generator.normal(size=shape))
    return generator.integers(0, 2, shape).astype(spec.dtype.as_numpy_dtype)

  batch = tf.nest.map_structure(make, specs)
  batch.env_outputs.info.truncated[:] = False
  batch.level_index[:] = 0
  batch.policy_version[:] = 0
  return tf.nest.flatten(batch)


@pytest.mark.parametrize('popart_levels', [None, 2])
def test_restoring_continues_as_if_nothing_had_happened(
  tmp_path, popart_levels
):
  whole = Training(tmp_path / 'whole', popart_levels=popart_levels)
  expected = whole.update(20)

  first = Training(tmp_path, popart_levels=popart_levels)
  actual = first.update(10)
  assert first.frames == 10 * _T * _B
  assert first.save()
  second = Training(tmp_path, popart_levels=popart_levels)
  assert second.path
  actual += second.update(10)

  assert second.frames == whole.frames == 20 * _T * _B
  for name in ('losses/total', 'learning_rate', 'gradient_norm'):
    np.testing.assert_allclose(
      [scalars[name] for scalars in actual],
      [scalars[name] for scalars in expected],
      rtol=1e-6,
      err_msg=name,
    )
  for ours, theirs in zip(
    second.learner.variables, whole.learner.variables, strict=True
  ):
    np.testing.assert_allclose(
      second.session.run(ours),
      whole.session.run(theirs),
      rtol=0,
      atol=1e-6,
      err_msg=ours.name,
    )


def test_a_longer_budget_decays_over_all_of_it(tmp_path):
  first = Training(tmp_path, 200_000_000)

  def set_frames():
    counter = first.learner.num_environment_frames
    with first.session.graph.as_default():
      first.session.run(counter.assign(100_000_000))

  set_frames()
  assert first.update(1)[0]['learning_rate'] == pytest.approx(3e-4)
  set_frames()
  first.save()
  second = Training(tmp_path, 400_000_000)
  assert second.update(1)[0]['learning_rate'] == pytest.approx(4.5e-4)
  assert second.frames == 100_000_000 + _T * _B
