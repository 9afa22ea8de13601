"""A worker of ``dist`` that keeps to no protocol costs its own place, and never another's."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sync_core import Address, Answer, Receiver, Sender, SendError
from sync_plugin_dist import sender as dist_sender
from sync_plugin_dist.process_group import Link, TensorGroup
from sync_plugin_dist.rendezvous import Rendezvous
from sync_plugin_dist.stream import WorkerStream
from sync_plugin_std.local import Channel, shake_hands
from sync_testing import eventually
from sync_testing.fuzz import Mutator, besiege, find, hostile

pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]

VOCABULARY: list[dict[str, Any]] = [
    {"type": "hello", "worker": 0, "pid": 1, "nonce": "0" * 64},
    {"type": "take"},
    {"type": "take"},
    {"type": "key", "number": 1, "key": "0/1", "value": "AAAA"},
    {"type": "key", "number": 2, "key": "0/2", "value": "AAAA"},
    {"type": "received", "version": 1},
    {"type": "broken", "number": 1},
    {"type": "give_up"},
    {"type": "answer", "answer": Answer(version=1).to_message(), "held": [1]},
    {"type": "on", "version": 1, "held": [1, 2]},
    {"type": "lacks", "index": 1},
    {"type": "look"},
    {"type": "leave", "reason": "left"},
]
OPTIONS: dict[str, dict[str, Any]] = {
    "memory": {},
    "streams": {"shared_memory": False},
    "broadcast": {"topology": "broadcast"},
}


@pytest.mark.fuzz
@pytest.mark.parametrize("scheme", ["dist", "chunked::dist"])
@pytest.mark.parametrize("way", OPTIONS)
def test_messages(way: str, scheme: str, seed: int) -> None:
    mutator = Mutator(seed, VOCABULARY)
    # Two chunks.
    model = nn.Linear(1_100, 1_000) if "chunked" in scheme else nn.Linear(2, 2)

    def attack(receiver: Receiver) -> None:
        # A chain has several of them.
        for channel in find(receiver, Channel):
            send = hostile(channel, mutator)
            for _ in range(mutator.random.randrange(4)):
                send()

    sender = Sender(scheme, model, num_workers=2, timeout=8.0, **OPTIONS[way])
    assert besiege(sender, model, attack, rounds=8 if way == "broadcast" else 30) > 1


class Saboteur:
    """Takes the place of a worker in every group, and has none of them work.

    Args:
        address: of the worker whose place it has.
        reports: whether it says at once that a group is broken; otherwise it says nothing.
    """

    def __init__(self, address: Address, *, reports: bool) -> None:
        endpoint = address.endpoint
        self._channel = Channel(socket.create_connection((endpoint.host, endpoint.port), 5.0))
        shake_hands(self._channel, address.token, address.worker_id, 10.0)
        self._reports = reports
        self.broken = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with suppress(ConnectionError):
            while (message := self._channel.receive(60.0)) is not None:
                if message["type"] in ("offer", "again"):
                    self._channel.send({"type": "take"})
                elif message["type"] == "wire":
                    self.broken += 1
                    if self._reports:
                        self._channel.send({"type": "broken", "number": message["number"]})

    def close(self) -> None:
        self._channel.wake()
        self._thread.join(10)
        self._channel.close()


@pytest.mark.parametrize("saboteur_id", [0, 1])
@pytest.mark.parametrize("reports", [True, False], ids=["reports", "silent"])
def test_a_worker_that_breaks_every_group(saboteur_id: int, *, reports: bool) -> None:
    model, copy = nn.Linear(2, 2), nn.Linear(2, 2)
    timeout, honest = 4.0, 1 - saboteur_id
    with (
        Sender("dist", model, num_workers=2, timeout=timeout, topology="broadcast") as sender,
        closing(Saboteur(sender.address(saboteur_id), reports=reports)) as saboteur,
        Receiver(sender.address(honest), copy) as receiver,
    ):
        for version in range(1, 4):
            with torch.no_grad():
                model.weight.fill_(float(version))
            pending = sender.send_async()
            assert receiver.receive(timeout) == version
            assert (copy.weight == version).all()
            with suppress(SendError):
                pending.wait(0.02)
        assert saboteur.broken >= 2


def test_a_worker_that_has_received_alone_is_grouped_again() -> None:
    model = nn.Linear(2, 2)
    with (
        Sender("dist", model, num_workers=2, timeout=8.0, topology="broadcast") as sender,
        Receiver(sender.address(0), nn.Linear(2, 2)) as receiver,
    ):
        with closing(Saboteur(sender.address(1), reports=True)):
            pending = sender.send_async()
            assert receiver.receive(8.0) == 1
            (stream,) = set(find(sender, WorkerStream))
            assert eventually(lambda: stream._suspects == {1})
        with suppress(SendError):
            pending.wait()
        with (
            Receiver(sender.address(1), nn.Linear(2, 2)) as successor,
            ThreadPoolExecutor(2) as pool,
        ):
            assert successor.receive(8.0) == 1
            assert eventually(lambda: not stream._suspects)
            for version in (2, 3):
                sent = sender.send_async()
                found = [pool.submit(each.receive, 8.0) for each in (receiver, successor)]
                assert sent.wait().updated == (0, 1)
                assert [each.result() for each in found] == [version] * 2
            assert [peer.id for peer in stream._junction.members] == [0, 1]


class Forged(TensorGroup):
    """A group of several workers, whose parts are others when they come than when they went."""

    def __init__(self, link: Link, rendezvous: Rendezvous, rank: int, size: int) -> None:
        super().__init__(link, rendezvous, rank, size)
        self._several = size > 2

    def send(self, part: Tensor) -> None:
        super().send(
            part.clone().fill_(66) if self._several and part.dtype == torch.uint8 else part
        )


@pytest.mark.parametrize("bucket_mb", [4.0, 0.25])
def test_no_worker_commits_what_others_have_changed(
    bucket_mb: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dist_sender, "TensorGroup", Forged)
    model, copies = nn.Linear(500, 500), [nn.Linear(500, 500) for _ in range(3)]
    options: dict[str, Any] = {"topology": "broadcast", "bucket_mb": bucket_mb}
    with (
        Sender("dist", model, num_workers=3, timeout=20.0, **options) as sender,
        ExitStack() as opened,
        ThreadPoolExecutor(3) as pool,
    ):
        receivers = [opened.enter_context(Receiver(sender.address(i), copies[i])) for i in range(3)]
        for version in (1, 2):
            with torch.no_grad():
                model.weight.fill_(float(version))
            sent = sender.send_async()
            found = [pool.submit(each.receive, 20.0) for each in receivers]
            assert [each.result() for each in found] == [version] * 3
            assert sent.wait().updated == (0, 1, 2)
            assert all((copy.weight == version).all() for copy in copies)
    assert "came with other bytes than the sender has packed" in caplog.text
