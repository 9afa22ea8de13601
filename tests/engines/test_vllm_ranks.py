"""An engine of two ranks, each in its own process."""

from __future__ import annotations

import copy
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import torch
from tests.engines.engines import (
    OPTIONS,
    change,
    check_output,
    generated,
    make_model,
    remove,
    shared_memory,
)

from sync_core import Sender, SendError, SyncError
from sync_plugin_scale import Sharded, join_addresses
from sync_plugin_std import lora
from sync_plugin_vllm import VllmTarget

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def llm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Any]:
    # For the function that lets a rank fail.
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    make_tied(0).save_pretrained(tmp_path)
    llm: Any = LLM(
        str(tmp_path),
        tensor_parallel_size=2,
        worker_cls="tests.engines.sleeping.SleepingWorker",
        weight_transfer_config=WeightTransferConfig(backend="sync_core"),
        **(OPTIONS | getattr(request, "param", {})),
    )
    yield llm
    left = shared_memory(psutil.Process().children())
    llm.llm_engine.engine_core.shutdown()
    # It does not wait until they have ended.
    for process in multiprocessing.active_children():
        process.join(60)
    remove(left)


def make_tied(seed: int) -> Any:
    return make_model("Llama", seed, tie_word_embeddings=True)


def _failing_once(rank: int) -> Any:
    """A function of a worker that lets one rank's next load fail."""

    def fail_once(worker: Any) -> None:
        model = worker.model_runner.model

        def fails(weights: Any) -> None:
            del model.load_weights
            next(iter(weights))
            raise MemoryError(f"no room on rank {rank}")

        if worker.rank == rank:
            model.load_weights = fails

    return fail_once


def _not_staging_once(rank: int) -> Any:
    """A function of a worker whose rank stages no version next time."""

    def not_once(worker: Any) -> None:
        receiver = worker.weight_transfer_engine._staging.receiver

        def fails(timeout: float | None = None) -> None:
            del receiver.stage
            raise MemoryError(f"no room on rank {rank}, within {timeout}")

        if worker.rank == rank:
            receiver.stage = fails

    return not_once


