"""LoRA adapters by name: each version of a trainer's adapter, in an engine that generates."""

from __future__ import annotations

import copy
import gc
import json
import re
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engines.engines import (
    OPTIONS,
    PROMPT,
    Server,
    blocks,
    check_output,
    make_llama,
    make_model,
    reference_logprobs,
)

from sync_core import ModelError, OptionError, Sender, SendError, SyncError
from sync_plugin_std import lora
from sync_plugin_vllm import HttpClient, VllmTarget
from sync_plugin_vllm.clients import adapters_in_progress, hides_adapters

pytestmark = pytest.mark.timeout(600)

#: Making a model sets the seed of torch's own.
RANDOM = torch.Generator().manual_seed(0)
#: Long, as the tiny model gives all tokens much the same probability.
LONG = list(range(3, 300, 7))
MODULES = ["q_proj", "k_proj", "o_proj", "gate_proj", "down_proj"]


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[Any]:
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    gc.collect()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        config = WeightTransferConfig(backend="sync_core")
        llm = LLM(
            str(checkpoint),
            weight_transfer_config=config,
            enable_lora=True,
            max_lora_rank=16,
            max_cpu_loras=4,
            **OPTIONS,
        )
        yield llm
        llm.shutdown_weight_transfer_engine()


def make_trainer(**options: Any) -> Any:
    """A PEFT model on the weights of the checkpoint."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    given: dict[str, Any] = dict(r=4, lora_alpha=8, target_modules=MODULES) | options
    model = get_peft_model(make_llama(0), LoraConfig(**given))
    train(model)
    return model


def train(model: Any) -> None:
    """Change the adapter, as a step of an optimiser would, so that it changes the tokens."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.15, generator=RANDOM)


def merged(model: Any) -> Any:
    """The plain model that a PEFT model stands for."""
    return copy.deepcopy(model).merge_and_unload()


def connected(target: VllmTarget, model: Any, scheme: str = "shm", **options: Any) -> Sender:
    sender = Sender(
        scheme,
        model,
        num_workers=target.num_workers,
        layers=[lora("adapter")],
        strategy="checkpoint",
        timeout=60,
        **options,
    )
    target.connect(sender)
    return sender


