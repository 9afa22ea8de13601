"""Failure policies, with workers that are threads."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from sync_core import (
    FailurePolicy,
    OptionError,
    Receiver,
    Sender,
    SendError,
    SendReport,
    WorkerFailure,
)
from sync_core.sending.failure_policy import Remedy
from sync_testing import eventually


def start(**options: Any) -> tuple[Sender, dict[int, Receiver]]:
    """A sender with two workers, both connected."""
    sender = Sender("thread", {"w": torch.zeros(2)}, num_workers=2, timeout=0.2, **options)
    return sender, {i: Receiver(sender.address(i), {"w": torch.zeros(2)}) for i in (0, 1)}


def send(sender: Sender, *receivers: Receiver) -> Any:
    """Send to workers of which only some receive."""
    pending = sender.send_async()
    for receiver in receivers:
        receiver.receive()
    return pending.wait()


def test_quarantine_costs_one_deadline_and_no_more() -> None:
    sender, workers = start(on_failure="quarantine")
    with sender:
        report = send(sender, workers[0])
        assert (report.updated, report.quarantined, report.failed) == ((0,), (1,), {})
        assert report.seconds >= 0.2
        quick = 0
        for _ in range(6):
            report = send(sender, workers[0])
            assert (report.updated, report.quarantined) == ((0,), (1,))
            quick += report.seconds < 0.2
        # On a slow machine it may be tried again meanwhile, once.
        assert quick >= 5
        # It comes back, and is up to date without another send.
        assert workers[1].receive() == report.version
        assert sender.workers[1].state == "current"
        report = send(sender, workers[0], workers[1])
        assert (report.updated, report.returned, report.quarantined) == ((0, 1), (1,), ())
        assert send(sender, *workers.values()).returned == ()


def test_a_worker_in_quarantine_is_tried_again_and_put_back_for_longer() -> None:
    sender, workers = start(on_failure="quarantine")
    with sender:
        send(sender, workers[0])
        first = sender.workers[1].retry_at - time.monotonic()
        time.sleep(max(0.0, first))
        assert send(sender, workers[0]).seconds >= 0.2
        second = sender.workers[1].retry_at - time.monotonic()
        assert 0.1 < first <= 0.2 < second <= 0.4


@pytest.mark.parametrize("remedy", ["raise", "drop", "quarantine"])
def test_a_function_that_removes_the_worker_itself(remedy: Remedy) -> None:
    reports: list[SendReport] = []

    def judge(failure: WorkerFailure) -> Remedy:
        sender.remove_worker(failure.worker_id)
        return remedy

    sender, workers = start(on_failure=judge, on_report=reports.append)
    with sender:
        if remedy == "drop":
            assert send(sender, workers[0]).dropped == (1,)
        else:
            with pytest.raises(SendError):
                send(sender, workers[0])
        assert [report.updated for report in reports] == [(0,)]
        assert sender.all_worker_ids() == (0,)
        assert send(sender, workers[0]).updated == (0,)


def test_a_function_judges_each_failure() -> None:
    seen: list[WorkerFailure] = []

    def judge(failure: WorkerFailure) -> Remedy:
        seen.append(failure)
        return "drop" if failure.status.failures > 1 else "raise"

    sender, workers = start(on_failure=judge)
    with sender:
        with pytest.raises(SendError) as raised:
            send(sender, workers[0])
        assert raised.value.report.updated == (0,)
        assert send(sender, workers[0]).dropped == (1,)
        assert sender.all_worker_ids() == (0,)
    assert [(f.worker_id, f.version, f.status.state) for f in seen] == [
        (1, 1, "suspect"),
        (1, 2, "suspect"),
    ]


@pytest.mark.parametrize("answer", ["shrug", "restart", None])
def test_a_function_that_does_not_know_raises(
    answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    sender, workers = start(on_failure=lambda _failure: answer)
    with sender, caplog.at_level(logging.ERROR, "sync_core"), pytest.raises(SendError):
        send(sender, workers[0])
    assert "on_failure raised about worker 1" in caplog.text


class Replace(FailurePolicy):
    """Starts workers by a function."""

    def __init__(self, start: Callable[[WorkerFailure], object]) -> None:
        self.start = start

    def __call__(self, failure: WorkerFailure) -> Callable[[], object]:
        return partial(self.start, failure)


def test_a_policy_starts_another_worker() -> None:
    target = {"w": torch.zeros(2)}
    begun: list[Receiver] = []

    def connect(failure: WorkerFailure) -> None:
        begun.append(Receiver(failure.address(), target))
        begun[-1].receive(5.0)

    sender, workers = start(on_failure=Replace(connect))
    with sender:
        assert send(sender, workers[0]).restarted == (1,)
        assert eventually(lambda: sender.workers[1].state == "current")
        assert send(sender, workers[0], begun[0]).updated == (0, 1)


def test_a_policy_that_cannot_start_another_worker(caplog: pytest.LogCaptureFixture) -> None:
    def fail(failure: WorkerFailure) -> None:
        raise RuntimeError("no machine is left")

    sender, workers = start(on_failure=Replace(fail))
    with sender, caplog.at_level(logging.ERROR, "sync_core"):
        assert send(sender, workers[0]).restarted == (1,)
        assert eventually(lambda: sender.workers[1].state == "quarantined")
        assert "no machine is left" in str(sender.workers[1].error)


def test_a_policy_refuses_a_sender() -> None:
    class Particular(Replace):
        def check(self, sender: Sender) -> None:
            raise OptionError(f"not with {sender.scheme}, {sender.calls_workers}")

    with pytest.raises(OptionError, match="not with thread, False"):
        start(on_failure=Particular(print))


def test_restart_is_answered_with_what_to_type() -> None:
    with pytest.raises(OptionError, match=r"type on_failure=Restart\(group, on_restart\)"):
        start(on_failure="restart")
