"""Receivers commit what belongs together at once, and tell their senders when it is committed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sync_core import PendingSend, Receiver, Sender, SendError, SyncError
from sync_plugin_std import receive_together


class Refusing(nn.Linear):
    """Does not take its state while it refuses."""

    refuses = False

    def __init__(self) -> None:
        super().__init__(2, 1)

    def get_extra_state(self) -> Tensor:
        return torch.zeros(1)

    def set_extra_state(self, state: Any) -> None:
        del state
        if self.refuses:
            raise RuntimeError("no")


class Tied(nn.Linear):
    """Has its weight under two names."""

    def __init__(self) -> None:
        super().__init__(2, 1)
        self.again = self.weight


class Pair:
    """Two senders, and the receivers of one worker."""

    def __init__(self, stack: ExitStack, scheme: str, zero_copy: bool) -> None:
        self.models = {"a": Tied(), "b": Refusing()}
        self.refusing = Refusing()
        self.copies = {"a": Tied(), "b": self.refusing}
        self.senders = {
            name: stack.enter_context(
                Sender(scheme, model, num_workers=1, zero_copy=zero_copy, timeout=10.0)
            )
            for name, model in self.models.items()
        }
        self.receivers = {
            name: stack.enter_context(Receiver(self.senders[name].address(0), copy))
            for name, copy in self.copies.items()
        }

    def send(self, *names: str) -> list[PendingSend]:
        for name in names:
            with torch.no_grad():
                self.models[name].weight.add_(1.0)
        return [self.senders[name].send_async() for name in names]

    def receive(self, timeout: float = 10.0, **versions: int) -> bool:
        return receive_together(self.receivers, versions, timeout)

    def equal(self, name: str) -> bool:
        return torch.equal(self.models[name].weight, self.copies[name].weight)


@pytest.fixture(params=[("thread", False), ("shm", False), ("shm", True)])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack, *request.param)


def test_both(pair: Pair) -> None:
    for version in (1, 2, 3):
        pending = pair.send("a", "b")
        assert pair.receive(a=version, b=version)
        assert [each.wait().updated for each in pending] == [(0,), (0,)]
        assert pair.equal("a")
        assert pair.equal("b")


def test_one_that_does_not_come_keeps_the_other_back(pair: Pair) -> None:
    (pending,) = pair.send("a")
    with pytest.raises(SyncError, match=r"version 1 of 'b' did not arrive within 0\.1 s"):
        pair.receive(0.1, a=1, b=1)
    assert not pair.equal("a")
    (other,) = pair.send("b")
    assert pair.receive(a=1, b=1)
    assert [each.wait().updated for each in (pending, other)] == [(0,), (0,)]
    assert pair.equal("a")


def test_one_that_refuses_undoes_the_other(pair: Pair) -> None:
    pending = pair.send("a", "b")
    assert pair.receive(a=1, b=1)
    for each in pending:
        each.wait()
    before = pair.copies["a"].weight.clone()
    pair.refusing.refuses = True
    pending = pair.send("a", "b")
    with pytest.raises(RuntimeError, match="no"):
        pair.receive(a=2, b=2)
    for each in pending:
        with pytest.raises(SendError, match="RuntimeError: no"):
            each.wait()
    assert torch.equal(pair.copies["a"].weight, before)
    assert pair.receivers["a"].version == 1
    pair.refusing.refuses = False
    pending = pair.send("a", "b")
    assert pair.receive(a=3, b=3)
    assert pair.equal("a")
    assert [each.wait().updated for each in pending] == [(0,), (0,)]


def test_what_was_overtaken_is_left_to_what_belongs_to_the_newer_one(pair: Pair) -> None:
    first = pair.send("a", "b")
    for each in first:
        each.abandon()
    second = pair.send("a")
    while pair.receivers["a"].staged < 2:
        pair.receivers["a"].stage(5.0)
    assert not pair.receive(a=1, b=1)
    assert not pair.equal("b")
    second += pair.send("b")
    assert pair.receive(a=2, b=2)
    assert pair.equal("a")
    assert pair.equal("b")
    assert [each.wait().updated for each in second] == [(0,), (0,)]


def test_all_are_confirmed_though_what_one_calls_raises(pair: Pair) -> None:
    def on_commit(version: int) -> None:
        raise ValueError(f"not {version}")

    pair.receivers["a"].close()
    address = pair.senders["a"].address(0)
    pair.receivers["a"] = Receiver(address, pair.copies["a"], on_commit=on_commit)
    first, second = pair.send("a", "b")
    with pytest.raises(ValueError, match="not 1"):
        pair.receive(a=1, b=1)
    with pytest.raises(SendError, match="not 1"):
        first.wait()
    assert second.wait().updated == (0,)
    assert pair.equal("a")
    assert pair.equal("b")


def test_the_sender_is_told_after_on_commit() -> None:
    model, copy = nn.Linear(2, 1), nn.Linear(2, 1)
    seen: list[tuple[int, bool, bool]] = []
    fail = False

    def on_commit(version: int) -> None:
        seen.append((version, pending.done(), torch.equal(copy.weight, model.weight)))
        if fail:
            raise ValueError("the ones below me have not got it")

    with Sender("thread", model, num_workers=1, timeout=10.0) as sender:
        receiver = Receiver(sender.address(0), copy, on_commit=on_commit)
        pending = sender.send_async()
        assert receiver.receive() == 1
        assert seen == [(1, False, True)]
        assert pending.wait().updated == (0,)

        fail = True
        pending = sender.send_async()
        with pytest.raises(ValueError, match="have not got it"):
            receiver.receive()
        with pytest.raises(SendError, match="have not got it"):
            pending.wait()
        assert receiver.version == 2

        fail = False
        pending = sender.send_async()
        assert receiver.receive() == 3
        assert pending.wait().updated == (0,)


def test_checking_sends_nothing() -> None:
    with Sender("thread", nn.Linear(2, 1), num_workers=1) as sender:
        sender.check()
        with pytest.raises(SyncError):
            sender.check(nn.Linear(3, 1))
        assert sender.version == 0
