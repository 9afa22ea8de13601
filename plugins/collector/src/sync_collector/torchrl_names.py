"""Arguments and methods of a collector under their names in TorchRL."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, Unpack, overload

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from sync_collector.collector_worker import CollectorWorker, WorkerSpecs
from sync_collector.options import (
    BatchOptions,
    WorkerOptions,
    changed_options,
    check_acts,
    count_workers,
    factories,
    per_worker,
)
from sync_collector.policies import module_of
from sync_collector.schemes import POLICY, ModelsElsewhere, UpdateArguments, chosen
from sync_core import Layout, ModelError, OptionError, SendReport
from sync_core.checks import check_count, check_seconds
from sync_core.models import check_match, named_tensors

if TYPE_CHECKING:
    from sync_collector.model_weights import ModelWeights
    from sync_collector.relay import PolicyRelay
    from sync_collector.worker_pool import WorkerPool
    from sync_core import Address, PendingSend

_Device: TypeAlias = torch.device | str | int | None
_Devices: TypeAlias = _Device | Sequence[_Device]
_OwnOptions: TypeAlias = Mapping[str, Any] | WorkerOptions
#: Options of single workers: one value for all, or one for each.
OwnOptions: TypeAlias = _OwnOptions | Sequence[_OwnOptions] | None

# How long to wait for a version sent before the collector registered, in seconds.
_SOON = 0.5


class TorchRLArguments(TypedDict, total=False):
    """Arguments of TorchRL's collectors that `Collector` takes under the same names.

    These are fields of `BatchOptions` (``split_trajs`` to ``init_random_frames``) and of
    `WorkerOptions`: ``num_workers_per_collector`` is ``num_envs``, and ``collector_kwargs`` is
    ``per_worker``, as a mapping. A device may also be a list, with one for each worker.
    ``weight_recv_schemes`` is given to `Collector.register_scheme_receiver`.
    """

    split_trajs: bool
    postproc: Callable[[TensorDictBase], Any] | None
    track_policy_version: bool
    init_random_frames: int
    num_workers_per_collector: int
    max_frames_per_traj: int
    reset_at_each_iter: bool
    exploration_type: InteractionType | str
    trust_policy: bool
    device: _Devices
    env_device: _Devices
    policy_device: _Devices
    storing_device: _Devices
    collector_kwargs: OwnOptions
    weight_recv_schemes: Mapping[str, Address] | None


@dataclass(frozen=True, slots=True)
class Named:
    """The option objects of a collector, completed by arguments under TorchRL's names.

    Args:
        batch: the options of batches.
        common: the options of all workers, by name; a list of devices has one for each worker.
        own: the options of single workers.
        own_name: the name of the argument with ``own``.
        receivers: addresses from which the collector receives models.
    """

    batch: BatchOptions
    common: Mapping[str, Any]
    own: OwnOptions
    own_name: str
    receivers: Mapping[str, Address]

    @classmethod
    def of(
        cls,
        given: TorchRLArguments,
        batch: BatchOptions | None,
        own_options: WorkerOptions | Sequence[WorkerOptions] | None,
    ) -> Named:
        """Return the options given under either name.

        Raises:
            TypeError: ``batch`` is not a `BatchOptions`.
            ValueError: an option was given twice.
        """
        if batch is not None and not isinstance(batch, BatchOptions):
            raise TypeError(
                f"batch is {batch!r}; type batch=sync_collector.BatchOptions(split_trajs=True)"
            )
        rest: dict[str, Any] = dict(given)
        receivers = rest.pop("weight_recv_schemes", None) or {}
        batch = BatchOptions() if batch is None else batch
        for name in [one.name for one in fields(BatchOptions) if one.name in rest]:
            if getattr(batch, name) != getattr(BatchOptions(), name):
                raise ValueError(f"{name} is given twice; leave out {name}={rest[name]!r}")
            batch = replace(batch, **{name: rest.pop(name)})
        own, own_name = rest.pop("collector_kwargs", None), "collector_kwargs"
        if own_options is not None:
            if own is not None:
                raise ValueError("collector_kwargs and per_worker are the same; leave out one")
            own, own_name = own_options, "per_worker"
        if "num_workers_per_collector" in rest:
            count = rest.pop("num_workers_per_collector")
            rest["num_envs"] = check_count(count, "num_workers_per_collector")
        return cls(batch, rest, own, own_name, receivers)


class TorchRLNames:
    """Methods of a collector under their names and with their arguments in TorchRL."""

    _timeout: float
    _pool: WorkerPool
    _weights: ModelWeights
    _elsewhere: ModelsElsewhere
    _relay: PolicyRelay
    _specs: WorkerSpecs

    @overload
    def update_policy_weights_(
        self,
        policy_or_weights: Any = ...,
        *,
        blocking: Literal[True] = ...,
        **given: Unpack[UpdateArguments],
    ) -> SendReport: ...

    @overload
    def update_policy_weights_(
        self, policy_or_weights: Any = ..., *, blocking: bool, **given: Unpack[UpdateArguments]
    ) -> SendReport | PendingSend: ...

    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        *,
        weights: Any = None,
        policy: Any = None,
        worker_ids: int | Iterable[int] | None = None,
        model_id: str | None = None,
        weights_dict: Mapping[str, Any] | None = None,
        blocking: bool = True,
    ) -> SendReport | PendingSend:
        """Send the policy's weights as a new version, and request that the workers commit them.

        A worker commits between two steps, also in the middle of a batch: ``policy_version`` has
        the version of each frame. A worker with several models commits between two batches, all
        models of the update or none. If a `skip_update` hook skips one of these models for a
        worker, all of them are skipped for that worker.

        Args:
            policy_or_weights: a module, a TensorDict or a state_dict; None for the trainer's own.
            weights: the same, under another name.
            policy: the same, under another name.
            worker_ids: one worker or several; None for all.
            model_id: the model of the weights: by default the policy or, if no weights are given,
                all models that the collector's workers hold. A model that other workers hold,
                ``weight_sync_schemes={name: {"scheme": "ray", "workers": [actor]}}``, is updated
                only by its name; ``worker_ids`` are then the ids of those workers.
            weights_dict: weights by the name of their model, instead of all the above; None for
                the trainer's own.
            blocking: wait until the workers have committed the version. Otherwise the returned
                object has the result, and the next update first waits for this one.

        Returns:
            A report; its version is the one in `stats` and in frames made with the weights.

        Raises:
            SendError: some workers do not have the version; the others do. Dead workers are
                replaced instead, if ``on_worker_failure`` says so.
            ModelError: the collector has no weights to send, or no policy to load them into.
            KeyError: there is no such model.
            ClosedError: the collector was shut down.
        """
        self._check_open()
        given = chosen(
            (policy_or_weights, weights, policy),
            model_id,
            weights_dict,
            (*self._weights.names, *self._elsewhere.senders),
        )
        held = self._elsewhere.among(given)
        if held is not None:
            return self._elsewhere.update(held, given[held], worker_ids, blocking=blocking)
        if self._pool.dismissed:
            # None after the last batch, as an update in a training loop comes after every batch.
            return SendReport(self._weights.version, 0.0, {})
        return self._pool.see_through(
            lambda: self._weights.update(given, worker_ids, blocking=blocking)
        )

    def next(self) -> TensorDictBase | None:
        """Return the next batch, or None at the end."""
        try:
            batch: TensorDictBase | None = self.__next__()
        except StopIteration:
            return None
        return batch

    async def async_shutdown(self) -> None:
        """Shut down, while other tasks of the event loop continue; see `Collector.shutdown`."""
        await asyncio.to_thread(self.shutdown)

    def cascade_execute(self, path: str, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Return the object at a path in every worker, or the result of calling it, by id order.

        Args:
            path: begins with ``env``, ``policy`` or another model: ``"env.transform[0].reset"``.
            *args: arguments of the call.
            **kwargs: keyword arguments of the call.

        Raises:
            RemoteCallError: the path does not exist in a worker, or the call raised.
        """
        self._check_open()
        if not isinstance(path, str):
            raise TypeError(f'path is {path!r}, which is not a string; write it like "env.reset"')
        return self._pool.gather_all(
            f"execute {path!r}", CollectorWorker.execute, path, args, kwargs
        )

    def increment_version(self) -> None:
        """Count a new version of the policy, whose weights reached the workers another way.

        Frames made from now on carry it.
        """
        self._check_open()
        self._weights.increment_version()

    def add_collectors(
        self,
        create_env_fn: Callable[[], Any] | Sequence[Callable[[], Any]],
        num_envs: int = 1,
        policy: Any = None,
        collector_kwargs: OwnOptions = None,
        remote_configs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[int, ...]:
        """Start a worker for each function, as `Collector.add_workers` does.

        Args:
            create_env_fn: makes an environment; or a list, one for each new worker.
            num_envs: the number of environments that each new worker makes and steps together.
            policy: the policy of the new workers, instead of a copy of the collector's policy. It
                gets the same weights as the other workers, so its names, shapes and dtypes must be
                the same.
            collector_kwargs: how the new workers make batches: `WorkerOptions` or a mapping, or a
                list with one for each. Other options are those of the first worker.
            remote_configs: options of the new workers' actors, with ``workers="ray"``: a mapping,
                or a list with one for each.

        Returns:
            The ids of the new workers.

        Raises:
            LayoutMismatchError: the policy's weights have other names, shapes or dtypes than the
                collector's.
            RemoteCallError: as for `Collector.add_workers`; workers that were added before the
                failure stay.
            ModelError: one of the two policies has weights and the other has none.
            OptionError: the worker group has no ``remote_configs``, or the workers act with the
                trainer's own policy.
            TypeError: an option cannot differ between workers.
            ValueError: a list has another length.
        """
        self._check_working()
        num_workers = count_workers(None, create_env_fn)
        env_fns = factories(create_env_fn, num_workers, "create_env_fn")
        configs = per_worker(remote_configs, num_workers, "remote_configs")
        base = replace(self._specs.options[0], num_envs=check_count(num_envs, "num_envs"))
        given = per_worker(collector_kwargs, num_workers, "collector_kwargs")
        options = [changed_options(base, each) for each in given]
        changes: dict[str, Any] = {}
        if policy is not None:
            _check_policy(policy, self._specs, self._weights, self._relay)
            changes = {"policy": policy, "policy_fn": None}
        return tuple(
            self._pool.add(
                {} if config is None else {"remote_configs": config},
                env_fn=env_fn,
                options=option,
                **changes,
            )
            for env_fn, option, config in zip(env_fns, options, configs, strict=True)
        )

    def register_scheme_receiver(
        self, addresses: Mapping[str, Address], *, synchronize_weights: bool = True
    ) -> None:
        """Receive models from other senders: this collector is then one of their workers.

        The collector receives weights before every batch and in `receive_weights`. It passes them
        to its own workers, and acknowledges them after these workers have committed. A model that
        only the workers have, such as a policy of ``policy_factory``, is received into a copy of
        its tensors.

        Args:
            addresses: the address from each model's sender for this collector, by model.
            synchronize_weights: receive the version that each sender has sent so far, if it arrives
                within half a second.

        Raises:
            KeyError: there is no such model.
            ModelError: neither the collector nor its workers have weights of that name.
        """
        self._check_open()
        self._relay.register(addresses)
        deadline, missing = time.monotonic() + _SOON, set(addresses)
        while synchronize_weights and missing:
            received = self._relay.receive(max(0.0, deadline - time.monotonic()))
            if not received:
                break
            missing -= received.keys()

    def receive_weights(
        self,
        policy_or_weights: Any = None,
        *,
        weights: Any = None,
        policy: Any = None,
        timeout: float | None = None,
    ) -> Mapping[str, int]:
        """Receive models from other senders, or take the given weights; pass them to the workers.

        Args:
            policy_or_weights: a module, a TensorDict or a state_dict for the collector's own
                policy, if no senders were registered.
            weights: the same, under another name.
            policy: the same, under another name.
            timeout: seconds to wait for a version of any model; None for the collector's timeout.

        Returns:
            The versions received, by model.

        Raises:
            ValueError: both weights and senders were given, or neither.
            SenderLostError: a sender is gone.
            SendError: some workers do not have the version; its sender was notified.
        """
        self._check_open()
        limit = self._timeout if timeout is None else check_seconds(timeout)
        return self._relay.receive_or_load((policy_or_weights, weights, policy), limit)

    if TYPE_CHECKING:

        def __next__(self) -> Any: ...
        def shutdown(self, timeout: float | None = None) -> None: ...
        def _check_open(self) -> None: ...
        def _check_working(self) -> None: ...


def _check_policy(
    policy: Any, specs: WorkerSpecs, weights: ModelWeights, relay: PolicyRelay
) -> None:
    """Raise unless a new worker may begin with this policy."""
    check_acts(policy, "policy is")
    if specs.share_policy:
        raise OptionError(
            "workers act with the trainer's own policy, so new ones have no other; leave out "
            "policy=, or use scheme='thread'"
        )
    module = module_of(policy)
    if POLICY not in weights.names:
        return
    own = weights.models.get(POLICY)
    held = relay.read_model(POLICY) if own is None else named_tensors(own, "tensordict")
    given = {} if module is None else named_tensors(module, "tensordict")
    if bool(held) != bool(given):
        raise ModelError(
            "the given policy has no weights, but the collector's policy has; give policy= a "
            "module with the same weights, or leave it out"
            if held
            else "the given policy has weights, but the collector's policy has no weights, so "
            "they would never be updated; give policy= a function, or leave it out"
        )
    if held:
        check_match(Layout.of(held), Layout.of(given))
