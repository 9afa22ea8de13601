"""What a sender runs in an RPC worker: lets the receiver there fetch a version and commit it."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch._C._distributed_rpc import PyRRef
from torch.distributed import rpc

from sync_core import Address, Answer, ModelPathError, Receiver, SenderLostError
from sync_plugin_dist.protocol import Farewell


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a sender asks of a worker.

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
        """What tells these weights from others of the worker."""
        return (str(self.holder), self.models or self.model_id)


@dataclass(frozen=True, slots=True)
class Delivered:
    """What became of a version in a worker.

    Args:
        outcome: ``"unknown"`` when the worker has no receiver for this sender, and was not given
            the address to make one.
        answer: why the version was not committed, as `Answer.to_message` gives it. That it was,
            the receiver says over its own connection.
    """

    outcome: Literal["committed", "failed", "unknown"]
    answer: dict[str, Any] | None = None


@dataclass
class _Kept:
    """The receiver for one model: whose it is, and who had its place before."""

    token: str = ""
    receiver: Receiver | None = None
    replaced: set[str] = field(default_factory=set)
    farewell: Farewell = field(default_factory=Farewell)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, order: Order, address: Address) -> None:
        if self.token and self.token != order.token:
            self.replaced.add(self.token)
            self.farewell.reason = _taken_over(order)
        self.close()
        self.farewell = Farewell()
        endpoint = replace(address.endpoint, farewell=self.farewell)
        self.receiver = _make_receiver(order, replace(address, endpoint=endpoint))
        self.token = order.token

    def taken_from(self, token: str) -> bool:
        """Whether a sender has lost its place to one that is still there."""
        if token in self.replaced and not self._has_sender():
            # It has died, or what it asks for at its end is still on its way.
            self.end()
        return token in self.replaced

    def close(self) -> None:
        if self.receiver is not None:
            self.receiver.close()
        self.receiver = None

    def end(self) -> None:
        """Let the sender go; whoever had its place may come back."""
        self.close()
        self.token = ""
        self.replaced.clear()

    def _has_sender(self) -> bool:
        try:
            if self.receiver is not None:
                self.receiver.receive(0)
        except Exception as error:
            # What could not be committed, its own sender is told.
            return not isinstance(error, SenderLostError)
        return self.receiver is not None


_kept: dict[tuple[object, ...], _Kept] = {}


def deliver(order: Order) -> Delivered:
    """Commit the newest version to a model of this worker."""
    kept = _kept.setdefault(order.place, _Kept())
    with kept.lock:
        if kept.taken_from(order.token):
            return _failed(Answer(version=order.version, error=_taken_over(order)))
        try:
            if kept.receiver is None or kept.token != order.token:
                if order.address is None:
                    return Delivered("unknown")
                kept.begin(order, order.address)
            _receive(kept, order)
        except Exception as error:
            if isinstance(error, SenderLostError):
                kept.close()
            return _failed(Answer.refusal(order.version, error))
        return Delivered("committed")


def _taken_over(order: Order) -> str:
    return f"another sender has taken over {order.model_id!r} here; close one of them"


def _failed(answer: Answer) -> Delivered:
    where = f"in RPC worker {rpc.get_worker_info().name!r}: {answer.error}"
    return Delivered("failed", replace(answer, error=where).to_message())


def forget(order: Order) -> None:
    """Let the sender go; the model keeps what it has, in memory of its own."""
    kept = _kept.get(order.place)
    if kept is None:
        return
    with kept.lock:
        if kept.token == order.token:
            kept.end()
            _kept.pop(order.place, None)


def _receive(kept: _Kept, order: Order) -> None:
    assert kept.receiver is not None
    deadline = time.monotonic() + order.timeout
    while kept.receiver.version < order.version:
        left = deadline - time.monotonic()
        if left < 0:
            raise TimeoutError(f"version {order.version} did not come")
        kept.receiver.receive(left)


def _make_receiver(order: Order, address: Address) -> Receiver:
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
