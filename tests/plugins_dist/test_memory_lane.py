"""Workers of the sender's machine beside those of others."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import torch
from torch import Tensor

from sync_core import Address, Answer, CapacityError, Receiver, Sender, SendError
from sync_core.testing.faults import few_descriptors
from sync_core.testing.worker_groups import eventually
from sync_plugin_dist.local import LocalReaders
from sync_plugin_dist.stream import Stream

pytestmark = pytest.mark.timeout(60)


def weights_of(value: float) -> dict[str, Tensor]:
    return {"w": torch.full((300_000,), value), "b": torch.full((3,), value)}


def elsewhere(address: Address, local: str = "\0no such socket") -> Address:
    """As it is to a worker of another machine, which finds no such socket there."""
    return dataclasses.replace(address, endpoint=dataclasses.replace(address.endpoint, local=local))


def lanes(sender: Sender) -> list[type[Any]]:
    transport: Any = sender._pipeline.transport
    return [type(transport._lanes[worker_id]) for worker_id in sorted(transport._lanes)]


def readers(sender: Sender) -> dict[int, int]:
    """Return how many read each of the versions that lie in slots."""
    slots = sender._pipeline.transport.publisher.slots  # type: ignore[union-attr]
    return {slot.version: len(slot.readers) for slot in slots if slot.version}


def deliver(sender: Sender, value: float, *receivers: Receiver) -> None:
    pending = sender.send_async(weights_of(value))
    threads = [threading.Thread(target=receiver.receive, args=(20.0,)) for receiver in receivers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pending.wait().updated == sender.all_worker_ids()


@pytest.mark.parametrize("zero_copy", [False, True])
def test_each_gets_a_version_in_its_own_way(zero_copy: bool) -> None:
    targets = [weights_of(0.0) for _ in range(3)]
    with (
        Sender("dist", weights_of(0.0), num_workers=3, timeout=20, zero_copy=zero_copy) as sender,
        Receiver(sender.address(0), targets[0]) as here,
        Receiver(elsewhere(sender.address(1)), targets[1]) as there,
        Receiver(elsewhere(sender.address(2), ""), targets[2]) as nowhere,
    ):
        for value in (1.0, 2.0, 3.0, 4.0):
            deliver(sender, value, here, there, nowhere)
            for target in targets:
                assert all((tensor == value).all() for tensor in target.values())
        assert lanes(sender) == [LocalReaders, Stream, Stream]


def test_a_worker_that_comes_back_from_another_machine() -> None:
    with Sender("dist", weights_of(1.0), num_workers=1, timeout=20) as sender:
        address = sender.address(0)
        for way, lane in (
            (address, LocalReaders),
            (elsewhere(address), Stream),
            (address, LocalReaders),
        ):
            target = weights_of(0.0)
            with Receiver(way, target) as receiver:
                deliver(sender, 5.0, receiver)
                assert lanes(sender) == [lane]
            assert all((tensor == 5).all() for tensor in target.values())


def test_one_that_is_late_reads_the_newest() -> None:
    target = weights_of(0.0)
    with Sender("dist", weights_of(1.0), num_workers=1, timeout=20) as sender:
        for value in (1.0, 2.0):
            sender.send_async(weights_of(value)).abandon()
        with Receiver(sender.address(0), target) as receiver:
            assert receiver.receive(20) == 2
    assert all((tensor == 2).all() for tensor in target.values())


def test_a_model_that_is_too_large_for_memory_leaves_nothing_open() -> None:
    model = {"weight": torch.zeros(1, dtype=torch.uint8).expand(2**44)}
    process = psutil.Process()
    before = process.num_fds()
    with pytest.raises(CapacityError, match=r"a slot needs \d{14} bytes of memory, \d+ are"):
        Sender("dist", model, num_workers=1)
    assert process.num_fds() == before


@pytest.mark.parametrize("left", [0, 1])
def test_a_worker_that_can_open_no_more_descriptors(left: int) -> None:
    target = weights_of(0.0)
    with (
        Sender("dist", weights_of(1.0), num_workers=1, timeout=20) as sender,
        Receiver(sender.address(0), target) as receiver,
    ):
        pending = sender.send_async()
        with few_descriptors(left), pytest.raises(CapacityError, match="ulimit -n"):
            receiver.receive(5.0)
        with pytest.raises(SendError, match="ulimit -n"):
            pending.wait()
        assert all((tensor == 0).all() for tensor in target.values())
        for value in (2.0, 3.0):
            deliver(sender, value, receiver)
            assert all((tensor == value).all() for tensor in target.values())


def test_an_answer_does_not_give_back_what_was_shown_meanwhile() -> None:
    model, copy = weights_of(0.0), weights_of(0.0)
    with (
        Sender("dist", model, num_workers=1, timeout=20, zero_copy=True) as sender,
        Receiver(sender.address(0), copy) as receiver,
    ):
        transport: Any = receiver._transport
        for value in (1.0, 2.0):
            sender.send_async(weights_of(value)).abandon()
            if value == 1.0:
                first = transport.receive(20)
        # As where a thread stages: it has asked, and then the version before that is answered.
        transport._take()
        assert eventually(lambda: readers(sender) == {1: 1, 2: 1})
        first.release()
        transport.acknowledge(Answer(version=1))
        assert eventually(lambda: readers(sender) == {1: 0, 2: 1})
        second = transport.receive(20)
        for value in (3.0, 4.0, 5.0):
            sender.send_async(weights_of(value)).abandon()
        assert all((tensor == 2).all() for tensor in second.tensors)
        second.release()


def test_a_receiver_that_was_interrupted_after_it_had_asked() -> None:
    copy = weights_of(0.0)
    with (
        Sender("dist", weights_of(0.0), num_workers=1, timeout=20, zero_copy=True) as sender,
        Receiver(sender.address(0), copy) as receiver,
    ):
        transport: Any = receiver._transport
        sender.send_async(weights_of(1.0)).abandon()
        transport._take()
        assert receiver.receive(20) == 1
        for value in (2.0, 3.0, 4.0, 5.0):
            sender.send_async(weights_of(value)).abandon()
            assert all((tensor == 1).all() for tensor in copy.values())
        assert receiver.receive(20) == 5
        assert all((tensor == 5).all() for tensor in copy.values())


def test_one_whose_place_was_taken_gives_back_what_it_drops() -> None:
    with (
        Sender("dist", weights_of(0.0), num_workers=1, timeout=20, zero_copy=True) as sender,
        Receiver(sender.address(0), weights_of(0.0)) as replaced,
    ):
        deliver(sender, 1.0, replaced)
        sender.send_async(weights_of(2.0)).abandon()
        assert replaced.stage(20) == 2
        with Receiver(sender.address(0), weights_of(0.0)) as receiver:
            replaced.load()
            replaced.confirm()
            for value in (3.0, 4.0, 5.0):
                deliver(sender, value, receiver)


@pytest.fixture
def waiting() -> Iterator[tuple[Sender, Receiver]]:
    """A sender, and a receiver of which it knows that it waits, until its time is over."""
    with (
        Sender("dist", weights_of(0.0), num_workers=1, timeout=20) as sender,
        Receiver(sender.address(0), weights_of(0.0)) as receiver,
        ThreadPoolExecutor(1) as threads,
    ):
        call = threads.submit(receiver.receive, 0.5)
        assert eventually(lambda: peer_of(sender).waits)
        with busy(sender):
            assert call.result(5) is None
            yield sender, receiver


def peer_of(sender: Sender) -> Any:
    transport: Any = sender._pipeline.transport
    return transport._peers[0]


@contextmanager
def busy(sender: Sender) -> Iterator[None]:
    """Let the sender's own thread hear nothing in this block."""
    transport: Any = sender._pipeline.transport
    with transport.publisher.lock:
        yield


