"""Leaves out what imports vLLM, where that is not installed."""

from importlib.util import find_spec

NEED_VLLM = ["engine", "lora_worker", "proof", "ranks", "reload", "sleep", "staging", "trainer"]

collect_ignore = (
    [] if find_spec("vllm") else [f"src/sync_plugin_vllm/{name}.py" for name in NEED_VLLM]
)
