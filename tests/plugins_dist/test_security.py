"""Peers of ``dist`` on the network: those that connect, and those connected to."""

from __future__ import annotations

import json
import pickle
import select
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

import pytest
import torch

from sync_core import (
    Address,
    Layout,
    Receiver,
    ReceiverTransport,
    Sender,
    SenderLostError,
    TransportContext,
)
from sync_plugin_dist.options import DistOptions
from sync_plugin_dist.protocol import Endpoint, Transfer
from sync_plugin_dist.receiver import create_receiver
from sync_plugin_dist.rendezvous import Rendezvous
from sync_plugin_std.local import Channel, shake_hands

exploded: list[str] = []


class Bomb:
    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return exploded.append, ("boom",)


BOMB = pickle.dumps(Bomb())


def framed(message: object) -> bytes:
    text = message if isinstance(message, bytes) else json.dumps(message).encode()
    return len(text).to_bytes(4, "little") + text


def test_loopback_by_default() -> None:
    assert DistOptions().host == "127.0.0.1"
    with Sender("dist", {"w": torch.ones(4)}, num_workers=1) as sender:
        assert sender.address(0).endpoint.host == "127.0.0.1"


def test_strangers_change_nothing_for_those_who_belong() -> None:
    target = {"w": torch.zeros(4)}
    with Sender("dist", {"w": torch.ones(4)}, num_workers=1, timeout=20.0) as sender:
        endpoint = sender.address(0).endpoint
        for noise in (BOMB, framed(BOMB), b"\xff" * 100, framed({"type": "take"}), b""):
            with socket.create_connection((endpoint.host, endpoint.port), 5.0) as stranger:
                stranger.sendall(noise)
        with Receiver(sender.address(0), target) as receiver:
            pending = sender.send_async()
            assert receiver.receive() == 1
            assert pending.wait().updated == (0,)
    assert (target["w"] == 1).all()
    assert exploded == []


