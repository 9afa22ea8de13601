"""A trainer publishes, and readers that it does not know read: whole versions, and no others."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load
from tests.store.linears import files, fill, model, tamper, values
from tests.store.web_faults import faulty
from torch import nn

from sync_core import Address, OptionError, Receiver, Sender, SenderLostError
from sync_core.errors import PayloadError
from sync_plugin_std import select
from sync_plugin_store import (
    ConflictError,
    Mirror,
    Run,
    StoreError,
    serve,
)
from sync_plugin_store.format import HEAD, object_name
from sync_plugin_store.objects import Directory, Objects, open_objects


@pytest.fixture(params=["directory", "s3", "http"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """The URL that the trainer writes to, and the one that readers read from."""
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


ODD_LEASES = [
    b'{"version": 1e999, "seconds": 60}',
    b'{"version": 1, "seconds": ' + b"9" * 400 + b"}",
    b'{"version": 1, "seconds": NaN}',
    b'{"version": ' + b"9" * 5000 + b', "seconds": 60}',
    b"[" * 2000,
    b'{"version": 1, "seconds": 60, "more": "' + b"x" * (1 << 25) + b'"}',
]


@pytest.mark.parametrize("lease", ODD_LEASES, ids=lambda data: data[:40].decode())
def test_a_lease_that_is_wrong_keeps_nothing(tmp_path: Path, lease: bytes) -> None:
    policy = model()
    (tmp_path / "leases").mkdir()
    (tmp_path / "leases" / "loop.json").symlink_to(tmp_path / "leases" / "loop.json")
    with Sender("store", policy, url=str(tmp_path), keep=1, grace=0.0) as sender:
        for value in (1.0, 2.0, 3.0):
            (tmp_path / "leases" / "one.json").write_bytes(lease)
            fill(policy, value)
            sender.send()
        with Run(str(tmp_path), Run.key_of(sender)) as run:
            assert run.versions() == (3,)
    # It may belong to others.
    assert (tmp_path / "leases" / "one.json").exists()


def test_a_lease_that_cannot_be_read_keeps_all_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    policy, look = model(), Directory.look

    def fail(self: Directory, name: str, tag: str | None = None) -> Any:
        if name.startswith("leases/"):
            raise StoreError(f"cannot read {name}")
        return look(self, name, tag)

    monkeypatch.setattr(Directory, "look", fail)
    (tmp_path / "leases").mkdir()
    (tmp_path / "leases" / "one.json").write_bytes(b"{}")
    with Sender("store", policy, url=str(tmp_path), keep=1, grace=0.0) as sender:
        for _ in range(3):
            sender.send()
        with Run(str(tmp_path), Run.key_of(sender)) as run:
            assert run.versions() == (1, 2, 3)
    assert "cannot read leases/one.json" in caplog.text


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
                    tamper(path, "changed")
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
    link = object_name("0" * 64)
    (tmp_path / link).symlink_to(tmp_path / "secret")
    with serve(str(tmp_path)) as url:
        remote: Objects = open_objects(url, 5.0)
        found = remote.look(HEAD)
        assert found is not None
        assert found.data == b"head"
        assert remote.look(HEAD, found.tag) is None
        refused = ("secret", "leases/one.json", "objects/../secret", "objects/%2e%2e/secret", "")
        for name in (*refused, link):
            connection = HTTPConnection(url.removeprefix("http://"), timeout=10)
            connection.request("GET", f"/{name}")
            assert connection.getresponse().status == 404
            connection.close()
    with pytest.raises(OptionError, match="can be read and not written"):
        Sender("store", model(), url=url)


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
