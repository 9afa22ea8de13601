"""A directory of Hugging Face is loaded as a model's version 0, whole or not at all."""

from __future__ import annotations

import json
import os
import secrets
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.store.linears import tamper
from tests.store.web_faults import files_served
from torch import Tensor, nn

from sync_core import LayoutMismatchError, OptionError, Receiver, Sender
from sync_core.errors import PayloadError
from sync_plugin_scale import Part
from sync_plugin_store import StoreError, checkpoints, load_checkpoint
from sync_plugin_store.objects import Directory, open_objects

INDEX = "model.safetensors.index.json"


class Tied(nn.Module):
    """A language model in form: its head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(300, 64)
        self.body = nn.Linear(64, 64)
        self.register_buffer("positions", torch.arange(64.0), persistent=False)
        self.head = nn.Linear(64, 300, bias=False)
        self.head.weight = self.embedding.weight


def trained() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)

    def made(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    return {
        "embedding.weight": made(300, 64),
        "body.weight": made(64, 64),
        "body.bias": made(64),
    }


def write(folder: Path, weights: dict[str, Tensor], files: int) -> None:
    folder.mkdir(exist_ok=True)
    if files == 1:
        save_file(weights, folder / "model.safetensors")
        return
    places = {n: f"model-{i % files:05}-of-{files:05}.safetensors" for i, n in enumerate(weights)}
    for file in set(places.values()):
        some = {name: weights[name] for name in weights if places[name] == file}
        save_file(some, folder / file, metadata={"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


@pytest.mark.parametrize("files", [1, 2, 3])
@pytest.mark.parametrize("place", ["directory", "s3", "http"])
def test_a_directory_becomes_version_0(
    tmp_path: Path, place: str, files: int, request: pytest.FixtureRequest
) -> None:
    weights, model, loaded = trained(), Tied(), dict[str, Tensor]()
    write(tmp_path, weights, files)
    for path in tmp_path.iterdir():
        os.utime(path, (1e9, 1e9))
    half = {n: torch.zeros(t.shape[0] // 2, *t.shape[1:]) for n, t in weights.items()}
    regions = {
        n: ((t.shape[0] // 2, t.shape[0]), *((0, s) for s in t.shape[1:]))
        for n, t in weights.items()
    }
    with files_served(tmp_path) as (served, _):
        url = {"directory": str(tmp_path), "http": served}.get(place, "")
        if place == "s3":
            url = f"{request.getfixturevalue('bucket')}/{secrets.token_hex(4)}"
            for path in tmp_path.iterdir():
                open_objects(url, 5.0).put(path.name, path.read_bytes())
        load_checkpoint(url, model)
        load_checkpoint(url, load=loaded.update)
        load_checkpoint(url, Part(half, regions))
    for name, tensor in weights.items():
        assert torch.equal(model.state_dict()[name], tensor.float())
        assert torch.equal(loaded[name], tensor)
        assert torch.equal(half[name], tensor[tensor.shape[0] // 2 :].float())
    assert model.head.weight is model.embedding.weight
    # The trainer's versions follow.
    with (
        Sender("store", model, url=str(tmp_path / "run")) as sender,
        Receiver(sender.address(), Tied()) as receiver,
    ):
        assert sender.send().version == 1
        assert receiver.receive(10.0) == 1


def test_a_shard_reads_its_bytes(tmp_path: Path) -> None:
    weights = {f"{i}.weight": torch.randn(1024, 512) for i in range(3)}
    write(tmp_path, weights, 2)
    regions = dict.fromkeys(weights, ((256, 512), (0, 512)))
    quarter = {name: torch.zeros(256, 512) for name in weights}
    with files_served(tmp_path) as (url, sent):
        load_checkpoint(url, Part(quarter, regions))
    assert all(torch.equal(quarter[name], t[256:512]) for name, t in weights.items())
    assert sum(sent) <= 1.05 * sum(t.nbytes for t in quarter.values())


@pytest.mark.parametrize("how", ["deleted", "truncated", "header", "index", "elsewhere"])
def test_nothing_is_written_of_a_directory_that_is_not_whole(tmp_path: Path, how: str) -> None:
    write(tmp_path, trained(), 2)
    file = tmp_path / "model-00001-of-00002.safetensors"
    places: dict[str, Any] = json.loads((tmp_path / INDEX).read_text())
    if how == "header":
        data = bytearray(file.read_bytes())
        data[:8] = (1 << 60).to_bytes(8, "little")
        file.write_bytes(data)
    elif how == "index":
        (tmp_path / INDEX).write_text("{")
    elif how == "elsewhere":
        places["weight_map"]["body.bias"] = "../secret.safetensors"
        (tmp_path / INDEX).write_text(json.dumps(places))
    else:
        tamper(file, how)
    model = Tied()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises((PayloadError, StoreError)):
        load_checkpoint(str(tmp_path), model, timeout=0.3)
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


def two_trainings(folder: Path, files: int) -> list[Path]:
    """Directories of equal sizes, whose values differ."""
    made = []
    for value in (1.0, 2.0):
        made.append(folder / str(value))
        write(made[-1], {name: torch.full((1024, 512), value) for name in "abc"}, files)
    return made


@pytest.mark.parametrize("case", [(1, 3), (1, 5), (2, 4), (2, 6)])
@pytest.mark.parametrize("place", ["directory", "s3", "http"])
def test_no_model_gets_parts_of_two_checkpoints(
    tmp_path: Path,
    place: str,
    case: tuple[int, int],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files, turn = case
    first, second = two_trainings(tmp_path, files)
    half = {name: torch.zeros(512, 512) for name in "abc"}
    regions = dict.fromkeys(half, ((512, 1024), (0, 512)))
    folder = tmp_path / "served"
    url = str(folder)
    if place == "s3":
        url = f"{request.getfixturevalue('bucket')}/{secrets.token_hex(4)}"
    target = open_objects(url, 5.0)

    def put(source: Path) -> None:
        for path in source.iterdir():
            target.put(path.name, path.read_bytes())

    put(first)
    with files_served(folder) as (served, _):
        opened = open_objects(served if place == "http" else url, 5.0)
        read, asked = opened.read, count(1)

        def read_or_replace(*args: Any, **options: Any) -> bool:
            if next(asked) == turn:
                put(second)
            return read(*args, **options)

        monkeypatch.setattr(opened, "read", read_or_replace)
        monkeypatch.setattr(checkpoints, "open_objects", lambda *_, **__: opened)
        load_checkpoint(url, Part(half, regions), streams=1)
    assert next(asked) > turn
    assert {value for t in half.values() for value in t.flatten().tolist()} == {2.0}


def test_a_transfer_is_not_resumed_out_of_another_file(tmp_path: Path) -> None:
    first, second = two_trainings(tmp_path, 1)
    model = {name: torch.zeros(1024, 512) for name in "abc"}

    def replace() -> None:
        data = (second / "model.safetensors").read_bytes()
        Directory(first, "").put("model.safetensors", data)

    with files_served(first, replace) as (url, _):
        load_checkpoint(url, model, timeout=10.0)
    assert {value for t in model.values() for value in t.flatten().tolist()} == {2.0}


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    write(tmp_path, {**trained(), "other": torch.zeros(3)}, 1)
    with pytest.raises(LayoutMismatchError, match="'other'"):
        load_checkpoint(str(tmp_path), Tied())
    with pytest.raises(StoreError, match=r"has no model\.safetensors; give a directory with"):
        load_checkpoint(str(tmp_path / "empty"), Tied())
    with pytest.raises(OptionError, match="a model, or load="):
        load_checkpoint(str(tmp_path))
