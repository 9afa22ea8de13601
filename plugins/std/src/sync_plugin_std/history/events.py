"""Histories of runs: what senders and workers did, one event in a line of JSON.

The layer `History` writes one. `sync_plugin_std.history.check_history` and the command
``sync-core check-history`` judge it. A test may write its own, with `append_event`.

An event has ``event`` (its kind), ``time`` (seconds since 1970), ``run`` and ``model_id`` (those of
its sender), and the fields that `FIELDS` lists for its kind. A line without ``event`` is a report,
as `Record` writes it.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path
from typing import Any

from sync_core import ApplyContext, BindContext, SendContext, SendReport, Update, hookimpl
from sync_core.errors import OptionError
from sync_core.transports import checksum
from sync_plugin_std.layers.checksums import check_installed
from sync_plugin_std.layers.record import Record

__all__ = ["FIELDS", "Event", "History", "append_event", "event_line", "read_history"]

Event = Mapping[str, Any]

#: The fields of each kind of event; those in brackets may be missing.
FIELDS: Mapping[str, tuple[str, ...]] = {
    # What `SendReport.as_dict` returns.
    "report": ("version", "seconds", "workers"),
    # A sender begins to send a version, whose bytes have this digest, and must end within deadline.
    "send": ("version", "[digest]", "[workers]", "[deadline]"),
    # The send of a version raised, and has no report.
    "raise": ("version",),
    # A worker has a new receiver, whose model has the version `to`.
    "receiver": ("worker", "life", "to"),
    # A worker's model went from one version to another, of these bytes.
    "commit": ("worker", "life", "version", "from", "to", "[digest]"),
    # A version could not be applied. The model has the version `to`; null where it is not known.
    "refuse": ("worker", "life", "version", "from", "to"),
    # A look at a model: the bytes that it holds.
    "look": ("worker", "life", "digest"),
    # The sender's view of a worker: its state, the version acknowledged, and the one meant.
    "state": ("worker", "to", "version", "wanted"),
    # These workers live and receive, so the next send must update them.
    "expect": ("workers",),
}


class History(Record):
    """Records sends, commits and reports: ``Sender(…, layers=[History("run.jsonl")])``.

    It is a `Record` that travels to the workers, where it appends each commit to the file of the
    same path: one file on one host, and one on each host otherwise. Give each sender its own, as
    the last of its layers. ``sync-core check-history run.jsonl`` judges the files. Digests take a
    read of the weights at both ends for each version.

    Args:
        path: the file; it is made if there is none.

    Raises:
        OSError: the file cannot be written.
        RequirementError: the hash library xxhash is not installed.

    Example:
        >>> import tempfile
        >>> from sync_core import Receiver, Sender
        >>> from sync_plugin_std.history import check_history
        >>> from torch import nn
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "run.jsonl")
        ...     layers = [History(path)]
        ...     with Sender("thread", nn.Linear(4, 2), num_workers=1, layers=layers) as sender:
        ...         receiver = Receiver(sender.address(0), nn.Linear(4, 2))
        ...         pending = sender.send_async()
        ...         version = receiver.receive()
        ...         report = pending.wait()
        ...     events = read_history([path])
        >>> [event["event"] for event in events], check_history(events)
        (['send', 'commit', 'report'], [])
    """

    #: The bytes that arrive are those that were prepared.
    capabilities = frozenset({"checks"})

    def __init__(self, path: str | os.PathLike[str]) -> None:
        check_installed("History")
        super().__init__(path)
        self.run = uuid.uuid4().hex
        self._life = ""

    def bind(self, context: BindContext) -> History:
        """Return a layer for one end; each receiver is a life of its worker."""
        bound = object.__new__(type(self))
        bound.path, bound.run = self.path, self.run
        bound._life = uuid.uuid4().hex if context.side == "receiver" else ""
        return bound

    def __call__(self, report: SendReport) -> None:
        """Append a report."""
        line = json.dumps({"time": time.time(), "run": self.run} | report.as_dict())
        self._append(f"{line}\n".encode())

    @hookimpl(wrapper=True)
    def prepare_weights(self, context: SendContext) -> Generator[None, Update, Update]:
        """Append the version that is about to be sent."""
        update = yield
        # Version 0 is prepared for its layout alone.
        if context.version and not context.skipped:
            self._add("send", context.model_id, version=context.version, digest=_digest(update))
        return update

    @hookimpl(wrapper=True)
    def apply_weights(self, update: Update, context: ApplyContext) -> Generator[None, bool, bool]:
        """Append the commit, or the refusal."""
        # Version 0 are weights given by hand, which travel from nowhere.
        digest = _digest(update) if context.version else None
        known = {
            "worker": context.worker_id,
            "life": self._life,
            "version": context.version,
            "from": context.held,
        }
        try:
            result = yield
        except BaseException:
            self._add("refuse", context.model_id, **known, to=None)
            raise
        if context.version:
            self._add("commit", context.model_id, **known, to=context.version, digest=digest)
        return result

    def _add(self, event: str, model_id: str, **fields: Any) -> None:
        append_event(self.path, event, run=self.run, model_id=model_id, **fields)


def append_event(path: str | os.PathLike[str], event: str, **fields: Any) -> None:
    """Append an event to a file, as one write, which other processes that append do not tear.

    Args:
        path: the file; it is made if there is none.
        event: its kind, of `FIELDS`.
        **fields: those of the kind, with ``run`` and ``model_id`` where there are several.

    Raises:
        OSError: the file cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     append_event(Path(folder, "run.jsonl"), "expect", workers=[0, 1])
        ...     [event["workers"] for event in read_history([Path(folder, "run.jsonl")])]
        [[0, 1]]
    """
    with Path(path).open("ab", buffering=0) as file:
        file.write(event_line(event, **fields))


def event_line(event: str, **fields: Any) -> bytes:
    """Return the line of an event, for a file that is open already; see `append_event`."""
    return f"{json.dumps({'event': event, 'time': time.time()} | fields)}\n".encode()


def read_history(paths: Iterable[str | os.PathLike[str]]) -> list[Event]:
    """Return the events of files, in the order of their times; those of one file stay in order.

    A last line without an end, which a process left that was killed, is not read.

    Args:
        paths: files of `History`, `Record` or `append_event`.

    Raises:
        OptionError: there is no such file, or a line is not an event.
    """
    events: list[Event] = []
    for path in map(Path, paths):
        try:
            lines = path.read_text(encoding="utf-8").split("\n")[:-1]
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"cannot read {path}: {error}") from error
        latest = 0.0
        for number, line in enumerate(lines, 1):
            event = _event(line, f"{path}, line {number}")
            # Clocks may be set back; the order in a file is that of the writes.
            latest = max(latest, event["time"])
            events.append({**event, "order": latest, "where": f"{path}:{number}"})
    return sorted(events, key=lambda event: float(event["order"]))


_NUMBER = (int, float)
# The types of fields, and the kinds of events in which they differ.
_HOLDS: Mapping[str, tuple[type, ...]] = {
    "version": (int,),
    "seconds": _NUMBER,
    "deadline": (*_NUMBER, type(None)),
    "worker": (int,),
    "workers": (list,),
    "life": (str,),
    "digest": (str, type(None)),
    "from": (int,),
    "to": (int, type(None)),
    "wanted": (int,),
    "run": (str,),
    "model_id": (str,),
}
_HOLDS_IN: Mapping[tuple[str, str], tuple[type, ...]] = {
    ("commit", "to"): (int,),
    ("refuse", "from"): (int, type(None)),
    ("state", "to"): (str,),
}


def _event(line: str, where: str) -> dict[str, Any]:
    try:
        event = json.loads(line)
        event.setdefault("event", "report")
        kind, moment = event["event"], float(event["time"])
        lacking = [n for n in FIELDS[kind] if not n.startswith("[") and n not in event]
        if lacking:
            raise KeyError(lacking[0])
        for name in _HOLDS.keys() & event.keys():
            if not isinstance(event[name], _HOLDS_IN.get((kind, name), _HOLDS[name])):
                raise TypeError(f"{name} is {event[name]!r:.80}")
        for each in event["workers"] if kind in ("report", "expect") else ():
            ids = (each["worker_id"], each["version"] or 0) if kind == "report" else (each,)
            if not all(isinstance(value, int) for value in ids):
                raise TypeError(f"workers has {each!r:.80}")
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise OptionError(
            f"{where}, is not an event of sync_plugin_std.History: {error!r}; "
            "type: sync-core check-history FILE, with a file that History or Record has written"
        ) from error
    return {**event, "time": moment}


def _digest(update: Update) -> str:
    return f"{checksum(update.tensors):016x}"
