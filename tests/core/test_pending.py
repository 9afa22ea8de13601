"""A send ends once, by a wait, by being abandoned, or when its sender closes."""

from __future__ import annotations

import itertools
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Literal

import pytest
import torch

from sync_core import PendingSend, PendingSendError, Receiver, Sender, SendError, SendReport
from sync_testing import eventually, interrupted

pytestmark = pytest.mark.timeout(60)


def weights() -> dict[str, Any]:
    return {"w": torch.zeros(2)}


def test_several_threads_wait_for_one_send() -> None:
    reports: list[SendReport] = []
    with (
        Sender("thread", weights(), num_workers=1, on_report=reports.append) as sender,
        ThreadPoolExecutor(4) as pool,
    ):
        receiver = Receiver(sender.address(0), weights())
        for version in range(1, 50):
            pending = sender.send_async()
            ends = [pool.submit(pending.wait) for _ in range(4)]
            receiver.receive()
            ended = [end.result() for end in ends]
            assert all(end is ended[0] for end in ended)
            assert [report.version for report in reports] == list(range(1, version + 1))


def test_who_waits_gets_the_report_as_it_ended() -> None:
    judging, judged = threading.Event(), threading.Event()

    def judge(failure: object) -> Literal["drop"]:
        del failure
        judging.set()
        judged.wait(10)
        return "drop"

    with (
        Sender("thread", weights(), num_workers=1, on_failure=judge) as sender,
        ThreadPoolExecutor(2) as pool,
    ):
        pending = sender.send_async()
        first = pool.submit(pending.wait, 0.0)
        assert judging.wait(10)
        second = pool.submit(pending.wait, 0.0)
        judged.set()
        ends = [first.exception(), second.exception()]
    assert [isinstance(end, SendError) and end.report.dropped for end in ends] == [(0,), (0,)]


def test_a_send_that_was_abandoned_does_not_end_the_next_one() -> None:
    with (
        Sender("thread", weights(), num_workers=1) as sender,
        ThreadPoolExecutor(1) as pool,
    ):
        for _ in range(50):
            first = sender.send_async()
            waiting = pool.submit(first.wait)
            first.abandon()
            second = sender.send_async()
            with pytest.raises(SendError):
                waiting.result()
            with pytest.raises(PendingSendError):
                sender.send_async()
            second.abandon()


def drop_it(failure: object) -> Literal["drop"]:
    del failure
    return "drop"


@pytest.mark.parametrize("on_failure", ["raise", "drop", "quarantine", drop_it])
def test_a_sender_that_is_closed_while_it_sends(on_failure: Any) -> None:
    reports: list[SendReport] = []
    sender = Sender(
        "thread", weights(), num_workers=2, on_failure=on_failure, on_report=reports.append
    )
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(sender.send)
        assert eventually(lambda: sender.version == 1)
        sender.close()
        with pytest.raises(SendError, match="worker 0: the sender was closed"):
            sending.result(10)
    (report,) = reports
    assert list(report.failed) == [0, 1]
    assert (report.dropped, report.quarantined) == ((), ())


def test_who_is_told_of_the_end_may_ask_for_it() -> None:
    asked: list[tuple[int, ...]] = []
    with Sender("thread", weights(), num_workers=1) as sender:
        sender.register_post_hook(lambda: asked.append(pending.wait().updated))
        receiver = Receiver(sender.address(0), weights())
        pending = sender.send_async()
        receiver.receive()
        assert pending.wait().updated == (0,)
        assert asked == [(0,)]


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("thread", {}),
        ("shm", {}),
        ("mp", {}),
        ("dist", {}),
        pytest.param("dist", {"shared_memory": False}, marks=pytest.mark.long),
    ],
)
def test_ctrl_c_at_any_moment_of_a_send_leaves_the_sender_ready(
    scheme: str, options: dict[str, Any]
) -> None:
    def work(receiver: Receiver) -> None:
        while not done.is_set():
            receiver.receive(0.05)

    done = threading.Event()
    with (
        Sender(scheme, weights(), num_workers=1, timeout=5.0, **options) as sender,
        Receiver(sender.address(0), weights()) as receiver,
        ThreadPoolExecutor(1) as pool,
    ):
        working = pool.submit(work, receiver)
        try:
            for moment in itertools.count():
                with interrupted(moment, within_threading=True) as moments:
                    sender.send()
                with suppress(PendingSendError, SendError):
                    sender.wait_async(0)
                assert sender.send().updated == (0,)
                if not moments.came:
                    break
        finally:
            done.set()
        working.result(10)


def test_an_interrupted_send_is_reported_as_interrupted() -> None:
    reports: list[SendReport] = []
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with Sender("thread", weights(), num_workers=1, on_report=reports.append) as sender:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(KeyboardInterrupt):
                sender.send()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert str(reports[0].workers[0].error) == (
        "worker 0: the send was interrupted by KeyboardInterrupt before the worker confirmed "
        "version 1"
    )


def test_a_send_that_begins_while_the_one_before_ends_is_pending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (
        Sender("thread", torch.nn.Linear(2, 2), num_workers=1, timeout=60) as sender,
        Receiver(sender.address(0), torch.nn.Linear(2, 2)) as receiver,
    ):
        first = sender.send_async()
        receiver.receive(30)
        look: Any = vars(PendingSend)["ended"].fget
        begun: list[threading.Thread] = []

        def ended(pending: PendingSend) -> Any:
            result = look(pending)
            if result and not begun:
                begun.append(threading.Thread(target=sender.send_async))
                begun[0].start()
                begun[0].join()
            return result

        with monkeypatch.context() as patch:
            patch.setattr(PendingSend, "ended", property(ended))
            first.wait()
        receiver.receive(30)
        assert sender.wait_async().version == 2
