"""The sender of ``rpc``: calls workers, which then fetch versions over ``dist``."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from torch._C._distributed_rpc import PyRRef, WorkerInfo
from torch.distributed import rpc

from sync_core import (
    Address,
    Delivery,
    ModelPathError,
    OptionError,
    Payload,
    Receiver,
    SenderLostError,
    TransportContext,
    WorkerError,
    WorkerLostError,
)
from sync_plugin_dist.options import DistOptions
from sync_plugin_dist.protocol import Farewell
from sync_plugin_dist.rpc_world import others
from sync_plugin_dist.sender import DistSender
from sync_plugin_std.calls import (
    CalledReceiver,
    CalledReceivers,
    CalledWorker,
    CallingTransport,
    DeliveryOutcome,
    DeliveryRequest,
)


class RpcReceiver(CalledReceiver):
    """The receiver for one model of an RPC worker; a call makes it fetch a version over ``dist``.

    In requests, the place is the object in which models are looked up; None for modules.
    """

    def __init__(self) -> None:
        super().__init__()
        self._farewell = Farewell()

    def find_model(self, request: DeliveryRequest, context: Any) -> tuple[Any, Any]:
        """Return the model's path, and the object or module that has it."""
        if request.place is not None:
            context = request.place.local_value()
            return super().find_model(request, context)
        if not request.models:
            module, path = _split(request.model_id)
            return path, module
        found = [_split(name) for name in request.models]
        paths = {name: f"[{i}].{found[i][1]}" for i, name in enumerate(request.models)}
        return paths, [module for module, _ in found]

    def connect(self, address: Address) -> Address:
        """Return the address, with a place for the reason why the receiver leaves."""
        self._farewell = Farewell()
        return replace(address, endpoint=replace(address.endpoint, farewell=self._farewell))

    def commit(self, receiver: Receiver, request: DeliveryRequest, content: Any) -> None:
        """Fetch the version and commit it."""
        del content
        deadline = time.monotonic() + request.timeout
        while receiver.delivered < request.version:
            left = deadline - time.monotonic()
            if left < 0:
                raise TimeoutError(f"version {request.version} did not come")
            receiver.receive(left)

    def committed(self, version: int) -> DeliveryOutcome:
        """Return no answer, since the receiver sends it over its own connection."""
        del version
        return DeliveryOutcome()

    def replaced_by(self, reason: str) -> None:
        """Notify the previous sender."""
        super().replaced_by(reason)
        self._farewell.reason = reason

    def sender_is_gone(self) -> bool:
        """Return whether the sender is gone or this worker has no receiver any more."""
        try:
            if self.receiver is not None:
                self.receiver.receive(0)
        except Exception as error:
            # Other errors are about versions, which this receiver's own sender reports.
            return isinstance(error, SenderLostError)
        return self.receiver is None


_receivers = CalledReceivers(RpcReceiver)


def deliver(request: DeliveryRequest) -> DeliveryOutcome:
    """Commit the newest version to a model of this worker."""
    return _receivers.deliver(request, where=f"in RPC worker {rpc.get_worker_info().name!r}")


def _split(name: str) -> tuple[Any, str]:
    """Split ``"package.module:path"`` into the module and the model's path in it."""
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


class RpcSender(CallingTransport):
    """Updates a model in each of several RPC workers.

    Args:
        context: the sender's context for `create_transport`.
        options: the options for sending weights.

    Raises:
        OptionError: RPC does not know a worker, or an object is not a worker.
    """

    def __init__(self, context: TransportContext, options: DistOptions) -> None:
        handles = [_find(worker) for worker in context.workers]
        self._wires = DistSender(context, options)
        super().__init__(context, handles, self._wires.publisher.roster)

    def send(self, payload: Payload, worker_ids: Sequence[int]) -> dict[int, Delivery]:
        """Call the workers that are not busy, and pack the version meanwhile."""
        return self._wires.send(payload, worker_ids, lambda: self.call_idle(worker_ids))

    def wait(self, deliveries: Sequence[Delivery], timeout: float) -> None:
        """Read the answers of workers on this machine, on this thread."""
        self._wires.wait(deliveries, timeout)

    def add_worker(self, worker_id: int, worker: Any = None) -> None:
        """Add a worker, and send it the newest version that went to all workers."""
        super().add_worker(worker_id, _find(worker))

    def remove_worker(self, worker_id: int) -> None:
        """Remove a worker, which keeps its weights."""
        super().remove_worker(worker_id)
        self._wires.remove_worker(worker_id)

    def endpoint(self, worker_id: int) -> Any:
        """Return the endpoint from which the worker fetches versions."""
        return self._wires.address(worker_id)

    def joined(self, worker: CalledWorker, given: Any) -> None:
        """Do nothing: the connection of the receiver notifies the sender."""

    def place_of(self, worker: CalledWorker) -> Any:
        """Return the object that has the worker's model."""
        return worker.handle[1]

    def call(
        self, worker: CalledWorker, request: DeliveryRequest, content: Any
    ) -> Future[DeliveryOutcome]:
        """Call the worker."""
        del content
        future: Future[DeliveryOutcome] = Future()

        def ended(reply: Any) -> None:
            try:
                future.set_result(reply.value())
            except Exception as error:
                future.set_exception(error)

        reply = rpc.rpc_async(worker.handle[0], deliver, args=(request,), timeout=request.timeout)
        reply.add_done_callback(ended)
        return future

    def explain(
        self, worker: CalledWorker, content: Any, error: Exception
    ) -> DeliveryOutcome | WorkerError:
        """Return a worker-lost error, unless the call timed out."""
        if not isinstance(error, RuntimeError):
            return super().explain(worker, content, error)
        # RPC reports a timeout only in its text. The send's own deadline reports it as well.
        if "timeout" in str(error):
            return DeliveryOutcome()
        name = worker.handle[0].name
        reason = f"RPC cannot call {name!r}: {str(error).strip()}"
        return WorkerLostError(worker.worker_id, reason)

    def closed(self) -> None:
        """Close the connections."""
        self._wires.close()


def _find(worker: Any) -> tuple[WorkerInfo, Any]:
    """Return the worker, and the object that has its model."""
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
