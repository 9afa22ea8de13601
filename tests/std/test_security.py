"""Peers of schemes on one host: memory, messages, and no pickle on the data path."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import pickle
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from sync_core import (
    Layout,
    Payload,
    Receiver,
    Sender,
    SenderLostError,
    SyncError,
    TransportContext,
)
from sync_core.errors import PayloadError
from sync_plugin_std.local import (
    Channel,
    ControlPage,
    Offer,
    ProcessEvent,
    SharedMemory,
    SharedMemoryReceiver,
    shake_hands,
)
from sync_plugin_std.local.handshake import Greeting
from sync_testing.faults import few_descriptors

linux = pytest.mark.skipif(sys.platform != "linux", reason="memory of Linux")

exploded: list[str] = []
unpickled: list[str] = []
watched: list[int] = []


class Bomb:
    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return exploded.append, ("boom",)


BOMB = pickle.dumps(Bomb())


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "pickle.find_class" and watched:
        unpickled.append(f"{arguments[0]}.{arguments[1]}")


@contextmanager
def nothing_unpickled() -> Iterator[None]:
    """Fail where anything is looked up by a pickle in this process meanwhile."""
    if not _hooked:
        sys.addaudithook(_hear)
        _hooked.append(True)
    unpickled.clear()
    watched.append(1)
    try:
        yield
    finally:
        watched.clear()
    assert unpickled == []


_hooked: list[bool] = []


@pytest.mark.parametrize("scheme", ["none", "thread", "shm", "mp"])
def test_no_pickle_on_the_data_path(scheme: str) -> None:
    weights = {"w": torch.ones(4)}
    target = weights if scheme == "none" else {"w": torch.zeros(4)}
    with (
        Sender(scheme, weights, num_workers=1) as sender,
        nothing_unpickled(),
        Receiver(sender.address(0), target) as receiver,
    ):
        pending = sender.send_async()
        receiver.receive()
        assert pending.wait().updated == (0,)


@linux
@pytest.mark.parametrize("directory", [None, "/dev/shm"])
def test_memory_is_nobody_elses(directory: str | None) -> None:
    memory = SharedMemory.create(4096, directory)
    assert stat.S_IMODE(os.fstat(memory.descriptor).st_mode) == 0o600
    assert not os.get_inheritable(memory.descriptor)
    assert not [name for name in os.listdir("/dev/shm") if "sync" in name]


@linux
def test_a_worker_cannot_write_to_slots_or_cut_them_short() -> None:
    memory = SharedMemory.create(4096)
    memory.block.memory.fill_(7)
    assert int(SharedMemory(memory.descriptor).block.memory[5]) == 7
    with pytest.raises(PermissionError):
        mmap.mmap(memory.descriptor, 4096)
    for size in (0, 8192):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.descriptor, size)
    with pytest.raises(PermissionError):
        os.pwrite(memory.descriptor, b"x", 0)


@linux
def test_what_a_worker_is_given_is_sealed() -> None:
    before = _shared_memory().keys()
    with Sender("mp", {"w": torch.ones(4)}, num_workers=1) as sender:
        receiver = Receiver(sender.address(0), {"w": torch.zeros(4)})
        pending = sender.send_async()
        receiver.receive()
        pending.wait()
        made = {file: seals for file, seals in _shared_memory().items() if file not in before}
        assert len(made) >= 2
        assert all(seals & fcntl.F_SEAL_SHRINK for seals in made.values())
        receiver.close()


def _shared_memory() -> dict[int, int]:
    """Return the seals of this process's anonymous memory, by inode."""
    found = {}
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if "memfd:sync-core" in os.readlink(f"/proc/self/fd/{descriptor}"):
                seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
                found[os.fstat(descriptor).st_ino] = seals
    return found