@contextmanager
def idle(sender: Sender) -> Iterator[None]:
    """Let it hear in this block, inside one of `busy`."""
    transport: Any = sender._pipeline.transport
    transport.publisher.lock.release()
    try:
        yield
    finally:
        transport.publisher.lock.acquire()


def send_and_forget(sender: Sender, *values: float) -> None:
    for value in values:
        sender.send_async(weights_of(value)).abandon()


def test_one_that_waited_in_vain_finds_the_next_version_at_once() -> None:
    with (
        Sender("dist", weights_of(0.0), num_workers=1, timeout=20) as sender,
        Receiver(sender.address(0), weights_of(0.0)) as receiver,
    ):
        for version in (1, 2, 3):
            assert receiver.receive(0.05) is None
            send_and_forget(sender, float(version))
            assert receiver.receive(0) == version


def test_one_that_waits_for_a_sender_that_does_nothing_waits_no_longer_than_it_said(
    waiting: tuple[Sender, Receiver],
) -> None:
    _, receiver = waiting
    begin = time.monotonic()
    assert receiver.receive(0) is None
    assert receiver.receive(0.1) is None
    assert time.monotonic() - begin < 5


def test_what_was_shown_to_one_that_waited_no_longer_is_dropped_for_the_newest(
    waiting: tuple[Sender, Receiver],
) -> None:
    sender, receiver = waiting
    send_and_forget(sender, 1.0, 2.0, 3.0)
    assert readers(sender)[1] == 1
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(receiver.receive, 20)
        with idle(sender):
            assert call.result(20) == 3


def test_one_that_was_interrupted_while_it_waited_finds_the_newest() -> None:
    with (
        Sender("dist", weights_of(0.0), num_workers=1, timeout=20) as sender,
        Receiver(sender.address(0), weights_of(0.0)) as receiver,
    ):
        interrupt = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            receiver.receive(20)
        interrupt.join()
        assert eventually(lambda: not peer_of(sender).waits)
        send_and_forget(sender, 1.0, 2.0)
        assert receiver.receive(0) == 2


def test_a_slot_that_was_shown_is_not_packed_again_after_ctrl_c(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    show = LocalReaders.pump

    def show_and_interrupt(lane: LocalReaders) -> None:
        promised = lane._promised is not None
        show(lane)
        shown = promised and lane._promised is None
        if shown and threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt

    with Sender("dist", weights_of(0.0), num_workers=1, timeout=10.0) as sender:
        target = weights_of(0.0)
        with Receiver(sender.address(0), target) as receiver, ThreadPoolExecutor(1) as pool:
            staging = pool.submit(receiver.stage, 10.0)
            monkeypatch.setattr(LocalReaders, "pump", show_and_interrupt)
            while not staging.done():
                with suppress(KeyboardInterrupt):
                    sender.send_async(weights_of(1.0)).abandon()
            monkeypatch.undo()
            send_and_forget(sender, 2.0, 3.0, 4.0, 5.0)
            receiver.load()
            receiver.confirm()
            assert {v for tensor in target.values() for v in tensor.tolist()} == {1.0}
