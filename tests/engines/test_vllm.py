"""An engine in this process and a server, fed by one sender."""

from __future__ import annotations

import base64
import os
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engines.engines import (
    OPTIONS,
    Server,
    change,
    check_output,
    generated,
    greedy,
    make_llama,
    make_model,
)

from sync_core import Sender, SendError, SyncError
from sync_plugin_vllm import NotLoadedError, VllmTarget

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[Any]:
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        config = WeightTransferConfig(backend="sync_core")
        llm = LLM(str(checkpoint), weight_transfer_config=config, **OPTIONS)
        yield llm
        llm.shutdown_weight_transfer_engine()


def connected(target: VllmTarget, model: Any, scheme: str = "shm", **options: Any) -> Sender:
    options.setdefault("strategy", "checkpoint")
    sender = Sender(scheme, model, num_workers=target.num_workers, timeout=60, **options)
    target.connect(sender)
    return sender


def engine_model(llm: Any) -> Any:
    """VLLM's own model, in an engine in this process."""
    return llm.llm_engine.model_executor.driver_worker.model_runner.model


@pytest.mark.parametrize("scheme", ["shm", "dist"])
def test_tokens_are_those_of_hugging_face_after_each_send(llm: Any, scheme: str) -> None:
    model = make_llama(1)
    target = VllmTarget(llm)
    with connected(target, model, scheme):
        for version in (1, 2):
            report = target.send()
            assert (report.version, report.updated) == (version, (0,))
            check_output(generated(llm), model, version)
            assert target.engines[0].state == "current"
            change(model)


