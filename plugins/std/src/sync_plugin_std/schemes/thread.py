"""The scheme ``thread``: workers are threads of the trainer's process."""

from __future__ import annotations

import queue
import secrets
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from sync_core import (
    Answer,
    Delivery,
    Payload,
    ReceiverTransport,
    SenderLostError,
    SenderTransport,
    TransportContext,
    hookimpl,
)
from sync_core.errors import AddressError
from sync_core.transports import Block
from sync_plugin_std.local import Publisher, Slot

_publishers: weakref.WeakValueDictionary[str, Publisher] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class ThreadOptions:
    """Options of the scheme ``thread``.

    Args:
        slots: how many versions may be kept at a time, for readers of old ones. None: three,
            and one more for each further version that workers which do not get on still hold, or
            that only some were sent, until they release it or get a newer one.
    """

    slots: int | None = None


class ThreadScheme:
    """Weights go through private memory of this process."""

    capabilities = frozenset({"broadcast", "late_join", "zero_copy"})
    endpoint_type = str

    @hookimpl
    def create_transport(self, context: TransportContext) -> SenderTransport | ReceiverTransport:
        """The sender's or a receiver's side."""
        if context.side == "receiver":
            return ThreadReceiver(context)
        return ThreadSender(context)


class ThreadSender(SenderTransport):
    """Packs into a slot, from which every worker reads."""

    def __init__(self, context: TransportContext) -> None:
        options = context.parse_options(ThreadOptions)
        assert context.layout is not None
        self._publisher = Publisher(
            Block.allocate,
            context.layout.nbytes,
            options.slots,
            context.worker_ids,
            timeout=context.timeout,
            views=context.zero_copy,
            notify=context.notify,
        )
        self._name = secrets.token_hex(8)
        _publishers[self._name] = self._publisher

    def address(self, worker_id: int) -> str:
        """The name under which this process knows the sender."""
        del worker_id
        return self._name

    def send(self, payload: Payload, worker_ids: Sequence[int]) -> dict[int, Delivery]:
        """Pack once for all."""
        return self._publisher.publish(payload, worker_ids)

    def add_worker(self, worker_id: int, worker: Any = None) -> None:
        """Serve one more worker."""
        del worker
        self._publisher.add_worker(worker_id)

    def remove_worker(self, worker_id: int) -> None:
        """Forget a worker."""
        self._publisher.remove_worker(worker_id)

    def close(self) -> None:
        """Let receivers know."""
        self._publisher.close()


class ThreadReceiver(ReceiverTransport):
    """Reads from the slots of a sender in the same process."""

    def __init__(self, context: TransportContext) -> None:
        publisher = _publishers.get(context.endpoint)
        if publisher is None:
            raise AddressError(
                "no such sender in this process: an address of scheme 'thread' is good only in "
                "the process that made it, while its sender lives; use 'shm' between processes"
            )
        self._publisher = publisher
        self._worker_id = context.worker_id
        self._name = f"worker {context.worker_id}"
        self._seen = 0
        self._held: set[int] = set()
        self._woken = self._left = False
        # Holds something when there is news: of the kinds of queues the one that may be put into
        # with any lock held, also by a finalizer.
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()
        if not publisher.joined(self._worker_id, self, self._wake):
            raise AddressError(f"the sender has no worker {self._worker_id} any more")

    def receive(self, timeout: float) -> Payload | None:
        """Wait for a version that this worker has not seen."""
        deadline = time.monotonic() + timeout
        while (slot := self._borrow()) is None:
            try:
                if self._woken:
                    return None
                self._news.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return None
        since = time.perf_counter()
        self._seen = slot.version
        release = partial(self._release, slot.index)
        try:
            self._held.add(slot.index)
            return Payload.unpack(
                slot.block, slot.version, digest=slot.digest, release=release, since=since
            )
        except BaseException:
            release()
            raise

    def acknowledge(self, answer: Answer) -> None:
        """Answer at once."""
        self._publisher.answer(self._worker_id, answer, self)

    def wake(self) -> None:
        """Wait no more."""
        self._woken = True
        self._wake()

    def leave(self, reason: str) -> None:
        """Fail what this worker has not answered."""
        self._left = True
        self._publisher.lost(self._worker_id, self, reason)

    def close(self) -> None:
        """Leave the sender, if the receiver has not left yet."""
        if not self._left:
            self.leave("closed its receiver")

    def _borrow(self) -> Slot | None:
        """Return the slot of a version that this worker has not seen."""
        with self._publisher.lock:
            dismissed = self._publisher.dismissed(self._worker_id, self)
            if dismissed is not None:
                raise SenderLostError(dismissed)
            if self._woken:
                return None
            return self._publisher.lend(self._worker_id, self._seen, self, self._name)

    def _wake(self) -> None:
        if self._news.empty():
            self._news.put(None)

    def _release(self, slot: int) -> None:
        self._held.discard(slot)
        self._publisher.give_back(self, kept=tuple(self._held))
