"""Ranks of a trainer write each version together, for readers that they do not know."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.store.linears import files
from tests.store.rank_trainers import (
    blank,
    check,
    check_read,
    part,
    published,
    send_all,
    senders_of,
    trainer,
    weights,
)
from tests.store.test_parts import at
from tests.store.web_faults import faulty

from sync_core import Address, OptionError, Receiver, Sender, SenderLostError
from sync_core.errors import AddressError
from sync_plugin_scale import Part, Sharded, join_addresses
from sync_plugin_std import Fuse
from sync_plugin_store import Mirror, Run, StoreError
from sync_plugin_store.format import object_name


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_any_reader_gets_versions_of_several_ranks(tmp_path: Path, size: int) -> None:
    region = ((3, 50), (7, 21))
    with trainer(tmp_path, size) as ranks, ExitStack() as ends:
        published(ranks.send(1.0, extras={"step": torch.tensor(7)}), 1)
        whole, some = blank(), part(region)
        of_rank = ranks.senders[-1].address()
        of_json = Address.from_json(ranks.senders[0].address().to_json())
        url, key = str(tmp_path / "run"), Run.key_of(ranks.senders[-1])
        run = ends.enter_context(Run(url, key))
        loaded: list[str] = []
        readers = [
            ends.enter_context(Receiver(of_rank, whole)),
            ends.enter_context(Receiver(of_json, some)),
            ends.enter_context(Receiver(run.address(), part(region))),
            ends.enter_context(
                Receiver(of_rank, load=lambda named: loaded.extend(name for name, _ in named))
            ),
        ]
        for version in (1, 2):
            if version == 2:
                published(ranks.send(2.0), 2)
            for reader in readers:
                assert reader.receive(20.0) == version
            assert readers[0].extras == ({"step": torch.tensor(7)} if version == 1 else {})
            check(whole, version)
            check(some.model, version, region)
        assert loaded == ["weight", "bias"] * 2 or set(loaded) == {"weight", "bias"}
        check_read(run.address(version=1), 1, 1)
        # The bias, which all ranks hold, was written by one of them.
        manifest = run.manifest(2)
        assert len(manifest.ranks) == size
        headers = [(tmp_path / "run" / object_name(f.pieces[0].digest)) for f in manifest.ranks]
        assert sum(b'"bias"' in header.read_bytes() for header in headers) == 1
        for sender in ranks.senders[::-1]:
            sender.close()
        with pytest.raises(SenderLostError, match="closed its sender after version 2"):
            readers[0].receive(20.0)


def test_a_reader_waits_for_the_first_version(tmp_path: Path) -> None:
    with trainer(tmp_path) as ranks:
        address = ranks.senders[1].address()
        with pytest.raises(StoreError, match=r"has no version after 0.2 s, from which to learn"):
            Receiver(address, blank(), timeout=0.2)
        published(ranks.send(1.0), 1)
        check_read(address, 1, 1)


def test_pieces_that_did_not_change_are_not_written_again(tmp_path: Path) -> None:
    with trainer(tmp_path, keep=1) as ranks:
        published(ranks.send(1.0), 1)
        before = files(tmp_path / "run")
        written = {name: (tmp_path / "run" / name).stat().st_mtime_ns for name in before}
        published(ranks.send(1.0), 2)
        published(ranks.send(1.0), 3)
        now = {name for name in files(tmp_path / "run") if name.startswith("objects/")}
        assert now == {name for name in before if name.startswith("objects/")}
        assert all((tmp_path / "run" / n).stat().st_mtime_ns == written[n] for n in now)
        check_read(ranks.senders[0].address(), 3, 1)


@pytest.mark.parametrize("place", ["directory", "s3"])
def test_a_reader_of_a_shard_reads_its_bytes_and_few_others(
    tmp_path: Path, place: str, request: pytest.FixtureRequest
) -> None:
    """Rows of another number of ranks, by ranges of HTTP."""
    torch.manual_seed(0)
    url = str(tmp_path / "run")
    if place == "s3":
        url = f"{request.getfixturevalue('bucket')}/ranks"
    whole = {f"layer.{i}.weight": torch.randn(1024, 512) for i in range(4)}
    whole |= {f"layer.{i}.bias": torch.randn(1024) for i in range(4)}
    held, bounds = [], []
    for rank in range(4):
        rows = (256 * rank, 256 * (rank + 1))
        held.append({n: t[slice(*rows)].clone() for n, t in whole.items()})
        bounds.append(
            {n: [(*rows, 1024), *((0, k, k) for k in t.shape[1:])] for n, t in whole.items()}
        )
    options: dict[str, Any] = {"url": url, "poll": 0.05, "piece_mb": 1.0, "chunks": True}
    with senders_of(tmp_path, held, bounds, **options) as senders:
        published(send_all(senders), 1)
        for first, last in ((0, 512), (256, 512), (128, 896), (0, 1024)):
            regions = {n: [(first, last), *((0, k) for k in t.shape[1:])] for n, t in whole.items()}
            mine = Part({n: torch.zeros_like(t[first:last]) for n, t in whole.items()}, regions)
            address = senders[1].address()
            with ExitStack() as reading:
                faults = None
                if place == "directory":
                    served, faults = reading.enter_context(faulty(tmp_path / "run"))
                    address = at(address, served)
                with Receiver(address, mine) as reader:
                    assert reader.receive(30.0) == 1
            for name, tensor in mine.model.items():
                assert torch.equal(tensor, whole[name][first:last]), (name, first, last)
            if faults is not None:
                assert faults.sent <= 1.05 * sum(t.nbytes for t in mine.model.values())


def test_one_run_is_written_by_one_process_and_by_ranks(tmp_path: Path) -> None:
    """Readers of either follow the other."""
    url, key = str(tmp_path / "run"), str(tmp_path / "key.pem")
    whole, some, region = blank(), part(((3, 9), (0, 32))), ((3, 9), (0, 32))
    with ExitStack() as ends:
        with Sender("store", weights(1), url=url, key=key) as sender:
            sender.send()
            readers = [
                ends.enter_context(Receiver(sender.address(), model)) for model in (whole, some)
            ]
            for reader in readers:
                assert reader.receive(20.0) == 1
        with trainer(tmp_path, version=1) as ranks:
            published(ranks.send(2.0), 2)
            for reader in readers:
                assert reader.receive(20.0) == 2
            check(whole, 2)
            check(some.model, 2, region)
            address = ranks.senders[1].address()
        with Sender("store", weights(3), url=url, key=key, version=2, grace=0) as sender:
            sender.send()
            readers.append(ends.enter_context(Receiver(address, blank())))
            for reader in readers:
                assert reader.receive(20.0) == 3
            check(whole, 3)
            check(some.model, 3, region)


def test_a_mirror_has_versions_of_ranks(tmp_path: Path) -> None:
    with trainer(tmp_path) as ranks:
        published(ranks.send(1.0), 1)
        public = Run.key_of(ranks.senders[0])
        with Mirror(str(tmp_path / "run"), str(tmp_path / "near"), public) as mirror:
            assert mirror.update() == 1
            with Run(mirror.url, public) as run:
                check_read(run.address(), 1, 1)
    assert not [name for name in files(tmp_path / "near") if name.startswith("parts/")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key": None}, "each needs the same key; type Sender"),
        ({"url": None}, "each needs the same url=, without {run}, got None"),
        ({"url": "runs/{run}"}, "without {run}, got 'runs/{run}'"),
        ({"url": "https://host/run"}, "can be read and not written"),
        ({"anchor_every": 5}, "anchor_every= is for a trainer of one process"),
        ({"layers": ["checksum"]}, "leave the layer that adds them out"),
    ],
)
def test_options_with_which_ranks_cannot_write_one_run(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    given: dict[str, Any] = {"url": str(tmp_path), "key": str(tmp_path / "key.pem"), **options}
    with pytest.raises(OptionError, match=re.escape(message)):
        Sender(Sharded("store", 0, 2), {"weight": torch.zeros(4)}, **given)


def test_ranks_whose_readers_answer_work_as_before(tmp_path: Path) -> None:
    scheme = Sharded("store", 0, 1)
    assert "publishes" in scheme.capabilities
    assert "publishes" not in Sharded("shm", 0, 1).capabilities
    model = blank()
    with (
        Sender(scheme, weights(1), num_workers=1, url=str(tmp_path)) as sender,
        Receiver(join_addresses([sender.address(0)]), model) as reader,
    ):
        pending = sender.send_async()
        assert reader.receive(20.0) == 1
        assert pending.wait(20.0).updated == (0,)
    check(model, 1)


def test_ranks_that_hold_other_layers_write_one_version(tmp_path: Path) -> None:
    """As those of a pipeline do: no rank knows the tensors of another."""
    held = [{f"layer.{i}": torch.full((3, 4), float(i)), "norm": torch.ones(4)} for i in range(3)]
    with senders_of(tmp_path, held) as senders:
        published(send_all(senders), 1)
        for sender in senders:
            model = {**{f"layer.{i}": torch.zeros(3, 4) for i in range(3)}, "norm": torch.zeros(4)}
            with Receiver(sender.address(), model) as reader:
                assert reader.receive(20.0) == 1
            for tensors in held:
                assert all(torch.equal(model[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("layer", ["bf16", "fuse"])
def test_layers_change_what_ranks_write(tmp_path: Path, layer: str) -> None:
    torch.manual_seed(0)
    whole = {"q": torch.randn(8, 6), "k": torch.randn(4, 6)}
    regions = [
        {"q": ((4 * r, 4 * r + 4, 8), (0, 6, 6)), "k": ((2 * r, 2 * r + 2, 4), (0, 6, 6))}
        for r in range(2)
    ]
    held = [
        {n: t[slice(*regions[r][n][0][:2])].clone() for n, t in whole.items()} for r in range(2)
    ]
    layers: list[Any] = ["bf16"] if layer == "bf16" else [Fuse({"qk": ["q", "k"]})]
    expected = whole
    if layer == "bf16":
        expected = {name: tensor.bfloat16().float() for name, tensor in whole.items()}
    else:
        expected = {"qk": torch.cat([whole["q"], whole["k"]])}
    with senders_of(tmp_path, held, regions, layers=layers) as senders:
        published(send_all(senders), 1)
        model = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        bounds = {name: [(1, t.shape[0] - 1), (2, 5)] for name, t in expected.items()}
        some = Part({n: torch.zeros(t.shape[0] - 2, 3) for n, t in expected.items()}, bounds)
        for target in (model, some):
            with Receiver(senders[1].address(), target) as reader:
                assert reader.receive(20.0) == 1
        for name, tensor in expected.items():
            assert torch.equal(model[name], tensor)
            assert torch.equal(some.model[name], tensor[1:-1, 2:5])


def test_addresses_of_ranks_that_publish_are_not_joined(tmp_path: Path) -> None:
    with trainer(tmp_path) as ranks:
        addresses = [sender.address() for sender in ranks.senders]
        with pytest.raises(AddressError, match=r"type Receiver\(sender.address\(\), model\)"):
            join_addresses(addresses)
