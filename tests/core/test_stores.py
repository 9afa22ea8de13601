"""Transports over a store: what the conformance cases, which generated ones pass, do not reach."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from sync_core import (
    ClosedError,
    OptionError,
    Payload,
    Receiver,
    ReceiverTransport,
    Sender,
    SenderLostError,
    SendError,
    SenderTransport,
    TransportContext,
    WorkerLostError,
    hookimpl,
)
from sync_core.errors import HookResultError, PayloadError
from sync_plugin_std.stores import Store, StoreOptions, store_transport
from sync_testing import eventually


class Memory(Store):
    """Bytes by name, and what goes wrong with them."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.broken: Exception | None = None
        self.text = self.keeps = False
        self.on_version: Callable[[], None] | None = None

    def put(self, name: str, data: bytes) -> None:
        self._check()
        self.kept[name] = data
        if self.on_version is not None and name.endswith(".safetensors"):
            self.on_version()

    def get(self, name: str) -> Any:
        self._check()
        return "text" if self.text else self.kept.get(name)

    def delete(self, name: str) -> None:
        self._check()
        if self.keeps and name.endswith(".safetensors"):
            raise OSError("no right to delete")
        self.kept.pop(name, None)

    def path(self, end: str) -> str:
        (path,) = [name for name in self.kept if name.endswith(f"/{end}")]
        return path

    def _check(self) -> None:
        if self.broken is not None:
            raise self.broken


class MemoryScheme:
    capabilities = frozenset({"broadcast", "late_join", "pull"})

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    @hookimpl
    def create_transport(self, context: TransportContext) -> SenderTransport | ReceiverTransport:
        return store_transport(context, self.memory, context.parse_options(StoreOptions))


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def sender(memory: Memory) -> Iterator[Sender]:
    options: dict[str, Any] = {"poll": 0.001, "lost_after": 0.5}
    model = nn.Linear(3, 2)
    with Sender(MemoryScheme(memory), model, num_workers=2, timeout=5.0, **options) as made:
        yield made


def join(sender: Sender, worker_id: int) -> Receiver:
    return Receiver(sender.address(worker_id), nn.Linear(3, 2))


def test_a_version_stands_there_once_as_safetensors(sender: Sender, memory: Memory) -> None:
    receivers = [join(sender, i) for i in (0, 1)]
    for _ in range(4):
        pending = sender.send_async()
        for receiver in receivers:
            receiver.receive()
        pending.wait()
    versions = sorted(name.split("/")[1] for name in memory.kept if name.endswith(".safetensors"))
    assert versions == ["policy-00000003.safetensors", "policy-00000004.safetensors"]
    data = memory.kept[memory.path("policy-00000004.safetensors")]
    weight = dict(zip(("bias", "weight"), Payload.from_bytes(data, 4).tensors, strict=True))
    assert {tuple(tensor.shape) for tensor in weight.values()} == {(2, 3), (2,)}
    for receiver in receivers:
        receiver.close()
    sender.close()
    assert not memory.kept


def test_a_receiver_that_outlives_its_sender_leaves_nothing(sender: Sender, memory: Memory) -> None:
    receiver = join(sender, 0)
    sender.close()
    with pytest.raises(SenderLostError, match="was closed"):
        receiver.receive()
    assert not memory.kept


def test_what_is_not_sealed_with_the_token_is_not_heeded(sender: Sender, memory: Memory) -> None:
    with join(sender, 0) as receiver:
        path = memory.path("sender.json")
        seal, _, text = memory.kept[path].partition(b"\n")
        with pytest.raises(SenderLostError, match="is gone, or the address is another"):
            Receiver(dataclasses.replace(sender.address(0), token="0" * 32), nn.Linear(3, 2))
        memory.kept[path] = seal + b"\n" + text.replace(b'"0": 0', b'"0": 9')
        with pytest.raises(SenderLostError, match="was closed"):
            receiver.receive(0.0)


def test_a_worker_that_left_fails_every_send_at_once(sender: Sender) -> None:
    join(sender, 1).close()
    for _ in range(2):
        with pytest.raises(SendError, match="closed its receiver") as failure:
            sender.send(worker_ids=1)
        assert failure.value.report.seconds < 30.0
    assert sender.workers[1].state == "lost"
    with join(sender, 1) as receiver:
        assert receiver.receive() == 2
        assert eventually(lambda: sender.workers[1].version == 2)