def test_sockets_are_nobody_elses() -> None:
    with Sender("shm", {"w": torch.ones(4)}, num_workers=1) as sender:
        name = sender.address(0).endpoint
        if sys.platform == "linux":
            # It has no permissions: the connecting user is checked instead, see tests/core.
            assert name.startswith("\0")
            assert len(name) > 32
        else:
            assert stat.S_IMODE(Path(name).parent.stat().st_mode) == 0o700


def framed(message: object) -> bytes:
    text = message if isinstance(message, bytes) else json.dumps(message).encode()
    return len(text).to_bytes(4, "little") + text


@linux
@pytest.mark.parametrize("left", [0, 2])
def test_a_worker_for_which_no_descriptor_is_left(
    left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, copy = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    with Sender("shm", model, num_workers=1, timeout=10) as sender:
        transport: Any = sender._pipeline.transport
        attempts: list[Any] = []
        accept = transport._accept

        def accept_and_count(listener: socket.socket) -> None:
            attempts.append(listener)
            accept(listener)

        monkeypatch.setattr(transport, "_accept", accept_and_count)
        address = sender.address(0)
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # One is for the worker to watch this process, one for the connection, and none for more.
        with stranger, few_descriptors(left):
            stranger.connect(address.endpoint)
            with closing(Channel(stranger)) as channel:
                if left:
                    shake_hands(channel, address.token, 0, 5.0)
                    refusal = channel.receive(5.0)
                    assert refusal is not None
                    assert "ulimit -n" in refusal["reason"]
                else:
                    with pytest.raises(SenderLostError, match=r"within 0\.5 s"):
                        shake_hands(channel, address.token, 0, 0.5)
        assert len(attempts) == 1  # and not as fast as the thread can
        sender.send_async().abandon()
        with Receiver(address, copy) as receiver:
            pending = sender.send_async()
            assert receiver.receive() == 2
            pending.wait()


class FalseSender:
    """The other side of a receiver, which sends what it likes."""

    def __init__(self) -> None:
        self.mine, self.theirs = socket.socketpair()
        self.page = ControlPage.create()
        self.event = ProcessEvent.create()

    def close(self) -> None:
        self.mine.close()
        self.page.close()
        self.event.close()

    def receiver(
        self, first: bytes = b"", *descriptors: int, layout: Layout | None = None
    ) -> SharedMemoryReceiver:
        given = descriptors or (self.page.descriptor, self.event.reader, self.event.writer)
        if first:
            self.mine.sendall(first)
        else:
            # It knows the token: a trainer that was taken over.
            self.prove(*given).start()
        context = TransportContext(
            side="receiver",
            scheme="mp",
            model_id="policy",
            token="",
            timeout=0.2,
            worker_id=0,
            layout=layout,
        )
        return SharedMemoryReceiver(context, Channel(self.theirs))

    def prove(self, *descriptors: int) -> threading.Thread:
        def answer() -> None:
            data = self.mine.recv(4096)
            greeting = Greeting.of(json.loads(data[4:]))
            self.mine.sendall(framed(greeting.challenge("")))
            self.mine.recv(4096)
            socket.send_fds(self.mine, [framed({"type": "welcome"})], descriptors)

        return threading.Thread(target=answer)

    def slot(self, content: bytes) -> None:
        """Offer a version that is whatever is given."""
        memory = SharedMemory.create(max(1, len(content)))
        memory.buffer[: len(content)] = content
        message = framed({"type": "slot", "index": 1, "live": [1]})
        socket.send_fds(self.mine, [message], [memory.descriptor])
        self.page.write_offer(Offer(version=1, slot=1, layout="00"))
        self.event.set()


@pytest.fixture
def false_sender() -> Iterator[FalseSender]:
    sender = FalseSender()
    yield sender
    sender.close()


@pytest.mark.parametrize(
    "first", [BOMB, framed(BOMB), framed({}), framed([]), b"\xff" * 8, framed(b"[" * 999)], ids=repr
)
def test_a_receiver_refuses_a_sender_that_is_none(false_sender: FalseSender, first: bytes) -> None:
    with pytest.raises(SenderLostError):
        false_sender.receiver(first)
    assert exploded == []


def test_a_receiver_refuses_what_is_not_a_page(false_sender: FalseSender) -> None:
    with pytest.raises(SenderLostError):
        false_sender.receiver(b"", *[false_sender.event.reader] * 3)


def test_a_receiver_maps_no_more_memory_than_its_model_gives_reason_for(
    false_sender: FalseSender,
) -> None:
    receiver = false_sender.receiver(layout=Layout.of({"w": torch.ones(4)}))
    memory = SharedMemory.create(1 << 34, sparse=True)
    message = framed({"type": "slot", "index": 1, "live": [1]})
    socket.send_fds(false_sender.mine, [message], [memory.descriptor])
    with pytest.raises(SenderLostError, match="17179869184 bytes"):
        receiver.receive(5.0)
    receiver.close()


def test_a_receiver_refuses_an_offer_that_is_torn(false_sender: FalseSender) -> None:
    receiver = false_sender.receiver()
    false_sender.page.write_offer(Offer(version=1, slot=1, layout="00"))
    false_sender.page._bytes[64] += 1
    false_sender.event.set()
    with pytest.raises(SenderLostError, match="does not keep to the protocol"):
        receiver.receive(5.0)
    receiver.close()


@pytest.mark.parametrize(
    "message",
    [{}, {"type": "slot"}, {"type": "slot", "index": [], "live": 3}, {"type": "gone"}, BOMB],
    ids=repr,
)
def test_a_receiver_refuses_messages_that_are_none(
    false_sender: FalseSender, message: object
) -> None:
    receiver = false_sender.receiver()
    socket.send_fds(false_sender.mine, [framed(message)], [false_sender.page.descriptor])
    with pytest.raises(SenderLostError):
        receiver.receive(5.0)
    receiver.close()
    assert exploded == []


@pytest.mark.parametrize("content", [BOMB, bytes(64), b"\xff" * 64, b"", os.urandom(500)], ids=len)
def test_a_slot_that_holds_no_payload_is_refused(false_sender: FalseSender, content: bytes) -> None:
    receiver = false_sender.receiver()
    false_sender.slot(content)
    with pytest.raises(PayloadError):
        receiver.receive(5.0)
    receiver.close()
    assert exploded == []


@pytest.mark.parametrize("scheme", ["thread", "shm", "mp"])
def test_weights_that_do_not_fit_change_nothing(scheme: str) -> None:
    target = {"a": torch.zeros(4), "b": torch.zeros(4)}
    with Sender(scheme, {"a": torch.ones(4), "b": torch.ones(4)}, num_workers=1) as sender:
        receiver = Receiver(sender.address(0), target)
        transport = receiver._connection.transport
        receive = transport.receive

        def forge(timeout: float) -> Payload | None:
            payload = receive(timeout)
            assert payload is not None
            forged = {"a": torch.full((4,), 9.0), "b": torch.full((5,), 9.0)}
            layout = type(payload.layout).of(forged)
            return Payload(payload.version, layout, tuple(forged.values()), payload.release)

        transport.receive = forge  # type: ignore[method-assign]
        sender.send_async()
        with pytest.raises(SyncError):
            receiver.receive()
        assert all((tensor == 0).all() for tensor in target.values())
        receiver.close()


@pytest.mark.parametrize("scheme", ["thread", "shm"])
def test_a_receiver_that_was_replaced_answers_for_nobody(scheme: str) -> None:
    with Sender(scheme, {"w": torch.ones(4)}, num_workers=1) as sender:
        first = Receiver(sender.address(0), {"w": torch.zeros(4)})
        pending = sender.send_async()
        assert first.stage(5.0) == 1
        second = Receiver(sender.address(0), {"w": torch.zeros(4)})
        first.load()
        first.confirm()
        assert not pending.unanswered[0].wait(0.1)
        assert sender.workers[0].state == "behind"
        assert second.receive(5.0) == 1
        assert pending.wait().updated == (0,)
        second.close()
        first.close()
