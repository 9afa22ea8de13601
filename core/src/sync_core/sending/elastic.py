"""Workers that share one address: admitted when they come, removed when they leave."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Protocol

from sync_core._util import release_with, uninterrupted
from sync_core.address import Address
from sync_core.admission import Admission, Entrance
from sync_core.errors import (
    ClosedError,
    UnknownWorkerError,
    WorkerError,
    WorkerLostError,
    WorkerTimeoutError,
)
from sync_core.report import SendReport, WorkerResult
from sync_core.sending.membership import MembershipEvent
from sync_core.sending.pipeline import Pipeline
from sync_core.sending.worker_state import WorkerState
from sync_core.transports.transport import closed_if_it_fails


class Members(Protocol):
    """The part of a `Sender` that is used here."""

    def add_worker(self) -> int:
        """Serve one more worker, and return its id."""

    def remove_worker(self, worker_id: int) -> None:
        """Stop serving a worker."""

    def subscribe(self, callback: Callable[[MembershipEvent], object]) -> Callable[[], None]:
        """Subscribe to changes of workers' states."""


class ElasticWorkers:
    """The workers of `Sender.address()`, with no id of their own.

    Args:
        sender: the sender; it is not kept alive.
        pipeline: the sender's.
        lock: what is held while a version is sent, or a worker added.

    Raises:
        OptionError: the scheme cannot serve workers that come later.
        ModelError: it is not known yet what will travel.
    """

    def __init__(self, sender: Members, pipeline: Pipeline, lock: threading.RLock) -> None:
        self._sender = weakref.ref(sender)
        self._pipeline = pipeline
        self._lock = lock
        # Those that have left included.
        self._admitted: set[int] = set()
        context = pipeline.admission_context()
        with closed_if_it_fails():
            self._admission = Admission(context, pipeline.side_stack(), self._admit, self._remove)
            with uninterrupted():
                self._admission.start()
                self._close = release_with(self, self._admission.close)
        sender.subscribe(partial(_remove_lost, weakref.ref(self)))

    def address(self) -> Address:
        """The address that all of them share."""
        entrance = Entrance(
            self._admission.endpoint(), self._admission.token, self._pipeline.opened.address(0)
        )
        return self._pipeline.make_address(worker_id=-1, endpoint=entrance)

    def remove_failed(self, report: SendReport) -> SendReport:
        """Remove those that have left, or not committed a version in time; the report says so."""
        gone = [i for i, result in report.failed.items() if i in self._admitted and _left(result)]
        for worker_id in gone:
            self._remove(worker_id)
        workers = {
            i: replace(r, remedy="drop") if i in gone else r for i, r in report.workers.items()
        }
        return replace(report, workers=workers)

    def close(self) -> None:
        """Admit no more workers."""
        self._close()

    def _admit(self) -> int:
        sender = self._sender()
        if sender is None:
            raise ClosedError("the sender is gone")
        with self._lock:
            worker_id = sender.add_worker()
            self._admitted.add(worker_id)
            return worker_id

    def _remove(self, worker_id: int) -> None:
        """Remove a worker that was admitted, unless that was done."""
        sender = self._sender()
        if sender is not None:
            with self._lock, suppress(UnknownWorkerError, ClosedError):
                sender.remove_worker(worker_id)

    def remove_lost(self, event: MembershipEvent) -> None:
        """Remove the worker of an event if it is lost and was admitted."""
        if event.after is WorkerState.LOST and event.worker_id in self._admitted:
            self._remove(event.worker_id)


def _remove_lost(workers: weakref.ref[ElasticWorkers], event: MembershipEvent) -> None:
    found = workers()
    if found is not None:
        found.remove_lost(event)


def _left(result: WorkerResult) -> bool:
    """Return whether a worker is gone, or silent; and not one that refused a version."""
    error = result.error
    return isinstance(error, WorkerLostError | WorkerTimeoutError) or type(error) is WorkerError
