"""A pool of workers that share one address: admitted when they come, removed when they leave."""

from __future__ import annotations

import os
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import replace
from typing import Self

from sync_core import (
    Address,
    ClosedError,
    MembershipEvent,
    Sender,
    SendReport,
    UnknownWorkerError,
    WorkerError,
    WorkerLostError,
    WorkerResult,
    WorkerState,
    WorkerTimeoutError,
)
from sync_core.transports import closed_if_it_fails, uninterrupted
from sync_plugin_scale.pools.admission import LAYOUT, PLACES, Admission

# How many workers may have been admitted and not have connected, before one that takes longer than
# this, in seconds, loses its place; estimates. It takes milliseconds on a machine that is not busy.
# No send waits for these: the limit is for memory.
_ABSENT = 16
_CONNECTING = 1.0


class Pool:
    """The workers of a sender that come and go: any number, by one address.

    Each `Receiver` that is made with `address` is given its own id, and the newest version,
    also one that was sent when there was no worker. Once it has committed that, or a newer one,
    sends wait for it; until then `SendReport.joining` names it. A worker that leaves, or that does
    not commit a version within the sender's ``timeout``, is removed: that is not an error, and
    `SendReport.dropped` names it. It joins again when it calls `receive`.

    The pool ends with its sender, or when it is closed. Make it before the first `Sender.send`:
    without a worker and without a pool, `send` does nothing.

    Args:
        sender: the sender; it is not kept alive. It may also have workers with ids of their own.

    Raises:
        OptionError: the scheme cannot serve workers that come later.
        AddressError: the scheme gives each worker another endpoint.
        ModelError: the sender knows no model yet.
        ClosedError: the sender is closed.

    Example:
        >>> import torch
        >>> from sync_core import Receiver, Sender
        >>> policy, replica = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
        >>> with Sender("thread", policy, num_workers=0) as sender:
        ...     address = Pool(sender).address()
        ...     report = sender.send()  # no worker is there yet
        ...     with Receiver(address, replica) as receiver:
        ...         receiver.receive(), receiver.worker_id
        (1, 0)
    """

    def __init__(self, sender: Sender) -> None:
        self._sender = weakref.ref(sender)
        self._process = os.getpid()
        # Held while a worker is added, until its id is known to be one of the pool's.
        self._adding = threading.Lock()
        # Those that have left included.
        self._admitted: set[int] = set()
        template = sender.address_template()
        with closed_if_it_fails():
            channel = sender.side_channel(LAYOUT, PLACES)
            self._admission = Admission(channel, self._admit, self._remove)
            with uninterrupted():
                self._admission.start()
                try:
                    self._unregister = sender.on_close(self._admission.close)
                except BaseException:
                    self._admission.close()
                    raise
        self._address = replace(template, endpoint=self._admission.entrance(template.endpoint))
        sender.subscribe(self._remove_lost)
        sender.settle_failures(self._remove_failed)

    def address(self) -> Address:
        """The address that all workers of the pool share; it pickles, and has a JSON form."""
        return self._address

    def close(self) -> None:
        """Admit no more workers; those that are there stay workers of the sender.

        In a process that was forked from the pool's, this does nothing.
        """
        if os.getpid() != self._process:
            return
        self._admission.close()
        self._unregister()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _admit(self) -> tuple[int, str]:
        sender = self._sender()
        if sender is None:
            raise ClosedError("the sender is gone")
        self._make_room(sender)
        with self._adding:
            worker_id = sender.add_worker(joining=True)
            self._admitted.add(worker_id)
            return worker_id, sender.address(worker_id).token

    def _make_room(self, sender: Sender) -> None:
        """Remove the oldest of many workers that were admitted and do not connect.

        A holder of the address may be admitted again and again.
        """
        late = time.monotonic() - _CONNECTING
        absent = [
            (status.since, worker_id)
            for worker_id, status in sender.workers.items()
            if status.state is WorkerState.CONNECTING and self._is_admitted(worker_id)
        ]
        for since, worker_id in sorted(absent)[: max(0, len(absent) - _ABSENT + 1)]:
            if since < late:
                self._remove(worker_id)

    def _remove(self, worker_id: int) -> None:
        """Remove a worker, where that has not been done."""
        sender = self._sender()
        if sender is not None:
            with suppress(UnknownWorkerError, ClosedError):
                sender.remove_worker(worker_id)

    def _is_admitted(self, worker_id: int) -> bool:
        with self._adding:
            return worker_id in self._admitted

    def _remove_lost(self, event: MembershipEvent) -> None:
        if event.after is WorkerState.LOST and self._is_admitted(event.worker_id):
            self._remove(event.worker_id)

    def _remove_failed(self, report: SendReport) -> SendReport:
        """Remove those that have left, or not committed a version in time; the report says so."""
        sender = self._sender()
        assert sender is not None
        left = {i for i, result in report.failed.items() if _left(result)}
        workers, late = dict(report.workers), time.monotonic() - sender.timeout
        for worker_id, status in sender.workers.items():
            if worker_id in report.joining and status.since < late:
                left.add(worker_id)
        for worker_id in filter(self._is_admitted, left):
            self._remove(worker_id)
            workers[worker_id] = replace(workers[worker_id], remedy="drop")
        return replace(report, workers=workers)


def _left(result: WorkerResult) -> bool:
    """Return whether a worker is gone, or silent; and not one that refused a version."""
    error = result.error
    return isinstance(error, WorkerLostError | WorkerTimeoutError) or type(error) is WorkerError