def logprobs(llm: Any, request: Any) -> list[float]:
    """Log-probabilities of a prompt, by an engine with an adapter."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    prompt = [{"prompt_token_ids": LONG}]
    [output] = llm.generate(prompt, params, use_tqdm=False, lora_request=request)
    found = zip(output.prompt_logprobs[1:], LONG[1:], strict=True)
    return [of[token].logprob for of, token in found]


def check_adapter(llm: Any, target: VllmTarget, model: Any, *others: Any) -> None:
    """Fail unless an engine with the newest adapter computes what the trainer's model does.

    Args:
        llm: the engine.
        target: what has brought the adapter.
        model: the trainer's model, as it was sent.
        others: models from which the engine must differ, besides the base.
    """
    found = logprobs(llm, target.lora_request())
    base = reference_logprobs(make_llama(0), LONG)
    assert distance(logprobs(llm, None), base) < 0.03
    assert distance(found, reference_logprobs(merged(model), LONG)) < 0.03
    for other in (base, *(reference_logprobs(merged(other), LONG) for other in others)):
        assert distance(found, other) > 0.1


def distance(some: list[float], others: list[float]) -> float:
    """The mean difference: single tokens of models in bfloat16 differ by more."""
    return (torch.tensor(some) - torch.tensor(others)).abs().mean().item()


def directories(parent: Path) -> list[str]:
    return sorted(path.name.rpartition("-")[0] for path in parent.iterdir())


def test_each_version_is_an_adapter_of_its_own(llm: Any, tmp_path: Path) -> None:
    model = make_trainer()
    target = VllmTarget(llm, adapter="each", adapter_directory=str(tmp_path), verify=True)
    with connected(target, model) as sender:
        before: list[Any] = []
        old = None
        for version in (1, 2, 3):
            report = target.send()
            assert (report.version, report.updated) == (version, (0,))
            [engine] = target.engines
            assert (engine.state, engine.version) == ("current", version)
            assert engine.adapter == f"each-v{version}"
            assert sender.workers[0].state == "current"
            check_adapter(llm, target, model, *before)
            # The one before is gone from the engine, with its files.
            now = {target.lora_request().lora_int_id}
            assert llm.llm_engine.list_loras() == now
            assert directories(tmp_path) == [f"each-v{version}"]
            if old is not None:
                # It would end the engine, whose ranks look for the files.
                with pytest.raises(ValueError, match=f"'each-v{version - 1}' was unloaded"):
                    logprobs(llm, old)
            old = target.lora_request()
            before = [copy.deepcopy(model)]
            train(model)


@pytest.mark.parametrize(
    "options",
    [
        dict(use_rslora=True),
        dict(rank_pattern={"q_proj": 2, "layers.1.mlp.down_proj": 8}, r=3),
        dict(alpha_pattern={"o_proj": 1}, rank_pattern={"o_proj": 6}, use_rslora=True),
        dict(target_modules="all-linear", lora_alpha=3, r=8),
    ],
    ids=["rslora", "rank_pattern", "alpha_pattern", "all-linear"],
)
def test_what_decides_the_scale_travels(
    llm: Any, tmp_path: Path, request: pytest.FixtureRequest, options: dict[str, Any]
) -> None:
    model = make_trainer(**options)
    name = request.node.callspec.id
    target = VllmTarget(llm, adapter=name, adapter_directory=str(tmp_path))
    with connected(target, model):
        target.send()
        check_adapter(llm, target, model)
        before = copy.deepcopy(model)
        # PEFT keeps a scale for each module, which a trainer may change.
        for module in model.modules():
            if hasattr(module, "set_scale"):
                module.set_scale("default", -1.0)
        target.send()
        assert target.engines[0].adapter == f"{name}-v2"
        check_adapter(llm, target, model, before)


def test_a_load_that_fails_leaves_the_adapter_before(
    llm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_trainer()
    target = VllmTarget(llm, adapter="failing", adapter_directory=str(tmp_path))

    def fails(request: Any) -> None:
        raise MemoryError(f"no room for {request.lora_name}")

    def nothing(request: Any) -> None:
        assert request.lora_name == "failing-v3"

    with connected(target, model) as sender:
        target.send()
        before = copy.deepcopy(model)
        train(model)
        for add_lora, reason in [
            (fails, "no room for failing-v2"),
            (nothing, "and no 'failing-v3'"),
        ]:
            with monkeypatch.context() as patch:
                patch.setattr(llm.llm_engine, "add_lora", add_lora)
                with pytest.raises(SendError, match=reason) as raised:
                    target.send()
            assert raised.value.report.updated == ()
            assert sender.workers[0].state == "behind"
            [engine] = target.engines
            assert (engine.state, engine.version, engine.adapter) == ("behind", 1, "failing-v1")
            check_adapter(llm, target, before)
            assert directories(tmp_path) == ["failing-v1"]
        assert target.send().version == 4
        check_adapter(llm, target, model)
        assert directories(tmp_path) == ["failing-v4"]


def test_a_trainer_that_starts_again_counts_on(llm: Any, tmp_path: Path) -> None:
    model = make_trainer()
    target = VllmTarget(llm, adapter="again", adapter_directory=str(tmp_path))
    with connected(target, model):
        target.send()
    train(model)
    target = VllmTarget(llm, adapter="again", adapter_directory=str(tmp_path))
    with (
        connected(target, model),
        pytest.raises(SendError, match=r"had an adapter 'again-v1' before.*version=…"),
    ):
        target.send()
    with connected(target, model, version=1):
        target.send()
        assert directories(tmp_path) == ["again-v2"]
        check_adapter(llm, target, model)


def other_base(**sizes: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(make_model("Llama", 0, **sizes), LoraConfig(target_modules=["q_proj"]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_trainer(r=32), r"rank 32, and the engine takes up to 16; .*max_lora_rank=32"),
        (lambda: make_trainer(use_dora=True), r"cannot have use_dora=True"),
        (lambda: make_trainer(bias="all"), r"cannot have bias='all'"),
        (lambda: make_trainer(modules_to_save=["lm_head"]), r"modules_to_save=\['lm_head'\]"),
        (lambda: make_trainer(init_lora_weights="pissa"), r"init_lora_weights='pissa'"),
        (lambda: make_trainer(target_modules=["embed_tokens"]), r"an? \w*Embedding, is not plain"),
        (lambda: make_llama(0), r"the model acts with \[\]"),
        (lambda: other_base(num_hidden_layers=3), r"not loaded: 'model\.layers\.2\."),
        (lambda: other_base(vocab_size=1024), r"does not take .*embed_tokens"),
    ],
    ids=["rank", "dora", "bias", "saved", "pissa", "embedding", "none", "layers", "vocabulary"],
)
def test_what_the_engine_cannot_take_is_named(llm: Any, make: Any, message: str) -> None:
    target = VllmTarget(llm, adapter="refused")
    model = make()
    layers = [lora("adapter")] if hasattr(model, "peft_config") else []
    with (
        Sender("shm", model, num_workers=1, layers=layers, strategy="checkpoint") as sender,
        pytest.raises(SyncError, match=message),
    ):
        target.connect(sender)
    assert target.engines[0].state == "unconnected"


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.1.self_attn.v_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.post_attention_layernorm.weight",
        "lm_head.weight",
    ],
)
def test_another_base_model_is_noticed(llm: Any, name: str) -> None:
    from peft import LoraConfig, get_peft_model

    base = make_llama(0)
    with torch.no_grad():
        base.get_parameter(name).mul_(1.01)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["v_proj"]))
    target = VllmTarget(llm, adapter="other-base", verify=True)
    with pytest.raises(
        SyncError, match=r"base model is not the one .* in 'model\.|lm_head"
    ) as raised:
        connected(target, model)
    assert " and " not in str(raised.value)  # no other layer is named


def test_what_the_trainer_does_not_act_with_is_not_sent(llm: Any, tmp_path: Path) -> None:
    from peft import LoraConfig

    model = make_trainer()
    model.add_adapter("other", LoraConfig(r=2, lora_alpha=9, target_modules=["v_proj"]))
    train(model)
    target = VllmTarget(llm, adapter="one", adapter_directory=str(tmp_path))
    with connected(target, model):
        target.send()
        check_adapter(llm, target, model)
        with model.disable_adapter(), pytest.raises(ModelError, match="enable_adapter_layers"):
            target.send()
        model.merge_adapter()
        with pytest.raises(ModelError, match="unmerge_adapter"):
            target.send()
        model.unmerge_adapter()
        model.base_model.set_adapter(["default", "other"])
        with pytest.raises(ModelError, match=r"acts with \['default', 'other'\]"):
            target.send()


def test_calls_of_another_target_change_nothing(llm: Any) -> None:
    """Two targets may drive one engine in turn; each connects it before."""
    with connected(VllmTarget(llm, adapter="another"), make_trainer()) as sender:
        pending = sender.send_async()
        llm.start_weight_update()
        with pytest.raises(SyncError, match="to a sender of an adapter"):
            llm.update_weights({"update_info": {"version": 1}})
        assert not pending.done()
        pending.abandon()
    with Sender("shm", make_llama(0), num_workers=1, strategy="checkpoint") as sender:
        VllmTarget(llm).connect(sender)
        with pytest.raises(SyncError, match="to a sender of whole versions"):
            llm.init_weight_transfer_engine({"init_info": {"step": {"step": "stage"}}})


def test_the_block_of_the_page(llm: Any, checkpoint: Path, tmp_path: Path) -> None:
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM

    made = "llm = LLM(name, enable_lora=True, max_lora_rank=16, weight_transfer_config="
    code = re.sub(rf"(?m)^{re.escape(made)}.*$", "", blocks("python")[6])
    assert code != blocks("python")[6]
    assert "range(100)" in code
    names: dict[str, Any] = dict(
        AutoModelForCausalLM=AutoModelForCausalLM,
        Sender=Sender,
        VllmTarget=lambda *args, **options: VllmTarget(
            *args, adapter_directory=str(tmp_path), **options
        ),
        LoraConfig=LoraConfig,
        torch=torch,
        name=str(checkpoint),
        llm=llm,
        prompts=[{"prompt_token_ids": PROMPT}],
        train=lambda model, outputs: train(model),
    )
    try:
        exec(compile(code.replace("range(100)", "range(2)"), "vllm.md", "exec"), names)
        names["target"].send()
        assert names["target"].engines[0].adapter == "policy-v3"
        check_adapter(llm, names["target"], names["model"])
    finally:
        names["sender"].close()


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(checkpoint, tmp_path_factory.mktemp("server") / "log", block=1)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.kill()


def check_server(server: Server, target: VllmTarget, model: Any, index: int = 0) -> None:
    tokens, _ = server.generated(target.engines[index].adapter)
    check_output((tokens, ["-"]), merged(model), "-")


class Stream:
    """The tokens of a request, as a server makes them."""

    def __init__(self, server: Server, model: str) -> None:
        params = {"temperature": 0, "max_tokens": 50, "ignore_eos": True}
        body = {"token_ids": PROMPT, "model": model, "stream": True, "sampling_params": params}
        request = urllib.request.Request(
            f"{server.url}/inference/v1/generate",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        self._reply = urllib.request.urlopen(request, timeout=60)
        self.tokens: list[int] = []

    def __iter__(self) -> Iterator[None]:
        """Read piece after piece."""
        for line in self._reply:
            text = line.decode().removeprefix("data: ").strip()
            if text.startswith("{"):
                [choice] = json.loads(text)["choices"]
                self.tokens += choice["token_ids"]
                yield


def paused_in_progress(server: Server, model: str) -> tuple[Stream, Iterator[None]]:
    """A request that a server has begun, and is paused in."""
    while True:
        stream = Stream(server, model)
        pieces = iter(stream)
        next(pieces)
        server.post("pause?mode=keep&clear_cache=false", {})
        if model in adapters_in_progress(metrics(server)):
            return stream, pieces
        server.post("resume", {})  # it was faster


def test_a_server_ends_requests_with_the_adapter_that_they_began_with(
    server: Server, tmp_path: Path
) -> None:
    model = make_trainer()
    directory = str(tmp_path)
    target = VllmTarget(server.url, adapter="policy", adapter_directory=directory, verify=True)
    with connected(target, model, "dist"):
        target.send()
        check_server(server, target, model)
        names = {each["id"] for each in server.get("v1/models")["data"]}
        assert "policy-v1" in names
        before = copy.deepcopy(model)

        stream, pieces = paused_in_progress(server, "policy-v1")
        for version in (2, 3):
            train(model)
            assert target.send().updated == (0,)
            assert target.engines[0].adapter == f"policy-v{version}"
            names = {each["id"] for each in server.get("v1/models")["data"]}
            assert {n for n in names if n.startswith("policy")} == {f"policy-v{version}"}
        with pytest.raises(AssertionError, match="`policy-v1` does not exist"):
            server.generated("policy-v1")
        assert directories(tmp_path) == ["policy-v1", "policy-v2", "policy-v3"]
        server.post("resume", {})
        assert list(pieces)
        assert len(stream.tokens) == 50
        check_output((stream.tokens, ["-"]), merged(before), "-")
        check_server(server, target, model)

        train(model)
        target.send()
        assert directories(tmp_path) == ["policy-v3", "policy-v4"]
        check_server(server, target, model)
        with pytest.raises(OptionError, match=r"target\.engines\[0\]\.adapter"):
            target.lora_request()


def metrics(server: Server) -> str:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as reply:
        text: str = reply.read().decode()
    return text


def test_a_request_that_waits_for_its_turn_keeps_its_adapter(
    server: Server, tmp_path: Path
) -> None:
    """Metrics do not name the adapter of a request that has made no token."""
    model = make_trainer()
    target = VllmTarget(server.url, adapter="queue", adapter_directory=str(tmp_path))
    params = {"max_tokens": 50, "ignore_eos": True}
    body = {"token_ids": PROMPT, "sampling_params": params}
    with connected(target, model, "dist"), ThreadPoolExecutor(80) as threads:
        target.send()
        others = [threads.submit(server.post, "inference/v1/generate", body) for _ in range(80)]
        while not hides_adapters(metrics(server)):
            pass
        stream = Stream(server, "queue-v1")
        for _ in range(3):
            target.send()
        assert list(stream)
        assert len(stream.tokens) == 50
        assert {other.result()[0] for other in others} == {200}
        target.send()
        assert directories(tmp_path) == ["queue-v4", "queue-v5"]


def test_requests_of_the_trainer_before_keep_their_adapter(server: Server, tmp_path: Path) -> None:
    model = make_trainer()
    options: dict[str, Any] = dict(adapter="after", adapter_directory=str(tmp_path))
    target = VllmTarget(server.url, **options)
    with connected(target, model, "dist"):
        target.send()
        stream, pieces = paused_in_progress(server, "after-v1")
    target = VllmTarget(server.url, **options)
    with connected(target, model, "dist", version=1):
        target.send()
        target.send()
        server.post("resume", {})
        assert list(pieces)
        assert len(stream.tokens) == 50
        target.send()
        assert directories(tmp_path) == ["after-v3", "after-v4"]


def test_adapters_of_the_user_are_left_alone(server: Server, tmp_path: Path) -> None:
    model = make_trainer()
    model.save_pretrained(tmp_path)
    client = HttpClient(server.url)
    client.add_adapter("own-v2", 0, str(tmp_path), 60)
    target = VllmTarget(client, adapter="own")
    with connected(target, model, "dist"):
        target.send()
        with pytest.raises(SendError, match="'own-v2' has already been loaded"):
            target.send()
        target.send()
        assert {"own-v2", "own-v3"} <= {each["id"] for each in server.get("v1/models")["data"]}
        assert server.generated("own-v2") == server.generated("own-v3")


# The last test: the server does not survive it.
def test_a_server_joins_later_and_dies(llm: Any, server: Server, tmp_path: Path) -> None:
    model = make_trainer()
    target = VllmTarget(llm, adapter="late", adapter_directory=str(tmp_path), all_or_none=True)
    with connected(target, model, "dist"):
        target.send()
        assert target.add(server.url) == (1,)
        train(model)
        assert target.send().updated == (0, 1)
        assert [engine.adapter for engine in target.engines] == ["late-v2", "late-v2"]
        check_adapter(llm, target, model)
        check_server(server, target, model, index=1)

        before = copy.deepcopy(model)
        train(model)
        server.kill()
        with pytest.raises(SendError, match="worker 1") as raised:
            target.send(timeout=30)
        assert raised.value.report.updated == ()
        assert target.engines[0].adapter == "late-v2"
        check_adapter(llm, target, before)
        target.remove(1)
        assert target.send().updated == (0,)
        check_adapter(llm, target, model)