def test_signs_that_stop_mean_death(sender: Sender) -> None:
    receiver = join(sender, 0)
    transport: Any = receiver._connection.transport
    transport._pulse.end()
    with pytest.raises(SendError) as failure:
        sender.send(worker_ids=0)
    error = failure.value.report.workers[0].error
    assert isinstance(error, WorkerLostError)
    assert "has given no sign of life for 0.5 s" in str(error)


def test_a_sender_without_signs_is_lost(sender: Sender) -> None:
    receiver = join(sender, 0)
    transport: Any = sender._pipeline.transport
    transport._pulse.end()
    with pytest.raises(SenderLostError, match="gives no sign of life"):
        receiver.receive(5.0)


def test_a_removed_worker_learns_it(sender: Sender) -> None:
    with join(sender, 1) as receiver:
        sender.remove_worker(1)
        with pytest.raises(SenderLostError, match="worker 1 was removed from the sender"):
            receiver.receive()


def test_a_store_that_fails_for_a_while(sender: Sender, memory: Memory) -> None:
    with join(sender, 0) as receiver:
        pending = sender.send_async(worker_ids=0)
        memory.broken = OSError("no route to the bucket")
        assert not eventually(pending.done, 0.2)
        with pytest.raises(OSError, match="no route to the bucket"):
            receiver.receive(0.0)
        memory.broken = None
        assert receiver.receive() == 1
        assert pending.wait().updated == (0,)


def test_no_worker_gets_the_version_of_a_send_that_failed(sender: Sender, memory: Memory) -> None:
    with join(sender, 0) as receiver:
        memory.on_version = lambda: setattr(memory, "broken", OSError("the disk is full"))
        with pytest.raises(SendError, match="the disk is full"):
            sender.send(worker_ids=0)
        memory.broken = memory.on_version = None
        # Signs of life are written meanwhile.
        assert receiver.receive(0.5) is None
        pending = sender.send_async(worker_ids=0)
        assert receiver.receive() == pending.version == 2
        assert pending.wait().updated == (0,)


def test_versions_that_cannot_be_removed_fail_no_send(sender: Sender, memory: Memory) -> None:
    with join(sender, 0) as receiver:
        for version in range(1, 7):
            memory.keeps = version < 6
            pending = sender.send_async(worker_ids=0)
            assert receiver.receive() == version
            assert pending.wait().updated == (0,)
            kept = sum(name.endswith(".safetensors") for name in memory.kept)
            assert kept == (version if memory.keeps else 2)


def test_an_interrupted_write_leaves_nothing(sender: Sender, memory: Memory) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    memory.on_version = interrupt
    with pytest.raises(KeyboardInterrupt):
        sender.send_async()
    assert memory.path("policy-00000001.safetensors")
    sender.close()
    assert not memory.kept


def test_closing_while_a_version_is_put_there(sender: Sender, memory: Memory) -> None:
    transport: Any = sender._pipeline.transport
    memory.on_version = transport.close
    with pytest.raises(ClosedError):
        sender.send_async()
    assert not memory.kept


def test_a_store_that_gives_no_bytes_is_named(sender: Sender, memory: Memory) -> None:
    memory.text = True
    with pytest.raises(HookResultError, match=r"Memory.get\('sync-.*returned a str, not bytes"):
        join(sender, 0)
    memory.text = False


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"poll": 0.0}, "seconds above 0"),
        ({"lost_after": -1.0}, "seconds above 0"),
        ({"lost_after": float("inf")}, "finite"),
        ({"poll": float("nan")}, "finite"),
        ({"keep": 0}, "keep=0 leaves no version"),
    ],
)
def test_options_that_make_no_sense(memory: Memory, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Sender(MemoryScheme(memory), {"w": torch.ones(1)}, num_workers=1, **options)


def test_what_is_longer_than_agreed_is_not_fetched(
    sender: Sender, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[int] = []
    get, kept = memory.get, memory.kept

    def note(name: str) -> Any:
        data = get(name)
        fetched.append(len(data or b""))
        return data

    with join(sender, 0) as receiver:
        pending = sender.send_async()
        memory.kept[memory.path("policy-00000001.safetensors")] += bytes(100)
        memory.kept[memory.path("sender.json").replace("sender", "worker-1")] = bytes(1 << 25)
        monkeypatch.setattr(memory, "size", lambda name: len(kept[name]) if name in kept else None)
        monkeypatch.setattr(memory, "get", note)
        with pytest.raises(PayloadError, match=r"bytes, and .* are there"):
            receiver.receive()
        with pytest.raises(SendError, match=r"bytes, and .* are there"):
            pending.wait(0.5)
    assert max(fetched) < 10_000
