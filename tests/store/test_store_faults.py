"""Faults between a trainer and its readers: nothing wrong is committed, and the rest continues."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.store.linears import files, fill, model, tamper, values
from tests.store.web_faults import faulty, files_served
from torch import nn

from sync_core import ClosedError, Payload, Receiver, Sender, Update
from sync_core.errors import PayloadError
from sync_plugin_store import (
    RolledBackError,
    Run,
    SignatureError,
    StoreError,
    serve,
)
from sync_plugin_store.format import HEAD, Head, object_name
from sync_plugin_store.holdings import Wanted
from sync_plugin_store.keys import SigningKey
from sync_plugin_store.objects import Directory, open_objects
from sync_plugin_store.parts import PartFetch, Parts
from sync_plugin_store.publisher import RunPublisher
from sync_plugin_store.reader import Fetch, RunReader


def payload_of(version: int) -> Payload:
    update = Update.of({"weight": torch.full((4000,), float(version))})
    return Payload(version, update.layout, update.source)


class Stopping(Directory):
    """A directory in which Ctrl-C or a kill comes at a step: half of an object is written."""

    def __init__(self, path: Path, steps: int, *, killed: bool) -> None:
        super().__init__(path, str(path))
        self._steps, self._killed = steps, killed

    def put(self, name: str, data: bytes | memoryview) -> None:
        self._steps -= 1
        if self._steps == -1 or (self._killed and self._steps < 0):
            part = (self.path / name).with_name(".sync-store-0123456789abcdef")
            part.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(bytes(data[: len(data) // 2]))
            raise KeyboardInterrupt
        super().put(name, data)


@pytest.mark.parametrize("killed", [True, False])
def test_a_trainer_that_ends_at_any_step_leaves_whole_versions(
    tmp_path: Path, killed: bool
) -> None:
    key = SigningKey.generate()

    steps, done = 0, False
    while not done:
        folder = tmp_path / str(steps)
        RunPublisher(Directory(folder, "run"), key, piece_nbytes=4096).publish(payload_of(1))
        place = Stopping(folder, steps, killed=killed)
        ended = RunPublisher(place, key, piece_nbytes=4096, grace=0.0)
        try:
            ended.publish(payload_of(2))
            done = True
        except KeyboardInterrupt:
            if not killed:
                ended.close()
        reader = RunReader([Directory(folder, "run")], key.public, timeout=5.0)
        head = reader.look()
        assert head is not None
        assert head.version == (2 if done else 1)
        arrived = threading.Event()
        fetch = reader.fetch(reader.manifest(head.version), arrived.set)
        while not fetch.ended:
            assert arrived.wait(5.0)
            arrived.clear()
        tensor = fetch.result().memory[-16000:].view(torch.float32)
        assert set(tensor.tolist()) == {float(head.version)}
        reader.close()
        for path in (*(folder / "objects").iterdir(), *(folder / "manifests").iterdir()):
            os.utime(path, (1.0, 1.0))
        again = RunPublisher(Directory(folder, "run"), key, piece_nbytes=4096, grace=60.0)
        again.publish(payload_of(3))
        reader = RunReader([Directory(folder, "run")], key.public, timeout=5.0)
        assert reader.look() is not None
        manifests = [reader.manifest(version) for version in again.head.versions]
        pieces = {p.digest for manifest in manifests for p in manifest.pieces}
        again.collect()
        left = {path.name for path in (folder / "objects").iterdir()}
        # A kill leaves objects that no manifest has named: these may belong to others.
        assert left >= pieces if killed else left == pieces
        assert len(list((folder / "manifests").iterdir())) == len(manifests)
        reader.close()
        steps += 1


@pytest.mark.parametrize("how", ["deleted", "truncated", "changed", "longer"])
@pytest.mark.parametrize("part", ["objects", "manifests"])
@pytest.mark.parametrize("http", [False, True], ids=["directory", "http"])
def test_nothing_that_was_tampered_with_is_committed(
    tmp_path: Path, how: str, part: str, http: bool
) -> None:
    policy, copy = model(1.0), model(9.0)
    with Sender("store", policy, url=str(tmp_path)) as sender, ExitStack() as ends:
        sender.send()
        address = sender.address()
        if http:
            url = ends.enter_context(serve(str(tmp_path)))
            address = replace(address, endpoint=replace(address.endpoint, urls=[url]))
        with Run(str(tmp_path), Run.key_of(sender)) as run:
            digest = max(run.manifest(1).pieces, key=lambda piece: piece.nbytes).digest
        path = tmp_path / "objects" / digest
        if part == "manifests":
            (path,) = (tmp_path / "manifests").iterdir()
        tamper(path, how)
        receiver = ends.enter_context(Receiver(address, copy, timeout=0.3))
        if how == "longer" and part == "objects" and not http:
            # More bytes than agreed are not read.
            assert receiver.receive(5.0) == 1
            return
        with pytest.raises(PayloadError, match="version 1 cannot be read"):
            receiver.receive(5.0)
        assert values(copy) == {9.0}
        # The next version is read.
        fill(policy, 2.0)
        sender.send()
        assert receiver.receive(5.0) == 2
        assert values(copy) == {2.0}


def test_a_head_of_another_key_is_refused(tmp_path: Path) -> None:
    copy = model(9.0)
    with Sender("store", model(1.0), url=str(tmp_path / "mine")) as sender:
        sender.send()
        with Sender("store", model(2.0), url=str(tmp_path / "false")) as false:
            false.send()
        for part in ("objects", "manifests"):
            shutil.copytree(tmp_path / "false" / part, tmp_path / "mine" / part, dirs_exist_ok=True)
        shutil.copy(tmp_path / "false" / HEAD, tmp_path / "mine" / HEAD)
        with (
            Receiver(sender.address(), copy) as receiver,
            pytest.raises(SignatureError, match="not signed with the key"),
        ):
            receiver.receive(5.0)
        assert values(copy) == {9.0}
        line, _, content = (tmp_path / "false" / HEAD).read_bytes().partition(b"\n")
        with pytest.raises(SignatureError):
            Head.from_bytes(
                line + b"\n" + content.replace(b'"version":1', b'"version":2'), "0" * 64
            )


def test_a_head_that_is_rolled_back_is_noticed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy, copy = model(1.0), model()
    with Sender("store", policy, url=str(tmp_path)) as sender:
        sender.send()
        old = (tmp_path / HEAD).read_bytes()
        fill(policy, 2.0)
        sender.send()
        reader = RunReader(
            [open_objects(str(tmp_path), 5.0)], Run.key_of(sender), timeout=5.0, stale_after=0.0
        )
        with Receiver(sender.address(), copy) as receiver:
            assert receiver.receive() == 2
            reader.look()
            new = (tmp_path / HEAD).read_bytes()
            (tmp_path / HEAD).write_bytes(old)
            assert receiver.receive(0.1) is None
            assert "has an older head" in caplog.text
            head = reader.look()
            assert head is not None
            assert head.version == 2
            with pytest.raises(RolledBackError, match="has had an older head, of version 1"):
                reader.look()
            (tmp_path / HEAD).write_bytes(new)
            fill(policy, 3.0)
            sender.send()
            assert receiver.receive() == 3
        reader.close()
    assert values(copy) == {3.0}


def test_a_tag_that_two_heads_share_hides_no_version(tmp_path: Path) -> None:
    """Web servers make tags of a size and a time in seconds."""
    policy, copy = model(1.0), model()
    with (
        Sender("store", policy, url=str(tmp_path), keep=1, poll=0.01) as sender,
        files_served(tmp_path) as (url, _),
    ):
        address = sender.address()
        address = replace(address, endpoint=replace(address.endpoint, urls=[url]))
        with Receiver(address, copy) as receiver:
            for version in range(1, 4):
                fill(policy, float(version))
                sender.send()
                assert receiver.receive(10.0) == version
                assert values(copy) == {float(version)}


@pytest.mark.parametrize("status", [429, 503])
def test_throttling_answers_are_tried_again_within_the_deadline(
    tmp_path: Path, status: int
) -> None:
    copy = model()
    with (
        Sender("store", model(1.0), url=str(tmp_path)) as sender,
        faulty(tmp_path) as (url, faults),
    ):
        sender.send()
        address = sender.address()
        address = replace(address, endpoint=replace(address.endpoint, urls=[url]))
        faults.status, faults.refuse = status, 4
        with Receiver(address, copy, timeout=20.0) as receiver:
            assert receiver.receive() == 1
        assert faults.refuse == 0
        assert values(copy) == {1.0}
        faults.refuse = 1 << 30
        with Receiver(address, model(), timeout=0.5) as receiver:
            begin = time.monotonic()
            with pytest.raises(StoreError, match=f"cannot read HEAD in {url}"):
                receiver.receive()
            assert time.monotonic() - begin < 10.0


def test_a_transfer_that_breaks_is_resumed(tmp_path: Path) -> None:
    source, copy = nn.Linear(1024, 1024), nn.Linear(1024, 1024)
    with (
        Sender("store", source, url=str(tmp_path)) as sender,
        faulty(tmp_path) as (url, faults),
    ):
        sender.send()
        address = sender.address()
        address = replace(address, endpoint=replace(address.endpoint, urls=[url]))
        faults.cut = 1
        with Receiver(address, copy, timeout=20.0) as receiver:
            assert receiver.receive() == 1
            nbytes = sum(p.nbytes for p in source.parameters())
        assert faults.cut == 0
        assert faults.ranges
        # A piece of the network's at most came twice.
        assert faults.sent < 1.4 * nbytes
    assert torch.equal(source.weight, copy.weight)


def test_another_mirror_is_asked_where_one_fails(tmp_path: Path) -> None:
    policy, copy = model(1.0), model()
    near, far = tmp_path / "near", tmp_path / "far"
    with Sender("store", policy, url=str(far)) as sender:
        sender.send()
        shutil.copytree(far, near)
        for path in (near / "objects").iterdir():
            tamper(path, "changed")
        with Run(str(near), Run.key_of(sender)) as run:
            named = near / object_name(run._head().address or "")
        # It cannot be read, and says so.
        named.unlink()
        named.mkdir()
        with (
            Run(str(near), Run.key_of(sender), mirrors=[str(far)]) as run,
            serve(str(tmp_path)) as gone,
        ):
            address = run.address(poll=0.01)
        endpoint = replace(address.endpoint, urls=[gone, str(near), str(far)])
        with Receiver(replace(address, endpoint=endpoint), copy, timeout=5.0) as receiver:
            assert receiver.receive() == 1
            assert values(copy) == {1.0}
            # The head of one is older.
            fill(policy, 2.0)
            sender.send()
            assert receiver.receive(20.0) == 2
    assert values(copy) == {2.0}


def test_a_full_disk_leaves_the_last_version(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource", reason="needs limits of Unix")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    policy, copy = nn.Linear(256, 256), nn.Linear(256, 256)
    with (
        Sender("store", policy, url=str(tmp_path)) as sender,
        Receiver(sender.address(), copy) as receiver,
    ):
        sender.send()
        assert receiver.receive() == 1
        fill(policy, 2.0)
        policy.weight.data.normal_()
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, before[1]))
        try:
            with pytest.raises(StoreError, match=r"File too large.*make room there"):
                sender.send()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert receiver.receive(0.05) is None
        assert not [name for name in files(tmp_path) if "/." in name]
        sender.send()
        assert receiver.receive() == 3
    assert torch.equal(policy.weight, copy.weight)


def test_what_becomes_visible_late_is_waited_for(tmp_path: Path) -> None:
    copy, late = model(), tmp_path / "late"
    with Sender("store", model(1.0), url=str(tmp_path / "run")) as sender:
        sender.send()
        address = sender.address()
        late.mkdir()
        shutil.copy(tmp_path / "run" / HEAD, late / HEAD)
        address = replace(address, endpoint=replace(address.endpoint, urls=[str(late)]))
        order: list[Callable[[], object]] = [
            lambda: shutil.copytree(tmp_path / "run" / "manifests", late / "manifests"),
            lambda: shutil.copytree(tmp_path / "run" / "objects", late / "objects"),
        ]
        timers = [threading.Timer(0.1 * (i + 1), show) for i, show in enumerate(order)]
        for timer in timers:
            timer.start()
        with Receiver(address, copy, timeout=20.0) as receiver:
            assert receiver.receive() == 1
        for timer in timers:
            timer.join()
    assert values(copy) == {1.0}


@pytest.mark.parametrize(
    ("options", "timeout"), [({"keep": 1, "grace": 0.0}, 20.0), ({"keep": 2}, 1.0)]
)
def test_a_reader_whose_version_is_broken_continues_with_a_newer_one(
    options: dict[str, Any], timeout: float, tmp_path: Path
) -> None:
    policy, copy = model(1.0), model()
    with Sender("store", policy, url=str(tmp_path), **options) as sender:
        sender.send()
        with Run(str(tmp_path), Run.key_of(sender)) as run:
            digest = max(run.manifest(1).pieces, key=lambda piece: piece.nbytes).digest
        tamper(tmp_path / "objects" / digest, "deleted")
        with Receiver(sender.address(), copy, timeout=timeout) as receiver:
            # It has begun to fetch the first version, which does not come.
            assert receiver.receive(0.2) is None
            fill(policy, 2.0)
            sender.send()
            assert receiver.receive(20.0) == 2
    assert values(copy) == {2.0}


class Interrupting(Directory):
    """Ctrl-C comes when the head is written, before the publisher knows that it is."""

    interrupts = 1

    def swap(self, name: str, data: bytes, tag: str | None) -> str:
        found = super().swap(name, data, tag)
        self.interrupts -= 1
        if self.interrupts >= 0:
            raise KeyboardInterrupt
        return found


def test_the_next_send_works_after_ctrl_c_when_the_head_was_written(tmp_path: Path) -> None:
    publisher = RunPublisher(Interrupting(tmp_path, "run"), SigningKey.generate())
    with pytest.raises(KeyboardInterrupt):
        publisher.publish(payload_of(1))
    publisher.publish(payload_of(2))
    assert list(publisher.head.versions) == [1, 2]
    publisher.close()


def test_a_version_is_named_while_the_trainer_publishes_the_next(tmp_path: Path) -> None:
    key = SigningKey.generate()
    trainer = RunPublisher(Directory(tmp_path, "run"), key)
    trainer.publish(payload_of(1))
    other = RunPublisher(Directory(tmp_path, "run"), key)
    trainer.publish(payload_of(2))
    other.name(1, "best")
    trainer.publish(payload_of(3))
    assert (trainer.head.version, dict(trainer.head.names)) == (3, {"best": 1})
    trainer.close()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("part", ["HEAD", "manifests", "objects"])
def test_a_pipe_in_place_of_an_object_makes_no_call_hang(tmp_path: Path, part: str) -> None:
    copy = model(9.0)
    with Sender("store", model(1.0), url=str(tmp_path)) as sender:
        sender.send()
        found = tmp_path / part
        for path in [found] if part == "HEAD" else list(found.iterdir()):
            path.unlink()
            os.mkfifo(path)
        with (
            Receiver(sender.address(), copy, timeout=0.3) as receiver,
            pytest.raises((PayloadError, StoreError), match="is not a file"),
        ):
            receiver.receive(1.0)
        if part == "HEAD":
            (tmp_path / HEAD).unlink()  # which the sender would have to replace
    assert values(copy) == {9.0}


class Down(Directory):
    """A place that does not answer."""

    def look(self, name: str, tag: str | None = None) -> Any:
        raise StoreError(f"cannot read {name}")

    def read(self, *args: Any, **options: Any) -> bool:
        raise StoreError(f"cannot read {args[0]}")


class Late(Directory):
    """A place in which objects become visible at the third look."""

    looks = 0

    def read(self, *args: Any, **options: Any) -> bool:
        self.looks += 1
        return self.looks > 2 and super().read(*args, **options)


def test_what_becomes_visible_late_is_waited_for_where_another_place_is_down(
    tmp_path: Path,
) -> None:
    key = SigningKey.generate()
    RunPublisher(Directory(tmp_path, "run"), key).publish(payload_of(1))
    places = [Down(tmp_path, "down"), Late(tmp_path, "late")]
    reader = RunReader(places, key.public, timeout=10.0, streams=1)
    assert reader.look() is not None
    piece = reader.manifest(1).pieces[-1]
    memory = bytearray(piece.nbytes)
    reader.read_piece(piece, memoryview(memory), 1)
    assert any(memory)
    reader.close()


def test_a_slow_reader_gets_a_large_object_by_one_request(tmp_path: Path) -> None:
    data = os.urandom(1 << 20) * 64
    digest = hashlib.sha256(data).hexdigest()
    Directory(tmp_path, "run").put(object_name(digest), data)
    with serve(str(tmp_path)) as url:
        connection = HTTPConnection(url.removeprefix("http://"), timeout=10)
        connection.request("GET", f"/{object_name(digest)}")
        answer = connection.getresponse()
        # The server has more to send than the kernel takes.
        time.sleep(0.2)
        assert answer.read() == data
        connection.close()


class Held(Directory):
    """A directory that reads when it is allowed to."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "run")
        self.began, self.allowed = threading.Event(), threading.Event()

    def read(self, *arguments: Any, **options: Any) -> bool:
        self.began.set()
        assert self.allowed.wait(10.0)
        return super().read(*arguments, **options)


@pytest.mark.parametrize("parts", [False, True])
def test_a_version_that_is_read_in_part_is_not_returned_after_the_end(
    tmp_path: Path, parts: bool
) -> None:
    key = SigningKey.generate()
    publisher = RunPublisher(Directory(tmp_path, "run"), key, piece_nbytes=4096)
    publisher.publish(payload_of(1))
    publisher.close()
    held = Held(tmp_path)
    reader = RunReader([held], key.public, streams=1)
    assert reader.look() is not None
    ended, manifest = threading.Event(), reader.manifest(1)
    wanted = Parts((Wanted("weight", "weight", ((0, 4000),), (4000,)),), payload_of(1).layout)
    fetch: Fetch | PartFetch
    if parts:
        fetch = reader.fetch_parts(manifest, ended.set, wanted)
    else:
        fetch = reader.fetch(manifest, ended.set)
    assert held.began.wait(10.0)
    # The first piece comes, and no other is read.
    reader.close()
    held.allowed.set()
    while not fetch.ended:
        assert ended.wait(10.0)
        ended.clear()
    with pytest.raises(ClosedError):
        fetch.result()
