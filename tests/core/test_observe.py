"""Observation of sends: phases, one line of log, and the trace of hook calls."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from sync_core import (
    Answer,
    ApplyContext,
    Receiver,
    SendContext,
    Sender,
    SendError,
    SendReport,
    hookimpl,
)
from sync_core._util import clock_id
from sync_testing.faults import Fault, Faulty


class Slow:
    """A layer that takes its time at both ends."""

    @hookimpl(wrapper=True)
    def prepare_weights(self, context: SendContext) -> Any:
        time.sleep(0.02 if context.version else 0)
        return (yield)

    @hookimpl(wrapper=True)
    def apply_weights(self, context: ApplyContext) -> Any:
        time.sleep(0.03)
        return (yield)


def send_and_receive(sender: Sender, receiver: Receiver) -> SendReport:
    pending = sender.send_async()
    receiver.receive()
    return pending.wait()


@pytest.mark.parametrize("scheme", ["thread", "shm", "dist"])
def test_the_phases_are_told_apart_and_add_up(scheme: str) -> None:
    with Sender(scheme, nn.Linear(2, 2), num_workers=1, layers=[Slow()]) as sender:
        receiver = Receiver(
            sender.address(0), nn.Linear(2, 2), on_commit=lambda _version: time.sleep(0.04)
        )
        report = send_and_receive(sender, receiver)
    result = report.workers[0]
    assert (report.scheme, report.model_id) == (scheme, "policy")
    assert report.prepare_seconds >= 0.02
    assert 0 < report.publish_seconds < report.seconds
    assert 0 < report.pack_seconds < report.seconds
    assert result.commit_seconds >= 0.03
    assert result.pause_seconds >= result.commit_seconds + 0.04
    assert result.deliver_seconds is not None
    published = report.prepare_seconds + report.publish_seconds
    in_worker = result.stage_seconds + result.pause_seconds
    parts = published + result.deliver_seconds + in_worker + result.acknowledge_seconds
    # The time between staging and commit is not counted, and `dist` stages while it publishes.
    assert parts == pytest.approx(result.seconds, abs=0.5)


@pytest.mark.parametrize("scheme", ["thread", "shm", "dist"])
def test_with_another_clock_what_follows_the_publication_is_one_figure(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sync_core.receiving.receiver.clock_id", lambda: "that of another host")
    with Sender(scheme, nn.Linear(2, 2), num_workers=1) as sender:
        receiver = Receiver(
            sender.address(0), nn.Linear(2, 2), on_commit=lambda _version: time.sleep(0.04)
        )
        report = send_and_receive(sender, receiver)
    result = report.workers[0]
    assert result.deliver_seconds is None
    assert result.acknowledge_seconds >= 0.04
    published = report.prepare_seconds + report.publish_seconds
    in_worker = result.stage_seconds + result.commit_seconds
    assert published + in_worker + result.acknowledge_seconds == pytest.approx(result.seconds)


@pytest.mark.parametrize("hours", [-1000, 1000])
def test_a_clock_of_the_same_name_that_tells_another_time(
    hours: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Answer.to_message

    def ahead(answer: Answer) -> dict[str, Any]:
        message = honest(answer)
        for name in ("known_at", "answered_at"):
            message[name] = max(0.0, message[name] + hours * 3600)
        return message

    monkeypatch.setattr(Answer, "to_message", ahead)
    with Sender("dist", nn.Linear(2, 2), num_workers=1, shared_memory=False) as sender:
        receiver = Receiver(sender.address(0), nn.Linear(2, 2))
        assert send_and_receive(sender, receiver).workers[0].deliver_seconds is None


@pytest.mark.timeout(60)
def test_the_worker_is_late_or_its_answer_is() -> None:
    late = Fault(action="delay", point="acknowledge", version=2, seconds=0.2)
    with Sender(Faulty("shm", late), nn.Linear(2, 2), num_workers=1) as sender:
        receiver = Receiver(sender.address(0), nn.Linear(2, 2))
        pending = sender.send_async()
        time.sleep(0.2)
        receiver.receive()
        asked_late = pending.wait().workers[0]
        answered_late = send_and_receive(sender, receiver).workers[0]
    assert (asked_late.deliver_seconds or 0) >= 0.2 > asked_late.acknowledge_seconds
    assert answered_late.acknowledge_seconds >= 0.2 > (answered_late.deliver_seconds or 0)


def test_a_process_knows_its_clock_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = "from sync_core._util import clock_id; print(clock_id())"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert printed.stdout.decode().strip() == str(clock_id())
    monkeypatch.setattr("sync_core._util._BOOT", tmp_path / "no such file")
    assert clock_id.__wrapped__() is None


def test_waiting_is_no_pause() -> None:
    with Sender("thread", nn.Linear(2, 2), num_workers=1) as sender:
        receiver = Receiver(sender.address(0), nn.Linear(2, 2))
        pending = sender.send_async()
        time.sleep(0.2)
        receiver.receive()
        result = pending.wait().workers[0]
    assert result.pause_seconds < 0.2
    assert (result.deliver_seconds or 0) >= 0.2


def test_a_send_is_one_line_of_log(caplog: pytest.LogCaptureFixture) -> None:
    with Sender("thread", nn.Linear(2, 2), num_workers=1) as sender:
        receiver = Receiver(sender.address(0), nn.Linear(2, 2))
        send_and_receive(sender, receiver)
        assert caplog.records == []
        caplog.set_level(logging.INFO, "sync_core")
        send_and_receive(sender, receiver)
        (record,) = caplog.records
        assert (record.name, record.levelno) == ("sync_core", logging.INFO)
        assert "send scheme=thread model_id=policy version=2 workers=1 updated=1" in record.message
        assert record.__dict__["sync_version"] == 2
        assert record.__dict__["sync_commit_seconds"] > 0
        assert record.__dict__["sync_deliver_seconds"] >= 0
        assert record.__dict__["sync_errors"] == []


def test_a_worker_that_fails_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with Sender("thread", nn.Linear(2, 2), num_workers=1, timeout=0.01) as sender:
        with pytest.raises(SendError):
            sender.send()
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert "failed=1" in record.message
        assert "errors='worker 0: did not confirm version 1" in record.message
        with (
            Sender(
                "thread", nn.Linear(2, 2), num_workers=1, timeout=0.01, on_failure="drop"
            ) as dropping,
            pytest.raises(SendError),
        ):
            dropping.send()
        assert "failed=0 dropped=1" in caplog.records[-1].message
        assert caplog.records[-1].levelno == logging.WARNING


_PROGRAM = """
import torch
from sync_core import Receiver, Sender
class Refuses(torch.nn.Linear):
    def get_extra_state(self): return torch.ones(1)
    def set_extra_state(self, state):
        if self.refuses: raise ValueError("no, thanks")
