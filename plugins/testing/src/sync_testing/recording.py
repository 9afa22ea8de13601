"""Records the history of a test's senders and workers, for `check_history`.

`Recorder` keeps the events, in memory or in a file to which several processes append.
`WorkerRecorder` records the events of one receiver.
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
    """Records the history of one sender and its workers.

    Args:
        path: the file, for workers in other processes; None to keep it in memory.

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
        # Opened at the beginning: later the test may leave no free descriptor.
        self._file = None if path is None else path.open("ab", buffering=0)

    def add(self, event: str, **fields: Any) -> None:
        """Add an event; see `sync_plugin_std.history.FIELDS`."""
        if self._file is None:
            self._events.append({"event": event, "time": time.time()} | fields)
        else:
            self._file.write(event_line(event, **fields))

    def send(self, version: int, *, digest: str | None, deadline: float | None = None) -> None:
        """Add the beginning of a send.

        Args:
            version: the version that is sent.
            digest: identifies the weights, as the ``look`` of a `WorkerRecorder` does.
            deadline: the time until which it must end, in seconds.
        """
        self.add("send", version=version, digest=digest, deadline=deadline)

    def report(self, report: SendReport) -> None:
        """Add the report of a finished send."""
        # One sender has one history, whatever its model id.
        self.add("report", **report.as_dict() | {"model_id": ""})

    def states(self, workers: Mapping[int, WorkerStatus]) -> None:
        """Add the sender's view of its workers: `Sender.workers`."""
        for worker_id, status in workers.items():
            self.add(
                "state",
                worker=worker_id,
                to=str(status.state),
                version=status.version,
                wanted=status.wanted,
            )

    def expect(self, worker_ids: Iterable[int]) -> None:
        """Add that these workers are alive and receiving, so the next send must update them."""
        self.add("expect", workers=sorted(worker_ids))

    def events(self) -> list[Event]:
        """Return all events, in order."""
        return list(self._events) if self.path is None else read_history([self.path])

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def check(self) -> list[Violation]:
        """Return the violated promises."""
        return check_history(self.events())


class WorkerRecorder:
    """Records the events of one receiver, which begins with version 0.

    Args:
        recorder: the recorder of the sender.
        worker_id: the worker.
        look: returns an identification of the model's current weights.
    """

    def __init__(self, recorder: Recorder, worker_id: int, look: Callable[[], str]) -> None:
        self._recorder, self._look = recorder, look
        self._known = {"worker": worker_id, "life": uuid.uuid4().hex}
        self.version = 0
        recorder.add("receiver", **self._known, to=0)

    def committed(self, version: int) -> None:
        """Add a commit; use it as ``on_commit`` of a `Receiver`, before the acknowledgement."""
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
            held: the version that the model has now; 0 if it may have parts of several.
        """
        before, self.version = self.version, held
        self._recorder.add("refuse", **self._known, version=version, **{"from": before}, to=held)

    def close(self) -> None:
        """Close the file of the recorder, if no other receiver uses it."""
        self._recorder.close()

    def looked(self) -> None:
        """Add the model's current weights."""
        self._recorder.add("look", **self._known, digest=self._look())
