"""Snapshots, and weights given by hand, while another thread commits a version."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.core.models import Counter
from torch import nn

from sync_core import Receiver, Sender

pytestmark = pytest.mark.timeout(60)

# How long a version is held half-written, in seconds.
_HALFWAY = 0.3


class Slow(Counter):
    """Is half-written for a while: it has the new extra state, and the old weights."""

    def __init__(self) -> None:
        super().__init__(1)
        self.halfway = threading.Event()
        self.read = threading.Event()

    def set_extra_state(self, state: dict[str, torch.Tensor]) -> None:
        super().set_extra_state(state)
        if not self.halfway.is_set():
            self.halfway.set()
            self.read.wait(_HALFWAY)


def beside_a_commit(worker: Slow, act: Callable[[Receiver], object]) -> object:
    """Call a function with a receiver that is in the middle of a commit in another thread."""
    source = Counter(2)
    with (
        Sender("thread", source, num_workers=1, timeout=10.0) as sender,
        Receiver(sender.address(0), worker) as receiver,
        ThreadPoolExecutor() as pool,
    ):
        pending = sender.send_async()
        received = pool.submit(receiver.receive, 10.0)
        assert worker.halfway.wait(10.0)
        acted = pool.submit(act, receiver)
        acted.add_done_callback(lambda _: worker.read.set())
        assert received.result(10.0) == 1
        result = acted.result(10.0)
        pending.wait()
        return result


def test_a_snapshot_is_that_of_one_version() -> None:
    found = beside_a_commit(Slow(), lambda receiver: receiver.snapshot())
    assert isinstance(found, dict)
    values = {float(value) for tensor in found.values() for value in tensor.flatten()}
    assert len(values) == 1


def test_weights_given_by_hand_do_not_mix_with_a_version() -> None:
    worker, other = Slow(), Counter(3)
    beside_a_commit(worker, lambda receiver: receiver.apply_weights(other))
    assert worker.weight.tolist() == [float(worker.count)] * 2


def test_a_snapshot_does_not_wait_for_a_version() -> None:
    with (
        Sender("thread", nn.Linear(2, 1), num_workers=1) as sender,
        Receiver(sender.address(0), nn.Linear(2, 1)) as receiver,
        ThreadPoolExecutor() as pool,
    ):
        received = pool.submit(receiver.receive, 60.0)
        assert set(receiver.snapshot() or ()) == {"weight", "bias"}
        assert not received.done()
        sender.send()
        assert received.result(10.0) == 1
