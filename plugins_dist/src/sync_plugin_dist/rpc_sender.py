"""The sender's side of ``rpc``: calls workers, so that they fetch what is sent over ``dist``."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch._C._distributed_rpc import PyRRef, WorkerInfo
from torch.distributed import rpc

from sync_core import (
    Address,
    Answer,
    Delivery,
    ModelPathError,
    OptionError,
    Payload,
    Receiver,
    SenderLostError,
    SenderTransport,
    TransportContext,
    WorkerError,
    WorkerLostError,
)
from sync_core.errors import AddressError
from sync_plugin_dist.options import DistOptions
from sync_plugin_dist.protocol import Farewell
from sync_plugin_dist.rpc_world import others
from sync_plugin_dist.sender import DistSender


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcRequest:
    """A sender's request to a worker.

    Args:
        token: the sender's secret.
        model_id: where the model is.
        models: where several models are, which travel as one; none for a single model.
        holder: the object in which they are looked up; None for modules.
        version: the version that there is by now.
        timeout: how long it may take to come, in seconds.
        address: what a receiver is made from; None when one was made before.
    """

    token: str = field(repr=False)
    model_id: str
    models: tuple[str, ...]
    holder: PyRRef[Any] | None
    version: int
    timeout: float
    address: Address | None

    @property
    def place(self) -> tuple[object, ...]:
        """Return what tells these weights from others of the worker."""
        return (str(self.holder), self.models or self.model_id)


@dataclass(frozen=True, slots=True)
class RpcOutcome:
    """The outcome of a version in a worker.

    Args:
        outcome: ``"unknown"`` when the worker has no receiver for this sender, and was not given
            the address to make one.
        answer: why the version was not committed, as `Answer.to_message` gives it. That it was,
            the receiver says over its own connection.
    """

    outcome: Literal["committed", "failed", "unknown"]
    answer: dict[str, Any] | None = None


@dataclass
class _KeptReceiver:
    """The receiver for one model, its sender, and the receiver before it."""

    token: str = ""
    receiver: Receiver | None = None
    replaced: set[str] = field(default_factory=set)
    farewell: Farewell = field(default_factory=Farewell)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, order: RpcRequest, address: Address) -> None:
        if self.token and self.token != order.token:
            self.replaced.add(self.token)
            self.farewell.reason = _taken_over(order)
        self.close()
        self.farewell = Farewell()
        endpoint = replace(address.endpoint, farewell=self.farewell)
        self.receiver = _make_receiver(order, replace(address, endpoint=endpoint))
        self.token = order.token

    def taken_from(self, token: str) -> bool:
        """Return whether a sender has lost its place to one that is still there."""
        if token in self.replaced and not self._has_sender():
            # It has died, or what it asks for at its end is still on its way.
            self.end()
        return token in self.replaced

    def close(self) -> None:
        if self.receiver is not None:
            self.receiver.close()
        self.receiver = None

    def end(self) -> None:
        """Release the sender; the receiver before it may return."""
        self.close()
        self.token = ""
        self.replaced.clear()

    def _has_sender(self) -> bool:
        try:
            if self.receiver is not None:
                self.receiver.receive(0)
        except Exception as error:
            # Its own sender reports a version that could not be committed.
            return not isinstance(error, SenderLostError)
        return self.receiver is not None


_kept: dict[tuple[object, ...], _KeptReceiver] = {}


def deliver(order: RpcRequest) -> RpcOutcome:
    """Commit the newest version to a model of this worker."""
    kept = _kept.setdefault(order.place, _KeptReceiver())
    with kept.lock:
        if kept.taken_from(order.token):
            return _failed(Answer(version=order.version, error=_taken_over(order)))
        try:
            if kept.receiver is None or kept.token != order.token:
                if order.address is None:
                    return RpcOutcome("unknown")
                kept.begin(order, order.address)
            _receive(kept, order)
        except Exception as error:
            if isinstance(error, SenderLostError):
                kept.close()
            return _failed(Answer.refusal(order.version, error))
        return RpcOutcome("committed")


def _taken_over(order: RpcRequest) -> str:
    return f"another sender has taken over {order.model_id!r} here; close one of them"


def _failed(answer: Answer) -> RpcOutcome:
    where = f"in RPC worker {rpc.get_worker_info().name!r}: {answer.error}"
    return RpcOutcome("failed", replace(answer, error=where).to_message())


def forget(order: RpcRequest) -> None:
    """Leave the sender; the model keeps what it has, in its own memory."""
    kept = _kept.get(order.place)
    if kept is None:
        return
    with kept.lock:
        if kept.token == order.token:
            kept.end()
            _kept.pop(order.place, None)


def _receive(kept: _KeptReceiver, order: RpcRequest) -> None:
    assert kept.receiver is not None
    deadline = time.monotonic() + order.timeout
    while kept.receiver.version < order.version:
        left = deadline - time.monotonic()
        if left < 0:
            raise TimeoutError(f"version {order.version} did not come")
        kept.receiver.receive(left)


def _make_receiver(order: RpcRequest, address: Address) -> Receiver:
    if order.holder is not None:
        model: Any = {name: name for name in order.models} or order.model_id
        return Receiver(address, model, context=order.holder.local_value())
    if not order.models:
        module, path = _split(order.model_id)
        return Receiver(address, path, context=module)
    found = [_split(name) for name in order.models]
    paths = {name: f"[{i}].{found[i][1]}" for i, name in enumerate(order.models)}
    return Receiver(address, paths, context=[module for module, _ in found])


def _split(name: str) -> tuple[Any, str]:
    """The module in which a model is, and its path there: ``"package.module:path"``."""
    module, colon, path = name.partition(":")
    if not colon or not path:
        raise ModelPathError(
            f"{name!r} says not in which module the model is; type "
            'model_id="package.module:policy", or "__main__:policy", or give workers as pairs '
            "(worker, rref) of a worker and the object that has it"
        )
    try:
        return sys.modules.get(module) or importlib.import_module(module), path
    except ImportError as error:
        raise ModelPathError(f"the worker cannot import {module!r}: {error}") from error


@dataclass(eq=False)
class _CalledWorker:
    """An RPC worker, and what it is doing for us.

    Args:
        worker_id: its id here.
        info: what RPC knows it by.
        holder: the object in which its model is; None for a module.
        delivery: the newest version meant for it.
        newest: that version's number.
        called: the version that the call under way was made for; 0 for none.
        introduced: whether it has a receiver for this sender.
    """

    worker_id: int
    info: WorkerInfo
    holder: Any
    delivery: Delivery | None = None
    newest: int = 0
    called: int = 0
    introduced: bool = False


class RpcSender(SenderTransport):
    """Updates a model in each of some RPC workers.

    A worker has one call of ours at a time. A later version replaces the one that waits.

    Args:
        context: what the sender gave to `create_transport`.
        options: of the connections over which weights travel.

    Raises:
        OptionError: a worker that RPC does not know, or something that is not a worker.
    """

    def __init__(self, context: TransportContext, options: DistOptions) -> None:
        self._context = context
        self._lock = threading.RLock()
        self._newest_for_all = 0
        self._closed = False
        self._workers = {
            worker_id: _CalledWorker(worker_id, *_find(worker))
            for worker_id, worker in zip(context.worker_ids, context.workers, strict=True)
        }
        self._wires = DistSender(context, options)

    def address(self, worker_id: int) -> Any:
        """There is none: the worker is called."""
        raise AddressError(
            f"worker {worker_id} is called over RPC, and needs no address; for receivers that "
            "connect by themselves, make a Sender without workers=, of scheme 'rpc' or 'dist'"
        )

    def send(self, payload: Payload, worker_ids: Sequence[int]) -> dict[int, Delivery]:
        """Call the workers that are not busy, and pack meanwhile."""
        deliveries = self._wires.send(payload, worker_ids, self._announced)
        with self._lock:
            if deliveries.keys() == self._workers.keys():
                self._newest_for_all = payload.version
        return deliveries

    def add_worker(self, worker_id: int, worker: Any = None) -> None:
        """Serve one more worker, and give it the newest version that went to all."""
        found = _find(worker)
        self._wires.add_worker(worker_id)
        with self._lock:
            added = self._workers[worker_id] = _CalledWorker(worker_id, *found)
            added.newest = self._newest_for_all
            if added.newest:
                self._call(added)

    def remove_worker(self, worker_id: int) -> None:
        """Forget a worker, which keeps the weights that it has."""
        with self._lock:
            worker = self._workers.pop(worker_id)
        self._wires.remove_worker(worker_id)
        self._dismiss(worker)

    def close(self) -> None:
        """Let the workers keep what they have, in their own memory."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            workers = list(self._workers.values())
            self._workers.clear()
        for worker in workers:
            self._dismiss(worker)
        self._wires.close()

    def _announced(self, deliveries: dict[int, Delivery]) -> None:
        with self._lock:
            for worker_id, delivery in deliveries.items():
                worker = self._workers.get(worker_id)
                if worker is None:
                    continue  # closed by another thread
                worker.delivery, worker.newest = delivery, delivery.version
                if not worker.called:
                    self._call(worker)

    def _call(self, worker: _CalledWorker) -> None:
        worker.called = worker.newest
        order = self._order(worker)
        try:
            future = rpc.rpc_async(
                worker.info, deliver, args=(order,), timeout=self._context.timeout
            )
        except RuntimeError as error:
            self._ended(worker, self._lost(worker, error))
            return
        future.add_done_callback(lambda ended: self._ended(worker, self._outcome(worker, ended)))

    def _ended(self, worker: _CalledWorker, outcome: RpcOutcome | WorkerError | None) -> None:
        with self._lock:
            version, worker.called = worker.called, 0
            worker.introduced = isinstance(outcome, RpcOutcome) and outcome.outcome != "unknown"
            delivery = worker.delivery
            if delivery is not None and delivery.version == version:
                if isinstance(outcome, WorkerError):
                    delivery.fail(outcome)
                elif outcome is not None and outcome.outcome == "failed":
                    delivery.settle(outcome.answer)
            again = isinstance(outcome, RpcOutcome) and outcome.outcome == "unknown"
            if not self._closed and (again or worker.newest > version):
                self._call(worker)

    def _outcome(self, worker: _CalledWorker, ended: Any) -> RpcOutcome | WorkerError | None:
        """Return the worker's answer, or how it ended; None when it was too late."""
        try:
            delivered = ended.value()
        except RuntimeError as error:
            # RPC tells by its words alone that a call took too long; the send's deadline says so.
            return None if "timeout" in str(error) else self._lost(worker, error)
        except Exception as error:
            return WorkerError(worker.worker_id, f"could not run the delivery: {error}")
        assert isinstance(delivered, RpcOutcome)
        return delivered

    def _lost(self, worker: _CalledWorker, error: RuntimeError) -> WorkerError:
        return WorkerLostError(
            worker.worker_id, f"RPC cannot call {worker.info.name!r}: {str(error).strip()}"
        )

    def _dismiss(self, worker: _CalledWorker) -> None:
        # A worker that cannot be called any more has nothing that could be ended.
        with suppress(RuntimeError):
            rpc.rpc_async(worker.info, forget, args=(self._order(worker),), timeout=5.0)

    def _order(self, worker: _CalledWorker) -> RpcRequest:
        assert self._context.make_address is not None
        address = None
        if not worker.introduced:
            address = self._context.make_address(
                worker_id=worker.worker_id, endpoint=self._wires.address(worker.worker_id)
            )
        return RpcRequest(
            token=self._context.token,
            model_id=self._context.model_id,
            models=self._context.models,
            holder=worker.holder,
            version=worker.called,
            timeout=self._context.timeout,
            address=address,
        )


def _find(worker: Any) -> tuple[WorkerInfo, Any]:
    """The worker, and the object in which its model is."""
    name, holder = worker if isinstance(worker, tuple) and len(worker) == 2 else (worker, None)
    if isinstance(name, WorkerInfo):
        name = name.name
    if not isinstance(name, str) or not isinstance(holder, PyRRef | None):
        raise OptionError(
            f"{worker!r} is not a RPC worker; workers= takes names, or pairs (name or info, rref)"
        )
    if holder is not None and holder.owner_name() != name:
        raise OptionError(f"the rref is of {holder.owner_name()!r}, and not of {name!r}")
    try:
        return rpc.get_worker_info(name), holder
    except RuntimeError as error:
        known = ", ".join(map(repr, others())) or "no other"
        raise OptionError(f"RPC knows no worker {name!r}; it knows: {known}") from error
