"""Wires the actors and the learner of a process, in one of three ways.

  LocalTraining    an actor and the learner, in two threads of one process
  ClusterLearner   a learner whose actors are in other processes
  RemoteActor      an actor whose learner is in another process

Each is a context manager: entering it makes environments, graph and session;
leaving it closes them. All have `start`, `close_queue` and `explain`.
`runtime.loop` runs the first two; `RemoteActor.run` runs the third.
"""

from collections.abc import Callable, Sequence
import contextlib
import dataclasses
import os
import threading

import numpy as np
import tensorflow as tf

import actor as actor_lib
from cluster import collectives
from cluster import learner_client
from cluster import learners
from cluster import membership
from cluster import registry as registry_lib
import config as config_lib
import environments
from envs import make
import learner as learner_lib
import networks
from runtime import callables
from runtime import console
from runtime import limits
from runtime import signals
from runtime import threads as threads_lib
import torsos
import unrolls

tf1 = tf.compat.v1

# The interval at which an actor polls its learner.
_POLL_SECS = 2.0
# How long to wait for a thread to end. One that waits for a lost learner does
# not end.
_END_SECS = 5.0
# How long an actor that was asked to stop may take to sign off.
_STOP_SECS = 2.0


class LocalTraining:
  """An actor and the learner, in two threads of this process; opens no port.

  Attributes:
    config: completed for the environments.
    level_names: the levels of the run, by level index.
    spec: the environments' spec.
    about: facts about environments and actors for the startup block, by name.
    session: holds the initialised weights and the queue.
    learner: the update.
  """

  def __init__(self, config: config_lib.Config, level_names: Sequence[str]):
    """Takes what to train; builds nothing yet."""
    self.config = config
    self.level_names = level_names

  def __enter__(self):
    with contextlib.ExitStack() as stack:
      envs = make.from_config(
        self.config,
        self.level_names,
        training=True,
        num_envs=self.config.num_envs,
      )
      stack.enter_context(contextlib.closing(envs))
      self.spec = envs.spec
      self.about = {
        'environments': envs.num_envs,
        'seeds': describe_seeds(envs),
        **envs.settings(),
      }
      self.config = complete(self.config, self.spec, self.level_names)
      stack.enter_context(tf.Graph().as_default())
      self._build(envs)
      stack.enter_context(self.session)
      self._stack = stack.pop_all()
    return self

  def __exit__(self, *error):
    return self._stack.__exit__(*error)

  def _build(self, envs):
    tf1.set_random_seed(self.config.run.seed)
    self.learner, queue, specs = build_learner(self.config, self.spec)
    agent = networks.make_agent(self.config, self.spec, 'actor')
    self._actor = build_actor(self.config, envs, self.level_names, agent, specs)
    copy = actor_lib.copy_weights(
      agent, self.learner.agent, self.learner.num_updates
    )
    enqueue, feeds = unrolls.make_enqueue(queue, specs)
    queue_size = queue.size()
    close_queue = queue.close(cancel_pending_enqueues=True)
    self.session = tf1.Session()
    self.session.run(tf1.global_variables_initializer())
    refresh = callables.make(self.session, [copy])
    self._refresh = lambda: refresh()[0]
    self._enqueue = callables.make(self.session, (), feeds, targets=[enqueue])
    self.queue_size = self.session.make_callable(queue_size)
    self.close_queue = self.session.make_callable(close_queue)

  def start(
    self,
    threads: threads_lib.Threads,
    on_update: Callable[[learner_lib.UpdateResult], None],
  ) -> None:
    """Starts acting and learning, in `threads`."""
    threads.start(
      lambda: self._actor.run(
        self.session, self._refresh, self._enqueue, threads.should_stop
      )
    )
    threads.start(
      lambda: self.learner.run(self.session, on_update, threads.should_stop)
    )

  def describe_actors(self) -> str:
    """Returns nothing: there are no remote actors."""
    return ''

  def linger(self) -> None:
    """Does nothing: there are no remote actors."""

  def explain(self, failure: Exception) -> Exception:
    """Returns the error to raise after a thread ended with `failure`."""
    return failure


