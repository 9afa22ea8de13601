"""Strangers, and peers that break the protocol, are refused."""

from __future__ import annotations

import json
import os
import pickle
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sync_core import Layout, Payload, TransportContext
from sync_core.errors import PayloadError
from sync_core.transports import Block
from sync_plugin_std.local import Channel, Message, Peer, Publisher, ServingTransport, shake_hands

exploded: list[str] = []


class Bomb:
    """Explodes when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return exploded.append, ("boom",)


BOMB = pickle.dumps(Bomb())


@pytest.fixture(autouse=True)
def unharmed() -> Iterator[None]:
    exploded.clear()
    yield
    assert exploded == []


def header(content: object) -> bytes:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return len(text).to_bytes(8, "little") + text


def entry(start: int, stop: int, shape: Any, dtype: Any = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


META = "__metadata__"
BAD_HEADERS: dict[str, object] = {
    "nothing": b"",
    "a pickle": BOMB,
    "no object": [1, 2],
    "nested too deep": b"[" * 100_000,
    "cut off": b'{"a":{"dtype":"U8"',
    "no text": b'{"\xff":1}',
    "half a surrogate pair": b'{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
    "a name twice": b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
    b'"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
    "no entry": {"a": None},
    "an unknown dtype": {"a": entry(0, 1, [1], "OBJECT")},
    "a dtype that is not a text": {"a": entry(0, 1, [1], ["U8"])},
    "a negative dimension": {"a": entry(0, 1, [-1, -1])},
    "true for a dimension": {"a": entry(0, 1, [True])},
    "a fraction of a dimension": {"a": entry(0, 1, [1.0])},
    "infinite dimensions": b'{"a":{"dtype":"U8","shape":[1e999],"data_offsets":[0,1]}}',
    "a number of 5000 digits": b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b"]}}",
    "more bytes than it has": {"a": entry(0, 4, [1])},
    "an end before the start": {"a": entry(4, 0, [1])},
    "sizes that overflow": {"a": entry(0, 0, [1 << 32, 1 << 32])},
    "sizes that overflow, times nothing": {"a": entry(0, 0, [1 << 32, 1 << 32, 0])},
    "one dimension that overflows, times nothing": {"a": entry(0, 0, [1 << 70, 0])},
    "too many dimensions": {"a": entry(0, 1, [1] * 100)},
    "an offset that overflows": {"a": entry(1 << 64, 1 << 64, [0])},
    "a body that is not there": {"a": entry(0, 1 << 40, [1 << 40])},
    "tensors that overlap": {"a": entry(0, 4, [4]), "b": entry(2, 6, [4])},
    "a tensor within another": {"a": entry(0, 8, [8]), "b": entry(2, 4, [2])},
    "the same bytes for two": {"a": entry(0, 4, [4]), "b": entry(0, 4, [4])},
    "metadata that is invalid": {META: 5, "a": entry(0, 1, [1])},
    "tied to nothing": {META: {"sync.aliases": '{"b":"c"}'}, "a": entry(0, 1, [1])},
    "tied to a list": {META: {"sync.aliases": '{"b":["a"]}'}, "a": entry(0, 1, [1])},
    "tied, and a list": {META: {"sync.aliases": '["b"]'}, "a": entry(0, 1, [1])},
    "tied to a number": {META: {"sync.aliases": "3"}, "a": entry(0, 1, [1])},
    "raw and nested": {META: {"sync.raw": "[" * 100_000}, "a": entry(0, 1, [1])},
    "raw of no dtype": {META: {"sync.raw": '{"a":[[],[1]]}'}, "a": entry(0, 1, [1])},
    "raw of other size": {
        META: {"sync.raw": '{"a":["torch.complex128",[1]]}'},
        "a": entry(0, 1, [1]),
    },
}


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_headers_that_contradict_themselves(name: str) -> None:
    with pytest.raises(PayloadError):
        _ = Payload.from_bytes(header(BAD_HEADERS[name]) + bytes(16), version=1).tensors


@pytest.mark.parametrize("claimed", [0, 7, 1 << 20, 1 << 32, (1 << 64) - 1])
def test_a_length_that_is_not_the_headers_is_refused_before_it_is_read(claimed: int) -> None:
    text = header({"a": entry(0, 1, [1])})[8:]
    data = claimed.to_bytes(8, "little") + text + b"\0"
    with pytest.raises(PayloadError):
        Payload.from_bytes(data, version=1)
    with pytest.raises(PayloadError):
        Layout.from_header(data)


GOOD = Payload(
    1,
    Layout.of({"a": torch.ones(3), "b": torch.ones(2, 2, dtype=torch.complex128)}),
    (torch.ones(3), torch.ones(2, 2, dtype=torch.complex128)),
).to_bytes()


def read(data: bytes) -> None:
    """Read what may be no payload, and then is refused."""
    try:
        tensors = Payload.from_bytes(data, version=1).tensors
    except PayloadError:
        return
    assert sum(tensor.nbytes for tensor in tensors) <= len(data)


NUMBERS = st.one_of(
    st.integers(-2, 40), st.integers(), st.sampled_from([1 << 31, 1 << 62, 1 << 63, 1 << 64])
)
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=4) | NUMBERS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["U8", "F32", "BF16", "F64", "OBJECT"]) | JSON,
        "shape": st.lists(NUMBERS, max_size=4) | JSON,
        "data_offsets": st.tuples(NUMBERS, NUMBERS) | JSON,
    }
)
RAW = st.dictionaries(
    st.sampled_from("ab"),
    st.tuples(st.sampled_from(["torch.complex128", "torch.float32"]), st.lists(NUMBERS)) | JSON,
)
METADATA = st.fixed_dictionaries(
    {}, optional={"sync.aliases": JSON.map(json.dumps), "sync.raw": RAW.map(json.dumps)}
)


@pytest.mark.fuzz
@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from("abc"), ENTRIES | JSON), METADATA | JSON, st.booleans())
def test_headers_of_any_content(content: dict[str, Any], metadata: Any, has_metadata: bool) -> None:
    read(header(content | ({META: metadata} if has_metadata else {})) + bytes(64))


class Served(ServingTransport[Peer]):
    """A transport whose workers say nothing of use."""

    def __init__(self, *listeners: socket.socket) -> None:
        self.publisher = Publisher(Block.allocate, 64, 2, [0], timeout=1.0)
        super().__init__("the token", self.publisher, Peer, listeners)

    def address(self, worker_id: int) -> None: ...

    def send(self, payload: Payload, worker_ids: Any) -> Any: ...

    def welcome(self, peer: Peer) -> None:
        self.tell(peer, {"type": "welcome"})

    def offer_peer(self, peer: Peer) -> None: ...

    def handle(self, peer: Peer, message: Message) -> None:
        peer.seen = int(message["version"])

    def join(self) -> Channel:
        """A worker that keeps to the protocol."""
        mine, theirs = socket.socketpair()
        self.connect(theirs)
        channel = Channel(mine)
        shake_hands(channel, "the token", 0, 10.0)
        assert channel.receive(10) == {"type": "welcome"}
        return channel


@pytest.fixture
def served() -> Iterator[Served]:
    transport = Served()
    yield transport
    transport.close()


def is_hung_up(connection: socket.socket) -> bool:
    connection.settimeout(10)
    try:
        while connection.recv(4096):
            pass
    except ConnectionError:
        pass
    return True


def framed(message: object) -> bytes:
    text = message if isinstance(message, bytes) else json.dumps(message).encode()
    return len(text).to_bytes(4, "little") + text


HELLO = {"type": "hello", "worker": 0, "pid": 1, "nonce": "0" * 64}
STRANGERS: dict[str, bytes] = {
    "a pickle": BOMB,
    "a pickle in a message": framed(BOMB),
    "noise": bytes(range(256)) * 20,
    "a message of four gigabytes": b"\xff\xff\xff\xff",
    "a long message before hello": (1 << 19).to_bytes(4, "little"),
    "no object": framed([1]),
    "nested": framed(b"[" * 4000),
    "no type": framed({}),
    "no hello": framed({"type": "take"}),
    "the token itself": framed({"type": "hello", "token": "the token", "worker": 0, "pid": 1}),
    "no nonce": framed({"type": "hello", "worker": 0, "pid": 1}),
    "a list for a nonce": framed(HELLO | {"nonce": ["0"]}),
    "a short nonce": framed(HELLO | {"nonce": "0"}),
    "half a surrogate pair": framed(HELLO) + framed(b'{"type":"proof","proof":"\\ud800"}'),
    "a wrong proof": framed(HELLO) + framed({"type": "proof", "proof": "0" * 64}),
    "no proof": framed(HELLO) + framed({"type": "proof"}),
    "a second hello": framed(HELLO) * 2,
    "a message without a proof": framed(HELLO) + framed({"type": "take"}),
    "an infinite worker": framed(b'{"type":"hello","nonce":"0","worker":1e999,"pid":1}'),
    "no process": framed({"type": "hello", "worker": 0, "nonce": "0" * 64}),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_strangers_are_hung_up_on_and_others_served(served: Served, name: str) -> None:
    worker = served.join()
    mine, theirs = socket.socketpair()
    with mine:
        served.connect(theirs)
        mine.sendall(STRANGERS[name])
        assert is_hung_up(mine)
    if "worker" not in name and "process" not in name:
        worker.send({"type": "answer", "version": 3})
        assert worker.receive(0.01) is None
    worker.close()
    served.join().close()


@pytest.mark.parametrize(
    "message",
    [{"type": "answer"}, b'{"version":1e999}', {"version": None}, {"version": [1]}, BOMB, b"[]"],
    ids=repr,
)
def test_workers_that_do_not_keep_to_the_protocol_are_lost(served: Served, message: Any) -> None:
    channel = served.join()
    channel._socket.sendall(framed(message))
    assert is_hung_up(channel._socket)
    channel.close()
    served.join().close()


def test_descriptors_that_nobody_asked_for(served: Served) -> None:
    mine, theirs = socket.socketpair()
    with mine, open(os.devnull, "rb") as file:
        before = len(os.listdir("/proc/self/fd"))
        served.connect(theirs)
        try:
            for byte in (4000).to_bytes(4, "little") + bytes(50):
                socket.send_fds(mine, [bytes([byte])], [file.fileno()] * 4)
        except OSError:
            pass
        assert is_hung_up(mine)
        assert len(os.listdir("/proc/self/fd")) <= before
    served.join().close()


@pytest.fixture
def listening() -> Iterator[tuple[Served, str]]:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    name = f"\0sync-test-{os.getpid()}-{time.monotonic_ns()}"
    listener.bind(name)
    listener.listen(256)
    transport = Served(listener)
    yield transport, name
    transport.close()


def dial(name: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(name)
    return connection


@pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")
def test_strangers_who_say_nothing_make_room_for_others(listening: tuple[Served, str]) -> None:
    _, name = listening
    silent = [dial(name) for _ in range(129)]
    try:
        assert is_hung_up(silent[0])
        worker = Channel(dial(name))
        shake_hands(worker, "the token", 0, 10.0)
        assert worker.receive(10) == {"type": "welcome"}
        worker.close()
    finally:
        for connection in silent:
            connection.close()


@pytest.mark.skipif(
    sys.platform != "linux" or os.getuid() != 0, reason="only root can change its user"
)
def test_other_users_are_hung_up_on_whatever_they_know(listening: tuple[Served, str]) -> None:
    _, name = listening
    script = (
        "import os, socket, sys\n"
        "os.setuid(65534)\n"
        "s = socket.socket(socket.AF_UNIX)\n"
        "s.settimeout(10)\n"
        "s.connect('\\0' + sys.argv[1])\n"
        "try:\n"
        "    s.send(bytes.fromhex(sys.argv[2]))\n"
        "    sys.exit(0 if s.recv(10) == b'' else 1)\n"
        "except ConnectionError:\n"
        "    sys.exit(0)\n"
    )
    arguments = [sys.executable, "-c", script, name[1:], framed(HELLO).hex()]
    assert os.spawnv(os.P_WAIT, sys.executable, arguments) == 0


def test_nothing_prints_a_token() -> None:
    context = TransportContext(
        side="sender", scheme="shm", model_id="policy", token="c0ffee", timeout=1.0
    )
    assert "c0ffee" not in repr(context)
