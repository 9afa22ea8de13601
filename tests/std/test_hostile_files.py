"""Others that may write to the directory of the scheme ``file``, and trainers that are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from torch import nn

from sync_core import Payload, PendingSend, Receiver, Sender, SendError
from sync_core.errors import PayloadError
from sync_plugin_std.schemes.file import DirectoryStore

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="pipes and links of Linux"),
]


@contextmanager
def sent(directory: Path) -> Iterator[tuple[Sender, Receiver, Path]]:
    """Send a version that a worker has not read yet."""
    source, copy = nn.Linear(3, 2), nn.Linear(3, 2)
    torch.nn.init.zeros_(copy.weight)
    with (
        Sender("file", source, num_workers=1, timeout=10.0, directory=str(directory)) as sender,
        Receiver(sender.address(0), copy) as receiver,
    ):
        refused = sender.send_async()
        yield sender, receiver, next(directory.glob("sync-*/*.safetensors"))
        assert not copy.weight.any()
        with pytest.raises(SendError, match="could not apply version 1"):
            refused.wait(5.0)
        pending = sender.send_async()
        assert receiver.receive(5.0) == 2
        assert pending.wait().updated == (0,)
        assert torch.equal(copy.weight, source.weight)
    assert not list(directory.iterdir())


def test_a_version_that_was_replaced_is_refused(tmp_path: Path) -> None:
    with sent(tmp_path) as (_, receiver, path):
        payload = Payload.from_bytes(path.read_bytes(), 1)
        for tensor in payload.tensors:
            tensor.fill_(666)
        path.write_bytes(payload.to_bytes())
        with pytest.raises(PayloadError, match="not those that the sender has put there"):
            receiver.receive(2.0)


@pytest.mark.parametrize("nbytes", [0, 10, 8 << 30])
def test_a_version_of_another_size_is_not_read(tmp_path: Path, nbytes: int) -> None:
    with sent(tmp_path) as (_, receiver, path):
        os.truncate(path, nbytes)
        with pytest.raises(PayloadError, match=f"{nbytes} are there"):
            receiver.receive(2.0)


@pytest.mark.parametrize("how", ["changed", "removed"])
@pytest.mark.parametrize("scheme", ["file", "increments::file"])
def test_a_newer_version_is_read_for_one_that_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, how: str
) -> None:
    source, copy = nn.Linear(3, 2), nn.Linear(3, 2)
    read, later = DirectoryStore.get_into, list[PendingSend]()

    def read_late(store: DirectoryStore, name: str, allocate: Callable[[int], memoryview]) -> bool:
        monkeypatch.undo()
        path = tmp_path / name
        if how == "changed":
            path.write_bytes(bytes(path.stat().st_size))
        else:
            path.unlink()
        later.append(sender.send_async())
        return read(store, name, allocate)

    with (
        Sender(scheme, source, num_workers=1, timeout=10.0, directory=str(tmp_path)) as sender,
        Receiver(sender.address(0), copy) as receiver,
    ):
        with pytest.raises(SendError):
            sender.send(timeout=0.1)
        monkeypatch.setattr(DirectoryStore, "get_into", read_late)
        # It has found the first version, and its call looks once.
        assert receiver.receive(0.0) == 2
        assert later[-1].wait().updated == (0,)
    assert torch.equal(copy.weight, source.weight)


@pytest.mark.parametrize("kind", ["pipe", "link", "folder", "device"])
def test_what_is_not_a_file_is_not_read(tmp_path: Path, kind: str) -> None:
    other = tmp_path / "other"
    with sent(tmp_path) as (_, receiver, path):
        content = path.read_bytes()
        path.unlink()
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        elif kind == "device":
            path.symlink_to("/dev/zero")
        else:
            other.write_bytes(content)
            path.symlink_to(other)
        started = time.monotonic()
        with pytest.raises(PayloadError, match=r"not a (regular )?file"):
            receiver.receive(2.0)
        assert time.monotonic() - started < 2
        if kind == "folder":
            path.rmdir()
        else:
            path.unlink()
        other.unlink(missing_ok=True)


def test_a_pipe_in_place_of_a_record_makes_no_call_hang(tmp_path: Path) -> None:
    source, copy = nn.Linear(3, 2), nn.Linear(3, 2)
    with Sender("file", source, num_workers=2, timeout=2.0, directory=str(tmp_path)) as sender:
        honest, other = (
            Receiver(sender.address(0), copy),
            Receiver(sender.address(1), nn.Linear(3, 2)),
        )
        record = next(tmp_path.glob("sync-*/worker-1.json"))
        record.unlink()
        os.mkfifo(record)
        pending = sender.send_async()
        assert honest.receive(2.0) == 1
        with pytest.raises(SendError) as failed:
            pending.wait()
        assert failed.value.report.updated == (0,)
        record.unlink()
        for receiver in (honest, other):
            receiver.close()


@pytest.mark.long
def test_the_next_sender_removes_what_a_killed_one_has_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program = f"""
import sys, time, torch
from sync_core import Sender
sender = Sender("file", torch.nn.Linear(3, 2), num_workers=1, directory={str(tmp_path)!r})
sender.send_async()
print("sent", flush=True)
time.sleep(60)
"""
    trainers = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        for trainer in trainers:
            assert trainer.stdout is not None
            assert trainer.stdout.readline() == "sent\n"
        (tmp_path / "sync-0123456789abcdef").symlink_to(tmp_path)
        mine = tmp_path / "sync-of-my-own"
        mine.mkdir()
        young = tmp_path / "sync-1123456789abcdef"
        young.mkdir()
        old = tmp_path / "sync-2123456789abcdef"
        old.mkdir()
        others = tmp_path / "sync-3123456789abcdef"
        others.mkdir()
        (others / "notes.txt").write_text("mine")
        (others / "worker-0.json").write_bytes(b"")
        for folder in (old, others):
            os.utime(folder, (0, 0))
        trainers[0].send_signal(signal.SIGKILL)
        trainers[0].wait(10)
        before = len(list(tmp_path.glob("sync-*/*.safetensors")))
        with Sender("file", nn.Linear(3, 2), num_workers=1, directory=str(tmp_path)):
            versions = list(tmp_path.glob("sync-*/*.safetensors"))
            # The other trainer lives.
            assert (before, len(versions)) == (4, 2) or (before, len(versions)) == (2, 1)
            assert mine.exists()
            assert young.exists()
            assert not old.exists()
            assert [path.name for path in others.iterdir()] == ["notes.txt"]
            assert "cannot remove" not in caplog.text
    finally:
        for trainer in trainers:
            with suppress(OSError):
                trainer.kill()
            trainer.wait(10)
            assert trainer.stdout is not None
            trainer.stdout.close()
