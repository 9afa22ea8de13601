"""Update RLlib's env runners with any scheme, on the new API stack with torch.

The learner has the sender, and each env runner has a receiver. Evaluation runners still use RLlib's
own weight sync, which sends arrays through the driver and Ray's object store.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

from sync_core import Address, OptionError, PendingSend, Receiver, Sender, SyncError

__all__ = ["EnvRunnerWeights", "sync_env_runners"]

_log = logging.getLogger("sync_core")
# By learner, in its process.
_SENDERS: WeakKeyDictionary[Any, _LearnerWeights] = WeakKeyDictionary()
# A learner that has added or removed modules returns this instead of a version.
_OTHER_MODULES = 0


def sync_env_runners(
    config: AlgorithmConfig, scheme: Any = "shm", *, timeout: float = 60.0, **options: Any
) -> AlgorithmConfig:
    """Update an algorithm's env runners with a scheme, instead of RLlib's own weight sync.

    From its next ``sample()``, a runner uses the version of the last update or a newer one; neither
    the learner nor the driver waits. A recreated runner gets the newest version before it samples.
    Call this last, since it extends the settings in the configuration.

    Args:
        config: the configuration of PPO, IMPALA, or another algorithm that calls ``sync_weights``
            or ``sync_env_runner_states`` of its env runners, on the new API stack with torch.
        scheme: a scheme by name, a chain or a plugin object, whose addresses can be pickled, such
            as ``"shm"`` on one machine, or ``"dist"`` and ``"ray"`` on several.
        timeout: how long a runner waits for a version, in seconds; then its ``sample()`` raises,
            and RLlib treats the runner as failed.
        **options: other arguments of `sync_core.Sender`, such as ``layers``, and options of the
            scheme.

    Returns:
        The same configuration.

    Raises:
        OptionError: the configuration uses the old API stack, another framework, or an env runner
            class without `EnvRunnerWeights`.

    Example:
        >>> from ray.rllib.algorithms.ppo import PPOConfig
        >>> config = PPOConfig().environment("CartPole-v1").env_runners(num_env_runners=2)
        >>> config = sync_env_runners(config, "shm")
        >>> config.env_runner_cls.__name__
        'SingleAgentRunner'
    """
    if not config.enable_env_runner_and_connector_v2 or config.framework_str != "torch":
        raise OptionError(
            "sync_env_runners needs RLlib's new API stack with torch, got "
            f"framework={config.framework_str!r}, enable_env_runner_and_connector_v2="
            f"{config.enable_env_runner_and_connector_v2}"
        )
    wanted = config.env_runner_cls
    if wanted in (None, SingleAgentEnvRunner, MultiAgentEnvRunner):
        wanted = MultiAgentRunner if config.is_multi_agent else SingleAgentRunner
    elif not issubclass(wanted, EnvRunnerWeights):
        raise OptionError(
            f"{wanted.__name__} cannot receive weights; type class {wanted.__name__}"
            "(EnvRunnerWeights, SingleAgentEnvRunner)"
        )
    setup = _Setup(scheme, timeout, tuple(options.items()))
    config.env_runners(env_runner_cls=wanted)
    config.callbacks(
        on_algorithm_init=[*_listed(config.callbacks_on_algorithm_init), setup],
        on_env_runners_recreated=[
            *_listed(config.callbacks_on_env_runners_recreated),
            _connect_recreated,
        ],
    )
    if hasattr(config, "use_env_runner_state_server"):
        # IMPALA's runners would also pull the weights that the scheme delivers.
        config.use_env_runner_state_server = False
    return config


class EnvRunnerWeights:
    """A mixin for env runner classes: receives weights before each sample. List it first.

    Attributes:
        weights_version: the runner's current version; 0 for its initial weights.

    Example:
        >>> from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
        >>> class MyRunner(EnvRunnerWeights, SingleAgentEnvRunner):
        ...     pass
    """

    module: Any
    _connected: tuple[Address, float, Sequence[str]] | None = None
    _receiver: Receiver | None = None
    _expected = 0
    _seconds = 60.0

    @property
    def weights_version(self) -> int:
        """The runner's current version."""
        return 0 if self._receiver is None else self._receiver.version

    def weight_names(self) -> dict[str, tuple[str, ...]]:
        """Return, by module id, the names of the tensors in each of the runner's modules."""
        return {mid: tuple(module.state_dict()) for mid, module in self._modules().items()}

    def connect_weights(self, address: Address, timeout: float, module_ids: Sequence[str]) -> None:
        """Receive from an address from now on.

        Args:
            address: the address of the learner's sender.
            timeout: how long to wait for an expected version, in seconds.
            module_ids: the ids of the modules that are sent.
        """
        self._connected = address, timeout, module_ids
        self._seconds = timeout
        self._disconnect()
        own = self._modules()
        models = {module_id: own[module_id] for module_id in module_ids}
        self._receiver = Receiver(address, models, timeout=timeout)

    def expect_weights(self, version: int) -> None:
        """Require this version or a newer one for all later samples.

        Args:
            version: the version, as counted by `Sender.version`.
        """
        self._expected = version

    def receive_weights(self) -> None:
        """Commit the newest version; wait for the expected one.

        Raises:
            SyncError: the expected version did not come in time.
        """
        if self._receiver is None:
            return
        self._receiver.receive(0 if self._receiver.version >= self._expected else self._seconds)
        if self._receiver.version < self._expected:
            raise SyncError(
                f"version {self._expected} did not come within {self._seconds:g} s, so this env "
                f"runner has version {self._receiver.version}; does the learner live?"
            )

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        """Receive weights, and then sample as RLlib does."""
        self.receive_weights()
        return super().sample(*args, **kwargs)  # type: ignore[misc]

    def make_module(self) -> None:
        """Make the module as RLlib does, and reconnect it if it was connected before."""
        super().make_module()  # type: ignore[misc]
        if self._connected is not None:
            self.connect_weights(*self._connected)

    def stop(self) -> None:
        """Stop as RLlib does, and disconnect from the sender."""
        self._disconnect()
        super().stop()  # type: ignore[misc]

    def _modules(self) -> dict[str, Any]:
        module = self.module
        return dict(module.items()) if hasattr(module, "items") else {DEFAULT_MODULE_ID: module}

    def _disconnect(self) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()


