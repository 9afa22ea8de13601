"""Our calls against the Python sources of vLLM: those installed, or those of another version.

The sources are parsed and not run, so that a build for other hardware does. To try a version::

    pip download --no-deps vllm==0.33.0 && unzip -q vllm-0.33.0-*.whl '*.py' -d sources
    SYNC_VLLM_SOURCES=sources python -m pytest tests/engines/test_vllm_signatures.py
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.engines.sources import FUNCTIONS, Sources, takes, targets

PLUGIN = Path(__file__).parents[2] / "plugins" / "vllm" / "src" / "sync_plugin_vllm"
MODULES = sorted(path.stem for path in PLUGIN.glob("*.py"))
LAYERS = "vllm.model_executor.layers"
TRANSFER = "vllm.distributed.weight_transfer.base"
SLEEP = "vllm.device_allocator.sleep_mode_backend"
LLM = ("vllm.entrypoints.llm", "LLM")
WORKER = ("vllm.v1.worker.gpu_worker", "Worker")

#: What our files read of vLLM's objects.
ATTRIBUTES = {
    (f"{LAYERS}.linear", "LinearBase"): "input_size output_size params_dtype quant_method tp_size",
    (f"{LAYERS}.linear", "RowParallelLinear"): "input_size_per_partition tp_rank",
    (f"{LAYERS}.linear", "MergedColumnParallelLinear"): "output_partition_sizes",
    (f"{LAYERS}.linear", "QKVParallelLinear"): "output_partition_sizes",
    (f"{LAYERS}.vocab_parallel_embedding", "ParallelLMHead"): (
        "embedding_dim num_embeddings_per_partition quant_method tp_size"
    ),
    (f"{LAYERS}.fused_moe.fused_moe_method_base", "FusedMoEMethodBase"): "moe_kernel",
    (f"{LAYERS}.fused_moe.routed_experts", "RoutedExperts"): "moe_config",
    (f"{LAYERS}.fused_moe.config", "FusedMoEConfig"): (
        "intermediate_size_per_partition_unpadded hidden_dim_unpadded num_logical_experts tp_size"
    ),
    ("vllm.config.parallel", "ParallelConfig"): (
        "world_size_across_dp data_parallel_index world_size rank pipeline_parallel_size "
        "tensor_parallel_size"
    ),
    ("vllm.config.model", "ModelConfig"): "quantization sleep_mode_backend",
    ("vllm.config.weight_transfer", "WeightTransferConfig"): "backend",
    (*WORKER,): "weight_transfer_engine sleep_mode_backend",
    ("vllm.config.vllm", "VllmConfig"): "lora_config",
    ("vllm.config.lora", "LoRAConfig"): "max_lora_rank",
    ("vllm.lora.model_manager", "LoRAModelManager"): "lora_manager modules list_adapters",
    ("vllm.lora.peft_helper", "PEFTHelper"): "r lora_alpha rank_pattern alpha_pattern use_rslora",
    ("vllm.distributed.parallel_state", "GroupCoordinator"): "cpu_group local_rank",
    (*LLM,): "llm_engine",
    (TRANSFER, "TrainerInitInfo"): "rank is_sender backend",
    (TRANSFER, "TrainerWeightTransferEngine"): "is_sender client source",
    (TRANSFER, "WeightSource"): "metadata",
    (TRANSFER, "ParamMeta"): "name dtype shape",
}


@pytest.fixture(scope="module")
def vllm() -> Sources:
    named = os.environ.get("SYNC_VLLM_SOURCES")
    if named:
        assert (Path(named) / "vllm" / "__init__.py").exists()
        return Sources(Path(named))
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed; name its sources by SYNC_VLLM_SOURCES")
    return Sources(Path(spec.origin).parents[1])


@pytest.mark.parametrize("module", MODULES)
def test_what_is_imported_is_there_and_takes_our_arguments(vllm: Sources, module: str) -> None:
    tree = ast.parse((PLUGIN / f"{module}.py").read_text())
    wrong = []
    imported: dict[str, ast.AST] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
            for alias in node.names:
                found = vllm.find(str(node.module), alias.name)
                if found is None:
                    wrong.append(f"{node.module} has no {alias.name}")
                else:
                    imported[alias.asname or alias.name] = found[1]
    for call in calls(tree):
        definition = called(call, imported)
        keywords = frozenset(k.arg for k in call.keywords if k.arg)
        if definition is not None and not takes(definition, len(call.args), keywords):
            wrong.append(f"line {call.lineno}: {ast.unparse(call)}")
    assert not wrong


def called(call: ast.Call, imported: dict[str, ast.AST]) -> ast.AST | None:
    """The definition of what is called; None where that is not of vLLM, or not a definition."""
    function = call.func
    definition: ast.AST | None = None
    if isinstance(function, ast.Name):
        definition = imported.get(function.id)
    elif isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        owner = imported.get(function.value.id)
        if isinstance(owner, ast.ClassDef):
            found = [n for n in owner.body if isinstance(n, FUNCTIONS) and n.name == function.attr]
            assert found, f"{function.value.id} has no method {function.attr}"
            definition = found[0]
    return definition if isinstance(definition, (ast.ClassDef, *FUNCTIONS)) else None


def test_what_is_inherited_has_our_arguments(vllm: Sources) -> None:
    """Each method of ours that vLLM's base class has takes the same arguments; none is lacking."""
    wrong = []
    for module, name, base in [
        (
            "engine",
            "SyncCoreWeightEngine",
            ("vllm.distributed.weight_transfer.base", "WeightTransferEngine"),
        ),
        (
            "sleep",
            "WatchedBackend",
            ("vllm.device_allocator.sleep_mode_backend", "SleepModeBackend"),
        ),
    ]:
        ours = methods(ast.parse((PLUGIN / f"{module}.py").read_text()), name)
        [theirs, *_] = vllm.classes(*base)
        for node in theirs.body:
            if not isinstance(node, FUNCTIONS):
                continue
            abstract = any("abstractmethod" in ast.unparse(each) for each in node.decorator_list)
            if node.name not in ours:
                if abstract:
                    wrong.append(f"{name} lacks {node.name}")
                continue
            count = len(node.args.args) - 1
            if not takes(ours[node.name], count):
                wrong.append(f"{name}.{node.name} takes other arguments")
    assert not wrong


