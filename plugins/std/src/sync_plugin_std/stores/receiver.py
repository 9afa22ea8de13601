"""A receiver's side: looks for a version that it has not seen, and answers in a record."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from typing import Any

from sync_core import Answer, Payload, ReceiverTransport, SenderLostError, TransportContext
from sync_core.transports import Block
from sync_plugin_std.stores.store import (
    SENDER,
    SIGNS,
    Pulse,
    Records,
    Store,
    StoreOptions,
    Watch,
    worker_record,
)

_log = logging.getLogger("sync_core")


class StoreReceiver(ReceiverTransport):
    """Reads whole versions, so that a newer one may appear meanwhile.

    Args:
        context: what the core knows.
        store: where versions and records stand.
        options: how often to look, and how long to wait for a sign of life.
    """

    def __init__(self, context: TransportContext, store: Store, options: StoreOptions) -> None:
        self._records = Records(store, context.token, context.model_id)
        self._worker_id = context.worker_id
        self._record = worker_record(context.worker_id)
        self._poll = options.poll
        self._seen = 0
        self._owner = secrets.token_hex(8)
        self._answer: dict[str, Any] | None = None
        self._beats = 0
        self._replaced = False
        self._left = "closed its receiver"
        self._closed = False
        self._woken = threading.Event()
        self._lock = threading.RLock()
        self._sender = Watch(options.lost_after)
        if self._records.read(SENDER) is None:
            raise SenderLostError("the sender is gone, or the address is not one of its own")
        self._write()
        self._pulse = Pulse(self._beat, options.lost_after / SIGNS)

    def receive(self, timeout: float) -> Payload | None:
        """The newest version that this worker has not seen."""
        deadline = time.monotonic() + timeout
        while True:
            payload = self._look()
            left = deadline - time.monotonic()
            if payload is not None or left <= 0 or self._woken.wait(min(self._poll, left)):
                return payload

    def acknowledge(self, answer: Answer) -> None:
        """Tell the sender that a version was committed, or why it was not."""
        with self._lock:
            self._answer = answer.to_message()
            if not self._rewrite():
                raise SenderLostError("the sender was closed, or has another receiver here")

    def leave(self, reason: str) -> None:
        """Have `close` say why."""
        self._left = reason

    def wake(self) -> None:
        """Look once more at most."""
        self._woken.set()

    def close(self) -> None:
        """Leave, and say so."""
        self._pulse.end()
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                self._rewrite()
            except Exception as error:
                _log.warning("worker %d cannot say that it leaves: %r", self._worker_id, error)

    def _look(self) -> Payload | None:
        wanted = self._wanted()
        if wanted <= self._seen:
            return None
        began = time.perf_counter()
        data = self._records.read_version(wanted)
        if data is None:
            return None  # a newer one has just taken its place
        self._seen = wanted
        return Payload.unpack(Block.of_bytes(data), wanted, since=began)

    def _wanted(self) -> int:
        with self._lock:
            record = self._records.read(SENDER)
            if record is None:
                raise SenderLostError("the sender was closed")
            if not self._sender.lives(record["beats"]):
                raise SenderLostError("the sender gives no sign of life")
        if self._replaced:
            raise SenderLostError("another receiver was given the same address")
        wanted: dict[str, int] = record["wanted"]
        if str(self._worker_id) not in wanted:
            raise SenderLostError(f"worker {self._worker_id} was removed from the sender")
        return wanted[str(self._worker_id)]

    def _beat(self) -> None:
        with self._lock:
            self._beats += 1
            if self._rewrite():
                # Between two calls of receive() too, so that the next knows how long it is dead.
                record = self._records.read(SENDER)
                if record is not None:
                    self._sender.lives(record["beats"])

    def _rewrite(self) -> bool:
        """Write, unless another has taken the place or the sender has closed; whether it did."""
        standing = self._records.read(self._record)
        if standing is None or standing["owner"] != self._owner:
            self._replaced = True
            return False
        self._write()
        return True

    def _write(self) -> None:
        record = {
            "owner": self._owner,
            "process": os.getpid(),
            "host": socket.gethostname(),
            "beats": -1 if self._closed else self._beats,
            "answer": self._answer,
            "left": self._left if self._closed else None,
        }
        self._records.write(self._record, record)
        # Its own may have been removed just before, by a sender that closes.
        if self._records.read(SENDER) is None:
            self._records.delete(self._record)