class SingleAgentRunner(EnvRunnerWeights, SingleAgentEnvRunner):
    """RLlib's env runner for one agent, updated by a scheme."""


class MultiAgentRunner(EnvRunnerWeights, MultiAgentEnvRunner):
    """RLlib's env runner for several agents, updated by a scheme."""


@dataclass(frozen=True)
class _Setup:
    """A callback that connects a new algorithm's env runners to its learner."""

    scheme: Any
    timeout: float
    options: tuple[tuple[str, Any], ...]

    def __call__(self, *, algorithm: Any, **_: Any) -> None:
        algorithm.weight_sync = _WeightSync(algorithm, self)


class _WeightSync:
    """Replaces RLlib's own weight sync in the driver.

    Worker 0 is the runner in the driver; the other worker ids are RLlib's indices.
    """

    def __init__(self, algorithm: Any, setup: _Setup) -> None:
        self._group, self._learners = algorithm.env_runner_group, algorithm.learner_group
        self._setup = setup
        self._timeout = setup.timeout
        self._sync_weights = self._group.sync_weights
        self._sync_states = self._group.sync_env_runner_states
        self._open()
        self._group.sync_weights = self.sync_weights
        self._group.sync_env_runner_states = self.sync_states
        self._refresh()

    def _open(self) -> None:
        """Make a sender for the modules that learners and runners share; connect the runners."""
        local = self._group.local_env_runner
        remote = self._group.healthy_worker_ids()
        if local is not None:
            names = local.weight_names()
        else:
            found = self._group.foreach_env_runner("weight_names", timeout_seconds=self._timeout)
            names = next(iter(found), None)
        ids = [*([0] if local is not None else []), *remote]
        self._module_ids, self._addresses = self._first(
            partial(_open_sender, setup=self._setup, worker_ids=tuple(ids), names=names)
        )
        self.connect(ids)

    def connect(self, ids: Sequence[int]) -> None:
        """Connect runners to the sender, which sends each the newest version."""
        for worker_id in ids:
            address = self._addresses.get(worker_id)
            if address is None:
                address = self._first(partial(_add_worker, worker_id=worker_id))
                self._addresses = {**self._addresses, worker_id: address}
            self._on_runner(
                worker_id,
                "connect_weights",
                address=address,
                timeout=self._timeout,
                module_ids=self._module_ids,
            )

    def sync_weights(
        self, *args: Any, from_worker_or_learner_group: Any = None, **kwargs: Any
    ) -> None:
        """Replace `EnvRunnerGroup.sync_weights`: send the learners' weights with the scheme."""
        if from_worker_or_learner_group is self._learners:
            self._refresh()
        else:
            kwargs["from_worker_or_learner_group"] = from_worker_or_learner_group
            self._sync_weights(*args, **kwargs)

    def sync_states(self, *, rl_module_state: Any = None, **kwargs: Any) -> None:
        """Replace `EnvRunnerGroup.sync_env_runner_states`: send weights with the scheme."""
        self._sync_states(**kwargs)
        if rl_module_state is not None:
            self._refresh()

    def _refresh(self) -> None:
        """Send the learner's weights, and make the runners wait for them before they sample."""
        version = self._first(_send)
        if version == _OTHER_MODULES:
            self._open()
            version = self._first(_send)
        self._group.foreach_env_runner_async(
            "expect_weights", tag="expect_weights", kwargs={"version": version}
        )
        self._group.fetch_ready_async_reqs(tags="expect_weights")
        if self._group.local_env_runner is not None:
            self._group.local_env_runner.expect_weights(version)
            self._group.local_env_runner.receive_weights()

    def _on_runner(self, worker_id: int, method: str, **kwargs: Any) -> None:
        if worker_id == 0:
            getattr(self._group.local_env_runner, method)(**kwargs)
        else:
            self._group.foreach_env_runner(
                method,
                kwargs=kwargs,
                local_env_runner=False,
                remote_worker_ids=[worker_id],
                timeout_seconds=self._timeout,
            )

    def _first(self, call: Callable[[Any], Any]) -> Any:
        """Call a function with each learner, and return the result of the sending one."""
        results = [each.get() for each in self._learners.foreach_learner(call)]
        return next(result for result in results if result is not None)


