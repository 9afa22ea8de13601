"""A sender and its workers in one thread, so that a case takes milliseconds."""

from __future__ import annotations

import pickle
from contextlib import suppress
from typing import Any

from sync_core import Receiver, Sender, SendReport, SyncError

# A layer that skips more pushes than this in a row leaves its workers behind for good.
_MOST_SKIPPED = 64


class Link:
    """A sender and its workers, all in this thread.

    Args:
        sender: the sender.
        targets: the models of its workers.
    """

    def __init__(self, sender: Sender, targets: list[Any]) -> None:
        self.sender = sender
        self.target = targets[0]
        self.receivers = [Receiver(sender.address(i), t) for i, t in enumerate(targets)]

    def send(self, weights: Any = None, worker_ids: list[int] | None = None) -> int:
        """Push until every worker that it is for has been updated; the version."""
        wanted = set(self.sender.all_worker_ids() if worker_ids is None else worker_ids)
        for _ in range(_MOST_SKIPPED):
            wanted -= set(self._push(weights, sorted(wanted)).updated)
            if not wanted:
                return self.sender.version
        raise AssertionError(f"{_MOST_SKIPPED} pushes in a row were held back")

    def push_unseen(self, weights: Any) -> None:
        """Push until one goes out, and let no worker receive it."""
        for _ in range(_MOST_SKIPPED):
            self.sender.send_async(weights).wait(0.0)
        raise AssertionError(f"{_MOST_SKIPPED} pushes in a row were held back")

    def join(self, target: Any) -> None:
        """One more worker."""
        worker_id = self.sender.add_worker()
        self.receivers.append(Receiver(self.sender.address(worker_id), target))

    def come_back(self, target: Any) -> None:
        """Worker 0 closes its receiver and makes another."""
        self.receivers[0].close()
        address = pickle.loads(pickle.dumps(self.sender.address(0)))
        self.receivers[0] = Receiver(address, target)

    def _push(self, weights: Any, worker_ids: list[int]) -> SendReport:
        pending = self.sender.send_async(weights, worker_ids)
        for worker_id in worker_ids:
            # What it raises, the sender is told.
            with suppress(SyncError):
                self.receivers[worker_id].receive(0)
        return pending.wait(0.0)
