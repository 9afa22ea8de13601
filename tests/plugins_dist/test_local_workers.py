"""Workers of the sender's machine beside those of others."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import torch
from torch import Tensor

from sync_core import Address, Answer, CapacityError, Receiver, Sender, SendError
from sync_testing import eventually
from sync_testing.faults import few_descriptors

pytestmark = pytest.mark.timeout(60)


def weights_of(value: float) -> dict[str, Tensor]:
    return {"w": torch.full((300_000,), value), "b": torch.full((3,), value)}


def elsewhere(address: Address, local: str = "\0no such socket") -> Address:
    """As it is to a worker of another machine, which finds no such socket there."""
    return dataclasses.replace(address, endpoint=dataclasses.replace(address.endpoint, local=local))


def are_local(sender: Sender) -> list[bool]:
    transport: Any = sender._pipeline.transport
    return [transport._peers[worker_id].local for worker_id in sorted(transport._peers)]


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
        assert are_local(sender) == [True, False, False]


def test_a_worker_that_comes_back_from_another_machine() -> None:
    with Sender("dist", weights_of(1.0), num_workers=1, timeout=20) as sender:
        address = sender.address(0)
        for way, local in ((address, True), (elsewhere(address), False), (address, True)):
            target = weights_of(0.0)
            with Receiver(way, target) as receiver:
                deliver(sender, 5.0, receiver)
                assert are_local(sender) == [local]
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


def test_an_answer_does_not_give_back_what_was_accepted_meanwhile() -> None:
    model, copy = weights_of(0.0), weights_of(0.0)
    with (
        Sender("dist", model, num_workers=1, timeout=20, zero_copy=True) as sender,
        Receiver(sender.address(0), copy) as receiver,
    ):
        transport: Any = receiver._connection.transport
        payloads = []
        for value in (1.0, 2.0):
            sender.send_async(weights_of(value)).abandon()
            # As where a thread stages: it asks for more before the version it has is answered.
            payloads.append(transport.receive(20))
        first, payload = payloads
        first.release()
        transport.acknowledge(Answer(version=1))
        assert eventually(lambda: readers(sender) == {1: 0, 2: 1})
        for value in (3.0, 4.0, 5.0):
            sender.send_async(weights_of(value)).abandon()
        assert all((tensor == 2).all() for tensor in payload.tensors)
        payload.release()


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
        send_and_forget(sender, 1.0, 2.0)
        assert receiver.receive(0) == 2
