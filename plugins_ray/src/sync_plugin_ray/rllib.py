"""RLlib's env runners, refreshed by any scheme: its new API stack, with torch.

The learner has the sender, and each env runner a receiver. RLlib's own way, by which weights
travel as arrays through the driver and Ray's object store, stays for runners of evaluation.
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
# Of a learner, in its process.
_SENDERS: WeakKeyDictionary[Any, _LearnerWeights] = WeakKeyDictionary()
# Returned, in place of a version, by a learner that has got or lost modules.
_OTHER_MODULES = 0


def sync_env_runners(
    config: AlgorithmConfig, scheme: Any = "shm", *, timeout: float = 60.0, **options: Any
) -> AlgorithmConfig:
    """Let a scheme refresh the env runners of an algorithm, in place of RLlib's own way.

    A runner acts with the version of the last update, or a newer one, from its next ``sample()``
    on; neither the learner nor the driver waits. A runner that is recreated gets the newest
    version before it samples. Call this last: it completes what the configuration has.

    Args:
        config: of PPO, IMPALA, or another algorithm that refreshes by ``sync_weights`` or
            ``sync_env_runner_states`` of its env runners; on the new API stack, with torch.
        scheme: the name of a scheme, a chain or a plugin object, whose addresses can travel, such
            as ``"shm"`` on one machine, ``"dist"`` and ``"ray"`` on several.
        timeout: within how many seconds a runner gets a version; later, its ``sample()`` raises
            and RLlib treats the runner as one that failed.
        **options: other arguments of `sync_core.Sender`, such as ``layers``, and options of the
            scheme.

    Returns:
        The same configuration.

    Raises:
        OptionError: the old API stack, another framework, or a class of env runners that lacks
            `EnvRunnerWeights`.

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
        # IMPALA's runners would pull what a scheme brings already.
        config.use_env_runner_state_server = False
    return config


class EnvRunnerWeights:
    """Mixed into a class of env runners, before it: receives weights before it samples.

    Attributes:
        weights_version: the version with which the runner acts; 0 for that of its start.

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
        """The version with which the runner acts."""
        return 0 if self._receiver is None else self._receiver.version

    def weight_names(self) -> dict[str, tuple[str, ...]]:
        """Return the names of the tensors of each module that the runner has, by its id."""
        return {mid: tuple(module.state_dict()) for mid, module in self._modules().items()}

    def connect_weights(self, address: Address, timeout: float, module_ids: Sequence[str]) -> None:
        """Receive from this address from now on.

        Args:
            address: of the learner's sender.
            timeout: seconds within which an expected version comes.
            module_ids: of the modules that the sender sends.
        """
        self._connected = address, timeout, module_ids
        self._seconds = timeout
        self._disconnect()
        own = self._modules()
        models = {module_id: own[module_id] for module_id in module_ids}
        self._receiver = Receiver(address, models, timeout=timeout)

    def expect_weights(self, version: int) -> None:
        """Sample with this version or a newer one from now on.

        Args:
            version: as `Sender.version` counts.
        """
        self._expected = version

    def receive_weights(self) -> None:
        """Commit the newest version, and wait for one that is expected.

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
        """Receive weights, and sample as RLlib does."""
        self.receive_weights()
        return super().sample(*args, **kwargs)  # type: ignore[misc]

    def make_module(self) -> None:
        """Make the module as RLlib does; one that was connected is connected again."""
        super().make_module()  # type: ignore[misc]
        if self._connected is not None:
            self.connect_weights(*self._connected)

    def stop(self) -> None:
        """Stop as RLlib does, and leave the sender."""
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
    """RLlib's env runner for one agent, with weights by a scheme."""


class MultiAgentRunner(EnvRunnerWeights, MultiAgentEnvRunner):
    """RLlib's env runner for several agents, with weights by a scheme."""


@dataclass(frozen=True)
class _Setup:
    """Connects an algorithm's env runners with its learner when the algorithm is made."""

    scheme: Any
    timeout: float
    options: tuple[tuple[str, Any], ...]

    def __call__(self, *, algorithm: Any, **_: Any) -> None:
        algorithm.weight_sync = _WeightSync(algorithm, self)


class _WeightSync:
    """Takes the place of RLlib's own weight sync, in the driver.

    Worker 0 is the runner in the driver, and the others have RLlib's indices.
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
        """Make a sender of the modules that learners and runners share, and connect the runners."""
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
        """Connect runners with the sender, which gives each the newest version."""
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
        """As `EnvRunnerGroup.sync_weights`; by the scheme where it is from the learners."""
        if from_worker_or_learner_group is self._learners:
            self._refresh()
        else:
            kwargs["from_worker_or_learner_group"] = from_worker_or_learner_group
            self._sync_weights(*args, **kwargs)

    def sync_states(self, *, rl_module_state: Any = None, **kwargs: Any) -> None:
        """As `EnvRunnerGroup.sync_env_runner_states`; weights go by the scheme."""
        self._sync_states(**kwargs)
        if rl_module_state is not None:
            self._refresh()

    def _refresh(self) -> None:
        """Send the learner's weights, and let the runners wait for them before they sample."""
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
        """Call a function with each learner, and return what it gave for the one that sends."""
        results = [each.get() for each in self._learners.foreach_learner(call)]
        return next(result for result in results if result is not None)


class _LearnerWeights:
    """The sender of a learner, in the learner's process.

    Args:
        learner: the learner.
        setup: what the sender is made from.
        worker_ids: of the runners.
        names: of what runners have of each module; None where no runner is there to tell.
        before: what it takes the place of; closed by the first `send`, as runners sample with it
            until they are connected with this one.
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
        """Return the ids of the modules that are sent."""
        return tuple(self._names)

    def send(self, learner: Any) -> int:
        """Send, without waiting for the runners, and return the version.

        Nothing is sent where the learner has got or lost modules: the sender's layout lacks them.
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
    """Make the sender, in the first learner, in place of the one before; others return None."""
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
    """Connect runners that RLlib has restarted."""
    if not is_evaluation:
        _log.info("env runners %s were recreated; they get the newest weights", env_runner_indices)
        algorithm.weight_sync.connect(env_runner_indices)


def _listed(callbacks: Any) -> list[Any]:
    if callbacks is None:
        return []
    return list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]
