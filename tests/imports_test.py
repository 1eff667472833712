"""Imports run one way: from the entry points down, and never back up."""

import ast
import graphlib

import pytest

from tests import program

# From the top. A module imports from its own floor and from those below it.
# `wing.*` is what else there is in a wing.
_FLOORS = {
  'entry points': ['experiment', 'local_cluster', 'examples.*'],
  'wiring': ['training', 'runtime.loop', 'evaluation.test_mode'],
  'processes': [
    'learner',
    'actor',
    'cluster.*',
    'runtime.monitor',
    'evaluation.*',
  ],
  'what travels between them': ['unrolls'],
  'agent': ['networks', 'torsos', 'popart', 'vtrace'],
  'families of environments': ['envs.*'],
  'levels': ['levels', 'suites', 'dmlab30', 'atari57'],
  'contract of environments': [
    'environments',
    'envs.instructions',
    'py_process',
    'py_process_worker',
  ],
  'foundation': ['config', 'runtime.*'],
}
_WITHOUT_TENSORFLOW = [
  *_FLOORS['families of environments'],
  *_FLOORS['levels'],
  *_FLOORS['contract of environments'],
  'runtime.console',
  'runtime.errors',
  'runtime.limits',
  'runtime.run_folder',
  'runtime.signals',
]
_READ_FLAGS = {'experiment', 'config'}
_MAX_ROOT_MODULES = 18


def _find_modules():
  """Returns the paths of all modules of the program by their full names."""
  root = program.ROOT
  modules = {path.stem: path for path in root.glob('*.py')}
  for init in root.glob('*/__init__.py'):
    for path in init.parent.glob('*.py'):
      modules[f'{init.parent.name}.{path.stem}'] = path
  return modules


def _read_imports(path):
  """Returns the full names of all that a file imports, wherever it does."""
  names = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f'{path} has a relative import'
      names |= {f'{node.module}.{alias.name}' for alias in node.names}
  return names


_MODULES = _find_modules()
_IMPORTS = {name: _read_imports(path) for name, path in _MODULES.items()}


def _floor(module):
  """Returns the number of a module's floor, 0 for the top."""
  for pattern in (module, f'{module.split(".")[0]}.*'):
    for number, patterns in enumerate(_FLOORS.values()):
      if pattern in patterns:
        return number
  pytest.fail(f'{module} has no floor')


def _own_imports(module):
  """Returns those modules of the program that a module imports."""
  # `from networks import Agent` imports networks.
  names = _IMPORTS[module] | {n.rpartition('.')[0] for n in _IMPORTS[module]}
  return names & _MODULES.keys()


def test_all_modules_are_found():
  assert {'experiment', 'vtrace', 'envs.make', 'runtime.errors'} <= set(
    _MODULES
  )
  assert 'torsos' in _own_imports('networks')
  assert 'envs.atari' in _own_imports('envs.make')  # Within a function.


@pytest.mark.parametrize('module', sorted(_MODULES))
def test_nothing_is_imported_from_above(module):
  floor = _floor(module)
  above = [name for name in _own_imports(module) if _floor(name) < floor]
  assert not above, f'{module} imports {above}'


def test_there_is_no_cycle():
  graph = {module: _own_imports(module) for module in _MODULES}
  graphlib.TopologicalSorter(graph).prepare()  # Raises, and names the cycle.


def test_no_wing_imports_the_entry_point_or_its_wirings():
  for module in _MODULES:
    if '.' in module:
      assert not _own_imports(module) & {'experiment', 'training'}, module


def test_learner_and_actor_are_separate():
  for module, other in (('learner', 'actor'), ('actor', 'learner')):
    assert other not in _own_imports(module)


def test_only_experiment_and_config_read_flags():
  readers = {
    module
    for module, names in _IMPORTS.items()
    if names & {'absl.flags', 'absl.flags.FLAGS'}
  }
  assert readers <= _READ_FLAGS


def test_environments_do_without_tensorflow():
  waiting = [
    module
    for module in _MODULES
    if {module, f'{module.split(".")[0]}.*'} & set(_WITHOUT_TENSORFLOW)
  ]
  assert len(waiting) > 10
  seen = set()
  while waiting:  # What they import has to do without it as well.
    module = waiting.pop()
    packages = {name.split('.')[0] for name in _IMPORTS[module]}
    assert not packages & {'tensorflow', 'sonnet'}, module
    waiting += _own_imports(module) - seen
    seen.add(module)


def test_the_root_can_be_overlooked():
  at_root = [module for module in _MODULES if '.' not in module]
  assert len(at_root) <= _MAX_ROOT_MODULES, at_root