def test_a_worker_calls_what_our_engine_has(vllm: Sources) -> None:
    """Each call of ``weight_transfer_engine`` in vLLM's worker, and that which makes our engine."""
    ours = methods(ast.parse((PLUGIN / "engine.py").read_text()), "SyncCoreWeightEngine")
    wrong, seen = [], 0
    for call in calls(vllm.parse(WORKER[0])):
        function = call.func
        if isinstance(function, ast.Attribute) and "transfer_engine" in ast.unparse(function.value):
            seen += 1
            method = ours.get(function.attr) or vllm.method(
                TRANSFER, "WeightTransferEngine", function.attr
            )
            keywords = frozenset(k.arg for k in call.keywords if k.arg)
            if function.attr == "create_engine":
                continue
            if method is None or not takes(method, len(call.args), keywords):
                wrong.append(ast.unparse(call))
    assert seen >= 5
    factory = vllm.parse("vllm.distributed.weight_transfer.factory")
    [made] = [c for c in calls(factory) if ast.unparse(c.func) == "engine_cls"]
    assert takes(ours["__init__"], len(made.args), frozenset(k.arg or "" for k in made.keywords))
    for name, count in (("suspend", 1), ("resume", 1), ("discard", 1)):
        used = [c for c in calls(vllm.parse(WORKER[0])) if ast.unparse(c.func).endswith(f".{name}")]
        used = [c for c in used if "sleep_mode_backend" in ast.unparse(c.func)]
        assert [len(c.args) for c in used] == [count], name
    assert not wrong


def test_the_clients_of_a_trainer_take_our_calls(vllm: Sources) -> None:
    """Each call of ``client`` in our trainer's engine, by vLLM's protocol and its own clients."""
    names = ("HTTPVLLMWeightSyncClient", "RayVLLMWeightSyncClient")
    clients = [("vllm.distributed.weight_transfer.clients", name) for name in names]
    wrong, seen = [], set()
    for call in calls(ast.parse((PLUGIN / "trainer.py").read_text())):
        function = call.func
        if not isinstance(function, ast.Attribute):
            continue
        if ast.unparse(function.value) not in ("client", "self.client"):
            continue
        seen.add(function.attr)
        for owner in [(TRANSFER, "VLLMWeightSyncClient"), *clients]:
            method = vllm.method(*owner, function.attr)
            if method is None or not takes(method, len(call.args)):
                wrong.append(f"{owner[1]}: {ast.unparse(call)}")
    assert len(seen) == 4
    assert not wrong
    factory = vllm.parse("vllm.distributed.weight_transfer.factory")
    [made] = [c for c in calls(factory) if ast.unparse(c.func) == "engine_cls.trainer_init"]
    assert {k.arg for k in made.keywords} == {"init_info", "client", "source"}


def test_an_engine_in_the_process_takes_our_calls(vllm: Sources) -> None:
    """Each ``self.call("method", timeout, …)`` of `LlmClient`."""
    wrong = []
    used = list(client_calls("LlmClient"))
    used += [("reset_prefix_cache", [], {}), ("reset_mm_cache", [], {})]
    used += [("sleep", [], {"level": ""}), ("wake_up", [], {"tags": ""})]
    for name, args, keywords in used:
        method = vllm.method(*LLM, name)
        if method is None or not takes(method, len(args), frozenset(keywords)):
            wrong.append(name)
    methods = {"reset_encoder_cache": 0, "add_lora": 1, "has_unfinished_requests": 0}
    for name, count in methods.items():
        method = vllm.method("vllm.v1.engine.llm_engine", "LLMEngine", name)
        assert method is not None, name
        assert takes(method, count), name
    remove = vllm.method("vllm.lora.model_manager", "LoRAModelManager", "remove_adapter")
    assert remove is not None
    assert takes(remove, 1)
    assert not wrong


