"""Anchors and increments in a run: readers get whole versions, an older one, or an error."""

from __future__ import annotations

import random
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.store.linears import files, fill, model, tamper, values
from tests.store.web_faults import faulty
from torch import Tensor, nn

from sync_core import OptionError, Receiver, Sender, SenderLostError
from sync_core.errors import PayloadError
from sync_plugin_scale import Increments, Part
from sync_plugin_store import ConflictError, Mirror, Run, StoreError
from sync_plugin_store.format import HEAD, object_name
from sync_plugin_store.objects import Directory


def weights() -> dict[str, Tensor]:
    return {"a": torch.zeros(300, 100), "b": torch.zeros(1001, dtype=torch.bfloat16)}


def step(trained: dict[str, Tensor], version: int) -> None:
    """Change few elements, so that they say the version."""
    trained["a"][version] = float(version)
    trained["b"][-1] = float(version)


def at(version: int) -> dict[str, Tensor]:
    made = weights()
    for each in range(1, version + 1):
        step(made, each)
    return made


def equal(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], two[name]) for name in one)


def object_of(folder: Path, key: str, version: int) -> Path:
    """The largest object that only this version has."""
    with Run(str(folder), key) as run:
        pieces = run.manifest(version).pieces
    return folder / object_name(max(pieces, key=lambda piece: piece.nbytes).digest)


def test_readers_of_any_age_get_every_version_whole(tmp_path: Path) -> None:
    """Readers of each version, of some, from a late one on, and of a single one."""
    chance = random.Random(45)
    trained = weights()
    with Sender("store", trained, url=str(tmp_path), anchor_every=4, keep=99) as sender:
        key = Run.key_of(sender)
        readers = []
        for version in range(1, 14):
            step(trained, version)
            sender.send(extras={"step": torch.tensor(version)})
            copy = weights()
            readers.append((Receiver(sender.address(), copy), copy))
            for receiver, copy in readers:
                if chance.random() < 0.5:
                    assert receiver.receive(10.0) in (version, None)
                if receiver.version:
                    assert equal(copy, at(receiver.version))
                    assert receiver.extras["step"] == receiver.version
        with Run(str(tmp_path), key) as run:
            bases = [run.manifest(version).base for version in range(1, 14)]
            assert bases == [0, 1, 2, 3, 0, 5, 6, 7, 0, 9, 10, 11, 0]
            for version in (3, 4, 5, 12):
                copy = weights()
                with Receiver(run.address(version=version), copy) as receiver:
                    assert receiver.receive(10.0) == version
                    assert equal(copy, at(version))
        for receiver, _ in readers:
            receiver.close()


def test_a_late_reader_takes_the_newest_anchor_and_what_follows(tmp_path: Path) -> None:
    trained, late, current = weights(), weights(), weights()
    with (
        Sender("store", trained, url=str(tmp_path), anchor_every=5, poll=0.01) as sender,
        faulty(tmp_path) as (url, faults),
    ):
        address = sender.address()
        address = replace(address, endpoint=replace(address.endpoint, urls=[url]))
        with Receiver(address, current) as receiver:
            for version in range(1, 9):
                step(trained, version)
                sender.send()
                assert receiver.receive(10.0) == version
                before, faults.sent = faults.sent, 0
                # A reader that is current is sent the changes only.
                assert (before > 100_000) == (version in (1, 6))
        faults.asked.clear()
        with Receiver(address, late) as receiver:
            assert receiver.receive(10.0) == 8
        # Versions 6, 7 and 8, of two objects each.
        assert sum(n for path, n in faults.asked.items() if "/objects/" in path) == 6
    assert equal(late, at(8))
    assert equal(current, at(8))


def test_increments_take_as_many_bytes_as_those_to_known_workers(tmp_path: Path) -> None:
    def trained() -> nn.Linear:
        torch.manual_seed(0)
        return nn.Linear(1000, 500).to(torch.bfloat16)

    def change(policy: nn.Linear) -> None:
        with torch.no_grad():
            policy.weight.view(-1)[::150] += 1

    policy, copy = trained(), trained()
    with (
        Sender(Increments("file"), policy, num_workers=1, directory=str(tmp_path)) as sender,
        Receiver(sender.address(0), copy) as receiver,
    ):
        for _ in range(2):
            pending = sender.send_async()
            receiver.receive(10.0)
            report = pending.wait(10.0)
            change(policy)
    policy = trained()
    with Sender("store", policy, url=str(tmp_path / "s"), anchor_every=9) as sender:
        sender.send()
        before = files(tmp_path / "s")
        change(policy)
        sender.send()
        new = files(tmp_path / "s") - before
        written = sum((tmp_path / "s" / name).stat().st_size for name in new)
    assert written < 1.1 * report.workers[0].nbytes