class FalseSender:
    """Listens as a sender does, and sends given messages."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.connections: list[Channel] = []

    def receiver(self, *messages: object) -> ReceiverTransport:
        thread = threading.Thread(target=self._serve, args=messages)
        thread.start()
        layout = Layout.of({"w": torch.zeros(4)})
        context = TransportContext(
            side="receiver",
            scheme="dist",
            model_id="policy",
            token="token",
            timeout=1.0,
            worker_id=0,
            endpoint=Endpoint("127.0.0.1", self.listener.getsockname()[1]),
            layout=layout,
        )
        try:
            return create_receiver(context, DistOptions())
        finally:
            thread.join()

    def _serve(self, *messages: object) -> None:
        connection, _ = self.listener.accept()
        channel = Channel(connection)
        self.connections.append(channel)
        channel.receive(5.0)
        connection.sendall(b"".join(map(framed, messages)))

    def close(self) -> None:
        self.listener.close()
        for connection in self.connections:
            connection.close()


@pytest.fixture
def false_sender() -> Iterator[FalseSender]:
    sender = FalseSender()
    yield sender
    sender.close()


WELCOME = {"type": "welcome"}
OFFER = {"type": "offer", "version": 1}


@pytest.mark.parametrize(
    "messages",
    [
        (BOMB,),
        (WELCOME, BOMB),
        (WELCOME, {}),
        (WELCOME, {"type": "offer"}),
        (WELCOME, {"type": "offer", "version": "1"}),
        (WELCOME, OFFER, {"type": "wire"}),
        (WELCOME, OFFER, {"type": "data"}),
        (WELCOME, OFFER, {"type": "data", "number": 1, "version": 1, "nbytes": -1}),
        (WELCOME, OFFER, {"type": "slot", "index": 1, "live": [1]}),
        (WELCOME, OFFER, {"type": "live"}),
        (WELCOME, OFFER, {"type": "here"}),
    ],
    ids=repr,
)
def test_a_receiver_refuses_messages_that_are_none(
    false_sender: FalseSender, messages: tuple[object, ...]
) -> None:
    with pytest.raises(SenderLostError), closing(false_sender.receiver(*messages)) as receiver:
        receiver.receive(1.0)
    assert exploded == []


DATA = {"number": 1, "version": 1, "digest": "0" * 64, "nbytes": 100, "part": 50}


@pytest.mark.parametrize(
    "change",
    [
        {"nbytes": 1 << 40},
        {"nbytes": 0},
        {"nbytes": 1.5},
        {"nbytes": True},
        {"part": 0},
        {"part": -1},
        {"version": 0},
        {"number": "1"},
        {"digest": None},
    ],
    ids=repr,
)
def test_transfers_that_nobody_would_announce(change: dict[str, Any]) -> None:
    assert Transfer.from_message(DATA, 100).nbytes == 100
    with pytest.raises(ValueError, match="announces"):
        Transfer.from_message(DATA | change, 100)


@pytest.mark.parametrize(
    "message",
    [
        {"key": "rank", "value": "AAAA"},
        {"key": 1, "value": "AAAA"},
        {"key": "other", "value": "?"},
        {"key": "other", "value": "A" * (1 << 20)},
    ],
    ids=["told twice", "no name", "no value", "a long value"],
)
def test_keys_that_no_end_of_a_wire_tells(message: dict[str, Any]) -> None:
    rendezvous = Rendezvous(1, lambda _: None, lambda _: None, timeout=1.0)
    rendezvous.put({"key": "rank", "value": "AQID"})
    assert rendezvous.get("rank") == b"\1\2\3"
    with pytest.raises(ValueError, match=r"is not a key|base64|has a value already"):
        rendezvous.put(message)


def test_a_worker_that_tells_no_end_of_keys_is_hung_up_on() -> None:
    with Sender("dist", {"w": torch.ones(4)}, num_workers=1, timeout=20.0) as sender:
        address = sender.address(0)
        connection = socket.create_connection((address.endpoint.host, address.endpoint.port), 5.0)
        with closing(Channel(connection)) as channel:
            shake_hands(channel, address.token, 0, 10.0)
            sender.send_async()
            channel.send({"type": "take"})
            number = 0
            while not number:
                message = channel.receive(10.0) or {}
                number = message.get("number", 0)
            for i in range(12):
                key = {"type": "key", "number": number, "key": f"key {i}", "value": "AAAA"}
                with suppress(ConnectionError):
                    channel.send(key)
            with pytest.raises(ConnectionError):
                wait_for_the_end(channel)


def wait_for_the_end(channel: Channel) -> None:
    while channel.receive(10.0) is not None:
        pass


def test_what_listens_where_a_trainer_was_learns_nothing_and_is_refused() -> None:
    model, copy = {"w": torch.ones(4)}, {"w": torch.zeros(4)}
    with Sender("dist", model, num_workers=1, shared_memory=False) as sender:
        address = sender.address(0)
    port = address.endpoint.port
    # The same software with another token.
    with Sender("dist", {"w": torch.full((4,), 9.0)}, num_workers=1, port=port) as other:
        other.send_async()
        with pytest.raises(SenderLostError, match="does not know its token"):
            Receiver(address, copy)
    assert not copy["w"].any()


class Relay:
    """A process between a worker and its trainer, which records what both say."""

    def __init__(self, address: Address) -> None:
        endpoint = address.endpoint
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = replace(address, endpoint=replace(endpoint, port=self.port, local=""))
        self.trainer = socket.create_connection((endpoint.host, endpoint.port))
        self.heard: dict[str, bytes] = {"worker": b"", "trainer": b""}
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    @property
    def port(self) -> int:
        port: int = self.listener.getsockname()[1]
        return port

    def _run(self) -> None:
        worker, _ = self.listener.accept()
        with worker, self.trainer:
            ends = {worker: ("worker", self.trainer), self.trainer: ("trainer", worker)}
            while True:
                for end in select.select(list(ends), [], [])[0]:
                    name, other = ends[end]
                    data = end.recv(1 << 16)
                    if not data:
                        return
                    self.heard[name] += data
                    other.sendall(data)

    def close(self) -> None:
        self.thread.join(10)
        self.listener.close()


def test_what_a_relay_has_heard_opens_nothing() -> None:
    model, copy = {"w": torch.ones(4)}, {"w": torch.zeros(4)}
    with Sender("dist", model, num_workers=1, shared_memory=False, timeout=20.0) as sender:
        address = sender.address(0)
        with closing(Relay(address)) as relay, Receiver(relay.address, copy) as receiver:
            pending = sender.send_async()
            assert receiver.receive() == 1
            assert pending.wait().updated == (0,)
        for heard in relay.heard.values():
            assert b"proof" in heard
            assert address.token.encode() not in heard
        # To the trainer again, as the worker.
        with socket.create_connection((address.endpoint.host, address.endpoint.port)) as connection:
            connection.sendall(relay.heard["worker"])
            with closing(Channel(connection)) as channel, pytest.raises(ConnectionError):
                wait_for_the_end(channel)
        with Receiver(address, copy) as receiver:
            sender.send_async()
            assert receiver.receive() == 2
    # To a worker, as the trainer.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = replace(address.endpoint, port=listener.getsockname()[1], local="")

        def replay() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(relay.heard["trainer"])
                connection.recv(4096)

        thread = threading.Thread(target=replay)
        thread.start()
        with pytest.raises(SenderLostError, match="does not know its token"):
            Receiver(replace(address, endpoint=endpoint), copy)
        thread.join(10)


def test_a_worker_of_an_older_version_is_told_what_to_type() -> None:
    with Sender("dist", {"w": torch.ones(4)}, num_workers=1) as sender:
        address = sender.address(0)
        connection = socket.create_connection((address.endpoint.host, address.endpoint.port))
        with closing(Channel(connection)) as channel:
            channel.send({"type": "hello", "token": address.token, "worker": 0, "pid": 1})
            answer = channel.receive(10.0)
            assert answer is not None
            assert "pip install --upgrade sync-core" in answer["reason"]


def test_a_trainer_of_an_older_version_is_named() -> None:
    with Sender("dist", {"w": torch.ones(4)}, num_workers=1) as sender:
        address = sender.address(0)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def hang_up() -> None:
            # An older sender expects the token itself in a hello.
            with closing(Channel(listener.accept()[0])) as channel:
                assert "token" not in (channel.receive(10.0) or {})

        hung_up = pool.submit(hang_up)
        endpoint = replace(address.endpoint, port=listener.getsockname()[1], local="")
        with pytest.raises(SenderLostError, match=r"older sync-core than .* pip install --upgrade"):
            Receiver(replace(address, endpoint=endpoint), {"w": torch.zeros(4)})
        hung_up.result()
