"""Three companions of a sender, from public names: a status reader, a pool, a restart policy.

    python docs/examples/companions.py

Each does the work of a class of this project (`sync_tools.StatusServer`, `sync_plugin_std.Restart`,
`sync_plugin_scale.Pool`) by the same public interface of the sender. See
docs/decisions/0028-companions.md for what a companion is.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch
from torch import nn

from sync_core import (
    Address,
    ClosedError,
    FailurePolicy,
    MembershipEvent,
    Receiver,
    Sender,
    SenderLostError,
    SendReport,
    UnknownWorkerError,
    WorkerFailure,
    WorkerLostError,
    WorkerState,
)
from sync_core.errors import AddressError


class StatusFile:
    """Writes the state of each worker to a file after every send, for ``watch cat status.json``.

    Args:
        sender: the sender; it is not kept alive.
        path: the file, which is removed when the sender ends.
    """

    def __init__(self, sender: Sender, path: Path) -> None:
        self._sender = weakref.ref(sender)
        self._path = path
        self._unsubscribe = sender.on_report(self._write)
        self._unregister = sender.on_close(partial(path.unlink, missing_ok=True))

    def close(self) -> None:
        """Stop writing, and remove the file."""
        self._unsubscribe()
        self._unregister()
        self._path.unlink(missing_ok=True)

    def _write(self, report: SendReport) -> None:
        sender = self._sender()
        if sender is None:
            return
        workers = {
            worker_id: {"state": status.state, "version": status.version}
            for worker_id, status in sender.workers.items()
        }
        status = {"version": report.version, "scheme": sender.scheme, "workers": workers}
        written = self._path.with_suffix(".new")
        written.write_text(json.dumps(status))
        written.replace(self._path)


class OpenPool:
    """Lets workers join and leave: gives each an address, and removes those that left.

    Args:
        sender: the sender; it is not kept alive.
    """

    def __init__(self, sender: Sender) -> None:
        self._sender = weakref.ref(sender)
        self._joined: set[int] = set()
        self._unsubscribe = sender.subscribe(self._remove_lost)
        self._unregister = sender.settle_failures(self._settle)

    def join(self) -> Address:
        """Add a worker, and return its address."""
        sender = self._sender()
        if sender is None:
            raise ClosedError("the sender is gone")
        worker_id = sender.add_worker(joining=True)
        self._joined.add(worker_id)
        return sender.address(worker_id)

    def close(self) -> None:
        """Stop removing workers."""
        self._unsubscribe()
        self._unregister()

    def _remove_lost(self, event: MembershipEvent) -> None:
        if event.after is WorkerState.LOST and event.worker_id in self._joined:
            self._remove(event.worker_id)

    def _settle(self, report: SendReport) -> SendReport:
        """Remove the workers that left during a send, so that the send does not raise."""
        workers = dict(report.workers)
        for worker_id, result in report.failed.items():
            if worker_id in self._joined and isinstance(result.error, WorkerLostError):
                self._remove(worker_id)
                workers[worker_id] = replace(result, remedy="drop")
        return replace(report, workers=workers)

    def _remove(self, worker_id: int) -> None:
        sender = self._sender()
        if sender is not None:
            with suppress(UnknownWorkerError, ClosedError):
                sender.remove_worker(worker_id)


class Respawn(FailurePolicy):
    """Replaces failed workers a number of times, then drops them.

    Args:
        start: starts a worker with an address.
        times: the total number of replacements.
    """

    def __init__(self, start: Callable[[Address], object], times: int = 3) -> None:
        self._start = start
        self._left = times

    def __call__(self, failure: WorkerFailure) -> Literal["drop"] | Callable[[], object]:
        """Return what to do about a failed worker."""
        if not self._left:
            return "drop"
        self._left -= 1
        return lambda: self._start(failure.address())


def serve(address: Address, versions: int) -> threading.Thread:
    """Run a worker that commits some versions, and ends."""

    def work() -> None:
        # The sender may end before this worker has started.
        with (
            suppress(AddressError, SenderLostError),
            Receiver(address, nn.Linear(4, 2)) as receiver,
        ):
            for _ in range(versions):
                receiver.receive()

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def main() -> None:
    """Send four versions with all three companions, to workers that end after two."""
    threads: list[threading.Thread] = []

    def start(address: Address) -> None:
        threads.append(serve(address, 2))

    with TemporaryDirectory() as folder:
        path = Path(folder, "status.json")
        policy = nn.Linear(4, 2)
        with Sender("thread", policy, num_workers=1, on_failure=Respawn(start)) as sender:
            StatusFile(sender, path)
            pool = OpenPool(sender)
            start(sender.address(0))
            start(pool.join())
            for _ in range(4):
                with torch.no_grad():
                    policy.weight.add_(1.0)
                report = sender.send()
                print("version", report.version, "to", report.updated, "again", report.restarted)
            print(path.read_text())
        print("the status was removed:", not path.exists())
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