class ClusterLearner:
  """A learner, perhaps one of several, whose actors are in other processes.

  Its attributes are those of `LocalTraining`.
  """

  def __init__(self, config: config_lib.Config, level_names: Sequence[str]):
    """Takes what to train; builds nothing yet."""
    self.config = config
    self.level_names = level_names
    self._cluster = membership.from_config(config.cluster)
    self._timeout_secs = config.cluster.connect_timeout_secs

  def __enter__(self):
    membership.bypass_proxies(self._cluster)
    with contextlib.ExitStack() as stack:
      server = membership.start_server(self._cluster)
      self.spec, about_envs = make.find_spec(
        self.level_names, **make.family_settings(self.config, self.level_names)
      )
      self.about = {
        'actors': membership.describe_actors(self._cluster),
        **about_envs,
      }
      self.config = complete(self.config, self.spec, self.level_names)
      membership.wait_for_learners(self._cluster, self._timeout_secs)
      stack.enter_context(tf.Graph().as_default())
      self._build(server)
      stack.enter_context(self.session)
      self._stack = stack.pop_all()
    return self

  def __exit__(self, *error):
    return self._stack.__exit__(*error)

  def _build(self, server):
    tf1.set_random_seed(self.config.run.seed)
    cluster = self._cluster
    self._agreed = membership.agreed_settings(
      self.config, self.spec, self.level_names
    )
    group = collectives.Group(
      len(cluster.learner_hosts),
      cluster.task,
      cluster.learner_device,
      self._timeout_secs,
    )
    with membership.on_learner(cluster):
      self.learner, queue, _ = build_learner(self.config, self.spec, group)
      self._fingerprints = learners.make_fingerprints(
        group, self._agreed | dataclasses.asdict(self.config.update)
      )
      queue_size = queue.size()
      close_queue = queue.close(cancel_pending_enqueues=True)
      with tf1.device(cluster.learner_device):
        self._registry = registry_lib.ActorRegistry(cluster.num_actors)
    self.session = tf1.Session(
      server.target, config=membership.session_config(cluster)
    )
    self.session.run(tf1.global_variables_initializer())
    self.queue_size = self.session.make_callable(queue_size)
    self._close_queue = self.session.make_callable(close_queue)

  def start(
    self,
    threads: threads_lib.Threads,
    on_update: Callable[[learner_lib.UpdateResult], None],
  ) -> None:
    """Lets actors join, times them and learns, in `threads`."""
    self._registry.open(self.session, self._agreed)
    threads.start(
      lambda: self._registry.keep_time(self.session, threads.should_stop)
    )
    threads.start(lambda: self._learn(on_update, threads.should_stop))

  def _learn(self, on_update, should_stop):
    cluster, timeout_secs = self._cluster, self._timeout_secs
    if len(cluster.learner_hosts) > 1:
      with learners.limit_first_collective(cluster, timeout_secs):
        learners.check_fingerprints(self.session.run(self._fingerprints))
      self.session.run(self.learner.broadcast_weights)
    with learners.limit_updates(
      cluster, timeout_secs, self.close_queue
    ) as note_update:
      self.learner.run(
        self.session,
        lambda result: (note_update(), on_update(result)),
        should_stop,
      )

  def describe_actors(self) -> str:
    """Returns how many of this learner's actors are playing."""
    cluster = self._cluster
    own = range(cluster.task, cluster.num_actors, len(cluster.learner_hosts))
    num_playing = self.session.run(self._registry.num_playing)
    return f'{num_playing} of {len(own)} actors play'

  def _is_over(self):
    frames = self.session.run(self.learner.num_environment_frames)
    return frames >= self.config.update.total_environment_frames

  def close_queue(self) -> None:
    """Wakes threads that wait at the queue; tells actors if the run is over."""
    if self._is_over():
      self._registry.end(self.session)
    self._close_queue()

  def linger(self) -> None:
    """Waits for actors to leave, if the run is over."""
    if self._is_over():
      self._registry.linger(self.session)

  def explain(self, failure: Exception) -> Exception:
    """Returns the error to raise after a thread ended with `failure`."""
    return learners.explain_failure(failure, self._cluster, self._timeout_secs)


