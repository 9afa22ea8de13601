"""The scheme `file` does what every scheme does, and any tool reads its files."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load, load_file

from sync_core import OptionError, Payload, Receiver, Sender, SendError, Update
from sync_testing import SchemeConformance


class TestFile(SchemeConformance):
    scheme = "file"
    options: ClassVar[Mapping[str, Any]] = {"lost_after": 3.0}


def test_another_tool_reads_the_files(tmp_path: Path) -> None:
    source, target = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    with Sender("file", source, num_workers=1, directory=str(tmp_path), keep=2) as sender:
        with Receiver(sender.address(0), target) as receiver:
            for version in range(1, 5):
                pending = sender.send_async()
                assert receiver.receive() == version
                pending.wait()
        names = sorted(path.name for path in tmp_path.glob("*/*.safetensors"))
        assert names == ["policy-00000003.safetensors", "policy-00000004.safetensors"]
        loaded = load_file(next(tmp_path.glob("*/*4.safetensors")))
        assert torch.equal(loaded["weight"], source.weight)
    assert torch.equal(target.weight, source.weight)
    assert not list(tmp_path.iterdir())


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    with pytest.raises(OptionError, match=f"no directory '{missing}' on this machine; make it"):
        Sender("file", torch.nn.Linear(3, 2), num_workers=1, directory=missing)


def test_a_forked_child_does_not_leave_in_its_parents_name(tmp_path: Path) -> None:
    program = f"""
import os
import torch
from sync_core import OptionError, Receiver, Sender

with Sender("file", torch.nn.Linear(2, 2), num_workers=1, directory={str(tmp_path)!r}) as sender:
    receiver = Receiver(sender.address(0), torch.nn.Linear(2, 2))
    child = os.fork()
    if not child:
        receiver.close()
        os._exit(0)
    os.waitpid(child, 0)
    pending = sender.send_async(timeout=10)
    receiver.receive()
    print(pending.wait().updated)
    receiver.close()
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.stdout == "(0,)\n", run.stderr


@pytest.mark.parametrize("started_by", ["", "fork", "spawn"])
def test_a_worker_that_an_exception_ends_says_which(tmp_path: Path, started_by: str) -> None:
    program = tmp_path / "worker.py"
    program.write_text("""
import multiprocessing, pathlib, pickle, sys
import torch
from sync_core import Receiver

def work():
    address = pickle.loads(pathlib.Path("address").read_bytes())
    receiver = Receiver(address, torch.nn.Linear(3, 2))
    receiver.receive(30)
    raise RuntimeError("the step failed")

if __name__ == "__main__":
    if sys.argv[1]:
        multiprocessing.get_context(sys.argv[1]).Process(target=work).start()
    else:
        work()
""")
    options: dict[str, Any] = {"directory": str(tmp_path), "lost_after": 60.0}
    with Sender("file", torch.nn.Linear(3, 2), num_workers=1, **options) as sender:
        (tmp_path / "address").write_bytes(pickle.dumps(sender.address(0)))
        pending = sender.send_async()
        command = [sys.executable, str(program), started_by]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=60, check=False)
        assert b"the step failed" in ended.stderr
        assert pending.wait().updated == (0,)
        said = "has ended without closing its receiver, after RuntimeError: the step failed"
        with pytest.raises(SendError, match=said):
            sender.send()


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource", reason="needs limits of Unix")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    source, target = torch.nn.Linear(256, 256), torch.nn.Linear(256, 256)
    with (
        Sender("file", source, num_workers=1, directory=str(tmp_path)) as sender,
        Receiver(sender.address(0), target) as receiver,
    ):
        # A full disk: records have room, and a version has not.
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, before[1]))
        try:
            with pytest.raises(SendError, match="File too large"):
                sender.send()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        names = sorted(path.name for path in tmp_path.glob("*/*"))
        assert names == ["sender.json", "worker-0.json"]
        pending = sender.send_async()
        assert receiver.receive() == 2
        assert pending.wait().updated == (0,)
    assert not list(tmp_path.iterdir())


def test_a_large_version_is_written_as_the_bytes_of_its_payload(tmp_path: Path) -> None:
    whole = torch.arange(60, dtype=torch.float32).reshape(6, 10)
    weights = {
        # Smaller versions are packed before they are written.
        "large": torch.arange(1_500_000.0).view(1000, 1500),
        "transposed": whole.t(),
        "column": whole[:, 1].requires_grad_(),
        "conjugate": torch.complex(whole, -whole).conj(),
        "negative": torch.complex(whole, whole).conj().imag,
        "scalar": torch.tensor(True),
        "empty": torch.empty(0, 3, dtype=torch.bfloat16),
        "tied": whole,
        "to this": whole,
        "bytes": torch.arange(7, dtype=torch.uint8),
    }
    target = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    with (
        Sender("file", weights, num_workers=1, directory=str(tmp_path)) as sender,
        Receiver(sender.address(0), target) as receiver,
    ):
        pending = sender.send_async()
        assert receiver.receive() == 1
        assert pending.wait().updated == (0,)
        assert all(torch.equal(target[name], tensor) for name, tensor in weights.items())
        update = Update.of(weights)
        written = next(tmp_path.glob("*/*1.safetensors")).read_bytes()
    assert written == Payload(1, update.layout, update.source).to_bytes()
    assert torch.equal(load(written)["bytes"], weights["bytes"])
