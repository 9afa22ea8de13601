"""A trainer publishes, and readers that it does not know read: whole versions, and no others."""

from __future__ import annotations

import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load
from tests.store.web_faults import faulty
from torch import nn

from sync_core import Address, OptionError, Receiver, Sender, SenderLostError
from sync_core.errors import PayloadError
from sync_plugin_std import select
from sync_plugin_store import (
    ConflictError,
    Mirror,
    RolledBackError,
    Run,
    SignatureError,
    StoreError,
    serve,
)
from sync_plugin_store.format import HEAD, Head, object_name
from sync_plugin_store.keys import SigningKey
from sync_plugin_store.objects import Directory, Objects, open_objects
from sync_plugin_store.publisher import Publisher
from sync_plugin_store.reader import RunReader


def model(value: float = 0.0, size: int = 64) -> nn.Linear:
    made = nn.Linear(size, size)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(value)
    return made


def fill(given: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in given.parameters():
            parameter.fill_(value)


def values(given: nn.Module) -> set[float]:
    return {value for p in given.parameters() for value in p.detach().flatten().tolist()}


def files(directory: Path) -> set[str]:
    paths = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)) for path in paths}


@pytest.fixture(params=["directory", "s3", "http"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Where the trainer writes, and where readers read."""
    if request.param == "s3":
        url = f"{request.getfixturevalue('bucket')}/{secrets.token_hex(4)}"
        yield url, url
    elif request.param == "http":
        (tmp_path / "run").mkdir()
        with serve(str(tmp_path / "run")) as url:
            yield str(tmp_path / "run"), url
    else:
        yield str(tmp_path / "run"), (tmp_path / "run").as_uri()


def test_versions_reach_readers_that_the_trainer_does_not_know(place: tuple[str, str]) -> None:
    written, read = place
    policy, copies = model(), [model(), model()]
    with (
        Sender("store", policy, url=written, piece_mb=0.004, poll=0.01) as sender,
        ExitStack() as e,
    ):
        fill(policy, 1.0)
        report = sender.send()
        assert (report.version, report.updated, dict(sender.workers)) == (1, (), {})
        run = e.enter_context(Run(read, Run.key_of(sender)))
        addresses = [sender.address(), run.address(poll=0.01)]
        receivers = [
            e.enter_context(Receiver(a, c)) for a, c in zip(addresses, copies, strict=True)
        ]
        for version in range(1, 4):
            assert run.versions() == tuple(range(1, version + 1))
            for receiver, copy in zip(receivers, copies, strict=True):
                assert receiver.receive(10.0) == version
                assert values(copy) == {float(version)}
            fill(policy, version + 1.0)
            extras = {"step": torch.tensor(version)}
            assert sender.send(extras=extras).version == version + 1
        assert receivers[0].receive(10.0) == 4
        assert receivers[0].extras["step"] == 3


def test_readers_leave_nothing_and_need_no_token(tmp_path: Path) -> None:
    policy, copy = model(2.0), model()
    with Sender("store", policy, url=str(tmp_path)) as sender:
        sender.send()
        before = files(tmp_path)
        address = Address.from_json(sender.address().to_json())
        with Receiver(replace(address, token="0" * 32), copy) as receiver:
            assert receiver.receive() == 1
        assert files(tmp_path) == before
        token = sender.address().token
        assert not any(token in (tmp_path / name).read_bytes().decode("latin1") for name in before)
    assert values(copy) == {2.0}


def test_the_objects_of_a_version_are_a_file_of_safetensors(tmp_path: Path) -> None:
    policy = nn.Sequential(nn.Linear(300, 200), nn.Linear(200, 7))
    with Sender("store", policy, url=str(tmp_path), piece_mb=0.01) as sender:
        sender.send()
        with Run(str(tmp_path), Run.key_of(sender)) as run:
            pieces = run.manifest(1).pieces
    assert len(pieces) > 10
    data = b"".join((tmp_path / object_name(p.digest)).read_bytes() for p in pieces)
    found = load(data)
    assert all(torch.equal(found[name], tensor) for name, tensor in policy.state_dict().items())


def test_what_did_not_change_is_not_written_again(tmp_path: Path) -> None:
    policy = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    with Sender("store", policy, url=str(tmp_path), piece_mb=0.0625) as sender:
        sender.send()
        before = files(tmp_path)
        fill(policy[1], 3.0)
        sender.send()
        # Half of the pieces have changed, and most of those are the same.
        assert 1 <= sum(name.startswith("objects/") for name in files(tmp_path) - before) <= 3


def test_a_run_that_is_closed_can_be_read(tmp_path: Path) -> None:
    copy = model()
    with Sender("store", model(2.0), url=str(tmp_path)) as sender:
        sender.send()
        key = Run.key_of(sender)
    with Run(str(tmp_path), key) as run, Receiver(run.address(), copy) as receiver:
        assert receiver.receive() == 1
        with pytest.raises(SenderLostError, match="closed its sender after version 1"):
            receiver.receive()


def test_a_receiver_does_not_wait_for_what_is_on_its_way(tmp_path: Path) -> None:
    copy = model()
    with (
        Sender("store", model(2.0), url=str(tmp_path)) as sender,
        Receiver(sender.address(), copy, timeout=20.0) as receiver,
    ):
        begin = time.monotonic()
        assert receiver.receive(0.05) is None
        assert time.monotonic() - begin < 5.0
        sender.send()
        assert receiver.receive() == 1


def test_a_layer_that_leaves_out_sends_all_to_readers_that_are_not_known(tmp_path: Path) -> None:
    copy = model()
    policy = model(1.0)
    with Sender("store", policy, url=str(tmp_path), layers=[select("*")]) as sender:
        sender.send()
        sender.send({"bias": torch.full((64,), 5.0)})
        with Receiver(sender.address(), copy) as receiver:
            assert receiver.receive() == 2
    assert values(copy) == {1.0, 5.0}


def test_pinned_and_named_versions(tmp_path: Path) -> None:
    url, key_file = str(tmp_path / "run"), str(tmp_path / "key.pem")
    policy = model()
    with Sender("store", policy, url=url, key=key_file, keep=2, grace=0.0) as sender:
        key = Run.key_of(sender)
        for version in range(1, 7):
            fill(policy, float(version))
            sender.send()
            if version == 2:
                with Run(url, key) as run:
                    run.set_name("best", 2, key_file)
        with Run(url, key) as run:
            assert (run.versions(), run.names(), run.version) == ((2, 5, 6), {"best": 2}, 6)
            for address, expected in [(run.address(version=5), 5), (run.address(name="best"), 2)]:
                copy = model()
                with Receiver(address, copy) as receiver:
                    assert receiver.receive() == expected
                    assert values(copy) == {float(expected)}
                    assert receiver.receive(0.05) is None
            with pytest.raises(OptionError, match=r"version 3 is not in .*, which has \[2, 5, 6\]"):
                run.address(version=3)
            with pytest.raises(OptionError, match="no version named 'worst'; names: best"):
                run.address(name="worst")
            with pytest.raises(StoreError, match="a name of a version must have letters"):
                run.set_name("../HEAD", 5, key_file)
            run.forget_name("best", key_file)
        sender.send()
        with Run(url, key) as run:
            assert run.versions() == (6, 7)
        # What only they had is gone.
        assert len(files(tmp_path / "run" / "manifests")) == 2


def test_a_lease_keeps_a_version(tmp_path: Path) -> None:
    url, policy, copy = str(tmp_path), model(), model()
    with Sender("store", policy, url=url, keep=1, grace=0.0) as sender:
        fill(policy, 1.0)
        sender.send()
        with Run(url, Run.key_of(sender)) as run:
            with run.lease(1):
                for value in (2.0, 3.0):
                    fill(policy, value)
                    sender.send()
                assert run.versions() == (1, 3)
                with Receiver(run.address(version=1), copy) as receiver:
                    assert receiver.receive() == 1
            sender.send()
            assert run.versions() == (4,)
    assert values(copy) == {1.0}
    assert not files(tmp_path / "leases")


def test_a_trainer_that_is_started_again_continues_its_run(tmp_path: Path) -> None:
    url, key_file, copy = str(tmp_path / "run"), str(tmp_path / "key.pem"), model()
    with Sender("store", model(1.0), url=url, key=key_file) as sender:
        sender.send()
        address = sender.address()
    assert (tmp_path / "key.pem").stat().st_mode & 0o777 == 0o600
    with Receiver(address, copy) as receiver:
        assert receiver.receive() == 1
        with (
            Sender("store", model(2.0), url=url, key=key_file) as again,
            pytest.raises(ConflictError, match=r"type Sender\(…, version=1\) to continue"),
        ):
            again.send(timeout=5.0)
        with Sender("store", model(3.0), url=url, key=key_file, version=1) as again:
            again.send()
            assert receiver.receive() == 2
    assert values(copy) == {3.0}
    with pytest.raises(ConflictError, match="was signed with another key; give the key"):
        Sender("store", model(), url=url)


def test_two_trainers_of_one_run_do_not_both_write(tmp_path: Path) -> None:
    url, key_file = str(tmp_path / "run"), str(tmp_path / "key.pem")
    with (
        Sender("store", model(1.0), url=url, key=key_file) as first,
        Sender("store", model(2.0), url=url, key=key_file) as second,
    ):
        first.send()
        with pytest.raises(ConflictError, match="another trainer writes to the run"):
            second.send()
        first.send()
        with Run(url, Run.key_of(first)) as run:
            assert run.versions() == (1, 2)


class Stopping(Directory):
    """A directory whose trainer is killed at a step: half of an object is written."""

    def __init__(self, path: Path, steps: int) -> None:
        super().__init__(path, str(path))
        self._steps = steps

    def put(self, name: str, data: bytes | memoryview) -> None:
        self._steps -= 1
        if self._steps < 0:
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            (self.path / name).with_name(".half").write_bytes(bytes(data[: len(data) // 2]))
            raise KeyboardInterrupt
        super().put(name, data)


def test_a_trainer_killed_at_any_step_leaves_whole_versions(tmp_path: Path) -> None:
    key, weights = SigningKey.generate(), {"weight": torch.zeros(4000)}

    def payload(version: int) -> Any:
        from sync_core import Payload, Update

        update = Update.of({"weight": torch.full((4000,), float(version))})
        return Payload(version, update.layout, update.source)

    del weights
    steps = 0
    while True:
        folder = tmp_path / str(steps)
        Publisher(Directory(folder, "run"), key, piece_nbytes=4096).publish(payload(1))
        killed = Publisher(Stopping(folder, steps), key, piece_nbytes=4096, grace=0.0)
        done = False
        try:
            killed.publish(payload(2))
            done = True
        except KeyboardInterrupt:
            pass
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
        again = Publisher(Directory(folder, "run"), key, piece_nbytes=4096, grace=0.0)
        again.publish(payload(3))
        reader = RunReader([Directory(folder, "run")], key.public, timeout=5.0)
        assert reader.look() is not None
        pieces = {
            p.digest
            for v in range(1, 4)
            if v in again.head.versions
            for p in reader.manifest(v).pieces
        }
        # What was cut short goes when it is older than the grace.
        for path in (folder / "objects").iterdir():
            if path.name not in pieces:
                os.utime(path, (1.0, 1.0))
        again.collect()
        assert {path.name for path in (folder / "objects").iterdir()} == pieces
        reader.close()
        if done:
            return
        steps += 1


def _tamper(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "deleted":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(data[:-1])
    elif how == "longer":
        path.write_bytes(bytes(data) + b"x")
    else:
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


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
        _tamper(path, how)
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
            _tamper(path, "changed")
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


def test_a_mirror_lets_a_version_cross_a_link_once(tmp_path: Path) -> None:
    policy = model(1.0)
    far, near = tmp_path / "far", tmp_path / "near"
    with Sender("store", policy, url=str(far)) as sender, faulty(far) as (url, faults):
        sender.send()
        key = Run.key_of(sender)
        with Mirror(url, str(near), key, poll=600.0, grace=0.0) as mirror:
            assert mirror.update() == 1
            copies = [model() for _ in range(4)]
            with Run(mirror.url, key) as run:
                for copy in copies:
                    with Receiver(run.address(), copy) as receiver:
                        assert receiver.receive() == 1
            assert all(values(copy) == {1.0} for copy in copies)
            objects = [count for path, count in faults.asked.items() if "/objects/" in path]
            assert objects
            assert set(objects) == {1}
            fill(policy, 2.0)
            sender.send()
            for path in (far / "objects").iterdir():
                if not (near / "objects" / path.name).exists():
                    _tamper(path, "changed")
        # What does not have its digest is not copied, and the mirror keeps what it has.
        with Mirror(url, str(near), key, poll=600.0, timeout=0.3) as mirror:
            with pytest.raises(PayloadError, match="of version 2 cannot be read"):
                mirror.update()
            with Run(mirror.url, key) as run:
                assert run.version == 1


def test_a_web_server_of_a_run_serves_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "leases").mkdir()
    (tmp_path / "leases" / "one.json").write_text("{}")
    (tmp_path / "objects").mkdir()
    (tmp_path / HEAD).write_bytes(b"head")
    with serve(str(tmp_path)) as url:
        remote: Objects = open_objects(url, 5.0)
        found = remote.look(HEAD)
        assert found is not None
        assert found.data == b"head"
        assert remote.look(HEAD, found.tag) is None
        for name in ("secret", "leases/one.json", "objects/../secret", "objects/%2e%2e/secret", ""):
            connection = HTTPConnection(url.removeprefix("http://"), timeout=10)
            connection.request("GET", f"/{name}")
            assert connection.getresponse().status == 404
            connection.close()
    with pytest.raises(OptionError, match="can be read and not written"):
        Sender("store", model(), url=url)


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


def test_a_reader_whose_version_is_gone_continues_with_the_newest(tmp_path: Path) -> None:
    policy, copy = model(1.0), model()
    with Sender("store", policy, url=str(tmp_path), keep=1, grace=0.0) as sender:
        sender.send()
        with Run(str(tmp_path), Run.key_of(sender)) as run:
            digest = max(run.manifest(1).pieces, key=lambda piece: piece.nbytes).digest
        _tamper(tmp_path / "objects" / digest, "deleted")
        with Receiver(sender.address(), copy, timeout=20.0) as receiver:
            # It has begun to fetch the first version, which does not come.
            assert receiver.receive(0.2) is None
            fill(policy, 2.0)
            sender.send()
            assert receiver.receive() == 2
    assert values(copy) == {2.0}


def test_options_that_make_no_sense(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="keep must be an integer >= 1, got 0"):
        Sender("store", model(), url=str(tmp_path), keep=0)
    with pytest.raises(OptionError, match="url must be a directory, or begin with"):
        Sender("store", model(), url="ftp://host/run")
    with Sender("store", model(), url=str(tmp_path)) as sender:
        with pytest.raises(OptionError, match="publishes for readers that it does not know"):
            sender.add_worker()
        with pytest.raises(StoreError, match="has no run yet"):
            Run(str(tmp_path), Run.key_of(sender))
    (tmp_path / "not a key").write_text("x")
    with pytest.raises(OptionError, match="must be a file with an Ed25519 private key"):
        Sender("store", model(), url=str(tmp_path), key=str(tmp_path / "not a key"))
    with Sender("thread", model(), num_workers=1) as sender, pytest.raises(OptionError):
        Run.key_of(sender)
