"""The program of docs/examples/read_run.py reads what the page about the format of a run says."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.store.rank_trainers import published, send_all, senders_of
from torch import Tensor, nn

from sync_core import Sender
from sync_plugin_std import Fuse
from sync_plugin_store import Run

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
sys.path.append(str(EXAMPLES))
read_run = importlib.import_module("read_run")


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
        for name, tensor in expected.items()
    )


@pytest.mark.parametrize("place", ["directory", "s3"])
def test_whole_versions_and_increments(
    tmp_path: Path, place: str, request: pytest.FixtureRequest
) -> None:
    """Of tensors that are tied, of dtypes without a name in the format, and of odd sizes."""
    url = str(tmp_path / "run")
    if place == "s3":
        url = f"{request.getfixturevalue('bucket')}/{os.urandom(4).hex()}"
    policy: dict[str, Any] = {
        "a": torch.randn(301, 70),
        "b": torch.randn(1001, dtype=torch.bfloat16),
        "c": torch.randn(3, 5, dtype=torch.complex128),
        "d": torch.tensor(True),
        "none": torch.zeros(0, 4),
    }
    policy["tied"] = policy["a"]
    options: dict[str, Any] = {"url": url, "key": str(tmp_path / "key"), "keep": 99}
    expected: list[dict[str, Tensor]] = []
    with Sender("store", policy, anchor_every=4, piece_mb=0.01, **options) as sender:
        for version in range(1, 8):
            policy["a"][7 * version] += 1
            policy["b"][-1] = version
            policy["c"][1, version % 5] *= 2
            extras = {"step": torch.tensor(version)}
            sender.send(extras=extras)
            found = {**policy, "__sync__.extra.step": extras["step"]}
            expected.append({name: tensor.clone() for name, tensor in found.items()})
        key = Run.key_of(sender)
    with Run(url, key) as run:
        assert [run.manifest(version).base for version in range(1, 8)] == [0, 1, 2, 3, 0, 5, 6]
    reader = read_run.Run(url, key)
    for version, tensors in enumerate(expected, 1):
        assert equal(reader.read(version), tensors), version
    assert equal(reader.read(), expected[-1])
    program = [sys.executable, str(EXAMPLES / "read_run.py"), url, key, "3"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=100, check=True)
    assert "none torch.float32 [0, 4] 0.0\n" in done.stdout


def test_versions_of_ranks(tmp_path: Path) -> None:
    whole = {"q": torch.randn(8, 6), "k": torch.randn(4, 6), "norm": torch.randn(6)}
    held = [
        {"q": whole["q"][4 * i : 4 * i + 4], "k": whole["k"][2 * i : 2 * i + 2]} for i in range(2)
    ]
    rows: list[dict[str, Any]] = [
        {"q": ((4 * i, 4 * i + 4, 8), (0, 6, 6)), "k": ((2 * i, 2 * i + 2, 4), (0, 6, 6))}
        for i in range(2)
    ]
    for i in range(2):
        held[i] |= {"norm": whole["norm"]}
        rows[i] |= {"norm": ((0, 6, 6),)}
    for number, layers in enumerate(([], [Fuse({"qk": ["q", "k"]})])):
        folder = tmp_path / str(number)
        folder.mkdir()
        with senders_of(folder, held, rows, layers=layers) as senders:
            published(send_all(senders), 1)
            key = Run.key_of(senders[0])
        expected = dict(whole)
        if layers:
            expected = {"qk": torch.cat([whole["q"], whole["k"]]), "norm": whole["norm"]}
        assert equal(read_run.Run(str(folder / "run"), key).read(), expected)


def test_nothing_else_is_taken_for_a_run(tmp_path: Path) -> None:
    with Sender("store", nn.Linear(4, 2), url=str(tmp_path)) as sender:
        sender.send()
        key = Run.key_of(sender)
        (path,) = (tmp_path / "manifests").iterdir()
        path.write_bytes(path.read_bytes().replace(b'"version":1', b'"version":2'))
        with pytest.raises(ValueError, match="has other bytes"):
            read_run.Run(str(tmp_path), key).read()
        with pytest.raises(ValueError, match=r"hex|signature"):
            read_run.Run(str(tmp_path), "0" * 64)
