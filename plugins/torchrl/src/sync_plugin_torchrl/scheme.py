"""Makes any scheme of sync-core a weight sync scheme of TorchRL."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NoReturn

import torch
from torch import nn
from torchrl.collectors import Collector
from torchrl.collectors.distributed import DistributedCollector
from torchrl.weight_update import weight_sync_schemes
from torchrl.weight_update.weight_sync_schemes import WeightSyncScheme

from sync_core import (
    Address,
    LayoutMismatchError,
    OptionError,
    PendingSend,
    Sender,
    SendError,
    UnknownWorkerError,
)
from sync_core.checks import check_seconds
from sync_core.models import resolve
from sync_plugin_std import SendGroup
from sync_plugin_torchrl.guarded_receiver import GuardedReceiver
from sync_plugin_torchrl.sources import find_devices, find_sources, find_target

# Attributes that are not pickled with a scheme.
_STAYS = (
    "_senders",
    "_group",
    "_pending",
    "_receiver",
    "_target",
    "_context_ref",
    "_model_ref",
)


class Scheme(WeightSyncScheme):  # type: ignore[misc]  # torchrl has no types
    """A scheme of sync-core, for ``weight_sync_schemes=`` of a TorchRL collector.

    Args:
        scheme: the name of an installed scheme, such as ``"shm"`` or ``"ray"``, or a plugin object.
        strategy: how a module is read and written, ``"tensordict"`` or ``"state_dict"``.
        sync: whether `send` waits until the workers have committed the version. Otherwise it
            returns once the weights are read, and the next `send` raises a failure.
        per_worker_weights: whether `send` accepts a dict with different weights for each worker.
            Set automatically if the collector has a policy factory for each worker.
        timeout: deadline of every send, and of a worker's first version, in seconds.
        **options: other arguments of `sync_core.Sender`, such as ``layers`` and ``zero_copy``,
            and options of the scheme.

    Example:
        >>> from torch import nn
        >>> trained, acting = nn.Linear(4, 2), nn.Linear(4, 2)
        >>> trainer, worker = Scheme("shm"), Scheme("shm")
        >>> trainer.init_on_sender(model=trained, num_workers=1)
        >>> trainer.connect()
        >>> worker.__setstate__(trainer.__getstate__())  # collectors pickle it
        >>> worker.init_on_receiver(model_id="policy", model=acting, worker_idx=0)
        >>> worker.connect()
        >>> trainer.send()
        >>> torch.equal(trained.weight, acting.weight)
        True
        >>> worker.shutdown(), trainer.shutdown()
        (None, None)
    """

    def __init__(
        self,
        scheme: Any = "shm",
        *,
        strategy: Literal["tensordict", "state_dict"] = "tensordict",
        sync: bool = True,
        per_worker_weights: bool = False,
        timeout: float = 60.0,
        **options: Any,
    ) -> None:
        super().__init__(strategy)
        self.sync = sync
        self.per_worker_weights = per_worker_weights
        self._timeout = check_seconds(timeout)
        self._scheme = scheme
        self._options = options
        self._addresses: dict[int, Address] = {}
        self._devices: dict[int, torch.device | None] = {}
        self._stay()

    def _stay(self) -> None:
        """Initialise the attributes that are not pickled."""
        # With weights per worker, one sender for each worker index; otherwise one sender under
        # None.
        self._senders: dict[int | None, Sender] = {}
        self._group = SendGroup(self._senders)
        self._pending: PendingSend | None = None
        self._receiver: GuardedReceiver | None = None
        # Keeps a model that was made for this worker alive: TorchRL refers to it weakly.
        self._target: Any = None

    # Methods for the trainer.

    def _init_on_sender_impl(
        self,
        *,
        model_id: str | None = None,
        context: Any = None,
        model: Any = None,
        weights: Any = None,
        params_map: Mapping[int, Any] | None = None,
        devices: Sequence[Any] | None = None,
        device_map_fn: Callable[[int, Any], Any] | None = None,
        num_workers: int | None = None,
        remote_collectors: Sequence[Any] | None = None,
        ctx: object = None,
    ) -> None:
        del ctx  # workers are reached by address, not through the pipes of a context
        self.model_id = model_id or "policy"
        self.context = context
        sources = find_sources(
            model_id=self.model_id,
            context=context,
            model=model,
            weights=weights,
            params_map=params_map,
            devices=devices,
            device_map_fn=device_map_fn,
            num_workers=num_workers,
            remote_collectors=remote_collectors,
        )
        if len({id(source) for source in sources.values()}) > 1:
            self.per_worker_weights = True
        if self.per_worker_weights:
            for index, source in sources.items():
                self._make_sender(index, source, [index])
        else:
            self._make_sender(None, next(iter(sources.values())), sorted(sources))
        first = _first_index(context)
        found = devices or find_devices(context, len(sources))
        for index, device in zip(sorted(sources), found, strict=True):
            sender = self._senders[index if self.per_worker_weights else None]
            self._addresses[first + index] = sender.address(index)
            self._devices[first + index] = device

    def _make_sender(self, key: int | None, source: Any, workers: Sequence[int]) -> None:
        # The model is registered last: a scheme learns the workers from it.
        sender = self._senders[key] = Sender(
            self._scheme,
            num_workers=1,
            model_id=self.model_id,
            strategy=self.strategy_str,
            timeout=self._timeout,
            **self._options,
        )
        for index in workers:
            if index not in sender.all_worker_ids():
                sender.add_worker(index)
        if 0 not in workers:
            sender.remove_worker(0)
        sender.register_model(source)

    def _setup_connection_and_weights_on_sender_impl(
        self, *, worker_idx: int | None = None, weights: Any = None
    ) -> None:
        del worker_idx
        # Not waited for: the collector is still starting the workers, and reports their errors.
        self._pending = self._group.send_async(dict.fromkeys(self._senders, weights))

    def send(self, weights: Any = None, worker_ids: int | Iterable[int] | None = None) -> None:
        """Send weights to workers, and wait until they have committed them unless ``sync=False``.

        Args:
            weights: a module, a TensorDict, a state_dict, or a path in the collector; None for the
                collector's model; or a dict from workers to these, with ``per_worker_weights``.
            worker_ids: one worker or several; None for all, or for all in the dict.

        Raises:
            SendError: some workers failed; the others have the weights.
            OptionError: a dict has no weights for a worker in ``worker_ids``; nothing was sent.
            UnknownWorkerError: no such worker; nothing was sent.
            LayoutMismatchError: the model has other names or shapes than before.
        """
        if not (self.initialized_on_sender and self.synchronized_on_sender):
            raise RuntimeError("call init_on_sender() and connect() before send()")
        given, chosen = self._message(weights, worker_ids)
        self._settle()
        try:
            if chosen:
                self._pending = self._group.send_async(given, chosen)
        except LayoutMismatchError as error:
            raise LayoutMismatchError(
                f"{error}; a collector makes these itself: type collector.shutdown(), and make a "
                "new collector with a new Scheme(…) and the changed model"
            ) from error
        if self.sync:
            self._settle()

    def _message(
        self, weights: Any, worker_ids: int | Iterable[int] | None
    ) -> tuple[Mapping[int | None, Any], list[int]]:
        """Return the weights for each sender, and the workers."""
        by_worker = _is_by_worker(weights)
        if by_worker and not self.per_worker_weights:
            raise OptionError(
                "weights for each worker need Scheme(…, per_worker_weights=True), or a collector "
                "with a policy factory for each worker"
            )
        if isinstance(weights, str):
            weights = resolve(self.context, weights)
        known = sorted({i for sender in self._senders.values() for i in sender.all_worker_ids()})
        if worker_ids is None:
            chosen = list(weights if by_worker else known)
        else:
            chosen = [worker_ids] if isinstance(worker_ids, int) else list(worker_ids)
        if unknown := [index for index in chosen if index not in known]:
            raise UnknownWorkerError(f"there are no workers {unknown}; this scheme has {known}")
        if by_worker and (lacking := [index for index in chosen if index not in weights]):
            raise OptionError(
                f"there are no weights for the workers {lacking}; give worker_ids= those of "
                f"{sorted(weights)}, or leave it out"
            )
        if not self.per_worker_weights:
            return {None: weights}, chosen
        return {index: weights[index] if by_worker else weights for index in chosen}, chosen

    def _settle(self) -> None:
        """Wait for the pending send.

        An error of the first version is ignored: it was sent while the workers were starting, and a
        late worker got it when it connected.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.wait()
        except SendError as error:
            if error.report.version > 1:
                raise

    # Methods for a worker.

    def _init_on_receiver_impl(
        self,
        *,
        model_id: str,
        context: Any = None,
        model: Any = None,
        worker_idx: int | None = None,
    ) -> None:
        self.model_id = model_id
        self.context = context
        self.worker_idx = getattr(context, "worker_idx", None) if worker_idx is None else worker_idx
        if model is None and context is not None:
            model = self._target = find_target(context, model_id)
        self.model = model

    def _setup_connection_and_weights_on_receiver_impl(
        self, *, worker_idx: int | None = None
    ) -> None:
        index = self.worker_idx if worker_idx is None else worker_idx
        if index is None and len(self._addresses) == 1:
            (index,) = self._addresses
        if index not in self._addresses:
            raise OptionError(
                f"worker {index} of {self.model_id!r} has no address; the scheme must be "
                f"initialised in the trainer before it is given to workers, and there it has "
                f"{sorted(self._addresses)}"
            )
        _materialize(self.model, self._devices.get(index))
        self._receiver = GuardedReceiver(
            self._addresses[index], self.model, timeout=self._timeout, on_commit=self._pass_on
        )

    def _pass_on(self, version: int) -> None:
        """Notify the worker's own collector of a version that its model has."""
        context = self.context
        if isinstance(context, Collector):
            # The collector acts with this same model, so nothing needs to be copied.
            if version > 1 and self.model_id == "policy":
                context.increment_version()
        elif hasattr(context, "update_policy_weights_"):
            context.update_policy_weights_(self.model, model_id=self.model_id)

    def receive(self, timeout: float | None = None) -> None:
        """Return None: a thread commits every version before the trainer's `send` returns."""
        del timeout
        if not (self.initialized_on_receiver and self.synchronized_on_receiver):
            raise RuntimeError("call init_on_receiver() and connect() before receive()")

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Commit the given weights between two forward passes of the model."""
        if self._receiver is None:
            raise RuntimeError("call init_on_receiver() and connect() before apply_weights()")
        if not inplace:
            raise OptionError("weights are always written in place; leave out inplace=False")
        self._receiver.apply_weights(weights)

    @property
    def model(self) -> Any:
        """The worker's model; None in the trainer, where the sender reads the collector's model."""
        return None if self.initialized_on_sender else super().model

    @model.setter
    def model(self, model: Any) -> None:
        WeightSyncScheme.model.fset(self, model)
        # A collector may copy its policy to another device after `connect`.
        if self._receiver is not None and model is not None:
            self._receiver.replace_model(model)

    # Methods for both sides.

    def create_transport(self, **kwargs: Any) -> NoReturn:
        """Raise an error: the scheme of sync-core makes the transports."""
        raise NotImplementedError("sync_core.Sender and sync_core.Receiver make the transports")

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        for name in _STAYS:
            state.pop(name, None)
        if self._addresses:
            # A worker needs only its address, and the trainer's layers may not pickle.
            state.update(_scheme=None, _options={})
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._stay()
        self._context_ref = self._model_ref = None
        super().__setstate__(state)

    def shutdown(self) -> None:
        """Close the senders or the receiver; the other side is notified."""
        # Also called for an object whose __init__ raised.
        state = vars(self)
        if receiver := state.get("_receiver"):
            receiver.close()
        if group := state.get("_group"):
            group.close()
        super().shutdown()


def _first_index(context: Any) -> int:
    """Return the index of the first worker: in a DistributedCollector, indices are ranks."""
    return 1 if isinstance(context, DistributedCollector) else 0


def _is_by_worker(weights: Any) -> bool:
    # A TensorDict is not a dict, and its keys are strings.
    return (
        isinstance(weights, dict) and bool(weights) and all(isinstance(key, int) for key in weights)
    )


def _materialize(model: Any, device: torch.device | None) -> None:
    """Allocate the tensors of a policy that TorchRL has sent without its weights."""
    if isinstance(model, nn.Module) and any(
        tensor.is_meta for tensor in (*model.parameters(), *model.buffers())
    ):
        model.to_empty(device=device or "cpu")


def _register() -> None:
    """Register the class for `WeightSyncScheme.from_backend("sync_core", scheme="shm")`."""
    register = getattr(weight_sync_schemes, "register_weight_sync_backend", None)
    if register is not None:
        register("sync_core")(Scheme)


_register()
