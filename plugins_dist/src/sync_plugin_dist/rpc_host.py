"""Host objects in an RPC worker, each with a thread that runs its calls."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from queue import SimpleQueue

import torch
from torch.distributed import rpc

from sync_plugin_std.workers import CallOutcome, close_hosted

#: A pickle, followed by the memory of each big array in it.
Message = list[torch.Tensor]


def pack(parts: Iterable[bytearray]) -> Message:
    """Return pickled parts as tensors that share their memory."""
    return [torch.frombuffer(part, dtype=torch.uint8) for part in parts]


def unpack(message: Message) -> list[memoryview]:
    """Return the parts of a message, without copies."""
    return [part.numpy().data for part in message]


_Reply = torch.futures.Future[Message]


class _Host:
    """A hosted object, which only its own thread makes, uses and releases.

    RPC's few threads are shared by all callers, so they only queue calls.

    Args:
        worker_id: the argument of the factory.
    """

    def __init__(self, worker_id: int) -> None:
        self._calls: SimpleQueue[tuple[Message, _Reply] | None] = SimpleQueue()
        self._ended: _Reply = torch.futures.Future()
        # A daemon thread, so that a call which never returns does not keep the process alive.
        threading.Thread(
            target=self._serve, args=(worker_id,), name=f"sync rpc host {worker_id}", daemon=True
        ).start()

    def put(self, call: Message) -> _Reply:
        reply: _Reply = torch.futures.Future()
        self._calls.put((call, reply))
        return reply

    def end(self) -> _Reply:
        """Close the object after the call in progress; return a future that completes then."""
        self._calls.put(None)
        return self._ended

    def _serve(self, worker_id: int) -> None:
        # The first call is to the factory with the id; later calls are on the object that it made.
        hosted: object = worker_id
        made = False
        while (item := self._calls.get()) is not None:
            call, reply = item
            outcome = CallOutcome.of_pickled(unpack(call), hosted)
            if not made and not outcome.failed:
                hosted, made = outcome.value, True
                outcome = outcome.without_value()
            _answer(reply, outcome)
            # Free these before the wait for the next call.
            del item, call, reply, outcome
        try:
            if made:
                close_hosted(worker_id, hosted)
        finally:
            # Even if closing raises.
            self._ended.set_result([])


_hosts: dict[str, _Host] = {}


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def make(key: str, worker_id: int, factory: Message) -> _Reply:
    """Make an object under a key.

    Args:
        key: the key, unique among the objects in this process.
        worker_id: the argument of the factory.
        factory: the pickled call of the factory.

    Returns:
        The outcome, without a value.
    """
    host = _hosts[key] = _Host(worker_id)
    return host.put(factory)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def run(key: str, call: Message) -> _Reply:
    """Run a call on the object with this key, after all earlier calls."""
    host = _hosts.get(key)
    if host is None:
        reply: _Reply = torch.futures.Future()
        error = LookupError("this process hosts no such object any more")
        _answer(reply, CallOutcome.failure("cannot run:", error))
        return reply
    return host.put(call)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def forget(key: str) -> _Reply:
    """Close and release an object, once its call in progress has ended."""
    host = _hosts.pop(key, None)
    if host is not None:
        return host.end()
    nothing: _Reply = torch.futures.Future()
    nothing.set_result([])
    return nothing


def ping() -> None:
    """Do nothing; returning shows that this process can be reached."""


def _answer(reply: _Reply, outcome: CallOutcome) -> None:
    reply.set_result(pack(map(bytearray, outcome.pickle())))
