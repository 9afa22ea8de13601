"""Faults of publishers: what stays, what is removed, and how long a send may take."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from tests.store.linears import files, model, tamper, values
from tests.store.test_store_faults import payload_of

from sync_core import OptionError, Receiver, Sender
from sync_plugin_store import Mirror, RolledBackError, Run, StoreError
from sync_plugin_store.format import HEAD, Manifest, Piece
from sync_plugin_store.keys import SigningKey
from sync_plugin_store.leases import Lease
from sync_plugin_store.objects import Directory, Found, ListedObject
from sync_plugin_store.publisher import RunPublisher
from sync_testing.fuzz import find


class Failing(Directory):
    """A directory of which one method fails."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, str(path))
        self.failing, self.failures = "", 0

    def _try(self, method: str) -> None:
        if method == self.failing:
            self.failures += 1
            raise StoreError("the store is down")

    def swap(self, name: str, data: bytes, tag: str | None) -> str:
        self._try("swap")
        return super().swap(name, data, tag)

    def delete(self, name: str) -> None:
        self._try("delete")
        super().delete(name)

    def list(self, prefix: str) -> Iterator[ListedObject]:
        self._try(f"list {prefix}")
        return super().list(prefix)


def publisher_of(sender: Sender) -> RunPublisher:
    (found,) = find(sender, RunPublisher)
    return found


def objects(directory: Path) -> set[str]:
    return {name for name in files(directory) if name.startswith(("objects/", "manifests/"))}


def test_a_version_whose_head_was_not_written_is_removed_later(tmp_path: Path) -> None:
    store = Failing(tmp_path)
    publisher = RunPublisher(store, SigningKey.generate(), keep=1, grace=0.0)
    store.failing = "swap"
    with pytest.raises(StoreError):
        publisher.publish(payload_of(1))
    assert objects(tmp_path)
    store.failing = ""
    for version in (2, 3):
        publisher.publish(payload_of(version))
    # A manifest, a header and a piece.
    assert len(objects(tmp_path)) == 3
    publisher.close()


def test_a_store_that_fails_once_the_head_is_written_fails_no_send(tmp_path: Path) -> None:
    """The version can be read; and one delete that fails is not followed by thousands."""
    store = Failing(tmp_path)
    publisher = RunPublisher(store, SigningKey.generate(), keep=1, grace=0.0, session="0" * 32)
    for version, failing in enumerate(("", "delete", "list objects/"), 1):
        store.failing, store.failures = failing, 0
        publisher.publish(payload_of(version))
        assert store.failures == bool(failing)
    publisher.close()


def test_ranks_keep_what_was_dropped_for_the_grace(tmp_path: Path) -> None:
    """Although it is old: a reader may have begun with it just before it was dropped."""
    store = Directory(tmp_path, "run")
    publisher = RunPublisher(store, SigningKey.generate(), keep=1, grace=600.0, session="0" * 32)
    publisher.publish(payload_of(1))
    publisher.publish(payload_of(2))
    before = objects(tmp_path)
    for name in before:
        os.utime(tmp_path / name, (1.0, 1.0))
    publisher.publish(payload_of(3))
    publisher.collect()
    assert before < objects(tmp_path)
    publisher.close()


def test_an_object_of_a_wrong_clock_ends_no_grace_and_no_lease(tmp_path: Path) -> None:
    store = Directory(tmp_path, "run")
    publisher = RunPublisher(store, SigningKey.generate(), keep=1)
    store.put("leases/one.json", Lease(1, 3600.0).to_bytes())
    publisher.publish(payload_of(1))
    store.put("objects/new", b"a piece of the next version")
    ahead = time.time() + 86400
    for path in (tmp_path / "manifests").iterdir():
        os.utime(path, (ahead, ahead))
    assert publisher.collect() == 0
    publisher.publish(payload_of(2))
    assert sorted(publisher.head.versions) == [1, 2]
    publisher.close()


class Leasing(Directory):
    """A directory in which a reader takes a lease while the head is replaced."""

    lease: Callable[[], object] = staticmethod(lambda: None)

    def swap(self, name: str, data: bytes, tag: str | None) -> str:
        lease, self.lease = self.lease, lambda: None
        lease()
        return super().swap(name, data, tag)


