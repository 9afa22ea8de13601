"""Relays: versions in chunks, in a row and in a tree."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from tests.scale.slow_links import SlowLinks

from sync_core import (
    Address,
    OptionError,
    Receiver,
    Sender,
    SenderLostError,
    SendError,
)
from sync_core.errors import AddressError
from sync_plugin_scale import Chunked, Pool, Relay, Sharded, join_addresses
from sync_testing.schemes import DeliveryCases, FaultCases, LifetimeCases, ProtocolCases

pytestmark = pytest.mark.timeout(60)


class Workers:
    """Receivers in threads, each with a model."""

    def __init__(self, addresses: list[Address], like: dict[str, torch.Tensor]) -> None:
        self.models = [{n: torch.zeros_like(t) for n, t in like.items()} for _ in addresses]
        self.receivers = [Receiver(a, m) for a, m in zip(addresses, self.models, strict=True)]
        self.ended: list[float] = [0.0] * len(addresses)

    def receive(self) -> list[threading.Thread]:
        threads = [
            threading.Thread(target=self._receive, args=(i,)) for i in range(len(self.ended))
        ]
        for thread in threads:
            thread.start()
        return threads

    def _receive(self, index: int) -> None:
        if self.receivers[index].receive() is not None:
            self.ended[index] = time.perf_counter()


class TestChunks(DeliveryCases, ProtocolCases, LifetimeCases, FaultCases):
    """Versions of many chunks are those of any other scheme."""

    # Three chunks of a small policy, and 20,000 of the largest model, which take some seconds.
    scheme = Chunked("thread", mb=0.0008)


def weights(nbytes: int) -> dict[str, torch.Tensor]:
    return {"a": torch.randn(nbytes // 8), "b": torch.randn(nbytes // 8)}


@pytest.mark.parametrize("scheme", ["thread", "shm", "dist", "file"])
def test_versions_in_chunks_are_those_that_were_sent(scheme: str, tmp_path: Any) -> None:
    policy = weights(100_000)
    options: dict[str, Any] = {"directory": str(tmp_path)} if scheme == "file" else {}
    with Sender(Chunked(scheme, mb=0.03), policy, num_workers=2, **options) as sender:
        workers = Workers([sender.address(i) for i in range(2)], policy)
        for version in (1, 2, 3):
            policy["a"].add_(1)
            threads = workers.receive()
            assert sender.send().updated == (0, 1)
            for thread in threads:
                thread.join()
            for model in workers.models:
                assert all(torch.equal(model[name], policy[name]) for name in policy), version


@pytest.mark.parametrize("scheme", ["thread", "dist"])
def test_a_tree_of_relays_passes_versions_on(scheme: str) -> None:
    policy = weights(100_000)
    with ExitStack() as opened:
        sender = opened.enter_context(Sender(Chunked(scheme, mb=0.03), policy, num_workers=2))
        relays = [opened.enter_context(Relay(sender.address(i), num_workers=2)) for i in range(2)]
        leaf = opened.enter_context(Relay(relays[0].address(1), num_workers=2))
        addresses = [relays[0].address(0), *(relays[1].address(i) for i in range(2))]
        workers = Workers([*addresses, *(leaf.address(i) for i in range(2))], policy)
        for _ in range(3):
            policy["b"].mul_(2)
            threads = workers.receive()
            assert sender.send().updated == (0, 1)
            for thread in threads:
                thread.join()
            for model in workers.models:
                assert all(torch.equal(model[name], policy[name]) for name in policy)


def test_the_workers_of_a_chain_receive_while_the_first_chunks_travel_on() -> None:
    """`docs/benchmarks/relays.py` measures how much time that saves."""
    policy = weights(200_000)
    with ExitStack() as opened:
        sender = opened.enter_context(
            Sender(Chunked(SlowLinks(), mb=0.01), policy, num_workers=1, rate=2e6)
        )
        address, workers = sender.address(0), []
        for _ in range(4):
            relay = opened.enter_context(Relay(address, num_workers=2, local=(1,)))
            address = relay.address(0)
            workers.append(relay.address(1))
        pool = Workers([*workers, address], policy)
        threads = pool.receive()
        sender.send()
        for thread in threads:
            thread.join()
        for model in pool.models:
            assert all(torch.equal(model[name], policy[name]) for name in policy)


def test_a_worker_of_a_relay_that_refuses_is_named() -> None:
    policy = weights(8_000)
    with ExitStack() as opened:
        sender = opened.enter_context(
            Sender(Chunked("thread", mb=1), policy, num_workers=1, timeout=5.0)
        )
        with Relay(sender.address(0), num_workers=2) as relay:
            good = Workers([relay.address(0)], policy)
            raising = Receiver(
                relay.address(1),
                {n: torch.zeros_like(t) for n, t in policy.items()},
                on_commit=_raise,
            )
            threads = good.receive()
            other = threading.Thread(target=_receive_and_ignore, args=(raising,))
            other.start()
            with pytest.raises(SendError, match="of a relay's workers, worker 1: has version 1"):
                sender.send()
            for thread in (*threads, other):
                thread.join()
            assert good.receivers[0].version == 1


def test_a_relay_without_workers_says_so_once_it_has_the_version() -> None:
    policy = weights(8_000)
    with (
        Sender(Chunked("thread", mb=0.002), policy, num_workers=1, timeout=40.0) as sender,
        Relay(sender.address(0), num_workers=1) as relay,
    ):
        Receiver(relay.address(0), policy).close()
        start = time.monotonic()
        with pytest.raises(SendError, match="of a relay's workers, worker 0: closed its"):
            sender.send()
        assert time.monotonic() - start < 30


def _raise(version: int) -> None:
    raise RuntimeError(version)


def _receive_and_ignore(receiver: Receiver) -> None:
    with pytest.raises(RuntimeError):
        receiver.receive()


def test_a_worker_that_comes_late_begins_with_the_first_chunk() -> None:
    policy = weights(100_000)
    with Sender(Chunked("thread", mb=0.01), policy, num_workers=2, timeout=1.0) as sender:
        first = Workers([sender.address(0)], policy)
        threads = first.receive()
        with pytest.raises(SendError, match="worker 1: did not confirm"):
            sender.send()
        threads[0].join()
        late = Workers([sender.address(1)], policy)
        late.receive()[0].join()
        assert late.receivers[0].version == 1
        # Another one in its place begins again.
        late.receivers[0].close()
        again = Workers([sender.address(1)], policy)
        again.receive()[0].join()
        assert torch.equal(again.models[0]["a"], policy["a"])
        assert sender.add_worker() == 2
        added = Workers([sender.address(2)], policy)
        added.receive()[0].join()
        assert torch.equal(added.models[0]["b"], policy["b"])


def test_workers_learn_that_a_relay_is_gone_and_a_relay_that_its_sender_is() -> None:
    policy = weights(8_000)
    with Sender(Chunked("thread", mb=1), policy, num_workers=1, timeout=5.0) as sender:
        relay = Relay(sender.address(0), num_workers=1)
        worker = Receiver(relay.address(0), {n: torch.zeros_like(t) for n, t in policy.items()})
        relay.close()
        with pytest.raises(SenderLostError):
            worker.receive()
        with pytest.raises(SendError, match="closed its relay"):
            sender.send()
        relay = Relay(sender.address(0), num_workers=1)
        assert not relay.wait(timeout=0.0)
        sender.close()
        assert relay.wait(timeout=10.0)


def test_a_sharded_trainer_can_send_chunks() -> None:
    halves = [torch.full((2, 3), float(rank)) for rank in range(2)]
    senders = [
        Sender(
            Sharded(
                Chunked("thread", mb=0.0005),
                rank,
                2,
                regions={"w": ((2 * rank, 2 * rank + 2), (0, 3))},
            ),
            {"w": half},
            num_workers=1,
        )
        for rank, half in enumerate(halves)
    ]
    model = {"w": torch.full((4, 3), 9.0)}
    receiver = Receiver(join_addresses([sender.address(0) for sender in senders]), model)
    pending = [sender.send_async() for sender in senders]
    assert receiver.receive() == 1
    assert torch.equal(model["w"], torch.cat(halves))
    for each in pending:
        each.wait()
    for sender in senders:
        sender.close()


def test_what_cannot_be_relayed_is_refused() -> None:
    policy = weights(80)
    with Sender("thread", policy, num_workers=1) as sender:
        address = sender.address(0)
        with pytest.raises(AddressError, match=r"type Sender\(Chunked\(.dist., mb=4\), …\)"):
            Relay(address, num_workers=1)
    with (
        Sender("chunked::shm", policy, num_workers=0) as sender,
        Pool(sender) as pool,
        pytest.raises(AddressError, match=r"type Relay\(sender.address\(sender.add_worker\(\)\)"),
    ):
        Relay(pool.address(), num_workers=1)
    for size in (0, float("nan"), True):
        with pytest.raises(OptionError, match="mb must be a size in MB"):
            Chunked("thread", mb=size)
    with pytest.raises(OptionError, match=r"'chunked::shm' .*cannot zero_copy"):
        Sender("chunked::shm", policy, num_workers=1, zero_copy=True)
    with pytest.raises(OptionError, match="leave slots= out"):
        Sender("chunked::shm", policy, num_workers=1, slots=4)
    with pytest.raises(OptionError, match="moves nothing"):
        Sender("chunked::none", policy, num_workers=1)
