"""Readers of each format get the inputs of `tests/corpora`, and changed ones.

`make fuzz KEEP=1` adds the inputs that reach new steps to the corpora.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch
from conftest import FUZZ_SEED
from torch import nn

from sync_core import (
    Address,
    Answer,
    ApplyContext,
    Layout,
    Payload,
    PluginNotFoundError,
    Sender,
    Update,
)
from sync_core.errors import AddressError, LayoutMismatchError, OptionError, PayloadError
from sync_plugin_dist.protocol import Transfer
from sync_plugin_dist.rendezvous import read_key
from sync_plugin_scale.increments.patch import Patch
from sync_plugin_scale.shards.endpoint import HeldTensor
from sync_plugin_scale.shards.request import Request
from sync_plugin_std import Zstd
from sync_plugin_std.history import check_history, read_history
from sync_plugin_std.local import Channel, ControlPage
from sync_plugin_store import load_checkpoint
from sync_plugin_store.chunks import read_chunks
from sync_plugin_store.errors import StoreError
from sync_plugin_store.format import Head, Manifest, Piece
from sync_plugin_store.holdings import JoinedHoldings
from sync_plugin_store.keys import PARTS_PURPOSE, SigningKey
from sync_plugin_store.leases import Lease
from sync_plugin_store.records import RankHolding, RankPart, Session, pieces_of_record
from sync_plugin_store.web import serve
from sync_testing.corpora import explore, read_corpus, write_corpus
from sync_testing.report import read_report
from sync_tools import StatusServer
from sync_tools.commands import report

CORPORA = Path(__file__).parents[1] / "corpora"
ROUNDS = 2000 if FUZZ_SEED in os.environ else 150
KEY = SigningKey.generate()
HELD = [HeldTensor("w", torch.float32, ((0, 4), (0, 2)), (8, 2))]
LAYOUT = Layout.of({"weight": torch.zeros(4, 2), "bias": torch.zeros(2)})
MANIFEST = Manifest(
    run="0" * 32, version=1, base=0, created=0.0, pieces=(Piece("0" * 64, 8), Piece("1" * 64, 999))
)


@dataclass(frozen=True)
class Format:
    """The reader of a format, and the errors that it may raise.

    Args:
        read: reads it, in its own directory.
        expected: the errors that the reader documents.
    """

    read: Callable[[bytes, Path], object]
    expected: tuple[type[Exception], ...] = ()


def read_payload(data: bytes, _: Path) -> None:
    tensors = Payload.from_bytes(data, version=1).tensors
    assert sum(tensor.nbytes for tensor in tensors) <= len(data)


def read_frames(data: bytes, _: Path) -> None:
    ours, theirs = socket.socketpair()
    with closing(Channel(ours)) as channel, theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        while channel.receive(0.0) is not None:
            pass


def read_page(data: bytes, _: Path) -> None:
    with closing(ControlPage.create()) as page:
        for begin, there in ((0, page.read_offer), (2048, page.read_answer)):
            # With the right checksum, as a worker can compute it.
            size = 24 if begin == 0 else 192
            content = data[:size].ljust(size, b"\0")
            record = content + zlib.crc32(content).to_bytes(4, "little")
            start = begin or 64
            page._bytes[start : start + len(record)] = record
            there()


def read_patch(data: bytes, _: Path) -> None:
    body = np.zeros(64, np.uint8)
    tensor = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)
    Patch.from_tensor(tensor, len(body)).apply(body)


def read_request(data: bytes, _: Path) -> None:
    Request.from_text(base64.b85encode(zlib.compress(data)).decode(), HELD)


def read_compressed(data: bytes, _: Path) -> None:
    content = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)
    context = ApplyContext(
        model_id="policy",
        version=1,
        worker_id=0,
        zero_copy=False,
        partial=False,
        layout=LAYOUT,
    )
    next(Zstd().apply_weights(Update.of({"__zstd__": content}), context))


def read_events(data: bytes, folder: Path) -> None:
    path = folder / "history.jsonl"
    path.write_bytes(data + b"\n")
    check_history(read_history([path]))


def read_reports(data: bytes, folder: Path) -> None:
    path = folder / "reports.jsonl"
    path.write_bytes(data + b"\n")
    report.page_of(path)


def read_results(data: bytes, folder: Path) -> None:
    path = folder / "conformance.json"
    path.write_bytes(data)
    read_report(path)


def read_head(data: bytes, _: Path) -> None:
    Head.from_bytes(f"ed25519 {KEY.public} {KEY.sign(data)}\n".encode() + data, KEY.public)


def read_record(data: bytes, _: Path) -> None:
    record = f"ed25519 {KEY.public} {KEY.sign(data, PARTS_PURPOSE)}\n".encode() + data
    pieces_of_record(record, KEY.public)
    for kind in (Session, RankHolding, RankPart):
        with suppress(PayloadError):
            kind.from_bytes(record, KEY.public)


def read_index(data: bytes, folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_bytes(data)
    load_checkpoint(str(folder), nn.Linear(2, 1), timeout=0.1)


FORMATS = {
    "header": Format(lambda data, _: Layout.from_header(data), (PayloadError,)),
    "payload": Format(read_payload, (PayloadError,)),
    "answer": Format(lambda data, _: Answer.from_message(json.loads(data)), (ValueError,)),
    "frames": Format(read_frames, (ConnectionError, TimeoutError)),
    "address": Format(
        lambda data, _: Address.from_json(data.decode("latin-1")),
        (AddressError, PluginNotFoundError),
    ),
    "page": Format(read_page, (ValueError,)),
    "patch": Format(read_patch, (PayloadError,)),
    "request": Format(read_request, (PayloadError,)),
    "compressed": Format(read_compressed, (PayloadError,)),
    "transfer": Format(
        lambda data, _: Transfer.from_message(json.loads(data), 1 << 20),
        (ValueError, LookupError, TypeError),
    ),
    "key": Format(lambda data, _: read_key(json.loads(data)), (ValueError, LookupError, TypeError)),
    "head": Format(read_head, (PayloadError,)),
    "manifest": Format(lambda data, _: Manifest.from_bytes(data), (PayloadError,)),
    "chunks": Format(lambda data, _: read_chunks(data, MANIFEST), (PayloadError,)),
    "holdings": Format(lambda data, _: JoinedHoldings.from_bytes(data), (PayloadError,)),
    "record": Format(read_record),
    "lease": Format(lambda data, _: Lease.of(data)),
    "index": Format(read_index, (PayloadError, StoreError, LayoutMismatchError)),
    "history": Format(read_events, (OptionError,)),
    "reports": Format(read_reports, (OptionError,)),
    "results": Format(read_results, (ValueError,)),
}


@pytest.mark.fuzz
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", FORMATS)
def test_a_reader_raises_what_it_documents_and_takes_little(
    name: str, seed: int, tmp_path: Path
) -> None:
    read, expected = FORMATS[name].read, FORMATS[name].expected
    path = CORPORA / f"{name}.jsonl"
    corpus = read_corpus(path)
    found = explore(
        lambda data: read(data, tmp_path), corpus, expected=expected, rounds=ROUNDS, seed=seed
    )
    if os.environ.get("SYNC_FUZZ_KEEP"):
        write_corpus(path, [*corpus, *found])


@contextmanager
def serving(name: str, folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the address of a server, and a request that it answers."""
    if name == "served":
        with serve(str(folder)) as url:
            (folder / "HEAD").write_bytes(b"of the run")
            yield url, b"GET /HEAD HTTP/1.0\r\n\r\n"
    else:
        with (
            Sender("thread", nn.Linear(2, 1), num_workers=1) as sender,
            StatusServer(sender) as status,
        ):
            yield status.address, f"GET {urlsplit(status.address).path} HTTP/1.0\r\n\r\n".encode()


def ask(address: str, request: bytes) -> bytes:
    """Return all that a server answers before it hangs up."""
    parts = urlsplit(address)
    answer = b""
    with (
        suppress(ConnectionError),
        socket.create_connection((parts.hostname, parts.port), 30) as line,
    ):
        line.sendall(request)
        line.shutdown(socket.SHUT_WR)
        while part := line.recv(1 << 16):
            answer += part
    return answer


@pytest.mark.fuzz
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["served", "status"])
def test_a_server_answers_others_whatever_it_is_asked(name: str, seed: int, tmp_path: Path) -> None:
    with serving(name, tmp_path) as (address, honest):
        explore(
            lambda data: ask(address, data),
            [honest, *read_corpus(CORPORA / "http.jsonl")],
            rounds=ROUNDS,
            seed=seed,
        )
        assert b" 200 OK\r\n" in ask(address, honest)
