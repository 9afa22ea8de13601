"""Deliver weights into vLLM engines with any scheme of sync-core.

vLLM calls `register` in each of its processes, which registers the weight transfer engine
``"sync_core"`` (`sync_plugin_vllm.engine`). The trainer drives engines with `VllmTarget`
(`sync_plugin_vllm.target`), and does not need vLLM installed. A trainer that is written to vLLM's
own interface uses `sync_plugin_vllm.trainer` instead, which needs vLLM.
"""

from sync_plugin_vllm.clients import EngineError, HttpClient
from sync_plugin_vllm.driver import EngineStatus
from sync_plugin_vllm.target import VllmTarget
from sync_plugin_vllm.votes import AdapterError, AsleepError, NotLoadedError

__version__ = "0.1.0"

__all__ = [
    "AdapterError",
    "AsleepError",
    "EngineError",
    "EngineStatus",
    "HttpClient",
    "NotLoadedError",
    "VllmTarget",
    "register",
]


def register() -> None:
    """Register the weight transfer backend ``"sync_core"``; vLLM calls this itself."""
    from vllm.distributed.weight_transfer.factory import (
        WeightTransferEngineFactory,
        WeightTransferTrainerFactory,
    )
    from vllm.logger import init_logger

    name = "sync_core"
    try:
        WeightTransferEngineFactory.register_engine(
            name, "sync_plugin_vllm.engine", "SyncCoreWeightEngine"
        )
        WeightTransferTrainerFactory.register_engine(
            name, "sync_plugin_vllm.trainer", "SyncCoreTrainerEngine"
        )
    except ValueError:
        # vLLM may load its plugins more than once in a process.
        init_logger(__name__).debug("the weight transfer backend 'sync_core' is registered already")
