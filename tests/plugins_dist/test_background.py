"""A background receiver stages, and does not commit."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from sync_core import (
    Answer,
    ClosedError,
    Payload,
    Receiver,
    ReceiverTransport,
    Sender,
    SenderLostError,
)
from sync_core.transports import BackgroundReceiver
from sync_plugin_scale import Sharded

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def policy() -> nn.Linear:
    return nn.Linear(8, 8)


@pytest.fixture
def sender(policy: nn.Linear) -> Iterator[Sender]:
    with Sender("dist", policy, num_workers=1, timeout=20) as sender:
        yield sender


def fill(model: nn.Linear, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def staged(receiver: Receiver) -> int:
    payload: Payload | None = receiver._connection.transport._staged  # type: ignore[attr-defined]
    return 0 if payload is None else payload.version


def wait_for(version: int, receiver: Receiver) -> None:
    deadline = time.monotonic() + 20
    while staged(receiver) != version:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("zero_copy", [False, True])
@pytest.mark.parametrize("shared_memory", [False, True])
def test_it_stages_the_newest_and_commits_when_asked(
    policy: nn.Linear, zero_copy: bool, shared_memory: bool
) -> None:
    copy = nn.Linear(8, 8)
    options: dict[str, Any] = {"zero_copy": zero_copy, "shared_memory": shared_memory}
    with (
        Sender("dist", policy, num_workers=1, timeout=20, **options) as sender,
        Receiver(sender.address(0), copy, background=True) as receiver,
    ):
        fill(copy, 0.0)
        committed = 0
        for version in (1, 2, 3):
            fill(policy, float(version))
            pending = sender.send_async()
            wait_for(version, receiver)
            assert not pending.done()
            assert copy.weight.unique().item() == committed
            if version == 2:
                pending.abandon()
                continue
            assert receiver.receive(0) == version
            assert pending.wait().updated == (0,)
            committed = version
            assert copy.weight.unique().item() == committed


@pytest.mark.parametrize("scheme", ["dist", "increments::dist"])
def test_a_version_joined_from_ranks_does_not_change_while_it_is_committed(scheme: str) -> None:
    policy, copy = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
    fill(policy, 1.0)
    with (
        Sender(Sharded(scheme, 0, 1), policy, num_workers=1) as sender,
        Receiver(sender.address(0), copy, background=True) as receiver,
    ):
        for _ in range(2):
            pending = sender.send_async()
            assert receiver.receive(20) == sender.version
            pending.wait()
        with torch.no_grad():
            policy.weight[0] = 2.0
        pending = sender.send_async()
        assert receiver.stage(20) == 3
        pending.abandon()
        with torch.no_grad():
            policy.weight[1] = 3.0
        pending = sender.send_async()
        transport: Any = receiver._connection.transport
        end = transport._ends[0].transport
        background = end.transport if "increments" in scheme else end
        deadline = time.monotonic() + 20
        while background._staged is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        receiver.load()
        assert receiver.confirm() == 3
        assert copy.weight.unique().tolist() == [1.0, 2.0]
        assert not pending.done()
        assert receiver.receive(20) == 4
        assert pending.wait().updated == (0,)
        assert torch.equal(copy.weight, policy.weight)


def test_what_it_drops_is_free_for_the_next_version() -> None:
    model, copy = {"w": torch.zeros(4)}, {"w": torch.zeros(4)}
    with (
        Sender("dist", model, num_workers=1, timeout=5, zero_copy=True) as sender,
        Receiver(sender.address(0), copy, background=True) as receiver,
    ):
        pending = sender.send_async()
        assert receiver.receive(5) == 1
        pending.wait()
        for version in range(2, 7):
            sender.send_async({"w": torch.full((4,), float(version))}).abandon()
            wait_for(version, receiver)
        assert receiver.receive(0) == 6
        assert copy["w"].tolist() == [6.0] * 4


def test_one_that_stands_still_with_three_versions_holds_up_nobody() -> None:
    model, copy = {"w": torch.zeros(4)}, {"w": torch.zeros(4)}
    with (
        Sender("dist", model, num_workers=1, timeout=5, zero_copy=True) as sender,
        Receiver(sender.address(0), copy) as receiver,
    ):
        pending = sender.send_async()
        assert receiver.receive(5) == 1
        pending.wait()
        transport: Any = receiver._connection.transport
        # The committed version, the staged one, and the one accepted next.
        for _ in range(2):
            sender.send_async().abandon()
            assert transport.receive(5) is not None
        for _ in range(3):
            sender.send_async().abandon()


def test_it_reports_that_the_sender_has_gone(sender: Sender) -> None:
    receiver = Receiver(sender.address(0), nn.Linear(8, 8), background=True)
    sender.close()
    with pytest.raises(SenderLostError):
        receiver.receive()


def test_closing_wakes_a_thread_that_waits(sender: Sender) -> None:
    receiver = Receiver(sender.address(0), nn.Linear(8, 8), background=True)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(receiver.receive, 20.0)
        time.sleep(0.1)
        receiver.close()
        with pytest.raises(ClosedError):
            waiting.result(15)


def test_closing_lets_a_thread_that_commits_answer(sender: Sender) -> None:
    committing, over = threading.Event(), threading.Event()

    def pass_on(version: int) -> None:
        committing.set()
        over.wait(0.3)

    receiver = Receiver(sender.address(0), nn.Linear(8, 8), background=True, on_commit=pass_on)
    pending = sender.send_async()
    with ThreadPoolExecutor(1) as threads:
        committed = threads.submit(receiver.receive, 20.0)
        assert committing.wait(20)
        receiver.close()
        assert committed.result(20) == 1
    assert pending.wait().updated == (0,)


def test_it_leaves_no_thread(sender: Sender) -> None:
    before = threading.active_count()
    receiver = Receiver(sender.address(0), nn.Linear(8, 8), background=True)
    assert threading.active_count() > before
    receiver.close()
    assert threading.active_count() == before


class Still(ReceiverTransport):
    """Has begun to receive, and does not come back."""

    def __init__(self) -> None:
        self.begun, self.over, self.closed = (threading.Event() for _ in range(3))

    def receive(self, timeout: float) -> None:
        self.begun.set()
        self.over.wait()

    def acknowledge(self, answer: Answer) -> None:
        raise AssertionError

    def close(self) -> None:
        self.closed.set()


def test_closing_does_not_wait_for_what_does_not_come() -> None:
    transport = Still()
    background = BackgroundReceiver(transport)
    assert transport.begun.wait(10)
    begin = time.monotonic()
    background.close()
    assert time.monotonic() - begin < 20
    assert not transport.closed.is_set()
    transport.over.set()
    assert transport.closed.wait(10)


def test_a_scheme_that_moves_nothing_needs_no_thread(policy: nn.Linear) -> None:
    copy = nn.Linear(8, 8)
    with Sender("thread", policy, num_workers=1) as sender:
        before = threading.active_count()
        receiver = Receiver(sender.address(0), copy, background=True)
        assert threading.active_count() == before
        sender.send_async()
        assert receiver.receive(0) == 1