def test_a_server_takes_our_requests(vllm: Sources) -> None:
    """Each ``self.call``, ``self.get`` and ``self.request`` of `HttpClient`."""
    routes = routes_of(vllm)
    wrong = []
    for called_path, args, keywords in client_calls("HttpClient"):
        kind = keywords.get("method", "POST")
        route, _, query = called_path.partition("?")
        if route == "metrics":
            continue
        function = routes.get((kind, f"/{route}"))
        taken = fields_taken(vllm, function)
        fields = {each.partition("=")[0] for each in query.split("&") if each}
        for body in args:
            fields |= {key.value for key in getattr(body, "keys", [])}
        if function is None or not fields <= taken:
            wrong.append(f"{kind} {called_path}")
    assert ("POST", "/v1/unload_lora_adapter") in routes
    metrics = (vllm.root / "vllm" / "v1" / "metrics" / "loggers.py").read_text()
    requests = ("vllm:num_requests_waiting", "vllm:num_requests_running")
    adapters = ("vllm:lora_requests_info", "waiting_lora_adapters", "running_lora_adapters")
    for name in (*requests, *adapters):
        assert f'"{name}"' in metrics
    assert ("POST", "/sleep") in routes
    assert ("POST", "/wake_up") in routes
    assert not wrong


def routes_of(vllm: Sources) -> dict[tuple[str, str], Any]:
    """The functions of a server, by method and path."""
    routes: dict[tuple[str, str], Any] = {}
    for path in (vllm.root / "vllm" / "entrypoints").rglob("api_router.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, FUNCTIONS):
                continue
            for each in node.decorator_list:
                text = ast.unparse(each)
                if text.startswith(("router.get(", "router.post(")) and isinstance(each, ast.Call):
                    kind = text[len("router.") :].partition("(")[0].upper()
                    routes[kind, ast.literal_eval(each.args[0])] = node
    return routes


def fields_taken(vllm: Sources, function: Any) -> set[str]:
    """The fields of the body and of the query that a route takes; none where there is no route."""
    if function is None:
        return set()
    taken = {each.arg for each in function.args.args}
    for name in ("LoadLoRAAdapterRequest", "UnloadLoRAAdapterRequest"):
        if f": {name}" in ast.unparse(function.args):
            [request, *_] = vllm.classes("vllm.entrypoints.serve.lora.protocol", name)
            taken |= {field for node in request.body for field in targets(node)}
    return taken


@pytest.mark.parametrize("of", ATTRIBUTES, ids=lambda of: of[1])
def test_what_we_read_is_there(vllm: Sources, of: tuple[str, str]) -> None:
    names = ATTRIBUTES[of].split()
    assert [name for name in names if not vllm.has_attribute(*of, name)] == []


def test_a_change_of_vllm_is_noticed(tmp_path: Path) -> None:
    """The reader of sources, on a package with what the versions of vLLM have changed so far."""
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("from .inner import Base as Public\n")
    (package / "inner.py").write_text(
        "class Root:\n    size: int\n    def close(self): ...\n"
        "class Base(Root):\n    def load(self, names, *, strict): ...\n"
    )
    sources = Sources(tmp_path)
    load = sources.method("vllm", "Public", "load")
    assert load is not None
    assert takes(load, 1, frozenset({"strict"}))
    assert not takes(load, 1)
    assert not takes(load, 2, frozenset({"strict"}))
    assert not takes(load, 1, frozenset({"strict", "fast"}))
    assert sources.method("vllm", "Public", "close") is not None
    assert sources.has_attribute("vllm", "Public", "size")
    assert not sources.has_attribute("vllm", "Public", "shape")
    assert sources.find("vllm.gone", "Public") is None
    assert sources.find("vllm", "Private") is None


def calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def methods(tree: ast.AST, name: str) -> dict[str, ast.AST]:
    [found] = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == name]
    return {node.name: node for node in found.body if isinstance(node, FUNCTIONS)}


def client_calls(name: str) -> Iterator[tuple[str, list[ast.expr], dict[str, str]]]:
    """The calls of an engine by a client of ours: the method, the arguments, and options."""
    tree = ast.parse((PLUGIN / "clients.py").read_text())
    for method in [*methods(tree, "Client").values(), *methods(tree, name).values()]:
        for call in calls(method):
            function = ast.unparse(call.func)
            if function not in ("self.call", "self.request", "self.get"):
                continue
            if isinstance(call.args[0], ast.Name):
                continue
            text, options = call.args[0], {"method": "GET"} if function == "self.get" else {}
            for each in call.keywords:
                if each.arg == "setting":
                    continue
                options[str(each.arg)] = ast.literal_eval(each.value)
            parts = text.values if isinstance(text, ast.JoinedStr) else [text]
            written = [str(p.value) if isinstance(p, ast.Constant) else "keep" for p in parts]
            yield "".join(written), call.args[2:], options