@pytest.mark.parametrize("swaps", [1, 2], ids=["before the head", "before what leaves is dropped"])
def test_a_lease_that_is_granted_during_a_send_keeps_its_version(
    tmp_path: Path, swaps: int
) -> None:
    place, copy = Leasing(tmp_path, "run"), model()
    with ExitStack() as ends:
        sender = ends.enter_context(Sender("store", model(1.0), url=str(tmp_path), keep=1, grace=0))
        publisher_of(sender)._objects = place
        sender.send()
        run = ends.enter_context(Run(str(tmp_path), Run.key_of(sender), timeout=0.3))
        granted = list[bool]()

        def lease() -> None:
            if swaps == 2 and not granted:
                granted.append(False)
                place.lease = lease
                return
            granted[:] = [True]
            with suppress(StoreError):
                ends.enter_context(run.lease(1))
                return
            granted[:] = [False]

        place.lease = lease
        for _ in range(3):
            sender.send()
        # Once the trainer has looked for leases of a version, none is granted.
        assert granted == [swaps == 1]
        assert run.versions() == ((1, 4) if granted[0] else (4,))
        if granted[0]:
            with Receiver(run.address(version=1), copy, timeout=5.0) as receiver:
                assert receiver.receive() == 1
            assert values(copy) == {1.0}


def test_a_lease_that_is_being_written_is_not_removed(tmp_path: Path) -> None:
    publisher = RunPublisher(Directory(tmp_path, "run"), SigningKey.generate(), keep=1)
    (tmp_path / "leases").mkdir()
    (tmp_path / "leases" / ".half").touch()
    for version in (1, 2):
        publisher.publish(payload_of(version))
    assert (tmp_path / "leases" / ".half").exists()
    publisher.close()


def test_a_sender_that_cannot_be_made_closes_no_run(tmp_path: Path) -> None:
    key = str(tmp_path / "key.pem")
    with Sender("store", model(), url=str(tmp_path), key=key) as sender:
        sender.send()
        with pytest.raises(OptionError, match="url must be a directory"):
            Sender("store", model(), url=str(tmp_path), key=key, answers="ftp://host")
        with Run(str(tmp_path), Run.key_of(sender)) as run:
            assert not run._head().closed


