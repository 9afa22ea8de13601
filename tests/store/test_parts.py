"""Readers of a shard read its bytes and few others, and commit nothing that was tampered with."""

from __future__ import annotations

import re
import secrets
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.store.linears import files, tamper
from tests.store.web_faults import faulty
from torch import Tensor, nn

from sync_core import Address, LayoutMismatchError, OptionError, Receiver, Sender, SendError, Update
from sync_core.errors import PayloadError
from sync_plugin_scale import Part
from sync_plugin_store import Run
from sync_plugin_store.chunks import cuts_of, read_chunks
from sync_plugin_store.format import Manifest, object_name
from sync_plugin_store.objects import open_objects

SHAPES = {
    "embedding": (1024, 256),
    "attention.weight": (256, 256),
    "attention.bias": (256,),
    "experts": (4, 192, 256),
    "wide": (6, 40000),
    "scale": (),
    "norm": (7, 5),
}


def weights(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in SHAPES.items()}


def rows(shape: tuple[int, ...], rank: int, size: int) -> tuple[tuple[int, int], ...]:
    """The part of a rank, as FSDP2 cuts."""
    if not shape:
        return ()
    step = -(-shape[0] // size)
    first = min(rank * step, shape[0])
    return ((first, min(first + step, shape[0])), *((0, n) for n in shape[1:]))


def take(tensor: Tensor, region: Any) -> Tensor:
    return tensor[tuple(slice(start, stop) for start, stop in region)]


def part_of(regions: dict[str, Any], dtype: torch.dtype = torch.float32) -> Part:
    shapes = {n: [stop - start for start, stop in region] for n, region in regions.items()}
    return Part({n: torch.zeros(s, dtype=dtype) for n, s in shapes.items()}, regions)


def at(address: Address, url: str) -> Address:
    return replace(address, endpoint=replace(address.endpoint, urls=[url]))


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_rank_reads_its_shard_and_little_else(tmp_path: Path, rank: int) -> None:
    # As large as a layer of a small model: less, and headers would count for more.
    trained = {f"layer.{i}.weight": torch.randn(1024, 512) for i in range(4)}
    trained |= {f"layer.{i}.bias": torch.randn(1024) for i in range(4)}
    regions = {name: rows(tuple(t.shape), rank, 4) for name, t in trained.items()}
    with (
        Sender("store", trained, url=str(tmp_path), piece_mb=3.0, chunks=True) as sender,
        faulty(tmp_path) as (url, faults),
    ):
        sender.send()
        part = part_of(regions)
        with Receiver(at(sender.address(), url), part) as receiver:
            assert receiver.receive(10.0) == 1
            shard = sum(t.nbytes for t in part.model.values())
            assert faults.sent <= 1.05 * shard
            for name, tensor in part.model.items():
                assert torch.equal(tensor, take(trained[name], regions[name]))


@pytest.mark.parametrize("place", ["directory", "s3"])
@pytest.mark.parametrize("piece_mb", [0.05, 0.7, 16.0])
def test_any_region_of_any_tensor_arrives(
    tmp_path: Path, piece_mb: float, place: str, request: pytest.FixtureRequest
) -> None:
    url = str(tmp_path)
    if place == "s3":
        url = f"{request.getfixturevalue('bucket')}/{secrets.token_hex(4)}"
    generator = torch.Generator().manual_seed(round(piece_mb * 100))

    def some(size: int) -> tuple[int, int]:
        first, last = torch.randint(0, size + 1, (2,), generator=generator).sort().values.tolist()
        return first, last

    trained = weights(1)
    with (
        Sender("store", trained, url=url, piece_mb=piece_mb, poll=0.01, chunks=True) as sender,
        ExitStack() as ends,
    ):
        readers = []
        for turn in range(4):
            regions: dict[str, Any] = {n: tuple(map(some, shape)) for n, shape in SHAPES.items()}
            if turn == 0:
                regions = {n: tuple((0, size) for size in shape) for n, shape in SHAPES.items()}
            part = part_of(regions)
            readers.append((ends.enter_context(Receiver(sender.address(), part)), part, regions))
        for version in (1, 2):
            for name, value in weights(version).items():
                trained[name].copy_(value)
            sender.send(extras={"step": torch.tensor(version)})
            for receiver, part, regions in readers:
                assert receiver.receive(10.0) == version
                assert receiver.extras["step"] == version
                for name, tensor in part.model.items():
                    assert torch.equal(tensor, take(trained[name], regions[name])), name


def test_chunks_are_for_places_that_are_far(tmp_path: Path, bucket: str) -> None:
    for url, expected in ((f"{bucket}/chunks", True), (str(tmp_path), False)):
        with Sender("store", {"weight": torch.randn(1024, 512)}, url=url) as sender:
            sender.send()
            with Run(url, Run.key_of(sender)) as run:
                assert (run.manifest(1).chunks is not None) == expected


def test_a_version_without_chunks_is_read_in_whole_pieces(tmp_path: Path) -> None:
    trained = {"weight": torch.randn(64, 64)}
    part = part_of({"weight": ((16, 32), (0, 64))})
    with Sender("store", trained, url=str(tmp_path), piece_mb=0.001) as sender:
        sender.send()
        with Run(str(tmp_path), Run.key_of(sender)) as run:
            assert run.manifest(1).chunks is None
        with faulty(tmp_path) as (url, faults):
            with Receiver(at(sender.address(), url), part) as receiver:
                assert receiver.receive(10.0) == 1
            objects = [path for path in faults.asked if path.startswith("/objects")]
            assert len(objects) < 10
    assert torch.equal(part.model["weight"], trained["weight"][16:32])


@pytest.mark.parametrize("how", ["deleted", "truncated", "changed"])
@pytest.mark.parametrize(
    ("what", "http"), [("header", False), ("body", False), ("chunks", False), ("body", True)]
)
def test_no_part_that_was_tampered_with_is_committed(
    tmp_path: Path, how: str, what: str, http: bool
) -> None:
    trained = {"weight": torch.randn(1024, 512)}
    part = part_of({"weight": ((0, 1024), (0, 512))})
    with Sender("store", trained, url=str(tmp_path), chunks=True) as sender, ExitStack() as ends:
        sender.send()
        with Run(str(tmp_path), Run.key_of(sender)) as run:
            manifest = run.manifest(1)
        assert manifest.chunks is not None
        piece = {
            "header": manifest.pieces[0],
            "body": manifest.pieces[1],
            "chunks": manifest.chunks,
        }
        tamper(tmp_path / object_name(piece[what].digest), how)
        address = sender.address()
        if http:
            address = at(address, ends.enter_context(faulty(tmp_path))[0])
        with Receiver(address, part, timeout=0.3) as receiver:
            with pytest.raises(PayloadError, match="of version 1 cannot be read"):
                receiver.receive(5.0)
            assert not part.model["weight"].any()
            if what == "header":
                return  # the next version has the same
            trained["weight"].fill_(2.0)
            sender.send()
            assert receiver.receive(5.0) == 2
            assert (part.model["weight"] == 2.0).all()


def test_chunks_that_were_swapped_are_not_committed(tmp_path: Path) -> None:
    trained = {"weight": torch.randn(1024, 512)}
    part = part_of({"weight": ((256, 512), (0, 512))})
    with Sender("store", trained, url=str(tmp_path), chunks=True) as sender:
        sender.send()
        with Run(str(tmp_path), Run.key_of(sender)) as run:
            body = run.manifest(1).pieces[1]
        path = tmp_path / object_name(body.digest)
        data = path.read_bytes()
        quarter = len(data) // 4
        swapped = data[:quarter] + data[2 * quarter : 3 * quarter] + data[quarter : 2 * quarter]
        path.write_bytes(swapped + data[3 * quarter :])
        with (
            Receiver(sender.address(), part, timeout=0.3) as receiver,
            pytest.raises(PayloadError, match="other bytes under its name"),
        ):
            receiver.receive(5.0)
    assert not part.model["weight"].any()


def test_a_part_comes_from_the_place_that_has_it(tmp_path: Path) -> None:
    trained = {"weight": torch.randn(2048, 1024)}
    part = part_of({"weight": ((512, 1536), (0, 1024))})
    run, other = tmp_path / "run", tmp_path / "other"
    with (
        Sender("store", trained, url=str(run), piece_mb=2.0, chunks=True) as sender,
        faulty(run) as (url, faults),
    ):
        sender.send()
        other.mkdir()
        (other / "HEAD").write_bytes((run / "HEAD").read_bytes())
        faults.cut, faults.refuse = 2, 2
        address = sender.address()
        urls = ["http://127.0.0.1:9", str(other), url]
        address = replace(address, endpoint=replace(address.endpoint, urls=urls))
        with Receiver(address, part, timeout=6.0) as receiver:
            assert receiver.receive(20.0) == 1
    assert torch.equal(part.model["weight"], trained["weight"][512:1536])


def test_a_list_of_chunks_must_fit_its_version(tmp_path: Path) -> None:
    with Sender(
        "store", {"weight": torch.randn(1024, 512)}, url=str(tmp_path), chunks=True
    ) as sender:
        sender.send()
        with Run(str(tmp_path), Run.key_of(sender)) as run:
            manifest = run.manifest(1)
    assert manifest.chunks is not None
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    data = (tmp_path / object_name(manifest.chunks.digest)).read_bytes()
    assert len(read_chunks(data, manifest).chunks) == len(data) // 40
    for wrong in (data[:-40], data + data[:40], data[:-1], bytes(len(data)), b"", b"\xff" * 40):
        with pytest.raises(PayloadError, match="list of chunks"):
            read_chunks(wrong, manifest)


def test_shards_begin_and_end_with_chunks() -> None:
    layout, _ = _layout_of({"w": (576, 576), "experts": (8, 64, 512)})
    cuts = set(cuts_of(layout))
    for spec in layout.specs:
        for size in (2, 4, 8):
            for rank in range(size):
                first = rows(spec.shape, rank, size)[0][0]
                assert spec.offset + first * spec.nbytes // spec.shape[0] in cuts
    assert len(cuts) <= 2 * 64


def _layout_of(shapes: dict[str, tuple[int, ...]]) -> Any:
    update = Update.of({n: torch.zeros(s, dtype=torch.bfloat16) for n, s in shapes.items()})
    return update.layout, update.source


def test_layers_that_cast_work_and_others_say_so(tmp_path: Path) -> None:
    trained = weights(3)
    regions = {n: rows(s, 1, 2) for n, s in SHAPES.items()}
    part = part_of(regions)
    with Sender("store", trained, url=str(tmp_path / "a"), layers=["bf16"]) as sender:
        sender.send()
        with Receiver(sender.address(), part) as receiver:
            assert receiver.receive(10.0) == 1
    expected = take(trained["experts"], regions["experts"]).to(torch.bfloat16).float()
    assert torch.equal(part.model["experts"], expected)
    with (
        Sender("store", trained, url=str(tmp_path / "b"), layers=["checksum"]) as sender,
        pytest.raises(OptionError, match=r"checksum.*works on whole tensors"),
    ):
        Receiver(sender.address(), part)
    wrong = part_of({**regions, "norm": ((0, 9), (0, 5))})
    with Sender("store", trained, url=str(tmp_path / "c")) as sender:
        with pytest.raises(LayoutMismatchError):
            Receiver(sender.address(), wrong)
        with pytest.raises(LayoutMismatchError, match="in the weights, not in the model"):
            Receiver(sender.address(), part_of({"norm": ((0, 7), (0, 5))}))


def test_readers_of_parts_answer(tmp_path: Path) -> None:
    trained = weights(4)
    regions = {n: rows(s, 0, 2) for n, s in SHAPES.items()}
    part = part_of(regions)
    with Sender("store", trained, url=str(tmp_path), num_workers=2) as sender:
        with Receiver(sender.address(0), part) as receiver:
            pending = sender.send_async(worker_ids=[0])
            assert receiver.receive(10.0) == 1
            assert pending.wait(10.0).updated == (0,)
        pending = sender.send_async(worker_ids=[1])
        with pytest.raises(LayoutMismatchError):
            Receiver(sender.address(1), part_of({"norm": ((0, 7), (0, 5))}))
        with pytest.raises(SendError, match="in the weights, not in the model"):
            pending.wait(10.0)
    assert torch.equal(part.model["experts"], take(trained["experts"], regions["experts"]))


@pytest.mark.long
def test_a_model_of_fsdp2_reads_its_shard(tmp_path: Path) -> None:
    """Two processes; each has one half of every parameter."""
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 512, bias=False))
    with Sender("store", policy, url=str(tmp_path / "run"), chunks=True) as sender:
        sender.send()
        (tmp_path / "address").write_text(sender.address().to_json())
        torch.save(policy.state_dict(), tmp_path / "expected")
        command = [sys.executable, "-m", "tests.store.fsdp_reader", str(tmp_path)]
        ranks = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True)
            for rank in range(2)
        ]
        try:
            printed = [rank.communicate(timeout=90.0)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    assert printed == ["version 1 equal True\n"] * 2
    assert files(tmp_path / "run")
    assert open_objects(str(tmp_path / "run"), 5.0).look("HEAD") is not None


def test_a_server_without_ranges_is_named_at_once(tmp_path: Path) -> None:
    """Such as Python's own; it serves whole models."""
    trained, whole = weights(), weights(1)
    command = [sys.executable, "-u", "-m", "http.server", "0", "-b", "127.0.0.1"]
    with (
        Sender("store", trained, url=str(tmp_path), chunks=True) as sender,
        subprocess.Popen(
            [*command, "-d", str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as server,
    ):
        try:
            assert server.stdout is not None
            (url,) = re.findall(r"http://[0-9.:]+", server.stdout.readline())
            sender.send()
            address = at(sender.address(), url)
            with Receiver(address, whole, timeout=60.0) as receiver:
                assert receiver.receive() == 1
            part = part_of({n: rows(tuple(t.shape), 1, 4) for n, t in trained.items()})
            began = time.monotonic()
            with (
                Receiver(address, part, timeout=60.0) as receiver,
                pytest.raises(PayloadError, match=r"whole objects alone, .*: sync-core serve DIR"),
            ):
                receiver.receive()
            assert time.monotonic() - began < 20.0
            for thread in threading.enumerate():
                if thread.name.startswith("sync-store-get"):
                    thread.join(20.0)
        finally:
            server.kill()
    assert all(torch.equal(whole[name], trained[name]) for name in trained)
