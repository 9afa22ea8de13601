"""Histories of the senders and workers of a test, for `check_history`.

`Recorder` keeps the events, in memory or in a file that several processes append to;
`WorkerRecorder` writes those of one receiver.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from sync_core import SendReport, WorkerStatus
from sync_plugin_std.history import Event, Violation, check_history, event_line, read_history

__all__ = ["Recorder", "WorkerRecorder"]


class Recorder:
    """The history of one sender and its workers.

    Args:
        path: the file, for workers in other processes; None for this process's memory.

    Example:
        >>> recorder = Recorder()
        >>> recorder.send(1, digest="1.0")
        >>> worker = WorkerRecorder(recorder, 0, look=lambda: "2.0")
        >>> worker.committed(1)
        >>> print(recorder.check()[0])
        whole: worker 0 has other bytes than those of version 1
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._events: list[Event] = []
        # Open from the beginning: a test may leave no descriptor for it.
        self._file = None if path is None else path.open("ab", buffering=0)

    def add(self, event: str, **fields: Any) -> None:
        """Add an event; see `sync_plugin_std.history.FIELDS`."""
        if self._file is None:
            self._events.append({"event": event, "time": time.time()} | fields)
        else:
            self._file.write(event_line(event, **fields))

    def send(self, version: int, *, digest: str | None, deadline: float | None = None) -> None:
        """Add a send that begins.

        Args:
            version: what it sends.
            digest: identifies the bytes, as the ``look`` of a `WorkerRecorder` does.
            deadline: the time until which it must end, in seconds.
        """
        self.add("send", version=version, digest=digest, deadline=deadline)

    def report(self, report: SendReport) -> None:
        """Add the report of a send that has ended."""
        # One sender has one history, whatever its model is called.
        self.add("report", **report.as_dict() | {"model_id": ""})

    def states(self, workers: Mapping[int, WorkerStatus]) -> None:
        """Add what a sender knows of its workers: `Sender.workers`."""
        for worker_id, status in workers.items():
            self.add(
                "state",
                worker=worker_id,
                to=str(status.state),
                version=status.version,
                wanted=status.wanted,
            )

    def expect(self, worker_ids: Iterable[int]) -> None:
        """Add that these workers live and receive, so that the next send must update them."""
        self.add("expect", workers=sorted(worker_ids))

    def events(self) -> list[Event]:
        """Return all events, in order."""
        return list(self._events) if self.path is None else read_history([self.path])

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def check(self) -> list[Violation]:
        """Return the promises that were not kept."""
        return check_history(self.events())


class WorkerRecorder:
    """The events of one receiver, which begins with version 0.

    Args:
        recorder: of the sender.
        worker_id: the worker.
        look: returns what identifies the bytes that the model holds.
    """

    def __init__(self, recorder: Recorder, worker_id: int, look: Callable[[], str]) -> None:
        self._recorder, self._look = recorder, look
        self._known = {"worker": worker_id, "life": uuid.uuid4().hex}
        self.version = 0
        recorder.add("receiver", **self._known, to=0)

    def committed(self, version: int) -> None:
        """Add a commit; as ``on_commit`` of a `Receiver`, before the sender learns of it."""
        before, self.version = self.version, version
        self._recorder.add(
            "commit",
            **self._known,
            version=version,
            **{"from": before},
            to=version,
            digest=self._look(),
        )

    def refused(self, version: int, held: int) -> None:
        """Add that a version could not be committed.

        Args:
            version: the version.
            held: what the model has now; 0 where that may be parts.
        """
        before, self.version = self.version, held
        self._recorder.add("refuse", **self._known, version=version, **{"from": before}, to=held)

    def close(self) -> None:
        """Close the file of the recorder, which has no other receiver then."""
        self._recorder.close()

    def looked(self) -> None:
        """Add what the model holds."""
        self._recorder.add("look", **self._known, digest=self._look())
