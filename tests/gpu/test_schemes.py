"""Models on a GPU, in trainer and workers, over each scheme that moves weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpu.models import Model, Worker, bits

from sync_core import RemoteCallError, Sender, SendError, WorkerGroup
from sync_plugin_std.workers import choose_group

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.timeout(120),
]

CHAINS: list[tuple[str, dict[str, Any]]] = [
    ("thread", {}),
    ("shm", {}),
    ("mp", {}),
    ("file", {}),
    ("store", {}),
    ("dist", {}),
    ("dist", {"shared_memory": False}),
    ("dist", {"topology": "broadcast"}),
    ("dist", {"backend": "nccl"}),
    ("dist", {"backend": "nccl", "topology": "broadcast"}),
    ("increments::shm", {}),
    ("chunked::shm", {}),
    ("two_phase::shm", {}),
    ("shm", {"layers": ["checksum", "readback"]}),
    ("shm", {"layers": ["zstd"]}),
]
IDS = ["-".join([name, *map(str, options.values())]) for name, options in CHAINS]


@contextmanager
def connected(
    scheme: str,
    options: dict[str, Any],
    directory: Path,
    trainer: str,
    worker: str,
    **receiver: Any,
) -> Iterator[tuple[Sender, WorkerGroup, Model]]:
    """A sender of a model on one device, and two workers with models on another."""
    if scheme == "file":
        options = {**options, "directory": str(directory)}
    if scheme == "store":
        options = {**options, "url": directory.as_uri()}
    model = Model(1, trainer)
    group = choose_group([scheme], None)(Worker, 2, timeout=60.0)
    try:
        with Sender(scheme, model, num_workers=2, **options) as sender:
            for i in group.worker_ids:
                group.call(i, Worker.connect, sender.address(i), worker, receiver).result(60)
            yield sender, group, model
            for i in group.worker_ids:
                group.call(i, Worker.close).result(30)
    finally:
        group.stop()


@pytest.mark.parametrize(("scheme", "options"), CHAINS, ids=IDS)
@pytest.mark.parametrize(
    "devices", [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")], ids="-".join
)
def test_every_bit_arrives_where_the_model_is(
    scheme: str,
    options: dict[str, Any],
    devices: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NCCL_HOSTID", "trainer")
    with connected(scheme, options, tmp_path, *devices) as (sender, group, model):
        for value in (2, 3, 4):
            model.fill(value)
            pending = sender.send_async()
            sent = bits(model)
            # The packed version stays as it was.
            model.fill(9)
            calls = [group.call(i, Worker.receive) for i in group.worker_ids]
            for call in calls:
                assert call.result(60) == (sent, {devices[1]}, True, True)
            assert pending.wait(30).updated == (0, 1)
        assert all(tensor.device.type == devices[0] for tensor in model.state_dict().values())


@pytest.mark.parametrize("scheme", ["shm", "dist", "chunked::shm"])
@pytest.mark.parametrize("use", [Worker.on_a_side_stream, Worker.replay], ids=["stream", "graph"])
def test_what_was_received_is_there_on_every_stream(scheme: str, use: Any, tmp_path: Path) -> None:
    with connected(scheme, {}, tmp_path, "cuda", "cuda") as (sender, group, model):
        if use is Worker.replay:
            for i in group.worker_ids:
                group.call(i, Worker.capture).result(60)
        for value in range(1, 9):
            model.fill(value)
            pending = sender.send_async()
            calls = [group.call(i, use) for i in group.worker_ids]
            assert [call.result(60) for call in calls] == [16.0 * value * value] * 2
            pending.wait(30)


def test_zero_copy_needs_the_model_in_host_memory(tmp_path: Path) -> None:
    options = {"zero_copy": True}
    with connected("shm", options, tmp_path, "cuda", "cuda") as (sender, group, _):
        pending = sender.send_async()
        call = group.call(0, Worker.receive)
        with pytest.raises(RemoteCallError, match="zero_copy needs the model on cpu"):
            call.result(60)
        with pytest.raises(SendError, match="zero_copy needs the model on cpu"):
            pending.wait(5)


def test_steps_of_a_side_stream_are_sent(tmp_path: Path) -> None:
    with connected("shm", {}, tmp_path, "cuda", "cuda") as (sender, group, model):
        side = torch.cuda.Stream()
        for value in range(1, 6):
            with torch.cuda.stream(side):
                torch.cuda._sleep(20_000_000)
                model.fill(value)
                pending = sender.send_async()
            calls = [group.call(i, Worker.receive) for i in group.worker_ids]
            got = [call.result(60)[0] for call in calls]
            assert got == [bits(Model(value, "cpu"))] * 2
            pending.wait(30)
