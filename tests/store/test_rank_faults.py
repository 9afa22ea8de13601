"""Faults of ranks that write versions together: no reader gets a mixture, and nothing stays."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.store.linears import files, tamper
from tests.store.rank_trainers import (
    blank,
    check,
    check_read,
    leave_part,
    parts,
    published,
    rank_sender,
    run_rank,
    send_all,
    senders_of,
    shard,
    trainer,
    transport_of,
    weights,
)

from sync_core import LayoutMismatchError, Receiver, Sender
from sync_core.errors import PayloadError
from sync_plugin_store import ConflictError, Run, SignatureError, StoreError
from sync_plugin_store.format import Manifest, object_name, read_json
from sync_plugin_store.keys import SigningKey
from sync_plugin_store.records import RankHolding, RankPart, Session


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
        ranks.senders[1].advance(5)
        leave_part(ranks.senders[1], 1, 4, 3.0)
        (first,) = ranks.send_from([0], 3.0)
        assert "as ranks 1 and 3 of 4 did not write a part" in str(first)
        assert "rank 1 has sent version 6; does each rank call send()" in str(first)
        transport_of(ranks.senders[0])._timeout = 60.0
        for sender in ranks.senders:
            sender.advance(6)
        published(ranks.send(7.0), 7)
        assert reader.receive(20.0) == 7
        check(model, 7)
        assert not [name for name in files(tmp_path / "run") if re.search("parts/.*-.*-", name)]


def test_ranks_that_hold_no_whole_model_say_so_on_every_rank(tmp_path: Path) -> None:
    regions = [{"weight": ((first, first + 4, 9),)} for first in (0, 5)]
    held = [{"weight": torch.zeros(4)} for _ in regions]
    with senders_of(tmp_path, held, regions, timeout=60.0) as senders:
        errors = send_all(senders)
    assert all(isinstance(error, LayoutMismatchError) for error in errors)
    assert all("no rank holds [4:5]" in str(error) for error in errors)


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
        check_read(ranks.senders[0].address(), 1, 1)


def test_a_wrong_part_is_refused(tmp_path: Path) -> None:
    """It was tampered with, signed with another key, or is not what its rank holds."""
    key = SigningKey.of_file(tmp_path / "key.pem")
    other = SigningKey.generate()

    def cut(part: RankPart, pieces: slice) -> RankPart:
        return replace(part, file=replace(part.file, pieces=part.file.pieces[pieces]))

    wrong: list[tuple[Callable[[RankPart], bytes], str]] = [
        (lambda p: p.to_bytes(key)[:-1], "the part of rank 1 in .* is not signed with the key"),
        (lambda p: p.to_bytes(key).replace(b"after", b"before"), "is not signed with the key"),
        (lambda p: p.to_bytes(other), "the part of rank 1 in .* is not signed with the key"),
        (lambda p: replace(p, version=p.version - 1).to_bytes(key), "another rank or version"),
        (lambda p: replace(p, run="0" * 32).to_bytes(key), "another rank or version"),
        (lambda p: replace(p, holdings="0" * 64).to_bytes(key), "other tensors than it held"),
        (lambda p: cut(p, slice(1, None)).to_bytes(key), "other tensors than it held at first"),
        (lambda p: cut(p, slice(1)).to_bytes(key), "has written [0-9]+ bytes of version"),
        (lambda p: replace(p, after=77).to_bytes(key), "has not written again.*version 77"),
    ]
    with trainer(tmp_path) as ranks:
        published(ranks.send(1.0), 1)
        for number, (change, message) in enumerate(wrong, 2):
            for sender in ranks.senders:
                sender.advance(number - 1)
            leave_part(ranks.senders[1], 1, 2, 2.0)
            (record,) = parts(tmp_path)
            found = RankPart.from_bytes(record.read_bytes(), key.public)
            record.write_bytes(change(found))
            (first,) = ranks.send_from([0], 2.0)
            assert isinstance(first, PayloadError | StoreError | SignatureError), first
            assert re.search(message, str(first)), first
            record.unlink()
        check_read(ranks.senders[0].address(), 1, 1)
        published(ranks.send(3.0), len(wrong) + 2)


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


def test_a_rank_notices_that_the_first_has_closed_its_sender(tmp_path: Path) -> None:
    with trainer(tmp_path, timeout=60.0) as ranks:
        published(ranks.send(1.0), 1)
        ranks.senders[0].close()
        with pytest.raises(StoreError, match="2 was not published, as rank 0 has closed its send"):
            ranks.senders[1].send(shard(2, 1, 2))


def test_the_reason_of_a_rank_that_has_closed_its_sender_since_is_given(tmp_path: Path) -> None:
    with trainer(tmp_path, timeout=60.0) as ranks:
        published(ranks.send(1.0), 1)
        transport_of(ranks.senders[0])._timeout = 0.1
        ranks.send_from([0], 2.0)
        ranks.senders[0].close()
        with pytest.raises(StoreError, match="rank 0 has given it up: StoreError: version 2 was"):
            ranks.senders[1].send(shard(2, 1, 2))


def test_one_rank_that_begins_again_takes_part(tmp_path: Path) -> None:
    with trainer(tmp_path, 3) as ranks:
        published(ranks.send(1.0), 1)
        ranks.senders[2].close()
        ranks.senders[2] = rank_sender(tmp_path, 2, 3, version=1)
        published(ranks.send(2.0), 2)
        check_read(ranks.senders[2].address(), 2, 2)
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
        check_read(ranks.senders[0].address(), 2, 2)
    with Sender(
        "store", weights(3), url=str(tmp_path / "run"), key=str(tmp_path / "key.pem"), version=2
    ):
        pass
    assert not parts(tmp_path)


def test_records_are_read_as_they_were_written() -> None:
    key = SigningKey.generate()
    session = Session("0" * 32, "1" * 32, 2, 7, "why")
    assert Session.from_bytes(session.to_bytes(key), key.public) == session
    for kind in (RankHolding, RankPart):
        with pytest.raises(PayloadError, match="is of kind 'session'"):
            kind.from_bytes(session.to_bytes(key), key.public)
    with pytest.raises(SignatureError):
        Session.from_bytes(session.to_bytes(SigningKey.generate()), key.public)


def run_ranks(directory: Path, rank: int, dies_at: str) -> list[str]:
    """Run two ranks, one of which dies; return what each has written down."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "tests.store.rank_trainers"])
    processes = [
        context.Process(target=run_rank, args=(directory, i, 2, dies_at if i == rank else "", 1.0))
        for i in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        process.kill()
        process.join()
    return [(directory / f"{i}.log").read_text() for i in range(2)]


@pytest.mark.parametrize(
    ("rank", "dies_at"),
    [(1, "objects/"), (1, "parts/"), (0, "objects/"), (0, "manifests/"), (0, "HEAD")],
    ids=["before-pieces", "before-part", "first-before-pieces", "before-manifest", "before-head"],
)
@pytest.mark.long
def test_a_rank_that_is_killed_leaves_the_last_version(
    tmp_path: Path, rank: int, dies_at: str
) -> None:
    printed = run_ranks(tmp_path, rank, dies_at)
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


def test_a_part_of_a_send_that_failed_is_not_joined_with_later_ones(tmp_path: Path) -> None:
    """Ranks count versions alone: rank 0 may send later weights under the number of the failure."""
    with trainer(tmp_path) as ranks:
        published(ranks.send(1.0), 1)
        transport_of(ranks.senders[1])._timeout = 0.2
        (failed,) = ranks.send_from([1], 2.0)
        assert isinstance(failed, StoreError)
        assert not parts(tmp_path)
        transport_of(ranks.senders[0])._timeout = 0.2
        # Rank 0 sends version 2, and rank 1 version 3.
        first, second = ranks.send(3.0)
        assert isinstance(first, StoreError), first
        assert isinstance(second, StoreError), second
        with Run(str(tmp_path / "run"), Run.key_of(ranks.senders[0])) as run:
            assert run.version == 1


def test_a_rank_that_joined_an_ended_trainer_writes_again_for_the_next(tmp_path: Path) -> None:
    """Also where the next trainer holds more: the ranks then write other parts."""
    held = [{name: torch.ones(4)} for name in "abc"]
    with senders_of(tmp_path, held[:2]) as (_, second), ThreadPoolExecutor(2) as pool:
        transport, written = transport_of(second), threading.Event()
        write = transport._write_part

        def write_and_tell(*arguments: Any) -> None:
            write(*arguments)
            written.set()

        transport._write_part = write_and_tell
        sending = pool.submit(second.send)
        assert written.wait(30.0)
        with senders_of(tmp_path, [{**held[0], **held[2]}, held[1]]) as (first, _):
            published([pool.submit(first.send).result(30.0), sending.result(30.0)], 1)
            with Run(str(tmp_path / "run"), Run.key_of(first)) as run:
                assert [len(file.pieces) for file in run.manifest(1).ranks] == [2, 2]


def test_a_record_that_is_being_written_is_not_removed(tmp_path: Path) -> None:
    with trainer(tmp_path) as ranks:
        half = tmp_path / "run" / "parts" / ".half"
        half.touch()
        published(ranks.send(1.0), 1)
        assert half.exists()


def test_the_others_learn_what_was_given_up_after_an_answer_was_lost(tmp_path: Path) -> None:
    """Also where Ctrl-C ended rank 0's send."""
    with trainer(tmp_path, timeout=60.0) as ranks:
        published(ranks.send(1.0), 1)
        first = transport_of(ranks.senders[0])
        swap, first._timeout = first._objects.swap, 0.1

        def lose(*arguments: Any) -> str:
            swap(*arguments)
            raise StoreError("the answer was lost")

        first._objects.swap = lose
        ranks.send_from([0], 2.0)
        del first._objects.swap

        def interrupt(*arguments: Any) -> None:
            raise KeyboardInterrupt

        first._wait_for_parts = interrupt
        with pytest.raises(KeyboardInterrupt):
            ranks.senders[0].send(shard(3.0, 0, 2))
        # Rank 1 is two versions behind.
        (failed,) = ranks.send_from([1], 2.0)
        assert "rank 0 has given it up: KeyboardInterrupt" in str(failed)


def test_a_list_of_parts_that_readers_refuse_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sync_plugin_store.ranks.MOST_HOLDINGS", 200)
    with trainer(tmp_path, timeout=1.0) as ranks:
        first, second = ranks.send(1.0)
        message = "the parts that 2 ranks hold take [0-9]+ bytes to list, and readers take 200"
        assert re.search(message, str(first))
        assert re.search(message, str(second))


@pytest.mark.long
def test_ranks_may_hold_very_many_tensors(tmp_path: Path) -> None:
    """Their list is longer than any other record."""
    names = [f"layer.{i}.{'x' * 4000}" for i in range(4300)]
    held = [{f"{name}.{rank}": torch.ones(()) for name in names} for rank in range(2)]
    with senders_of(tmp_path, held) as senders:
        published(send_all(senders), 1)


def test_the_next_version_is_published_after_the_answer_about_a_head_was_lost(
    tmp_path: Path,
) -> None:
    """The other ranks have found it, and do not write again what rank 0 takes for lost."""
    with trainer(tmp_path, keep=1) as ranks:
        first = transport_of(ranks.senders[0])
        swap = first._objects.swap

        def lose(*arguments: Any) -> str:
            swap(*arguments)
            raise StoreError("the answer was lost")

        for version in (1, 2):
            first._objects.swap = lose
            lost, second = ranks.send(1.0)
            assert "the answer was lost" in str(lost)
            del first._objects.swap
            published([second], 2 * version - 1)
            published(ranks.send(1.0), 2 * version)
            check_read(ranks.senders[0].address(), 2 * version, 1)


def test_a_version_given_up_after_it_was_published_is_published(tmp_path: Path) -> None:
    """A rank that saw the head before, and the session after, looks at the head again."""
    seen, given_up = threading.Event(), threading.Event()
    with trainer(tmp_path) as ranks:
        published(ranks.send(1.0), 1)
        first, second = (transport_of(sender) for sender in ranks.senders)
        swap, give_up, look = first._objects.swap, first._give_up, second._reader.look

        def lose(*arguments: Any) -> str:
            assert seen.wait(60.0)
            swap(*arguments)
            del first._objects.swap
            raise StoreError("the answer was lost")

        def give_up_and_say(*arguments: Any) -> None:
            give_up(*arguments)
            given_up.set()

        def look_early() -> Any:
            head = look()
            if not seen.is_set() and parts(tmp_path):
                seen.set()
                assert given_up.wait(60.0)
            return head

        first._objects.swap, first._give_up = lose, give_up_and_say
        second._reader.look = look_early
        lost, after = ranks.send(2.0)
        assert "the answer was lost" in str(lost)
        published([after], 2)
        assert seen.is_set()
        check_read(ranks.senders[0].address(), 2, 2)
