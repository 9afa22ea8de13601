"""A scheme of one process whose senders have links of limited bandwidth."""

from __future__ import annotations

import queue
import secrets
import threading
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from sync_core import (
    Answer,
    Payload,
    ReceiverTransport,
    SenderLostError,
    SenderTransport,
    TransportContext,
    WorkerLostError,
    hookimpl,
)
from sync_plugin_std.calls import PointToPointTransport

_links: dict[str, threading.Lock] = {}
_senders: WeakValueDictionary[str, SlowSender] = WeakValueDictionary()


@dataclass(frozen=True)
class SlowOptions:
    """Options of the scheme.

    Args:
        rate: bytes per second that a sender can send, to all its workers together.
        local: workers on the sender's host, which that does not limit.
    """

    rate: float
    local: tuple[int, ...] = ()


class SlowLinks:
    """Each sender has one link, over which one payload travels at a time."""

    capabilities = frozenset({"late_join"})

    @hookimpl
    def create_transport(self, context: TransportContext) -> SenderTransport | ReceiverTransport:
        """The sender's or a receiver's side."""
        if context.side == "receiver":
            return SlowReceiver(context)
        return SlowSender(context, context.parse_options(SlowOptions))


class SlowSender(PointToPointTransport):
    """Waits as long as the bytes would take."""

    def __init__(self, context: TransportContext, options: SlowOptions) -> None:
        self._options = options
        # Those of one sender, which differ in the end of their token, have one link.
        self._link = _links.setdefault(context.token.partition("-")[0], threading.Lock())
        self._timeout = context.timeout
        #: How many bytes were sent.
        self.nbytes = 0
        self.inboxes: dict[int, queue.SimpleQueue[Payload | None]] = {}
        self.answers: dict[int, queue.SimpleQueue[Answer]] = {}
        self._name = secrets.token_hex(8)
        _senders[self._name] = self
        super().__init__(context.worker_ids, context.notify)

    def address(self, worker_id: int) -> str:
        """The sender's name."""
        del worker_id
        return self._name

    def add_worker(self, worker_id: int, worker: Any = None) -> None:
        """Serve one more worker."""
        self.inboxes[worker_id] = queue.SimpleQueue()
        self.answers[worker_id] = queue.SimpleQueue()
        super().add_worker(worker_id, worker)

    def send_to(self, worker_id: int, payload: Payload) -> Answer:
        """Take the time that the link needs, and wait for the answer."""
        if worker_id not in self._options.local:
            with self._link:
                self.nbytes += payload.nbytes
                threading.Event().wait(payload.nbytes / self._options.rate)
        self.inboxes[worker_id].put(payload)
        try:
            while (answer := self.answers[worker_id].get(timeout=self._timeout)).version != (
                payload.version
            ):
                pass
        except queue.Empty:
            raise WorkerLostError(worker_id, "does not answer") from None
        return answer

    def close(self) -> None:
        """Let the workers know."""
        for inbox in self.inboxes.values():
            inbox.put(None)
        super().close()


class SlowReceiver(ReceiverTransport):
    """Takes what comes."""

    def __init__(self, context: TransportContext) -> None:
        sender = _senders[context.endpoint]
        self._inbox = sender.inboxes[context.worker_id]
        self._answers = sender.answers[context.worker_id]

    def receive(self, timeout: float) -> Payload | None:
        """Wait for a payload."""
        try:
            payload = self._inbox.get(timeout=timeout)
        except queue.Empty:
            return None
        if payload is None:
            self._inbox.put(None)
            raise SenderLostError("the sender was closed")
        return payload

    def acknowledge(self, answer: Answer) -> None:
        """Answer at once."""
        self._answers.put(answer)

    def wake(self) -> None:
        """Let `receive` raise."""
        self._inbox.put(None)

    def close(self) -> None:
        """Nothing is held."""
