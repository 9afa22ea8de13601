"""Ranks of a trainer write each version together, for readers that they do not know."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.store.linears import files, tamper
from tests.store.rank_trainers import leave_part, rank_sender, shard, trainer, transport_of, weights
from tests.store.test_parts import at
from tests.store.web_faults import faulty

from sync_core import (
    Address,
    LayoutMismatchError,
    OptionError,
    Receiver,
    Sender,
    SenderLostError,
    SendReport,
)
from sync_core.errors import AddressError, PayloadError
from sync_plugin_scale import Part, Sharded, join_addresses
from sync_plugin_std import Fuse
from sync_plugin_store import ConflictError, Mirror, Run, SignatureError, StoreError
from sync_plugin_store.format import Manifest, object_name, read_json
from sync_plugin_store.keys import SigningKey
from sync_plugin_store.records import RankHolding, RankPart, Session


def check(model: Any, values: float, region: Any = None) -> None:
    expected = weights(values)
    if region is not None:
        expected["weight"] = expected["weight"][tuple(slice(*bounds) for bounds in region)]
    for name, tensor in expected.items():
        assert torch.equal(model[name], tensor), name


def blank() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in weights(0).items()}


def part(region: Any) -> Part:
    shape = [stop - start for start, stop in region]
    return Part({"weight": torch.zeros(shape), "bias": torch.zeros(5)}, {"weight": region})


def published(outcomes: Sequence[SendReport | BaseException], version: int) -> None:
    for outcome in outcomes:
        assert isinstance(outcome, SendReport), outcome
        assert outcome.version == version


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_any_reader_gets_versions_of_several_ranks(tmp_path: Path, size: int) -> None:
    region = ((3, 50), (7, 21))
    with trainer(tmp_path, size) as ranks, ExitStack() as ends:
        published(ranks.send(1.0, extras={"step": torch.tensor(7)}), 1)
        whole, some = blank(), part(region)
        of_rank = ranks.senders[-1].address()
        of_json = Address.from_json(ranks.senders[0].address().to_json())
        url, key = str(tmp_path / "run"), Run.key_of(ranks.senders[-1])
        run = ends.enter_context(Run(url, key))
        loaded: list[str] = []
        readers = [
            ends.enter_context(Receiver(of_rank, whole)),
            ends.enter_context(Receiver(of_json, some)),
            ends.enter_context(Receiver(run.address(), part(region))),
            ends.enter_context(
                Receiver(of_rank, load=lambda named: loaded.extend(name for name, _ in named))
            ),
        ]
        for version in (1, 2):
            if version == 2:
                published(ranks.send(2.0), 2)
            for reader in readers:
                assert reader.receive(20.0) == version
            assert readers[0].extras == ({"step": torch.tensor(7)} if version == 1 else {})
            check(whole, version)
            check(some.model, version, region)
        assert loaded == ["weight", "bias"] * 2 or set(loaded) == {"weight", "bias"}
        pinned = blank()
        with Receiver(run.address(version=1), pinned) as reader:
            assert reader.receive(20.0) == 1
        check(pinned, 1)
        # The bias, which all ranks hold, was written by one of them.
        manifest = run.manifest(2)
        assert len(manifest.ranks) == size
        headers = [(tmp_path / "run" / object_name(f.pieces[0].digest)) for f in manifest.ranks]
        assert sum(b'"bias"' in header.read_bytes() for header in headers) == 1
        for sender in ranks.senders[::-1]:
            sender.close()
        with pytest.raises(SenderLostError, match="closed its sender after version 2"):
            readers[0].receive(20.0)


def test_a_reader_waits_for_the_first_version(tmp_path: Path) -> None:
    with trainer(tmp_path) as ranks:
        address = ranks.senders[1].address()
        with pytest.raises(StoreError, match=r"has no version after 0.2 s, from which to learn"):
            Receiver(address, blank(), timeout=0.2)
        published(ranks.send(1.0), 1)
        with Receiver(address, blank()) as reader:
            assert reader.receive(20.0) == 1


def test_pieces_that_did_not_change_are_not_written_again(tmp_path: Path) -> None:
    with trainer(tmp_path, keep=1) as ranks:
        published(ranks.send(1.0), 1)
        before = files(tmp_path / "run")
        written = {name: (tmp_path / "run" / name).stat().st_mtime_ns for name in before}
        published(ranks.send(1.0), 2)
        published(ranks.send(1.0), 3)
        now = {name for name in files(tmp_path / "run") if name.startswith("objects/")}
        assert now == {name for name in before if name.startswith("objects/")}
        assert all((tmp_path / "run" / n).stat().st_mtime_ns == written[n] for n in now)
        model = blank()
        with Receiver(ranks.senders[0].address(), model) as reader:
            assert reader.receive(20.0) == 3
        check(model, 1)


@pytest.mark.parametrize("place", ["directory", "s3"])
def test_a_reader_of_a_shard_reads_its_bytes_and_few_others(
    tmp_path: Path, place: str, request: pytest.FixtureRequest
) -> None:
    """Rows of another number of ranks, by ranges of HTTP."""
    torch.manual_seed(0)
    url = str(tmp_path / "run")
    if place == "s3":
        url = f"{request.getfixturevalue('bucket')}/ranks"
    whole = {f"layer.{i}.weight": torch.randn(1024, 512) for i in range(4)}
    whole |= {f"layer.{i}.bias": torch.randn(1024) for i in range(4)}
    with ExitStack() as ends:
        senders = []
        for rank in range(4):
            held = {n: t[256 * rank : 256 * (rank + 1)].clone() for n, t in whole.items()}
            bounds = {
                name: [(256 * rank, 256 * (rank + 1), 1024), *((0, n, n) for n in t.shape[1:])]
                for name, t in whole.items()
            }
            scheme = Sharded("store", rank, 4, regions=bounds)
            key = str(tmp_path / "key.pem")
            options: dict[str, Any] = {"url": url, "key": key, "piece_mb": 1.0, "chunks": True}
            sender = Sender(scheme, held, timeout=30.0, poll=0.05, **options)
            senders.append(ends.enter_context(sender))
        pending = [
            ends.enter_context(ThreadPoolExecutor(1)).submit(sender.send) for sender in senders
        ]
        published([each.result(60.0) for each in pending], 1)
        for first, last in ((0, 512), (256, 512), (128, 896), (0, 1024)):
            regions = {n: [(first, last), *((0, k) for k in t.shape[1:])] for n, t in whole.items()}
            mine = Part({n: torch.zeros_like(t[first:last]) for n, t in whole.items()}, regions)
            address = senders[1].address()
            with ExitStack() as reading:
                faults = None
                if place == "directory":
                    served, faults = reading.enter_context(faulty(tmp_path / "run"))
                    address = at(address, served)
                with Receiver(address, mine) as reader:
                    assert reader.receive(30.0) == 1
            for name, tensor in mine.model.items():
                assert torch.equal(tensor, whole[name][first:last]), (name, first, last)
            if faults is not None:
                assert faults.sent <= 1.05 * sum(t.nbytes for t in mine.model.values())


def test_ranks_that_send_nothing_are_named_and_the_next_send_works(tmp_path: Path) -> None:
    with trainer(tmp_path, 4, timeout=60.0) as ranks, ExitStack() as ends:
        published(ranks.send(1.0), 1)
        model = blank()
        reader = ends.enter_context(Receiver(ranks.senders[0].address(), model))
        assert reader.receive(20.0) == 1
        transport_of(ranks.senders[0])._timeout = 1.0
        first, third = ranks.send_from((0, 2), 2.0)
        message = (
            r"version 2 was not published, as ranks (1 and 3|1, 2 and 3) of 4 did not write a part "
            r"of it within 1 s; does each rank call send\(\), with the same version"
        )
        assert isinstance(first, StoreError)
        assert re.search(message, str(first))
        # It raises the reason at once, and does not wait for a minute.
        assert isinstance(third, StoreError)
        assert re.search("version 2 was not published, as rank 0 has given it up", str(third))
        assert reader.receive(0.0) is None
        # The others hear so as soon as they send it.
        for outcome in ranks.send_from((1, 3), 2.0):
            assert re.search("rank 0 has given it up: StoreError: version 2", str(outcome))
        leave_part(ranks.senders[2], 2, 4, 3.0)
        (first,) = ranks.send_from([0], 3.0)
        assert "as ranks 1 and 3 of 4 did not write a part" in str(first)
        transport_of(ranks.senders[0])._timeout = 60.0
        for sender in ranks.senders:
            sender.advance(3)
        published(ranks.send(4.0), 4)
        assert reader.receive(20.0) == 4
        check(model, 4)
        assert not [name for name in files(tmp_path / "run") if re.search("parts/.*-.*-", name)]


def test_other_versions_are_named_where_ranks_count_differently(tmp_path: Path) -> None:
    with trainer(tmp_path) as ranks:
        published(ranks.send(1.0), 1)
        ranks.senders[1].advance(5)
        leave_part(ranks.senders[1], 1, 2, 2.0)
        transport_of(ranks.senders[0])._timeout = 0.5
        (first,) = ranks.send_from([0], 2.0)
        assert "rank 1 has sent version 6; does each rank call send()" in str(first)


def test_ranks_that_hold_no_whole_model_say_so_on_every_rank(tmp_path: Path) -> None:
    with ExitStack() as ends:
        senders = [
            ends.enter_context(
                Sender(
                    Sharded("store", rank, 2, regions={"weight": ((first, first + 4, 9),)}),
                    {"weight": torch.zeros(4)},
                    url=str(tmp_path / "run"),
                    key=str(tmp_path / "key.pem"),
                    timeout=60.0,
                )
            )
            for rank, first in enumerate((0, 5))
        ]
        pending = [
            ends.enter_context(ThreadPoolExecutor(1)).submit(sender.send) for sender in senders
        ]
        errors = [each.exception(60.0) for each in pending]
    assert isinstance(errors[0], LayoutMismatchError)
    assert isinstance(errors[1], LayoutMismatchError | StoreError)
    assert all("no rank holds [4:5]" in str(error) for error in errors)


def parts(directory: Path) -> list[Path]:
    return [p for p in (directory / "run" / "parts").iterdir() if p.name.count("-") == 2]


def abandoned(directory: Path, version: int, values: float, **options: Any) -> list[Path]:
    """Have rank 1 write a part of a version that rank 0 does not publish; return its record."""
    with trainer(directory, version=version - 1, **options) as ranks:
        leave_part(ranks.senders[1], 1, 2, values)
    return parts(directory)


def test_what_an_ended_trainer_has_left_is_never_taken(tmp_path: Path) -> None:
    (left,) = abandoned(tmp_path, 1, 99.0)
    content = left.read_bytes()
    with trainer(tmp_path) as ranks:
        assert not parts(tmp_path)
        # It comes back, from a cache or by an attacker, under its own name and under the new one.
        left.write_bytes(content)
        published(ranks.send(1.0), 1)
        assert not parts(tmp_path)
        session = json.loads(
            (tmp_path / "run" / "parts" / "session.json").read_bytes().partition(b"\n")[2]
        )
        (tmp_path / "run" / "parts" / f"{session['session']}-2-1.json").write_bytes(content)
        (first,) = ranks.send_from([0], 2.0)
        assert isinstance(first, PayloadError)
        assert "is that of another rank or version" in str(first)
        model = blank()
        with Receiver(ranks.senders[0].address(), model) as reader:
            assert reader.receive(20.0) == 1
        check(model, 1)


@pytest.mark.parametrize("how", ["changed", "truncated", "replayed", "foreign"])
def test_a_part_that_was_tampered_with_is_refused(tmp_path: Path, how: str) -> None:
    with trainer(tmp_path) as ranks:
        published(ranks.send(1.0), 1)
        leave_part(ranks.senders[1], 1, 2, 2.0)
        (record,) = parts(tmp_path)
        public = Run.key_of(ranks.senders[0])
        found = RankPart.from_bytes(record.read_bytes(), public)
        if how == "replayed":
            record.rename(record.with_name(record.name.replace("-2-1", "-3-1")))
            ranks.senders[0].advance(2)
        elif how == "foreign":
            record.write_bytes(found.to_bytes(SigningKey.generate()))
        else:
            tamper(record, how)
        (first,) = ranks.send_from([0], 2.0)
        assert isinstance(first, SignatureError | PayloadError), first
        assert re.search("the part of rank 1|another rank or version", str(first))
        model = blank()
        with Receiver(ranks.senders[0].address(), model) as reader:
            assert reader.receive(20.0) == 1


def test_a_part_must_have_what_its_rank_holds(tmp_path: Path) -> None:
    key = SigningKey.of_file(tmp_path / "key.pem")
    wrong: list[tuple[Callable[[RankPart], RankPart], str]] = [
        (lambda p: replace(p, holdings="0" * 64), "other tensors than it held at first"),
        (
            lambda p: replace(p, file=replace(p.file, pieces=p.file.pieces[1:])),
            "other tensors than it held at first",
        ),
        (
            lambda p: replace(p, file=replace(p.file, pieces=p.file.pieces[:1])),
            "has written [0-9]+ bytes of version",
        ),
        (lambda p: replace(p, after=77), "rank 1 has not written again.*version 77"),
        (lambda p: replace(p, run="0" * 32), "another rank or version"),
    ]
    with trainer(tmp_path) as ranks:
        published(ranks.send(1.0), 1)
        for number, (change, message) in enumerate(wrong, 2):
            ranks.senders[1].advance(number - 1)
            leave_part(ranks.senders[1], 1, 2, 2.0)
            (record,) = parts(tmp_path)
            found = RankPart.from_bytes(record.read_bytes(), key.public)
            record.write_bytes(change(found).to_bytes(key))
            ranks.senders[0].advance(number - 1)
            (first,) = ranks.send_from([0], 2.0)
            assert isinstance(first, PayloadError | StoreError), first
            assert re.search(message, str(first)), first
            record.unlink()
        for sender in ranks.senders:
            sender.advance(10)
        published(ranks.send(3.0), 11)


def test_ranks_with_other_keys_say_so(tmp_path: Path) -> None:
    with trainer(tmp_path) as ranks, ExitStack() as ends:
        published(ranks.send(1.0), 1)
        with pytest.raises(
            SignatureError, match="not signed with this rank's key; give every rank"
        ):
            rank_sender(tmp_path, 1, 2, key=str(tmp_path / "other.pem"))
        with pytest.raises(ConflictError, match="signed with another key"):
            ends.enter_context(rank_sender(tmp_path, 0, 2, key=str(tmp_path / "other.pem")))


def test_a_rank_notices_that_the_first_has_begun_again(tmp_path: Path) -> None:
    with trainer(tmp_path) as ranks:
        published(ranks.send(1.0), 1)
        with (
            rank_sender(tmp_path, 0, 2, version=1),
            pytest.raises(ConflictError, match="begun again"),
        ):
            ranks.senders[1].send(shard(2, 1, 2))


def test_one_rank_that_begins_again_takes_part(tmp_path: Path) -> None:
    with trainer(tmp_path, 3) as ranks:
        published(ranks.send(1.0), 1)
        ranks.senders[2].close()
        ranks.senders[2] = rank_sender(tmp_path, 2, 3, version=1)
        published(ranks.send(2.0), 2)
        model = blank()
        with Receiver(ranks.senders[2].address(), model) as reader:
            assert reader.receive(20.0) == 2
        check(model, 2)
        ranks.senders[2].close()


def test_versions_only_grow_on_every_rank(tmp_path: Path) -> None:
    with trainer(tmp_path, version=6) as ranks:
        published(ranks.send(7.0), 7)
    with trainer(tmp_path) as ranks:
        outcomes = ranks.send(1.0)
        assert all(isinstance(each, ConflictError) for each in outcomes)
        assert all("has version 7, and versions only grow, got 1" in str(e) for e in outcomes)
    with trainer(tmp_path, 3, version=7) as ranks:
        published(ranks.send(8.0), 8)


def test_one_run_is_written_by_one_process_and_by_ranks(tmp_path: Path) -> None:
    """Readers of either follow the other."""
    url, key = str(tmp_path / "run"), str(tmp_path / "key.pem")
    whole, some, region = blank(), part(((3, 9), (0, 32))), ((3, 9), (0, 32))
    with ExitStack() as ends:
        with Sender("store", weights(1), url=url, key=key) as sender:
            sender.send()
            readers = [
                ends.enter_context(Receiver(sender.address(), model)) for model in (whole, some)
            ]
            for reader in readers:
                assert reader.receive(20.0) == 1
        with trainer(tmp_path, version=1) as ranks:
            published(ranks.send(2.0), 2)
            for reader in readers:
                assert reader.receive(20.0) == 2
            check(whole, 2)
            check(some.model, 2, region)
            address = ranks.senders[1].address()
        with Sender("store", weights(3), url=url, key=key, version=2, grace=0) as sender:
            sender.send()
            readers.append(ends.enter_context(Receiver(address, blank())))
            for reader in readers:
                assert reader.receive(20.0) == 3
            check(whole, 3)
            check(some.model, 3, region)


def test_a_mirror_has_versions_of_ranks(tmp_path: Path) -> None:
    with trainer(tmp_path) as ranks:
        published(ranks.send(1.0), 1)
        public = Run.key_of(ranks.senders[0])
        with Mirror(str(tmp_path / "run"), str(tmp_path / "near"), public) as mirror:
            assert mirror.update() == 1
            model = blank()
            with Run(mirror.url, public) as run, Receiver(run.address(), model) as reader:
                assert reader.receive(20.0) == 1
    check(model, 1)
    assert not [name for name in files(tmp_path / "near") if name.startswith("parts/")]


def test_an_object_of_a_rank_that_was_changed_is_not_committed(tmp_path: Path) -> None:
    with trainer(tmp_path) as ranks:
        published(ranks.send(1.0), 1)
        with Run(str(tmp_path / "run"), Run.key_of(ranks.senders[0])) as run:
            manifest = run.manifest(1)
        assert manifest.holdings is not None
        address = ranks.senders[0].address()
        pieces = [*manifest.ranks[0].pieces, *manifest.ranks[1].pieces, manifest.holdings]
        for piece in pieces:
            path = tmp_path / "run" / object_name(piece.digest)
            data = path.read_bytes()
            model = blank()
            with Receiver(address, model, timeout=0.3) as reader:
                tamper(path, "changed")
                with pytest.raises(PayloadError, match="cannot be read"):
                    reader.receive(20.0)
            assert not any(tensor.any() for tensor in model.values())
            path.write_bytes(data)


def test_a_manifest_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    with trainer(tmp_path) as ranks:
        published(ranks.send(1.0), 1)
        with Run(str(tmp_path / "run"), Run.key_of(ranks.senders[0])) as run:
            manifest = run.manifest(1)
    data = manifest.to_bytes()
    assert Manifest.from_bytes(data) == manifest
    # The error of a release before format 2.
    with pytest.raises(PayloadError, match=r"format 2, and this is .* for format 1; type: pip"):
        read_json(data, "a manifest", (1,))
    content = json.loads(data)
    changes: list[dict[str, Any]] = [
        {"ranks": []},
        {"ranks": [{}]},
        {"ranks": [{"pieces": []}]},
        {"ranks": {"pieces": []}},
        {"holdings": None},
        {"holdings": ["0" * 64, 1 << 40]},
        {"base": 1},
        {"anchor": True},
        {"ranks": [{"pieces": [["0" * 64, 8]], "chunks": ["0" * 64, 9]}]},
        {"ranks": [{"pieces": [["0" * 64, 1 << 62]]}] * 4},
        {"format": 3},
    ]
    for change in changes:
        with pytest.raises(PayloadError, match=r"not a manifest|has format 3"):
            Manifest.from_bytes(json.dumps({**content, **change}).encode())


def test_what_was_abandoned_is_removed_and_what_a_part_needs_stays(tmp_path: Path) -> None:
    (left,) = abandoned(tmp_path, 1, 99.0)
    long_ago = time.time() - 3600
    for name in files(tmp_path / "run"):
        if name.startswith("objects/"):
            os.utime(tmp_path / "run" / name, (long_ago, long_ago))
    old = {n for n in files(tmp_path / "run") if n.startswith("objects/")}
    with trainer(tmp_path) as ranks:
        now = files(tmp_path / "run")
        # The holdings are the same, and were written again.
        assert left.name not in {Path(name).name for name in now}
        assert len(now & old) < len(old)
        published(ranks.send(1.0), 1)
        # A part that waits, although its objects are old by now.
        leave_part(ranks.senders[1], 1, 2, 2.0)
        for name in files(tmp_path / "run"):
            if name.startswith("objects/"):
                os.utime(tmp_path / "run" / name, (long_ago, long_ago))
        transport_of(ranks.senders[0])._publisher.collect()
        published(ranks.send_from([0], 2.0), 2)
        model = blank()
        with Receiver(ranks.senders[0].address(), model) as reader:
            assert reader.receive(20.0) == 2
        check(model, 2)
    with Sender(
        "store", weights(3), url=str(tmp_path / "run"), key=str(tmp_path / "key.pem"), version=2
    ):
        pass
    assert not parts(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key": None}, "each needs the same key; type Sender"),
        ({"url": None}, "each needs the same url=, without {run}, got None"),
        ({"url": "runs/{run}"}, "without {run}, got 'runs/{run}'"),
        ({"url": "https://host/run"}, "can be read and not written"),
        ({"anchor_every": 5}, "anchor_every= is for a trainer of one process"),
        ({"layers": ["checksum"]}, "leave the layer that adds them out"),
    ],
)
def test_options_with_which_ranks_cannot_write_one_run(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    given: dict[str, Any] = {"url": str(tmp_path), "key": str(tmp_path / "key.pem"), **options}
    with pytest.raises(OptionError, match=re.escape(message)):
        Sender(Sharded("store", 0, 2), {"weight": torch.zeros(4)}, **given)


def test_ranks_whose_readers_answer_work_as_before(tmp_path: Path) -> None:
    scheme = Sharded("store", 0, 1)
    assert "publishes" in scheme.capabilities
    assert "publishes" not in Sharded("shm", 0, 1).capabilities
    model = blank()
    with (
        Sender(scheme, weights(1), num_workers=1, url=str(tmp_path)) as sender,
        Receiver(join_addresses([sender.address(0)]), model) as reader,
    ):
        pending = sender.send_async()
        assert reader.receive(20.0) == 1
        assert pending.wait(20.0).updated == (0,)
    check(model, 1)


def test_records_are_read_as_they_were_written() -> None:
    key = SigningKey.generate()
    session = Session("0" * 32, "1" * 32, 2, 7, "why")
    assert Session.from_bytes(session.to_bytes(key), key.public) == session
    for kind in (RankHolding, RankPart):
        with pytest.raises(PayloadError, match="is of kind 'session'"):
            kind.from_bytes(session.to_bytes(key), key.public)
    with pytest.raises(SignatureError):
        Session.from_bytes(session.to_bytes(SigningKey.generate()), key.public)


def senders_of(
    directory: Path, held: Sequence[dict[str, torch.Tensor]], regions: Any = (), **options: Any
) -> list[Sender]:
    """Senders of ranks that hold any tensors."""
    return [
        Sender(
            Sharded("store", rank, len(held), regions=regions[rank] if regions else None),
            tensors,
            url=str(directory / "run"),
            key=str(directory / "key.pem"),
            timeout=30.0,
            **options,
        )
        for rank, tensors in enumerate(held)
    ]


def test_ranks_that_hold_other_layers_write_one_version(tmp_path: Path) -> None:
    """As those of a pipeline do: no rank knows the tensors of another."""
    held = [{f"layer.{i}": torch.full((3, 4), float(i)), "norm": torch.ones(4)} for i in range(3)]
    with ExitStack() as ends:
        senders = [ends.enter_context(sender) for sender in senders_of(tmp_path, held)]
        pool = ends.enter_context(ThreadPoolExecutor(3))
        published(list(pool.map(Sender.send, senders)), 1)
        for sender in senders:
            model = {**{f"layer.{i}": torch.zeros(3, 4) for i in range(3)}, "norm": torch.zeros(4)}
            with Receiver(sender.address(), model) as reader:
                assert reader.receive(20.0) == 1
            for tensors in held:
                assert all(torch.equal(model[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("layer", ["bf16", "fuse"])
def test_layers_change_what_ranks_write(tmp_path: Path, layer: str) -> None:
    torch.manual_seed(0)
    whole = {"q": torch.randn(8, 6), "k": torch.randn(4, 6)}
    regions = [
        {"q": ((4 * r, 4 * r + 4, 8), (0, 6, 6)), "k": ((2 * r, 2 * r + 2, 4), (0, 6, 6))}
        for r in range(2)
    ]
    held = [
        {n: t[slice(*regions[r][n][0][:2])].clone() for n, t in whole.items()} for r in range(2)
    ]
    layers: list[Any] = ["bf16"] if layer == "bf16" else [Fuse({"qk": ["q", "k"]})]
    expected = whole
    if layer == "bf16":
        expected = {name: tensor.bfloat16().float() for name, tensor in whole.items()}
    else:
        expected = {"qk": torch.cat([whole["q"], whole["k"]])}
    with ExitStack() as ends:
        senders = [
            ends.enter_context(each) for each in senders_of(tmp_path, held, regions, layers=layers)
        ]
        pool = ends.enter_context(ThreadPoolExecutor(2))
        published(list(pool.map(Sender.send, senders)), 1)
        model = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        bounds = {name: [(1, t.shape[0] - 1), (2, 5)] for name, t in expected.items()}
        some = Part({n: torch.zeros(t.shape[0] - 2, 3) for n, t in expected.items()}, bounds)
        for target in (model, some):
            with Receiver(senders[1].address(), target) as reader:
                assert reader.receive(20.0) == 1
        for name, tensor in expected.items():
            assert torch.equal(model[name], tensor)
            assert torch.equal(some.model[name], tensor[1:-1, 2:5])


def test_addresses_of_ranks_that_publish_are_not_joined(tmp_path: Path) -> None:
    with trainer(tmp_path) as ranks:
        addresses = [sender.address() for sender in ranks.senders]
        with pytest.raises(AddressError, match=r"type Receiver\(sender.address\(\), model\)"):
            join_addresses(addresses)


def run_ranks(directory: Path, *arguments: Sequence[str]) -> list[str]:
    """Run processes, one for each rank; return what they have printed."""
    processes = []
    try:
        for rank, given in enumerate(arguments):
            command = [sys.executable, "-m", "tests.store.rank_trainers", str(directory)]
            command += [str(rank), str(len(arguments)), *given]
            processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("rank", "dies_at"),
    [(1, "objects/"), (1, "parts/"), (0, "objects/"), (0, "manifests/"), (0, "HEAD")],
    ids=["before-pieces", "before-part", "first-before-pieces", "before-manifest", "before-head"],
)
def test_a_rank_that_is_killed_leaves_the_last_version(
    tmp_path: Path, rank: int, dies_at: str
) -> None:
    dying = ["--versions", "1", "2", "--dies-at", dies_at, "--dies-with", "2"]
    living = ["--versions", "1", "2", "--timeout", "3"]
    printed = run_ranks(tmp_path, *[dying if i == rank else living for i in range(2)])
    assert printed[rank] == "version 1 is published\n"
    assert printed[1 - rank].startswith("version 1 is published\nversion 2: StoreError: ")
    assert f"rank {rank}" in printed[1 - rank]
    url, key = str(tmp_path / "run"), SigningKey.of_file(tmp_path / "key.pem").public
    model = blank()
    with Run(url, key) as run, Receiver(run.address(), model) as reader:
        assert run.versions() == (1,)
        assert reader.receive(20.0) == 1
        check(model, 1)
        # All ranks begin again, with other numbers of the same version.
        with trainer(tmp_path, version=1) as ranks:
            published(ranks.send(5.0), 2)
            assert reader.receive(20.0) == 2
            check(model, 5)
            assert not parts(tmp_path)