class _LearnerWeights:
    """Sends a learner's weights, in the learner's process.

    Args:
        learner: the learner.
        setup: the arguments for the sender.
        worker_ids: the worker ids of the runners.
        names: by module id, the names of the tensors that runners have; None if there is no runner
            to ask.
        before: the sender that this one replaces. The first `send` closes it, since runners use it
            until they are connected to this one.
    """

    def __init__(
        self,
        learner: Any,
        setup: _Setup,
        worker_ids: Sequence[int],
        names: Mapping[str, tuple[str, ...]] | None,
        before: _LearnerWeights | None,
    ) -> None:
        self._learned = set(learner.module.keys())
        if names is None:
            names = {
                module_id: tuple(module.unwrapped().get_state(inference_only=True))
                for module_id, module in learner.module.items()
            }
        self._names = {mid: names[mid] for mid in names if mid in self._learned}
        self._before = before
        self._pending: PendingSend | None = None
        options = {"on_failure": "quarantine", **dict(setup.options)}
        self.sender = Sender(setup.scheme, self._read(learner), num_workers=0, **options)
        for worker_id in worker_ids:
            self.sender.add_worker(worker_id)
        if before is not None:
            self.sender.advance(before.sender.version)

    @property
    def module_ids(self) -> tuple[str, ...]:
        """The ids of the modules that are sent."""
        return tuple(self._names)

    def send(self, learner: Any) -> int:
        """Start sending without waiting for the runners, and return the version.

        If the learner has added or removed modules, send nothing, since they do not match the
        sender's layout.
        """
        if set(learner.module.keys()) != self._learned:
            return _OTHER_MODULES
        self._close_before()
        self._end_pending()
        self._pending = self.sender.send_async(self._read(learner))
        return self._pending.version

    def close(self) -> None:
        """Close the sender."""
        self._close_before()
        self._end_pending()
        self.sender.close()

    def _close_before(self) -> None:
        before, self._before = self._before, None
        if before is not None:
            before.close()

    def _end_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None and not pending.done():
            pending.abandon("a newer version is sent")
        elif pending is not None:
            pending.wait()

    def _read(self, learner: Any) -> dict[str, dict[str, torch.Tensor]]:
        states = {mid: learner.module[mid].unwrapped().state_dict() for mid in self._names}
        return {
            module_id: {
                name: states[module_id][name] for name in names if name in states[module_id]
            }
            for module_id, names in self._names.items()
        }


def _open_sender(
    learner: Any,
    *,
    setup: _Setup,
    worker_ids: Sequence[int],
    names: Mapping[str, tuple[str, ...]] | None,
) -> tuple[tuple[str, ...], dict[int, Address]] | None:
    """Replace the sender, in the first learner; other learners return None."""
    if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
        return None
    weights = _LearnerWeights(learner, setup, worker_ids, names, _SENDERS.get(learner))
    _SENDERS[learner] = weights
    return weights.module_ids, {i: weights.sender.address(i) for i in worker_ids}


def _add_worker(learner: Any, *, worker_id: int) -> Address | None:
    weights = _SENDERS.get(learner)
    if weights is None:
        return None
    weights.sender.add_worker(worker_id)
    return weights.sender.address(worker_id)


def _send(learner: Any) -> int | None:
    weights = _SENDERS.get(learner)
    return None if weights is None else weights.send(learner)


def _connect_recreated(
    *, algorithm: Any, env_runner_indices: Sequence[int], is_evaluation: bool, **_: Any
) -> None:
    """Connect the runners that RLlib has restarted."""
    if not is_evaluation:
        _log.info("env runners %s were recreated; they get the newest weights", env_runner_indices)
        algorithm.weight_sync.connect(env_runner_indices)


def _listed(callbacks: Any) -> list[Any]:
    if callbacks is None:
        return []
    return list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]