model, copy = Refuses(2, 2), Refuses(2, 2)
copy.refuses = False
with Sender("thread", model, num_workers=1, layers=["bf16", "checksum"]) as sender:
    receiver = Receiver(sender.address(0), copy)
    pending = sender.send_async()
    receiver.receive()
    pending.wait()
    copy.refuses = True
    sender.send_async()
    try:
        receiver.receive()
    except ValueError:
        pass
"""


@pytest.mark.timeout(60)
@pytest.mark.long
def test_the_trace_is_a_line_for_each_hook_call() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        env={**os.environ, "SYNC_TRACE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("sync-trace ")]
    calls = [dict(part.split("=", 1) for part in line.split()[1:] if "=" in part) for line in lines]
    assert [call["hook"] for call in calls] == [
        "prepare_weights",
        "create_transport",
        "create_transport",
        "prepare_weights",
        "apply_weights",
        "prepare_weights",
        "apply_weights",
    ]
    assert calls[2]["side"] == "receiver"
    assert calls[3]["plugins"] == "checksum,bf16,sync-core"
    assert calls[4]["plugins"] == "checksum,sync-core"
    assert (calls[4]["model_id"], calls[4]["worker_id"], calls[4]["version"]) == (
        "policy",
        "0",
        "1",
    )
    assert float(calls[4]["seconds"]) > 0
    assert calls[4]["outcome"] == "ok"
    assert "outcome=ValueError('no, thanks')" in lines[-1]
    assert "token" not in done.stderr


def test_without_being_asked_no_call_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SYNC_TRACE", raising=False)
    with Sender("thread", nn.Linear(2, 2), num_workers=1) as sender:
        assert sender._pipeline.stack._manager._inner_hookexec.__name__ == "_multicall"