def test_adapters_arrive_merged(llm: Any) -> None:
    from peft import LoraConfig, get_peft_model

    from sync_plugin_std import lora

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])
    model = get_peft_model(make_llama(2), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    target = VllmTarget(llm)
    with connected(target, model, layers=[lora("merged")]):
        target.send()
    tokens, versions = generated(llm)
    check_output((tokens, versions), model.merge_and_unload(), versions[0])
    assert tokens != greedy(make_llama(2))


def test_names_are_accounted_for(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before, name = generated(llm), "model.layers.1.self_attn.k_proj.weight"
    weights = dict(make_llama(3).state_dict())
    others = {key: value for key, value in weights.items() if key != name}
    for given, message in [
        (others, f"not sent: {name!r}"),
        (others | {f"{name}_2": weights[name]}, f"not loaded: '{name}_2'"),
    ]:
        target = VllmTarget(llm)
        with pytest.raises(SyncError, match=message):
            connected(target, given)
        assert target.engines[0].state == "unconnected"
    assert generated(llm) == before

    # Tensors that the model's own loader leaves out.
    engine = engine_model(llm)
    load_weights = engine.load_weights
    monkeypatch.setattr(engine, "load_weights", lambda w: load_weights(w) - {"model.norm.weight"})
    target = VllmTarget(llm)
    with connected(target, weights), pytest.raises(SendError, match=r"loaded: 'model\.norm"):
        target.send()
    assert target.engines[0].state == "bad"


def test_shapes_are_compared_when_an_engine_is_connected(llm: Any, server: Server) -> None:
    before = generated(llm), server.generated()
    for options, name, shape in [
        (dict(intermediate_size=320), "model.layers.0.mlp.gate_proj.weight", [320, 128]),
        (dict(vocab_size=640), "model.embed_tokens.weight", [640, 128]),
        (dict(num_key_value_heads=4), "model.layers.0.self_attn.k_proj.weight", [128, 128]),
    ]:
        target = VllmTarget([llm, server.url])
        with pytest.raises(SyncError) as raised:
            connected(target, make_model("Llama", 3, **options))
        assert str(raised.value).count(f"does not take {name!r} of shape {shape}") >= 2
        assert {engine.state for engine in target.engines} == {"unconnected"}
    with pytest.raises(SyncError, match=r"strategy='tensordict'; type Sender.*\"checkpoint\""):
        connected(VllmTarget(llm), make_model("Gemma3", 3), strategy="tensordict")
    with pytest.raises(SyncError, match=r"send that model"):
        connected(VllmTarget(llm), make_model("Gemma3", 3))
    assert (generated(llm), server.generated()) == before


def test_half_a_version_is_known_bad_until_the_next_heals_it(
    llm: Any, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, engine = make_llama(4), engine_model(llm)
    load_weights = engine.load_weights

    def fails(weights: Any) -> None:
        load_weights([next(iter(weights))])
        raise MemoryError("no room for the next tensor")

    target = VllmTarget([llm, server.url])
    with connected(target, model) as sender:
        with monkeypatch.context() as patch:
            patch.setattr(engine, "load_weights", fails)
            with pytest.raises(SendError, match="no room for the next tensor") as raised:
                target.send()
        report = raised.value.report
        assert (set(report.failed), report.updated) == ({0}, (1,))
        assert sender.workers[0].state == "bad"
        assert [engine.state for engine in target.engines] == ["bad", "current"]
        assert generated(llm)[1] == ["bad"]
        check_output(server.generated(), model, "1")

        assert target.send().updated == (0, 1)
        check_output(generated(llm), model, "2")
        check_output(server.generated(), model, "2")


def test_no_engine_loads_what_one_has_not_staged(
    llm: Any, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_llama(4)
    target = VllmTarget([llm, server.url], all_or_none=True)

    def fails(timeout: float | None = None) -> None:
        raise MemoryError(f"no room, within {timeout}")

    with connected(target, model) as sender:
        target.send()
        before = make_llama(4)
        change(model)
        transfer = llm.llm_engine.model_executor.driver_worker.weight_transfer_engine
        with monkeypatch.context() as patch:
            patch.setattr(transfer._staging.receiver, "stage", fails)
            with pytest.raises(SendError, match=r"staged the versions \[None\]") as raised:
                target.send()
        assert raised.value.report.updated == ()
        assert [engine.state for engine in target.engines] == ["behind", "behind"]
        assert isinstance(target.engines[1].error, NotLoadedError)
        assert sender.workers[1].failures == 0
        check_output(generated(llm), before, "1")
        check_output(server.generated(), before, "1")

        assert target.send().updated == (0, 1)
        check_output(generated(llm), model, "3")
        check_output(server.generated(), model, "3")


def test_a_server_that_its_user_has_paused_is_not_resumed(server: Server) -> None:
    model = make_llama(4)
    target = VllmTarget(server.url)
    with connected(target, model):
        for paused in (True, False):
            server.post(f"{'pause' if paused else 'resume'}?mode=abort", {})
            target.send()
            assert server.get("is_paused") == {"is_paused": paused}
        check_output(server.generated(), model, "2")


class InProcess:
    """The four calls of vLLM's interface for trainers, of an engine in this process."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self.llm.start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        self.llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.llm.finish_weight_update(weight_version)


def test_a_trainer_of_vllms_interface(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from sync_plugin_vllm.trainer import SyncCoreTrainerInitInfo

    def trainer(model: Any, client: Any, rank: int = 0) -> Any:
        info = SyncCoreTrainerInitInfo("increments::shm", num_workers=1, rank=rank)
        source = ModuleSource(model)
        return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)

    with pytest.raises(SyncError, match="do not fit vLLM's LlamaForCausalLM"):
        trainer(torch.nn.Linear(2, 1), InProcess(llm))
    # Another rank gathers, and calls no engine.
    assert trainer(torch.nn.Linear(2, 1), None, rank=1).send_weights() is None

    model, vllms = make_llama(9), engine_model(llm)
    engine = trainer(model, InProcess(llm))
    for version in (1, 2):
        assert engine.send_weights().version == version
        check_output(generated(llm), model, version)
        change(model)

    def fails(weights: Any) -> None:
        raise MemoryError(f"no room for {next(iter(weights))[0]}")

    with monkeypatch.context() as patch:
        patch.setattr(vllms, "load_weights", fails)
        with pytest.raises(SendError, match="no room for"):
            engine.send_weights()
    assert engine.sender.workers[0].state == "bad"
    engine.send_weights()
    check_output(generated(llm), model, "4")
    engine.shutdown()


def test_other_addresses_are_refused(llm: Any, server: Server, tmp_path: Path) -> None:
    before = server.generated()
    with Sender("shm", make_llama(5), num_workers=1, strategy="checkpoint") as sender:
        address = sender.address(0)
        marker = tmp_path / "ran"
        pickled = pickle.dumps(Touch(str(marker)))
        for wrong, reason in [
            (replace(address, token="0" * 32).to_json(), "SenderLostError"),
            (address.to_json()[:-1], "not an address in JSON"),
            (base64.b64encode(pickled).decode(), "not an address in JSON"),
        ]:
            for addresses in ([wrong], wrong):
                body = {"init_info": {"addresses": addresses}}
                status, _ = server.post("init_weight_transfer_engine", body)
                assert status >= 400
            with pytest.raises(Exception, match=reason):
                llm.init_weight_transfer_engine({"init_info": {"addresses": [wrong]}})
        assert not marker.exists()
        assert sender.workers[0].state == "connecting"
    assert server.generated() == before


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self._path,)


# The last test: the server does not survive it.
def test_an_engine_joins_later_and_dies(llm: Any, server: Server) -> None:
    model = make_llama(6)
    target = VllmTarget(llm)
    with connected(target, model, scheme="dist"):
        target.send()
        assert target.add(server.url) == (1,)
        change(model)
        assert target.send().updated == (0, 1)
        for output in (server.generated(), generated(llm)):
            check_output(output, model, "2")

        server.kill()
        change(model)
        with pytest.raises(SendError, match="worker 1"):
            target.send(timeout=30)
        assert target.engines[0].state == "current"
        check_output(generated(llm), model, "3")
        with pytest.raises(SyncError, match=server.url):
            target.add(server.url)

        target.remove(1)
        assert target.send().updated == (0,)
