"""Files of others beside a run: none is replaced or removed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import nullcontext
from http.client import HTTPConnection
from pathlib import Path

import pytest
from obstore.store import MemoryStore
from tests.store.linears import files, model
from tests.store.rank_trainers import published, trainer
from tests.store.test_publisher_faults import Failing
from tests.store.test_store_faults import payload_of

from sync_core import OptionError, Receiver, Sender
from sync_plugin_store import ConflictError, Mirror, Run, SignatureError, StoreError, serve
from sync_plugin_store.format import HEAD, Manifest, Piece, digest_of, manifest_name
from sync_plugin_store.keys import SigningKey
from sync_plugin_store.leases import Lease
from sync_plugin_store.objects import Directory, Objects
from sync_plugin_store.publisher import RunPublisher
from sync_plugin_store.records import RankPart, holding_name, part_name
from sync_plugin_store.remote_objects import RemoteObjects

OTHER = Manifest(run="f" * 32, version=1, pieces=(Piece("a" * 64, 4),)).to_bytes()
NAMES = (
    "train.py",
    "HEAD.bak",
    "data/objects/x",
    "objects/teapot.obj",
    "objects/deep/mine.bin",
    "objects/.half",
    "objects/.0123456789abcdef",
    f"objects/{'a' * 64}",
    f"objects/{'b' * 64}.bin",
    f"objects/{'c' * 64}",
    "manifests/deployment.yaml",
    f"manifests/{'d' * 64}.json",
    "parts/list.csv",
    holding_name("0" * 32, 1),
    part_name("1" * 32, 1, 1),
    "leases/flat.json",
    "leases/contract.pdf",
    f"leases/{'0' * 16}.json",
    "answers/sheet.csv",
    "holdings/mine",
    ".sync-store-mine",
)
STRANGERS = {
    **dict.fromkeys(NAMES, b"mine"),
    # Of other runs, and by other programs.
    manifest_name(digest_of(OTHER)): OTHER,
    f"leases/{'1' * 16}.json": Lease(1, 0.0, "f" * 32).to_bytes(),
    f"leases/{'2' * 16}.json": b'{"version": 1, "seconds": 0}',
    part_name("0" * 32, 1, 2): RankPart("f" * 32, "0" * 32, 2, 1, 0, "", None).to_bytes(  # type: ignore[arg-type]
        SigningKey.generate()
    ),
}


@pytest.fixture(params=["directory", "s3", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    if request.param == "directory":
        return Directory(tmp_path / "run", "run")
    if request.param == "s3":
        url = f"{request.getfixturevalue('bucket')}/{os.urandom(4).hex()}"
        return RemoteObjects(url, 10.0)
    made = RemoteObjects("s3://memory", 10.0)
    made._store = MemoryStore()
    return made


def put(place: Objects, names: Iterable[str] = STRANGERS) -> None:
    for name in names:
        place.put(name, STRANGERS[name])


def check(place: Objects, names: Iterable[str] = STRANGERS) -> None:
    found = {name: place.look(name) for name in names}
    assert {n: f and f.data for n, f in found.items()} == {n: STRANGERS[n] for n in names}


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all be older than any grace."""
    for module in ("publisher", "leases"):
        path = f"sync_plugin_store.{module}.store_time"
        monkeypatch.setattr(path, lambda _: time.time() + 86400.0)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("session", ["", "0" * 31 + "1"], ids=["alone", "ranks"])
def test_a_run_removes_its_own_objects_alone(place: Objects, session: str) -> None:
    key = SigningKey.generate()
    for first in (1, 4):
        publisher = RunPublisher(place, key, keep=1, grace=0.0, session=session)
        for version in range(first, first + 3):
            publisher.publish(payload_of(version))
            put(place)
        publisher.collect()
        publisher.remove_records(version)
        own = {name for name in place.walk() if name.startswith(("objects/", "manifests/"))}
        # A manifest, a header and a piece.
        assert len(own - STRANGERS.keys()) == 3
        check(place)
        publisher.close()


@pytest.mark.parametrize("name", ["train.py", "objects/teapot.obj", "leases/contract.pdf"])
def test_a_place_of_other_things_is_refused(place: Objects, name: str) -> None:
    put(place, [name])
    with pytest.raises(
        OptionError, match=f"holds other things, such as '{name}', and no run; give"
    ):
        RunPublisher(place, SigningKey.generate())
    place.put(HEAD, b"ref: refs/heads/main\n")
    with pytest.raises(OptionError, match="begins with b'ref: refs/heads/main', and is not that"):
        RunPublisher(place, SigningKey.generate())
    check(place, [name])
    assert {*place.walk()} == {name, HEAD}


def test_a_run_can_begin_where_another_ended_before_its_first_version(tmp_path: Path) -> None:
    """Also where the key lies beside it."""
    run, key = tmp_path / "run", str(tmp_path / "run" / "key.pem")
    run.mkdir()
    for workers in (2, None):
        with Sender("store", model(), url=str(run), key=key, num_workers=workers):
            pass
    place = Failing(run)
    for place.failing in ("swap", "swap", ""):
        publisher = RunPublisher(place, SigningKey.of_file(Path(key)))
        with pytest.raises(StoreError) if place.failing else nullcontext():
            publisher.publish(payload_of(1))
        publisher.writer.close()


