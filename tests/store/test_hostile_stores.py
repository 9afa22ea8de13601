"""A reader of a hostile store takes no more memory and time than its model gives reason for."""

from __future__ import annotations

import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.store.linears import fill, model, values

from sync_core import Payload, Receiver, Sender, SyncError, Update
from sync_core.errors import PayloadError
from sync_plugin_store import Run, StoreError, load_checkpoint, reading, serve
from sync_plugin_store.format import HEAD, File, Head, Manifest, Piece, digest_of
from sync_plugin_store.keys import SigningKey
from sync_plugin_store.objects import Directory, open_objects

MB = 1 << 20


class FalseTrainer:
    """Writes what it likes into a run, with the run's key."""

    def __init__(self, folder: Path) -> None:
        self._place = Directory(folder / "run", "run")
        with Sender(
            "store", model(1.0, 2), url=str(folder / "run"), key=str(folder / "key.pem")
        ) as sender:
            sender.send()
            self.address = sender.address()
        self._key = SigningKey.of_file(folder / "key.pem")
        self.run = self.address.endpoint.run

    def piece(self, data: bytes) -> Piece:
        digest = digest_of(data)
        self._place.put(f"objects/{digest}", data)
        return Piece(digest, len(data))

    def manifest(self, data: bytes) -> str:
        digest = digest_of(data)
        self._place.put(f"manifests/{digest}.json", data)
        return digest

    def publish(self, *manifests: Manifest | bytes) -> None:
        found = self._place.look(HEAD)
        assert found is not None
        head = Head.from_bytes(found.data, self._key.public)
        versions = {
            number: self.manifest(each if isinstance(each, bytes) else each.to_bytes())
            for number, each in enumerate(manifests, 2)
        }
        head = replace(head, sequence=9, version=max(versions), versions=versions, closed=False)
        self._place.swap(HEAD, head.to_bytes(self._key), found.tag)

    def chain(self) -> None:
        update = Update.of({"weight": torch.zeros(40 * MB, dtype=torch.uint8)})
        data = Payload(2, update.layout, update.source).to_bytes()
        header = len(update.layout.header)
        pieces = self.piece(data[:header]), self.piece(data[header:])
        chain = [Manifest(run=self.run, version=2, anchor=True, pieces=pieces)]
        for v in range(3, 20):
            base = digest_of(chain[-1].to_bytes())
            chain.append(
                Manifest(run=self.run, version=v, base=v - 1, base_digest=base, pieces=pieces)
            )
        self.publish(*chain)

    def holdings(self) -> None:
        listed = self.piece(b"[" + b"[]," * (20 * MB) + b"0]")
        ranks = (File((self.piece(b"x"),)),)
        self.publish(Manifest(run=self.run, version=2, ranks=ranks, holdings=listed))

    def header(self) -> None:
        text = b'{"a":[' + b"[]," * (15 * MB) + b"0]}"
        pieces = self.piece(len(text).to_bytes(8, "little")), self.piece(text)
        self.publish(Manifest(run=self.run, version=2, pieces=pieces))

    def lists(self) -> None:
        made = Manifest(run=self.run, version=2, pieces=(self.piece(b"x"),)).to_bytes()
        self.publish(made[:-1] + b',"more":[' + b"[]," * (5 * MB) + b"0]}")

    def pieces(self) -> None:
        one = self.piece(bytes(256))
        self.publish(Manifest(run=self.run, version=2, pieces=(one,) * 200_000))


def peak_nbytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


@pytest.mark.parametrize("what", ["chain", "holdings", "header", "lists", "pieces"])
def test_a_false_trainer_takes_no_memory_and_no_time_of_a_reader(tmp_path: Path, what: str) -> None:
    trainer, copy = FalseTrainer(tmp_path), model(9.0, 2)
    getattr(trainer, what)()
    Path("/proc/self/clear_refs").write_text("5")
    before, begin = peak_nbytes(), time.monotonic()
    with Receiver(trainer.address, copy, timeout=5.0) as receiver, suppress(SyncError):
        assert receiver.receive(1.0) is None
    assert time.monotonic() - begin < 5.0
    assert peak_nbytes() - before < 260 * MB
    assert values(copy) == {9.0}


