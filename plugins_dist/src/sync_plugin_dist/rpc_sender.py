"""The sender's side of ``rpc``: calls workers, so that they fetch what is sent over ``dist``."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch._C._distributed_rpc import PyRRef, WorkerInfo
from torch.distributed import rpc

from sync_core import (
    Delivery,
    OptionError,
    Payload,
    SenderTransport,
    TransportContext,
    WorkerError,
    WorkerLostError,
)
from sync_core.errors import AddressError
from sync_plugin_dist.options import DistOptions
from sync_plugin_dist.rpc_agent import Delivered, Order, deliver, forget
from sync_plugin_dist.rpc_world import others
from sync_plugin_dist.sender import DistSender


@dataclass(eq=False)
class _Worker:
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

    A worker has one call of ours at a time. What is sent meanwhile replaces what waits.

    Args:
        context: what the sender gave to `create_transport`.
        options: of the connections over which weights travel.

    Raises:
        OptionError: a worker that RPC does not know, or something that is no worker.
    """

    def __init__(self, context: TransportContext, options: DistOptions) -> None:
        self._context = context
        self._lock = threading.RLock()
        self._newest_for_all = 0
        self._closed = False
        self._workers = {
            worker_id: _Worker(worker_id, *_find(worker))
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
            added = self._workers[worker_id] = _Worker(worker_id, *found)
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
        """Let the workers keep what they have, in memory of their own."""
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

    def _call(self, worker: _Worker) -> None:
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

    def _ended(self, worker: _Worker, outcome: Delivered | WorkerError | None) -> None:
        with self._lock:
            version, worker.called = worker.called, 0
            worker.introduced = isinstance(outcome, Delivered) and outcome.outcome != "unknown"
            delivery = worker.delivery
            if delivery is not None and delivery.version == version:
                if isinstance(outcome, WorkerError):
                    delivery.fail(outcome)
                elif outcome is not None and outcome.outcome == "failed":
                    delivery.settle(outcome.answer)
            again = isinstance(outcome, Delivered) and outcome.outcome == "unknown"
            if not self._closed and (again or worker.newest > version):
                self._call(worker)

    def _outcome(self, worker: _Worker, ended: Any) -> Delivered | WorkerError | None:
        """What the worker answered, or what became of it; None when it was too late."""
        try:
            delivered = ended.value()
        except RuntimeError as error:
            # RPC tells by its words alone that a call took too long; the send's deadline says so.
            return None if "timeout" in str(error) else self._lost(worker, error)
        except Exception as error:
            return WorkerError(worker.worker_id, f"could not run the delivery: {error}")
        assert isinstance(delivered, Delivered)
        return delivered

    def _lost(self, worker: _Worker, error: RuntimeError) -> WorkerError:
        return WorkerLostError(
            worker.worker_id, f"RPC cannot call {worker.info.name!r}: {str(error).strip()}"
        )

    def _dismiss(self, worker: _Worker) -> None:
        # Whoever cannot be called any more has nothing of ours that anybody could end.
        with suppress(RuntimeError):
            rpc.rpc_async(worker.info, forget, args=(self._order(worker),), timeout=5.0)

    def _order(self, worker: _Worker) -> Order:
        assert self._context.make_address is not None
        address = None
        if not worker.introduced:
            address = self._context.make_address(
                worker_id=worker.worker_id, endpoint=self._wires.address(worker.worker_id)
            )
        return Order(
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
            f"{worker!r} is no RPC worker; workers= takes names, or pairs (name or info, rref)"
        )
    if holder is not None and holder.owner_name() != name:
        raise OptionError(f"the rref is of {holder.owner_name()!r}, and not of {name!r}")
    try:
        return rpc.get_worker_info(name), holder
    except RuntimeError as error:
        known = ", ".join(map(repr, others())) or "no other"
        raise OptionError(f"RPC knows no worker {name!r}; it knows: {known}") from error
