"""Histories of real runs hold, and each planted violation is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sync_core import Receiver, Sender, SendError
from sync_core.errors import OptionError
from sync_plugin_std import History
from sync_plugin_std.history import RULES, append_event, check_history, read_history


def event(kind: str, **fields: Any) -> dict[str, Any]:
    return {"event": kind, "time": 1.0} | fields


def send(version: int, digest: str = "d", **fields: Any) -> dict[str, Any]:
    return event("send", version=version, digest=digest, deadline=1.0) | fields


def commit(before: int, after: int, digest: str = "d", life: str = "a") -> dict[str, Any]:
    fields = {"worker": 0, "life": life, "version": after, "from": before, "to": after}
    return event("commit", digest=digest, **fields)


def report(version: int, seconds: float = 0.1, **fields: Any) -> dict[str, Any]:
    workers = [{"worker_id": 0, "version": version}]
    return event("report", version=version, seconds=seconds, workers=workers) | fields


def receiver(life: str = "a", to: int = 0) -> dict[str, Any]:
    return event("receiver", worker=0, life=life, to=to)


def current(version: int, wanted: int) -> dict[str, Any]:
    return event("state", worker=0, to="current", version=version, wanted=wanted)


def look(digest: str) -> dict[str, Any]:
    return event("look", worker=0, life="a", digest=digest)


NOTHING = [{"worker_id": 0, "version": None}]
GOOD = [receiver(), send(1), commit(0, 1), look("d"), report(1), current(1, 1)]


@pytest.mark.parametrize(
    ("events", "rule"),
    [
        ([*GOOD, send(2), commit(1, 2), commit(2, 1)], "forward only"),
        ([*GOOD, send(3), commit(2, 3)], "forward only"),
        ([send(2), report(2), send(1), report(1)], "forward only"),
        ([*GOOD, send(2, "e"), commit(1, 2)], "whole"),
        ([*GOOD, send(3), commit(1, 2)], "whole"),
        ([*GOOD, look("half")], "whole"),
        ([receiver(), send(1), report(1), commit(0, 1)], "honest answers"),
        ([*GOOD, send(2), report(2)], "honest answers"),
        ([*GOOD, receiver("b"), current(1, 1)], "up to date"),
        ([*GOOD, send(2), commit(1, 2), report(2), current(1, 2)], "up to date"),
        ([*GOOD, send(2), commit(1, 2), report(2, 9.0)], "an end"),
        ([*GOOD, send(2), send(3)], "an end"),
        ([*GOOD, send(2), event("expect", workers=[], time=9.0)], "an end"),
        (
            [*GOOD, event("expect", workers=[0]), send(2), report(2, workers=NOTHING)],
            "the next send works",
        ),
    ],
)
def test_planted_violations(events: list[dict[str, Any]], rule: str) -> None:
    assert check_history(GOOD) == []
    assert {violation.rule for violation in check_history(events)} == {rule}


def test_what_is_not_a_violation() -> None:
    assert "whole" in RULES
    refuse = event("refuse", worker=0, life="a", version=2, **{"from": 1, "to": None})
    raised = event("raise", version=2)
    # A worker that may hold either, a new receiver, and sends that raised.
    assert not check_history([*GOOD, send(2), refuse, report(2, workers=NOTHING), commit(1, 2)])
    assert not check_history([*GOOD, receiver("b"), commit(0, 1, life="b"), current(1, 1)])
    assert not check_history([*GOOD, send(2), raised, send(2), commit(1, 2), report(2)])
    # Of reports alone, only deadlines are known.
    assert not check_history([report(1), report(2)])
    assert check_history([report(1, 9.0)], deadline=1.0)
    # Two senders.
    assert not check_history([*GOOD, *({**each, "run": "b"} for each in GOOD)])


@pytest.mark.parametrize("scheme", ["thread", "shm", "increments::shm"])
def test_a_recording(scheme: str, tmp_path: Path) -> None:
    path, model = tmp_path / "run.jsonl", nn.Linear(20, 30)
    copies = [nn.Linear(20, 30) for _ in range(2)]
    with Sender(
        scheme, model, num_workers=2, layers=["bf16", History(path)], timeout=20.0
    ) as sender:
        receivers = [Receiver(sender.address(i), copy) for i, copy in enumerate(copies)]
        for value in range(1, 4):
            with torch.no_grad():
                model.bias.fill_(float(value))
            pending = sender.send_async()
            assert [receiver.receive(10.0) for receiver in receivers] == [value] * 2
            assert pending.wait().updated == (0, 1)
        pending = sender.send_async()
        receivers[1].receive(10.0)
        with pytest.raises(SendError):
            pending.wait(0.0)
        for receiver in receivers:
            receiver.close()
    events = read_history([path])
    kinds = [each["event"] for each in events]
    assert [kinds.count(kind) for kind in ("send", "report", "commit")] == [4, 4, 7]
    assert check_history(events, deadline=20.0) == []
    # A worker that answers for what it has not: its commit is taken out of the history.
    lying = [each for each in events if (each["event"], each.get("to")) != ("commit", 2)]
    assert {violation.rule for violation in check_history(lying)} == {
        "honest answers",
        "forward only",
    }


def test_files_of_several_hosts(tmp_path: Path) -> None:
    trainer, worker = tmp_path / "trainer", tmp_path / "worker"
    for moment, each in enumerate(GOOD):
        path = worker if each["event"] in ("receiver", "commit", "look") else trainer
        written = each | {"time": float(moment)}
        with path.open("a") as file:
            file.write(json.dumps(written) + "\n")
    events = read_history([worker, trainer])
    assert [each["event"] for each in events] == [each["event"] for each in GOOD]
    assert not check_history(events)
    append_event(trainer, "expect", workers=[0])
    assert read_history([trainer])[-1]["workers"] == [0]
    with worker.open("a") as file:
        file.write('{"event": "commit", "time"')  # a process was killed
    assert len(read_history([worker])) == 3


@pytest.mark.parametrize("line", ["{", "[]", '{"event": "commit"}', '{"event": "x", "time": 1}'])
def test_what_is_not_a_history(line: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(OptionError, match=r"line 1, is not an event"):
        read_history([path])
    with pytest.raises(OptionError, match="cannot read"):
        read_history([tmp_path / "none"])


def test_an_answer_that_was_lost_is_told_from_a_version_that_was() -> None:
    expected = [*GOOD, event("expect", workers=[0]), send(2)]
    (lost,) = check_history([*expected, report(2, workers=NOTHING)])
    assert lost.problem == "worker 0 has no version 2"
    (unanswered,) = check_history([*expected, commit(1, 2), report(2, workers=NOTHING)])
    assert unanswered.problem == "worker 0 committed version 2, and its answer did not come"