@pytest.mark.parametrize("pinned", [False, True])
def test_a_chain_that_does_not_fit_in_memory_is_read_in_parts(
    tmp_path: Path, pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that each version of the chain is read for itself.
    monkeypatch.setattr(reading, "_SHARE", 1 << 60)
    source, copy = model(0.0), model(9.0)
    with Sender("store", source, url=str(tmp_path), anchor_every=6) as sender:
        for version in range(1, 6):
            with torch.no_grad():
                source.bias[version] = version
            sender.send()
        with Run(str(tmp_path), Run.key_of(sender)) as run:
            address = run.address(version=4) if pinned else run.address()
            assert [run.manifest(v).base for v in run.versions()] == [0, 1, 2, 3, 4]
        with Receiver(address, copy) as receiver:
            assert receiver.receive(10.0) == (4 if pinned else 5)
            assert copy.bias[4] == 4.0
            assert copy.bias[5] == (0.0 if pinned else 5.0)
            if not pinned:
                fill(source, 3.0)
                sender.send()
                assert receiver.receive(10.0) == 6
                assert values(copy) == {3.0}


def test_an_increment_of_a_version_that_is_not_an_anchor_is_refused(tmp_path: Path) -> None:
    trainer = FalseTrainer(tmp_path)
    pieces = (trainer.piece(bytes(64)),)
    base = Manifest(run=trainer.run, version=2, pieces=pieces)
    digest = digest_of(base.to_bytes())
    trainer.publish(
        base, Manifest(run=trainer.run, version=3, base=2, base_digest=digest, pieces=pieces)
    )
    with (
        Receiver(trainer.address, model(9.0, 2)) as receiver,
        pytest.raises(PayloadError, match="version 2, which is not an anchor"),
    ):
        receiver.receive(5.0)


class Odd(socketserver.BaseRequestHandler):
    """Hangs, drips or redirects, and notes that it was asked."""

    server: Any

    def handle(self) -> None:
        self.request.recv(1 << 12)
        self.server.asked.append(self.server.how)
        with suppress(OSError):
            getattr(self, self.server.how)()

    def hangs(self) -> None:
        self.server.stopped.wait()

    def drips(self) -> None:
        self.request.sendall(b"HTTP/1.1 200 OK\r\nX: ")
        while not self.server.stopped.wait(0.1):
            self.request.sendall(b"x")

    def redirects(self) -> None:
        text = f"HTTP/1.1 302 Found\r\nLocation: {self.server.other}/HEAD\r\n"
        self.request.sendall(f"{text}Content-Length: 0\r\nConnection: close\r\n\r\n".encode())

    loops = redirects


@contextmanager
def server_that(how: str, other: str = "") -> Iterator[tuple[str, list[str]]]:
    """A server at its URL, and what it was asked; it redirects to another one."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Odd) as made:
        server: Any = made
        server.daemon_threads, server.how, server.other = True, how, other
        server.stopped, server.asked = threading.Event(), []
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", server.asked
        finally:
            server.stopped.set()
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("how", ["hangs", "drips", "redirects", "loops"])
def test_no_call_takes_longer_than_its_deadline_whatever_a_server_does(
    tmp_path: Path, how: str
) -> None:
    address = FalseTrainer(tmp_path).address
    with (
        server_that("hangs") as (elsewhere, asked),
        server_that(how, elsewhere if how == "redirects" else "") as (url, _),
    ):
        address = replace(address, endpoint=replace(address.endpoint, urls=[url]))
        receiver = Receiver(address, model(9.0, 2), timeout=20.0)
        for seconds in (0.0, 0.0, 0.5):
            begin = time.monotonic()
            with suppress(StoreError):
                assert receiver.receive(seconds) is None
            assert time.monotonic() - begin < seconds + 1.0
        receiver.close()
        begin = time.monotonic()
        redirects = how in {"redirects", "loops"}
        with pytest.raises(StoreError, match="redirect" if redirects else "cannot read"):
            load_checkpoint(url, model(), timeout=1.0)
        assert time.monotonic() - begin < 12.0
        assert not asked


def test_a_redirect_to_a_server_that_was_given_is_followed(tmp_path: Path) -> None:
    (tmp_path / HEAD).write_bytes(b"head")
    with serve(str(tmp_path)) as given, server_that("redirects", given) as (url, _):
        found = open_objects(url, 5.0, redirects=[given]).look(HEAD)
        assert found is not None
        assert found.data == b"head"
