"""``increments="auto"``: the way that is chosen at a rate; either brings the same bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sync_core import (
    Increments,
    OptionError,
    Payload,
    Receiver,
    ReceiverTransport,
    Sender,
    SenderTransport,
    SendReport,
    TransportContext,
    hookimpl,
)
from sync_core.increments.choice import Choice
from sync_testing.loopback import Loopback, LoopbackReceiver
from sync_testing.worker_groups import eventually

# Seconds for each byte: no machine compares as slowly, or as fast.
SLOW, FAST = 1e-3, 1e-15


class LinkReceiver(LoopbackReceiver):
    """Says that each byte took so long."""

    rate = SLOW

    def receive(self, timeout: float) -> Payload | None:
        payload = super().receive(timeout)
        return payload and replace(payload, stage_seconds=payload.nbytes * self.rate)


class Link(Loopback):
    """A link of a rate to workers elsewhere."""

    capabilities = Loopback.capabilities | {"cross_process"}

    def __init__(self, rate: float) -> None:
        self.rate = rate

    @hookimpl
    def create_transport(self, context: TransportContext) -> SenderTransport | ReceiverTransport:
        if context.side == "sender":
            return super().create_transport(context)
        transport = LinkReceiver(context)
        transport.rate = self.rate
        return transport


def send(sender: Sender, receiver: Receiver) -> SendReport:
    pending = sender.send_async()
    receiver.receive(0)
    return pending.wait(10.0)


def make(value: float = 0.0) -> dict[str, Tensor]:
    return {name: torch.full((5000,), value) for name in "abc"}


@pytest.mark.parametrize(
    ("rate", "bases"), [(SLOW, [0, 0, 0, 3, 4, 5]), (FAST, [0, 0, 0, 0, 0, 0])]
)
def test_a_way_is_chosen_by_the_rate_of_the_link(rate: float, bases: list[int]) -> None:
    model, copy = make(), make(1.0)
    with Sender(Link(rate), model, num_workers=1, increments="auto") as sender:
        receiver = Receiver(sender.address(0), copy)
        found = []
        for number in range(6):
            model["b"][number] += 1
            found.append(send(sender, receiver).workers[0].base)
            assert torch.equal(copy["b"], model["b"])
        assert found == bases
        # A receiver keeps nothing where no increment builds on it.
        assert receiver._increments is not None
        assert (receiver._increments._kept is None) == (rate == FAST)


def test_a_worker_that_comes_back_and_a_subset_where_versions_go_whole() -> None:
    model = make()
    with Sender(Link(FAST), model, num_workers=2, increments="auto") as sender:
        copies = [make(1.0), make(1.0)]
        receivers = [Receiver(sender.address(i), copies[i]) for i in range(2)]
        for number in range(4):
            model["a"][number] = number
            ids = [number % 2] if number else [0, 1]
            pending = sender.send_async(worker_ids=ids)
            for worker_id in ids:
                receivers[worker_id].receive(0)
            assert pending.wait(10.0).updated == tuple(ids)
            assert all(torch.equal(copies[i]["a"], model["a"]) for i in ids)
        copies[0] = make(1.0)
        receivers[0] = Receiver(sender.address(0), copies[0])
        pending = sender.send_async()
        for receiver in receivers:
            receiver.receive(0)
        assert pending.wait(10.0).updated == (0, 1)
        assert all(torch.equal(copy["a"], model["a"]) for copy in copies)


def test_a_version_that_a_worker_may_ask_for_is_kept() -> None:
    model, copy = make(), make(1.0)
    with Sender(Link(SLOW), model, num_workers=2, increments="auto", timeout=20.0) as sender:
        receivers = [Receiver(sender.address(i), make(1.0)) for i in range(2)]
        bases = []
        for number in range(4):
            model["a"][number] = number
            pending = sender.send_async()
            for receiver in receivers:
                # Increments take much longer in the end.
                receiver._increments._transport.rate = SLOW * (1 if number < 3 else 1e9)  # type: ignore[union-attr]
                receiver.receive(0)
            bases.append(pending.wait(20.0).workers[0].base)
        assert bases == [0, 0, 0, 3]
        before = model["a"].clone()
        model["a"][:9] = 7
        pending = sender.send_async(worker_ids=[0])
        receivers[0].receive(0)
        assert pending.wait(20.0).workers[0].base == 4
        receivers[1] = Receiver(sender.address(1), copy)
        assert eventually(lambda: receivers[1].receive(0) == 4, 20.0)
        assert torch.equal(copy["a"], before)


def test_a_way_that_takes_longer_than_it_seemed_is_left() -> None:
    choice = Choice()
    for version in (1, 2):
        choice.began(version, "whole", nbytes=1, seconds=0.0)
        choice.took(version, SLOW)
    assert choice.compares()
    choice.began(3, "increment", nbytes=1, seconds=SLOW)
    choice.took(3, SLOW)
    assert not choice.compares()
    # Out of date after some versions, so that it is tried again.
    for version in range(4, 70):
        choice.began(version, "whole", nbytes=1, seconds=0.0)
    assert choice.compares()


def test_all_changed_takes_hardly_more_bytes_than_without_increments() -> None:
    bytes_of = {}
    for increments in (False, True):
        model = make()
        scheme = Link(FAST)
        with Sender(scheme, model, num_workers=1, increments=increments) as sender:
            receiver = Receiver(sender.address(0), make(1.0))
            send(sender, receiver)
            for tensor in model.values():
                tensor.add_(1)
            bytes_of[increments] = send(sender, receiver).nbytes
    assert bytes_of[True] <= 1.15 * bytes_of[False]


def test_options() -> None:
    assert Increments.of("auto") == Increments(auto=True)
    with pytest.raises(OptionError, match="auto must be True or False, got 1"):
        Increments(auto=1)  # type: ignore[arg-type]