def test_two_ranks_have_one_version(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tied(1)
    target = VllmTarget(llm, verify=True)
    check_output(generated(llm), make_tied(0), "default")
    with Sender("dist", model, num_workers=2, strategy="checkpoint", timeout=60) as sender:
        target.connect(sender)
        for version in (1, 2):
            assert target.send().updated == (0, 1)
            check_output(generated(llm), model, version)
            change(model)

        # Weights that one rank has not loaded count as loaded on no rank.
        llm.collective_rpc(_failing_once(rank=1))
        with pytest.raises(SendError, match="no room on rank 1") as raised:
            target.send()
        assert set(raised.value.report.failed) == {0, 1}
        assert "loaded here, but not by every rank" in str(raised.value)
        assert target.engines[0].state == "bad"
        target.send()
        check_output(generated(llm), model, "4")

        # Both ranks lose their weights together, and get them with the next send.
        llm.sleep(level=2)
        assert [engine.state for engine in target.engines] == ["lost"]
        with pytest.raises(SendError, match="is asleep and has lost its weights") as raised:
            target.send()
        assert set(raised.value.report.failed) == {0, 1}
        llm.wake_up()
        version = target.send().version
        check_output(generated(llm), model, version)

    # With all_or_none a rank that has not staged a version is known before any rank loads.
    with Sender("shm", model, num_workers=2, strategy="checkpoint", timeout=60) as sender:
        target = VllmTarget(llm, all_or_none=True)
        target.connect(sender)
        for rank in (0, 1):
            llm.collective_rpc(_not_staging_once(rank))
            with pytest.raises(SendError, match="have staged the versions"):
                target.send()
            assert target.engines[0].state == "behind"
            assert target.send().updated == (0, 1)

        # An update that the engine has not started is not ended, which all ranks would refuse.
        with monkeypatch.context() as patch:
            patch.setattr(llm, "start_weight_update", lambda: 1 / 0)
            with pytest.raises(SendError, match="division"):
                target.send()
        assert target.send().updated == (0, 1)
        assert llm.collective_rpc(_rank) == [0, 1]

    check_refusals(llm)

    # No rank is left connected where the weights do not fit, and vLLM's next call is answered.
    wrong = {name: value for name, value in model.state_dict().items() if "k_proj" not in name}
    with Sender("dist", wrong, num_workers=2, timeout=60) as sender:
        with pytest.raises(SyncError, match="rank 1: LayoutMismatchError"):
            target.connect(sender)
        assert {status.state for status in sender.workers.values()} == {"connecting"}
    with Sender("shm", model, num_workers=2, strategy="checkpoint", timeout=60) as sender:
        target.connect(sender)
        target.send()
        check_output(generated(llm), model, "1")

    send_shards(llm)


def check_refusals(llm: Any) -> None:
    """One rank answers for all that refuse, as vLLM takes further answers for later ones."""
    llm.shutdown_weight_transfer_engine()
    llm.start_weight_update()
    step = {"step": "stage", "version": 1}
    for method, request, message in [
        ("init_weight_transfer_engine", {"init_info": {"addresses": []}}, "has 2 ranks"),
        ("init_weight_transfer_engine", {"init_info": {"step": step}}, "has no sender yet"),
        ("update_weights", {"update_info": {"version": 1}}, "has no sender yet"),
    ]:
        with pytest.raises(Exception, match=message):
            getattr(llm, method)(request)
        assert llm.collective_rpc(_rank) == [0, 1]
    # The update has ended in the rank that has answered.
    with pytest.raises(Exception, match="without a matching start"):
        llm.finish_weight_update()


def _rank(worker: Any) -> int:
    rank: int = worker.rank
    return rank


@pytest.mark.parametrize("llm", [dict(enable_lora=True, max_cpu_loras=2)], indirect=True)
def test_two_ranks_have_one_adapter(llm: Any, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"])
    model: Any = get_peft_model(make_tied(0), config)
    parent = tmp_path / "adapters"
    parent.mkdir()
    target = VllmTarget(llm, adapter="policy", adapter_directory=str(parent), verify=True)

    def check(version: int) -> None:
        tokens, _ = generated(llm, target.lora_request())
        check_output((tokens, ["-"]), copy.deepcopy(model).merge_and_unload(), "-")
        assert [path.name.rpartition("-")[0] for path in parent.iterdir()] == [f"policy-v{version}"]

    layers = [lora("adapter")]
    with Sender(
        "dist", model, num_workers=2, strategy="checkpoint", layers=layers, timeout=60
    ) as sender:
        target.connect(sender)
        for version in (1, 2):
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "lora_" in name:
                        parameter.normal_(std=0.15)
            assert target.send().updated == (0, 1)
            check(version)

        # A version that one rank has not staged is loaded by none, and the one before is used.
        llm.collective_rpc(_not_staging_once(rank=0))
        with pytest.raises(SendError, match="have staged the versions"):
            target.send()
        assert target.engines[0].state == "behind"
        check(2)
        assert target.send().updated == (0, 1)
        check(4)

        # A base model that is discarded does not come with an adapter.
        llm.sleep(level=2)
        assert [engine.state for engine in target.engines] == ["lost"]
        llm.wake_up()
        with pytest.raises(SendError, match="which an adapter does not bring"):
            target.send()
        with Sender("shm", make_tied(0), num_workers=2, strategy="checkpoint") as whole:
            base = VllmTarget(llm)
            base.connect(whole)
            base.send()
        target.connect(sender)
        assert target.send().updated == (0, 1)
        check(6)


def send_shards(llm: Any) -> None:
    """Two ranks of a trainer send the halves that they hold, and no rank gathers the model."""
    model, senders = make_tied(2), []
    weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
    for rank in range(2):
        rows = {n: (rank * len(t) // 2, (rank + 1) * len(t) // 2) for n, t in weights.items()}
        regions = {n: (rows[n], *((0, size) for size in t.shape[1:])) for n, t in weights.items()}
        halves = {name: weights[name][first:last] for name, (first, last) in rows.items()}
        scheme = Sharded("dist", rank, 2, regions)
        senders.append(Sender(scheme, halves, num_workers=2, timeout=60))
    target = VllmTarget(llm, verify=True)
    with senders[0], senders[1]:
        joined = [join_addresses([sender.address(i) for sender in senders]) for i in range(2)]
        target.connect(senders[0], joined)
        for version in (1, 2):
            others = senders[1].send_async()
            assert target.send().updated == (0, 1)
            assert others.wait().version == version
            check_output(generated(llm), model, version)
            change(model)
