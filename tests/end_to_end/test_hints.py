"""The hints that errors give, and the secrets that they leave out."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sync_core import Address, Answer, Receiver, Sender, SendError
from sync_core.errors import OptionError, SenderLostError, WorkerLostError
from sync_plugin_std.workers import ProcessGroup

pytestmark = pytest.mark.timeout(120)


def _write_to_a_view(address: Address) -> None:
    model = nn.Linear(2, 2)
    receiver = Receiver(address, model)
    receiver.receive(60)
    with torch.no_grad():
        model.weight.add_(1.0)


@pytest.mark.parametrize("scheme", ["shm", "mp", "dist"])
def test_a_worker_that_wrote_to_a_view_is_explained(scheme: str) -> None:
    with Sender(scheme, nn.Linear(2, 2), num_workers=1, zero_copy=True) as sender:
        arguments = (sender.address(0),)
        process = multiprocessing.get_context("spawn").Process(
            target=_write_to_a_view, args=arguments
        )
        process.start()
        sender.send()
        process.join(60)
        with pytest.raises(SendError, match=r"type Sender\(…, zero_copy=False\)"):
            sender.send()


def _load_in_place(model: nn.Module, address: Address) -> None:
    def load(named: Iterable[tuple[str, Tensor]]) -> None:
        for _, tensor in named:
            tensor.mul_(2)

    Receiver(address, model, load=load).receive(60)


@pytest.mark.long
def test_a_worker_that_wrote_to_what_arrived_is_explained() -> None:
    with (
        ProcessGroup(lambda worker_id: nn.Linear(2, 2), 1) as group,
        Sender("shm", nn.Linear(2, 2), num_workers=1) as sender,
    ):
        call = group.call(0, _load_in_place, sender.address(0))
        with pytest.raises(SendError):
            sender.send()
        with pytest.raises(WorkerLostError, match=r"SIGSEGV.*a load= function that writes"):
            call.result(60)


def test_an_error_with_a_lone_surrogate_can_be_printed() -> None:
    error = Answer(version=1, error="name \ud800").to_error(0)
    for each in (error, SenderLostError("name \ud800"), WorkerLostError(1, "name \ud800")):
        assert str(each).encode().endswith(b"name \\ud800")


def test_a_long_directory_for_temporary_files_is_named(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 110)
    folder.mkdir()
    script = (
        "from multiprocessing.reduction import ForkingPickler\n"
        "from sync_core import Sender\n"
        "from torch import nn\n"
        "with Sender('mp', nn.Linear(2, 2), num_workers=1) as sender:\n"
        "    try: ForkingPickler.dumps(sender.address(0))\n"
        "    except Exception as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert done.stdout.startswith("AddressError ")
    assert "type TMPDIR=/tmp" in done.stdout


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"increment": True}, r"'increment'; did you mean scheme=\"increments::shm\"\?"),
        ({"time_out": 3}, r"Sender has no argument 'time_out'; did you mean timeout=…\?"),
        ({"slot": 3}, r"'shm' has no option 'slot'; .*; did you mean slots=…\?"),
        ({"bf16": True}, r"Sender has no argument 'bf16'; did you mean layers=\['bf16'\]\?"),
        ({"zzzzzz": True}, r"'shm' has no option 'zzzzzz'; its options are: directory, slots$"),
    ],
)
def test_a_misspelt_argument_gets_what_was_meant(given: dict[str, object], meant: str) -> None:
    with pytest.raises(OptionError, match=meant):
        Sender("shm", nn.Linear(2, 2), num_workers=1, **given)  # type: ignore[arg-type]