@pytest.mark.usefixtures("late")
def test_ranks_leave_what_is_not_theirs(tmp_path: Path) -> None:
    place = Directory(tmp_path / "run", "run")
    for first in (0, 3):
        with trainer(tmp_path, version=first, keep=1, grace=0.0) as ranks:
            for version in range(first + 1, first + 4):
                published(ranks.send(float(version)), version)
                put(place)
    check(place)
    (tmp_path / "other").mkdir()
    place = Directory(tmp_path / "other" / "run", "run")
    place.put("parts/session.json", b"mine")
    with pytest.raises(OptionError, match=r"parts/session.json in .* is not of the ranks"):
        trainer(tmp_path / "other").__enter__()
    assert (tmp_path / "other" / "run" / "parts" / "session.json").read_bytes() == b"mine"


def test_a_mirror_removes_the_objects_of_its_run_alone(tmp_path: Path) -> None:
    far, near = Directory(tmp_path / "far", "far"), Directory(tmp_path / "near", "near")
    key = SigningKey.generate()
    publisher = RunPublisher(far, key, keep=1, grace=0.0)
    for _ in range(2):
        publisher.publish(payload_of(publisher.head.version + 1))
        with Mirror(str(far.path), str(near.path), key.public, poll=600.0, grace=0.0) as mirror:
            for _ in range(2):
                publisher.publish(payload_of(publisher.head.version + 1))
                # What is not needed is removed once it was not needed before.
                mirror.update()
                mirror.update()
                put(near)
    own = {name for name in near.walk() if name.startswith(("objects/", "manifests/"))}
    assert own - STRANGERS.keys() == {
        name for name in far.walk() if name.startswith(("objects/", "manifests/"))
    }
    check(near)
    publisher.close()
    put(other := Directory(tmp_path / "other", "other"), ["objects/teapot.obj"])
    with pytest.raises(OptionError, match=r"holds other things, such as 'objects/teapot\.obj'"):
        Mirror(str(far.path), str(other.path), key.public)
    check(other, ["objects/teapot.obj"])
    with pytest.raises(SignatureError, match="not signed with the key"):
        Mirror(str(near.path), str(far.path), "0" * 64)


@pytest.mark.parametrize("folder", ["objects", "manifests", "parts", "leases"])
def test_no_link_is_followed(tmp_path: Path, folder: str) -> None:
    """By a process that may write to the directory, and has no key."""
    run, key, victim = tmp_path / "run", SigningKey.generate(), tmp_path / "home"
    publisher = RunPublisher(Directory(run, "run"), key, keep=1, grace=0.0)
    publisher.publish(payload_of(1))
    (run / folder).mkdir(exist_ok=True)
    (run / folder / "id_ed25519").write_bytes(b"secret")
    (run / folder).rename(victim)
    (run / folder).symlink_to(victim)
    before = files(victim)
    for _ in range(2):
        if folder in {"objects", "manifests"}:
            with pytest.raises(StoreError, match="is a link, which is not followed: put a dir"):
                publisher.publish(payload_of(publisher.head.version + 1))
        else:
            publisher.publish(payload_of(publisher.head.version + 1))
        publisher.collect()
        publisher.writer.close()
        publisher = RunPublisher(Directory(run, "run"), key, keep=1, grace=0.0, session="0" * 32)
    publisher.writer.close()
    assert files(victim) == before
    with serve(str(run)) as url:
        connection = HTTPConnection(url.removeprefix("http://"), timeout=10)
        for name in before:
            connection.request("GET", f"/{folder}/{name}")
            answer = connection.getresponse()
            assert (answer.status, answer.read()) == (404, b"")
        connection.close()


def test_a_server_of_a_run_serves_no_files_of_others(tmp_path: Path) -> None:
    put(Directory(tmp_path, "run"))
    with serve(str(tmp_path)) as url:
        connection = HTTPConnection(url.removeprefix("http://"), timeout=10)
        # Names of the format's own form are of objects that readers check.
        for name in sorted(STRANGERS):
            if not name.startswith(("objects/", "manifests/")) or not name[10:50].isalnum():
                connection.request("GET", f"/{name}")
                answer = connection.getresponse()
                assert (answer.status, answer.read()) == (404, b""), name
        connection.close()


def test_an_empty_head_is_named_as_such(tmp_path: Path) -> None:
    """As a machine may leave it that lost power."""
    url, key = str(tmp_path / "run"), str(tmp_path / "key.pem")
    with Sender("store", model(), url=url, key=key) as sender:
        sender.send()
        address, public = sender.address(), Run.key_of(sender)
    (tmp_path / "run" / HEAD).write_bytes(b"")
    with pytest.raises(SignatureError, match="HEAD is empty, as after a loss of power"):
        Run(url, public, timeout=0.2)
    with (
        pytest.raises(SignatureError, match="HEAD is empty"),
        Receiver(address, model(), timeout=0.2) as receiver,
    ):
        receiver.receive()
    with pytest.raises(SignatureError, match="HEAD is empty"):
        Sender("store", model(), url=url, key=key)
    (tmp_path / "run" / HEAD).write_bytes(b"ed25519 0 0\n{}")
    with pytest.raises(ConflictError, match="signed with another key"):
        Sender("store", model(), url=url, key=key)