@pytest.mark.parametrize("how", ["deleted", "truncated", "changed"])
@pytest.mark.parametrize("broken", [5, 6, 7])
def test_a_broken_chain_falls_back_to_what_is_whole(
    tmp_path: Path, how: str, broken: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Anchors are 1, 5 and 9; the newest version that needs nothing broken is read."""
    trained, late, current = weights(), weights(), weights()
    with Sender("store", trained, url=str(tmp_path), anchor_every=4, keep=99) as sender:
        key = Run.key_of(sender)
        reader = Receiver(sender.address(), current, timeout=0.2)
        for version in range(1, 8):
            step(trained, version)
            sender.send()
            if version == 2:
                assert reader.receive(10.0) == 2
        tamper(object_of(tmp_path, key, broken), how)
        with reader, Receiver(sender.address(), late, timeout=0.2) as other:
            for receiver, copy in ((other, late), (reader, current)):
                assert receiver.receive(10.0) == broken - 1
                assert equal(copy, at(broken - 1))
                assert f"version {broken - 1} is read instead of 7" in caplog.text
                caplog.clear()
                # Newer versions cannot be read, and the caller learns why.
                with pytest.raises(PayloadError, match=f"of version {broken} cannot be read"):
                    receiver.receive(10.0)
                assert equal(copy, at(broken - 1))
            for version in (8, 9):
                step(trained, version)
                sender.send()
            for receiver, copy in ((other, late), (reader, current)):
                assert receiver.receive(10.0) == 9
                assert equal(copy, at(9))


def test_a_manifest_of_a_chain_that_is_gone_is_fallen_back_from(tmp_path: Path) -> None:
    trained, copy = weights(), weights()
    with Sender("store", trained, url=str(tmp_path), anchor_every=9) as sender:
        for version in range(1, 5):
            step(trained, version)
            sender.send()
            if version == 2:
                standing = files(tmp_path / "manifests")
        (third,) = [
            path
            for name in files(tmp_path / "manifests") - standing
            if b'"version":3' in (path := tmp_path / "manifests" / name).read_bytes()
        ]
        tamper(third, "changed")
        with Receiver(sender.address(), copy, timeout=0.2) as receiver:
            assert receiver.receive(10.0) == 2
            with pytest.raises(PayloadError, match="version 3 cannot be read"):
                receiver.receive(10.0)
    assert equal(copy, at(2))


def test_a_publication_that_fails_leaves_no_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, current, late = weights(), weights(), weights()
    with Sender("store", trained, url=str(tmp_path), anchor_every=99) as sender:
        reader = Receiver(sender.address(), current)
        for version in range(1, 9):
            step(trained, version)
            if version % 3 == 2:
                with monkeypatch.context() as patched:

                    def full(*args: object) -> None:
                        raise StoreError("the disk is full")

                    patched.setattr(Directory, "put", full)
                    with pytest.raises(StoreError, match="the disk is full"):
                        sender.send(version=version)
                assert reader.receive(0.1) is None
            else:
                sender.send(version=version)
                assert reader.receive(10.0) == version
        sender.send(version=9)
        with reader, Receiver(sender.address(), late) as other:
            assert [reader.receive(10.0), other.receive(10.0)] == [9, 9]
    assert equal(current, at(8))
    assert equal(late, at(8))


def test_what_kept_versions_build_on_is_kept(tmp_path: Path) -> None:
    trained, copy = weights(), weights()
    with Sender("store", trained, url=str(tmp_path), anchor_every=4, keep=1, grace=0.0) as sender:
        for version in range(1, 8):
            step(trained, version)
            sender.send()
        with Run(str(tmp_path), Run.key_of(sender)) as run:
            assert run.versions() == (5, 6, 7)
        assert len(files(tmp_path / "manifests")) == 3
        with Receiver(sender.address(), copy) as receiver:
            assert receiver.receive(10.0) == 7
    assert equal(copy, at(7))


def test_a_trainer_that_is_started_again_begins_with_an_anchor(tmp_path: Path) -> None:
    key_file, trained, current = str(tmp_path / "key.pem"), weights(), weights()
    reader = None
    for first in (1, 4):
        with Sender(
            "store",
            trained,
            url=str(tmp_path / "run"),
            key=key_file,
            anchor_every=99,
            version=first - 1,
        ) as sender:
            reader = reader or Receiver(sender.address(), current)
            for version in range(first, first + 3):
                step(trained, version)
                sender.send()
                assert reader.receive(10.0) == version
                assert equal(current, at(version))
            with Run(str(tmp_path / "run"), Run.key_of(sender)) as run:
                assert run.manifest(first).base == 0
                assert run.manifest(first + 2).base == first + 1
    assert reader is not None
    reader.close()


def test_a_mirror_copies_what_a_version_builds_on(tmp_path: Path) -> None:
    trained, copy = weights(), weights()
    with Sender("store", trained, url=str(tmp_path / "far"), anchor_every=4) as sender:
        for version in range(1, 8):
            step(trained, version)
            sender.send()
        key = Run.key_of(sender)
        with (
            Mirror(str(tmp_path / "far"), str(tmp_path / "near"), key, poll=600.0) as mirror,
        ):
            assert mirror.update() == 7
            with Run(mirror.url, key) as run, Receiver(run.address(), copy) as receiver:
                assert receiver.receive(10.0) == 7
    assert equal(copy, at(7))


def test_readers_of_a_shard_get_the_anchors(tmp_path: Path) -> None:
    trained = weights()
    part = Part({"a": torch.zeros(150, 100), "b": weights()["b"]}, {"a": ((0, 150), (0, 100))})
    with (
        Sender("store", trained, url=str(tmp_path), anchor_every=3, keep=99) as sender,
        Receiver(sender.address(), part) as receiver,
    ):
        for version in range(1, 6):
            step(trained, version)
            sender.send()
            anchor = version in (1, 4)
            assert receiver.receive(20.0 if anchor else 0.1) == (version if anchor else None)
        assert torch.equal(part.model["a"], at(4)["a"][:150])
        sender.close()
        with pytest.raises(SenderLostError, match="has closed its sender after version 5"):
            receiver.receive(5.0)


def test_a_model_that_changes_entirely_travels_whole(tmp_path: Path) -> None:
    policy, copy = model(), model()
    with (
        Sender("store", policy, url=str(tmp_path), anchor_every=9) as sender,
        Receiver(sender.address(), copy) as receiver,
    ):
        for version in range(1, 4):
            fill(policy, float(version))
            sender.send()
            assert receiver.receive(10.0) == version
            assert values(copy) == {float(version)}
        with Run(str(tmp_path), Run.key_of(sender)) as run:
            assert [run.manifest(version).base for version in (1, 2, 3)] == [0, 0, 0]


def test_increments_for_readers_that_answer_have_a_scheme() -> None:
    with pytest.raises(OptionError, match="increments::store"):
        Sender("store", model(), num_workers=1, anchor_every=4)
    with pytest.raises(OptionError, match="anchor_every must be an integer >= 1, got 0"):
        Sender("store", model(), anchor_every=0)


@pytest.mark.parametrize("library", [True, False], ids=["with xxhash", "without"])
def test_an_increment_of_a_run_that_went_back_applies_to_its_own_base_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: bool
) -> None:
    """Such as in a bucket that was restored: version 2 is another then."""
    if not library:
        monkeypatch.setitem(sys.modules, "xxhash", None)
    url, current, near = str(tmp_path / "run"), weights(), weights()
    options: dict[str, Any] = {"url": url, "key": str(tmp_path / "k"), "anchor_every": 99}
    trained = weights()
    first = Sender("store", trained, **options)
    first.send()
    head = (tmp_path / "run" / HEAD).read_bytes()
    key = Run.key_of(first)
    with (
        Mirror(url, str(tmp_path / "near"), key, poll=600.0) as mirror,
        Receiver(first.address(), current, timeout=5.0) as reader,
    ):
        assert reader.receive() == 1
        step(trained, 2)
        first.send()
        assert (reader.receive(), mirror.update()) == (2, 2)
        (tmp_path / "run" / HEAD).write_bytes(head)
        other = weights()
        with Sender("store", other, version=1, **options) as second:
            step(other, 7)
            second.send()
            step(other, 8)
            assert second.send().version == 3
            assert reader.receive() == 3
            assert equal(current, other)
            assert mirror.update() == 3
            with Run(mirror.url, key) as run, Receiver(run.address(), near) as late:
                assert late.receive() == 3
            assert equal(near, other)
            # Where only a part of a run went back, the newest version that fits is read.
            manifest = run.manifest(3)
            assert manifest.base_digest == run._head().versions[2]
    with suppress(ConflictError):
        first.close()
