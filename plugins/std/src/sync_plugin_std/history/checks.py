"""The checker of histories: what a run promised, compared with what it did.

The rules are those of ``docs/explanation/protocol.md``, in its words. Only events of
the history are judged: a `Record` alone has no commits, so that only deadlines are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from sync_plugin_std.history.events import Event

__all__ = ["RULES", "Violation", "check_history"]

#: The promises that are judged.
RULES = {
    "forward only": "a receiver commits no version older than its own; a sender's versions grow",
    "whole": "what a worker commits, or holds, are the bytes that were sent as that version",
    "honest answers": "a version that was acknowledged was committed before",
    "up to date": "no worker that counts as current lacks the version meant for it",
    "an end": "every send ends by its deadline",
    "the next send works": "it updates every worker that lives and receives",
}


@dataclass(frozen=True, slots=True)
class Violation:
    """One promise that was not kept.

    Args:
        rule: which, of `RULES`.
        where: the file and line of the event, where it came from a file.
        problem: what happened.
    """

    rule: str
    where: str
    problem: str

    def __str__(self) -> str:
        return f"{self.where + ': ' if self.where else ''}{self.rule}: {self.problem}"


def check_history(
    events: Iterable[Event], *, deadline: float | None = None, grace: float = 3.0
) -> list[Violation]:
    """Return the promises that were not kept in a history.

    Args:
        events: of any number of senders, in order.
        deadline: that of sends whose event names none, in seconds; None: those are not judged.
        grace: how much longer a send may take on a busy machine, in seconds.

    Example:
        >>> commit = {"event": "commit", "worker": 0, "life": "a", "from": 3, "to": 2, "version": 2}
        >>> [violation] = check_history([commit])
        >>> print(violation)
        forward only: worker 0 went back from version 3 to 2
    """
    runs: defaultdict[tuple[str, str], list[Event]] = defaultdict(list)
    for event in events:
        runs[event.get("run", ""), event.get("model_id", "")].append(event)
    return [
        violation for run in runs.values() for violation in _Run(run, deadline, grace).violations()
    ]


@dataclass
class _Life:
    """One receiver; ``version`` is None where it is not known, as after a failure in a commit."""

    version: int | None


class _Run:
    """The events of one sender and its workers."""

    def __init__(self, events: list[Event], deadline: float | None, grace: float) -> None:
        self._events, self._deadline, self._grace = events, deadline, grace
        self._digests: defaultdict[int, set[str | None]] = defaultdict(set)
        for event in events:
            if event["event"] == "send":
                self._digests[event["version"]].add(event.get("digest"))
        self._lives: dict[tuple[int, str], _Life] = {}
        self._life_of: dict[int, _Life] = {}
        self._committed: defaultdict[int, set[int]] = defaultdict(set)
        self._sent = 0
        self._open: Event | None = None
        self._expected: set[int] = set()

    def violations(self) -> Iterator[Violation]:
        for event in self._events:
            judge = getattr(self, f"_{event['event']}")
            for rule, problem in judge(event):
                yield Violation(rule, event.get("where", ""), problem)
        if self._open is not None and self._events:
            yield from self._unended(self._events[-1])

    def _send(self, event: Event) -> Iterator[tuple[str, str]]:
        version = event["version"]
        if version < self._sent:
            yield "forward only", f"version {version} was sent after version {self._sent}"
        # One version may be prepared several times, as for workers that lack different parts.
        if self._open is not None and self._open["version"] != version:
            yield from ((each.rule, each.problem) for each in self._unended(None))
        self._sent, self._open = max(version, self._sent), event

    def _unended(self, last: Event | None) -> Iterator[Violation]:
        """Report a send without a report, unless the history ends before its deadline."""
        event, self._open = self._open, None
        assert event is not None
        limit = event.get("deadline")
        if limit is None or (last is not None and last["time"] - event["time"] <= limit):
            return
        yield Violation("an end", event.get("where", ""), f"version {event['version']} has no end")

    def _raise(self, event: Event) -> Iterator[tuple[str, str]]:
        del event
        self._open = None
        yield from ()

    def _report(self, event: Event) -> Iterator[tuple[str, str]]:
        limit, seconds = self._deadline, event["seconds"]
        if self._open is not None and self._open["version"] == event["version"]:
            limit, self._open = self._open.get("deadline", limit), None
        if limit is not None and seconds > limit + self._grace:
            yield "an end", f"version {event['version']} took {seconds:.1f} s, not {limit:g} s"
        for result in event["workers"]:
            worker, version = result["worker_id"], result["version"]
            # Of a worker without a recording nothing is known.
            known = worker in self._committed
            if known and version is not None and version not in self._committed[worker]:
                yield "honest answers", f"worker {worker} answered for {version} uncommitted"
            if worker in self._expected and version != event["version"]:
                expected = event["version"]
                problem = f"worker {worker} has no version {expected}"
                if known and expected in self._committed[worker]:
                    problem = (
                        f"worker {worker} committed version {expected}, and its answer did not come"
                    )
                yield "the next send works", problem
        self._expected.clear()

    def _receiver(self, event: Event) -> Iterator[tuple[str, str]]:
        life = self._lives[event["worker"], event["life"]] = _Life(event["to"])
        self._life_of[event["worker"]] = life
        self._committed[event["worker"]] |= {event["to"]}
        yield from ()

    def _commit(self, event: Event) -> Iterator[tuple[str, str]]:
        worker, before, after = event["worker"], event["from"], event["to"]
        life = self._life(event)
        if life.version is not None and before != life.version:
            yield "forward only", f"worker {worker} had {life.version}, and went on from {before}"
        if after <= before:
            yield "forward only", f"worker {worker} went back from version {before} to {after}"
        yield from self._compare(worker, after, event.get("digest"))
        life.version = after
        self._committed[worker].add(after)

    def _refuse(self, event: Event) -> Iterator[tuple[str, str]]:
        self._life(event).version = event["to"]
        yield from ()

    def _look(self, event: Event) -> Iterator[tuple[str, str]]:
        if version := self._life(event).version:
            yield from self._compare(event["worker"], version, event["digest"])

    def _state(self, event: Event) -> Iterator[tuple[str, str]]:
        worker, version, wanted = event["worker"], event["version"], event["wanted"]
        life = self._life_of.get(worker)
        if event["to"] != "current" or life is None or life.version is None:
            return
        if version < wanted:
            yield "up to date", f"worker {worker} counts as current with {version} of {wanted}"
        if life.version < version:
            yield (
                "up to date",
                f"worker {worker} counts as current with {version}, and has {life.version}",
            )

    def _expect(self, event: Event) -> Iterator[tuple[str, str]]:
        self._expected = set(event["workers"])
        yield from ()

    def _life(self, event: Event) -> _Life:
        known = event["worker"], event["life"]
        if known not in self._lives:
            self._lives[known] = _Life(event.get("from"))
        life = self._life_of[event["worker"]] = self._lives[known]
        return life

    def _compare(self, worker: int, version: int, digest: Any) -> Iterator[tuple[str, str]]:
        if not self._digests or digest is None:
            return
        if version not in self._digests:
            yield "whole", f"worker {worker} has version {version}, which was never sent"
        elif digest not in self._digests[version] and None not in self._digests[version]:
            yield "whole", f"worker {worker} has other bytes than those of version {version}"