def test_a_lock_that_another_process_holds_ends_a_send_in_time(tmp_path: Path) -> None:
    with (
        Sender("store", model(), url=str(tmp_path), timeout=0.2) as sender,
        (tmp_path / ".lock").open("w") as lock,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(StoreError, match=r"another process has held .*\.lock for 0.2 s"):
            sender.send()
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert sender.send().version == 2


def test_what_readers_refuse_is_not_published(tmp_path: Path) -> None:
    publisher = RunPublisher(Directory(tmp_path, "run"), SigningKey.generate())
    pieces = (Piece("0" * 64, 1),) * 250_000
    with pytest.raises(StoreError, match="readers take 16777216 at most; give a larger piece_mb="):
        publisher.commit(Manifest(run=publisher.run, version=1, pieces=pieces))
    assert not files(tmp_path)
    with pytest.raises(OptionError, match="keep must be 5000 at most, got 1000000"):
        Sender("store", model(), url=str(tmp_path), keep=1_000_000)
    with pytest.raises(OptionError, match=r"piece_mb must be a number >= 0\.001, got"):
        Sender("store", model(), url=str(tmp_path), piece_mb=1e-7)


@pytest.mark.timeout(20)
def test_sends_that_were_interrupted_make_no_send_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = RunPublisher(Directory(tmp_path, "run"), SigningKey.generate(), streams=1)

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(publisher.writer._pool, "submit", interrupt)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                publisher.publish(payload_of(1))
    publisher.publish(payload_of(1))
    publisher.close()


class Later(Manifest):
    """A manifest of a later release, with an entry that is not known yet."""

    def to_bytes(self) -> bytes:
        return super().to_bytes()[:-1] + b',"more":1}'


def test_a_mirror_copies_the_bytes_of_manifests_and_asks_for_each_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far, looked = tmp_path / "near", tmp_path / "far", list[str]()
    key = SigningKey.generate()
    publisher = RunPublisher(Directory(far, "run"), key)
    file = publisher.writer.write(payload_of(1), ())
    publisher.commit(Later(run=publisher.run, version=1, pieces=file.pieces))
    publisher.close()
    look = Directory.look

    def note(self: Directory, name: str, tag: str | None = None) -> Found | None:
        looked.append(str(self.path / name))
        return look(self, name, tag)

    with Mirror(str(far), str(near), key.public, poll=600.0) as mirror:
        assert mirror.update() == 1
        monkeypatch.setattr(Directory, "look", note)
        assert mirror.update() == 1
    assert not [name for name in looked if name.startswith(str(far / "manifests"))]
    assert str(far / HEAD) in looked
    assert objects(near) == objects(far)
    for name in objects(far):
        assert (near / name).read_bytes() == (far / name).read_bytes()


def test_a_mirror_that_begins_again_puts_no_older_head_in_place(tmp_path: Path) -> None:
    near, far, key = tmp_path / "near", tmp_path / "far", SigningKey.generate()
    publisher = RunPublisher(Directory(far, "run"), key)
    publisher.publish(payload_of(1))
    older = (far / HEAD).read_bytes()
    publisher.publish(payload_of(2))
    publisher.close()
    with Mirror(str(far), str(near), key.public) as mirror:
        assert mirror.update() == 2
    newer = (near / HEAD).read_bytes()
    (far / HEAD).write_bytes(older)
    with (
        Mirror(str(far), str(near), key.public, poll=600.0) as mirror,
        pytest.raises(RolledBackError, match="has version 2 of the run, and where it is copied"),
    ):
        mirror.update()
    assert (near / HEAD).read_bytes() == newer


def test_a_mirror_that_begins_again_mends_its_copy(tmp_path: Path) -> None:
    near, far, key = tmp_path / "near", tmp_path / "far", SigningKey.generate()
    publisher = RunPublisher(Directory(far, "run"), key)
    publisher.publish(payload_of(1))
    publisher.close()
    for how in ("made", "changed", "truncated"):
        for name in objects(near):
            tamper(near / name, how)
        with Mirror(str(far), str(near), key.public, poll=600.0) as mirror:
            assert mirror.update() == 1
        for name in objects(far):
            assert (near / name).read_bytes() == (far / name).read_bytes()


@pytest.mark.parametrize("how", ["deleted", "truncated"])
def test_a_trainer_that_begins_again_writes_what_was_lost(tmp_path: Path, how: str) -> None:
    """Such as by a machine that lost power before the bytes of an object were on the disk."""
    url, key, policy, copy = str(tmp_path / "run"), str(tmp_path / "key.pem"), model(1.0), model()
    for version in (0, 1):
        with Sender("store", policy, url=url, key=key, version=version) as sender:
            sender.send()
            with Receiver(sender.address(), copy, timeout=1.0) as receiver:
                assert receiver.receive(20.0) == version + 1
        for name in files(tmp_path / "run"):
            if name.startswith("objects/"):
                tamper(tmp_path / "run" / name, how)
    assert values(copy) == {1.0}


@pytest.mark.parametrize("durable", [True, False])
def test_what_a_head_names_is_on_the_disk_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    """But where the directory ends with the sender."""
    done = list[str]()
    fsync, replace = os.fsync, os.replace

    def note_fsync(descriptor: int) -> None:
        done.append(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path))
        fsync(descriptor)

    def note_replace(source: str, target: str, **folders: int) -> None:
        done.append(f"{source} -> {target}")
        replace(source, target, **folders)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    publisher = RunPublisher(Directory(tmp_path, "run", durable=durable), SigningKey.generate())
    publisher.publish(payload_of(1))
    publisher.close()
    renames = [i for i, what in enumerate(done) if "->" in what]
    # A header, a piece, a manifest, a head, and that of a run that is closed.
    assert len(renames) == 5
    assert done[renames[3]].endswith("-> HEAD")
    if durable:
        synced = sorted(done[: renames[3]])
        assert [what for what in synced if what in {"objects", "manifests"}] == [
            "manifests",
            "objects",
            "objects",
        ]
        for i in renames:
            name = done[i].partition(" ->")[0]
            assert any(what.endswith(name) for what in done[:i])
    else:
        assert len(done) == len(renames)
