"""The sender's side: puts each version once, and looks for answers in a thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sync_core import (
    ClosedError,
    Delivery,
    Payload,
    SenderTransport,
    TransportContext,
    WorkerError,
    WorkerLostError,
)
from sync_core.transports import Notice
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


@dataclass(eq=False)
class _Place:
    watch: Watch
    wanted: int = 0
    delivery: Delivery | None = None
    owner: str | None = None
    answer: dict[str, Any] | None = None
    lost: bool = False

    @property
    def waits(self) -> bool:
        return self.delivery is not None and not self.delivery.wait(0)


class StoreSender(SenderTransport):
    """Tells by one record which version each worker is to have, and lives by rewriting it.

    Args:
        context: what the core knows.
        store: where versions and records stand.
        options: how often to look, and how long to wait for a sign of life.
    """

    def __init__(self, context: TransportContext, store: Store, options: StoreOptions) -> None:
        self._records = Records(store, context.token, context.model_id)
        self._notify = context.notify
        self._options = options
        self._beats = 0
        self._newest = 0
        self._written: list[int] = []
        self._served = set(context.worker_ids)
        self._places = {i: self._new_place() for i in context.worker_ids}
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._closed = False
        self._publish()
        self._pulse = Pulse(self._publish, options.lost_after / SIGNS)
        self._thread = threading.Thread(target=self._watch, name="sync-store", daemon=True)
        self._thread.start()

    def address(self, worker_id: int) -> None:
        """Nothing: the token, which every address has, leads to the records."""

    def send(self, payload: Payload, worker_ids: Sequence[int]) -> dict[int, Delivery]:
        """Put the weights once, then tell whom they are for."""
        self._records.write_version(payload.version, payload.to_bytes())
        deliveries = {i: Delivery(i, payload.version, payload.nbytes) for i in worker_ids}
        with self._lock:
            if self._closed:
                self._records.delete_version(payload.version)
                raise ClosedError("the sender is closed")
            self._written.append(payload.version)
            for worker_id, delivery in deliveries.items():
                place = self._places[worker_id]
                place.wanted, place.delivery = payload.version, delivery
            if len(deliveries) == len(self._places):
                self._newest = payload.version
            self._publish()
            self._remove_old()
            self._changed.notify()
        return deliveries

    def add_worker(self, worker_id: int, worker: Any = None) -> None:
        """Serve one more worker, which wants what went to all."""
        del worker
        with self._lock:
            # One that had this id may have left its record, which says nothing of the new one.
            self._records.delete(worker_record(worker_id))
            self._served.add(worker_id)
            self._places[worker_id] = self._new_place()
            self._publish()

    def remove_worker(self, worker_id: int) -> None:
        """Forget a worker, which learns it by the record."""
        with self._lock:
            place = self._places.pop(worker_id)
            self._publish()
        if place.delivery is not None:
            place.delivery.fail(WorkerError(worker_id, "was removed from the sender"))

    def close(self) -> None:
        """End the threads, and remove all that stands in the store."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for worker_id, place in self._places.items():
                if place.delivery is not None:
                    place.delivery.fail(WorkerError(worker_id, "the sender was closed"))
            self._changed.notify()
        self._pulse.end()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        # First, so that no worker leaves a record after its own was removed.
        self._records.delete(SENDER)
        for worker_id in self._served:
            self._records.delete(worker_record(worker_id))
        for version in self._written:
            self._records.delete_version(version)

    def _new_place(self) -> _Place:
        return _Place(Watch(self._options.lost_after), wanted=self._newest)

    def _publish(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._beats += 1
            wanted = {str(i): place.wanted for i, place in self._places.items()}
            self._records.write(SENDER, {"beats": self._beats, "wanted": wanted})

    def _remove_old(self) -> None:
        needed = {self._newest, *(place.wanted for place in self._places.values())}
        for version in self._written[: -self._options.keep]:
            if version not in needed:
                # Whoever comes too late to read it finds a newer one.
                self._records.delete_version(version)
                self._written.remove(version)

    def _watch(self) -> None:
        due = 0.0
        while True:
            with self._lock:
                if self._closed:
                    return
                places = dict(self._places)
            if everybody := time.monotonic() >= due:
                due = time.monotonic() + self._options.lost_after / SIGNS
            for worker_id, place in places.items():
                if everybody or place.waits:
                    self._look(worker_id, place)
            with self._lock:
                # A send may have begun, or all have ended, since the places were looked at.
                if not self._closed:
                    waits = any(place.waits for place in self._places.values())
                    self._changed.wait(
                        self._options.poll if waits else max(0.0, due - time.monotonic())
                    )

    def _look(self, worker_id: int, place: _Place) -> None:
        try:
            record = self._records.read(worker_record(worker_id))
        except Exception as error:
            _log.warning("worker %d cannot be seen in the store: %r", worker_id, error)
            return
        if record is None and place.owner is None:
            return  # it has not come yet
        reason = self._reason(place, record)
        if record is not None and reason is None and record["owner"] != place.owner:
            place.owner, place.answer = record["owner"], None
            self._notify(worker_id, Notice("connected"))
        if record is not None:
            self._hear(worker_id, place, record["answer"])
        if reason is None:
            place.lost = False
            return
        if not place.lost:
            place.lost = True
            self._notify(worker_id, Notice("lost", reason=reason))
        if place.delivery is not None:
            place.delivery.fail(WorkerLostError(worker_id, reason))

    def _reason(self, place: _Place, record: dict[str, Any] | None) -> str | None:
        """Why the worker counts as lost; None where it does not."""
        if record is None:
            return "its record is gone from the store, or not whole"
        who = f"its process {record['process']} on {record['host']}"
        if record["beats"] < 0:
            return f"{who} {record['left']}"
        if not place.watch.lives((record["owner"], record["beats"])):
            return f"{who} has given no sign of life for {self._options.lost_after:g} s"
        return None

    def _hear(self, worker_id: int, place: _Place, answer: dict[str, Any] | None) -> None:
        if answer is None or answer == place.answer:
            return
        place.answer = answer
        if place.delivery is not None and place.delivery.version == answer["version"]:
            place.delivery.settle(answer)
        elif answer["error"] is None:
            self._notify(worker_id, Notice("acknowledged", answer["version"]))
