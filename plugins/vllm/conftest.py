"""Leaves out what imports vLLM, where that is not installed."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("vllm") else ["src/sync_plugin_vllm/engine.py"]