class RemoteActor:
  """An actor whose learner is in another process, and may restart."""

  def __init__(self, config: config_lib.Config, level_names: Sequence[str]):
    """Takes what to play; builds nothing yet."""
    self.config = config
    self.level_names = level_names
    self._cluster = membership.from_config(config.cluster)

  def __enter__(self):
    membership.bypass_proxies(self._cluster)
    learner_client.hide_gpus()
    learner_client.keep_memory()
    with contextlib.ExitStack() as stack:
      envs = make.from_config(
        self.config,
        self.level_names,
        training=True,
        num_envs=self.config.envs.envs_per_actor,
        actor=self._cluster.task,
      )
      stack.enter_context(contextlib.closing(envs))
      console.say(f'Environments with the seeds {describe_seeds(envs)}.')
      self.config = complete(self.config, envs.spec, self.level_names)
      stack.enter_context(tf.Graph().as_default())
      self._build(envs)
      stack.enter_context(self.session)
      self._stack = stack.pop_all()
    return self

  def __exit__(self, *error):
    return self._stack.__exit__(*error)

  def _build(self, envs):
    # Each actor samples its own actions.
    seed = np.random.SeedSequence([self.config.run.seed, self._cluster.task])
    tf1.set_random_seed(int(seed.generate_state(1)[0] >> 1))
    agent = networks.make_agent(self.config, envs.spec)
    self._specs = unrolls.unroll_specs(
      agent, envs.spec, self.config.update.unroll_length
    )
    self._actor = build_actor(
      self.config, envs, self.level_names, agent, self._specs
    )
    self._weights = agent.variables
    self._agreed = membership.agreed_settings(
      self.config, envs.spec, self.level_names
    )
    feeds = [tf1.placeholder(w.dtype, w.shape) for w in self._weights]
    pairs = zip(self._weights, feeds, strict=True)
    load = tf.group(*(weight.assign(feed) for weight, feed in pairs))
    self.session = tf1.Session()
    self._load = callables.make(self.session, (), feeds, targets=[load])
    self.session.graph.finalize()

  def run(self) -> bool:
    """Plays until the run is over or a signal ends it.

    Returns:
      Whether the run is over.

    Raises:
      membership.LearnerLost: the learner was away for too long.
      errors.SettingError: see `learner_client.LearnerClient.poll`.
      py_process.EnvironmentFailed: an environment failed.
    """
    threads = threads_lib.Threads(self.close_queue)
    self._client = learner_client.LearnerClient(
      self._cluster,
      self._specs,
      self.config.update.queue_capacity,
      self._weights,
      self._agreed,
      self.config.cluster.connect_timeout_secs,
      threads.should_stop,
    )

    def stop():
      threads.stop()
      # An actor has nothing to save, and may be waiting for its learner.
      timer = threading.Timer(_STOP_SECS, os._exit, [signals.EXIT_STOPPED])
      timer.daemon = True  # If the actor ends before, so does the process.
      timer.start()

    with signals.stopping(stop):
      self.start(threads)
      try:
        while not (is_over := self._client.poll()):
          if threads.wait(_POLL_SECS):
            break
      finally:
        threads.join(_END_SECS)
    if threads.failure:
      raise self.explain(threads.failure)
    console.say(f'Actor {self._cluster.task} has ended.')
    return is_over

  def start(self, threads: threads_lib.Threads) -> None:
    """Starts acting, in `threads`."""
    threads.start(
      lambda: self._actor.run(
        self.session, self._refresh, self._client.enqueue, threads.should_stop
      )
    )

  def _refresh(self):
    policy_version, weights = self._client.read_weights()
    self._load(*weights)
    return policy_version

  def close_queue(self) -> None:
    """Signs off, and cancels a waiting enqueue."""
    self._client.leave()

  def explain(self, failure: Exception) -> Exception:
    """Returns the error to raise after a thread ended with `failure`."""
    return failure


def complete(
  config: config_lib.Config,
  spec: environments.EnvironmentSpec,
  level_names: Sequence[str],
) -> config_lib.Config:
  """Returns a config in which the settings left open have values."""
  return config.completed(len(level_names), torsos.default_torso(spec))


def build_learner(
  config: config_lib.Config,
  spec: environments.EnvironmentSpec,
  group: collectives.Group = collectives.ALONE,
) -> tuple[learner_lib.Learner, tf.queue.FIFOQueue, unrolls.ActorOutput]:
  """Builds the learner and its queue, in the current graph.

  Returns:
    The learner, the queue, and the result of `unrolls.unroll_specs`.

  Raises:
    errors.SettingError: the queue and the batches cannot fit in memory.
  """
  agent = networks.make_agent(config, spec)
  specs = unrolls.unroll_specs(agent, spec, config.update.unroll_length)
  update = config.update
  limits.check_memory(
    tf.nest.flatten(specs),
    # One batch trains while the next one is staged.
    update.queue_capacity + 2 * update.batch_size,
    f'the unrolls (--unroll_length={update.unroll_length}) of a queue '
    f'(--queue_capacity={update.queue_capacity}) and two batches '
    f'(--batch_size={update.batch_size})',
  )
  queue = unrolls.make_queue(specs, config.update.queue_capacity)
  learner = learner_lib.Learner(
    agent, queue, specs, spec.frames_per_step, config.update, group
  )
  return learner, queue, specs


def build_actor(
  config: config_lib.Config,
  envs: environments.Environments,
  level_names: Sequence[str],
  agent: networks.Agent,
  specs: unrolls.ActorOutput,
) -> actor_lib.Actor:
  """Builds an actor and its policy, in the current graph.

  Raises:
    errors.SettingError: the environments' unrolls cannot fit in memory.
  """
  length = config.update.unroll_length
  limits.check_memory(
    tf.nest.flatten(specs),
    envs.num_envs,
    f'the unrolls (--unroll_length={length}) of {envs.num_envs} environments',
  )
  level_indices = [level_names.index(name) for name in envs.level_names]
  return actor_lib.Actor(
    envs,
    np.array(level_indices, np.int32),
    actor_lib.Policy(agent, envs.spec),
    specs,
    length,
  )


def describe_seeds(envs: environments.Environments) -> str:
  """Returns the seeds of the first few environments, as text."""
  more = ', ...' if envs.num_envs > 4 else ''
  return ', '.join(map(str, envs.seeds[:4])) + more
