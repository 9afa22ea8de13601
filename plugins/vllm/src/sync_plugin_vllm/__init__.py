"""Weights for vLLM by any scheme of sync-core.

vLLM calls `register` in each of its processes, and finds the weight transfer engine
``"sync_core"`` (`sync_plugin_vllm.engine`). The trainer drives engines with `VllmTarget`
(`sync_plugin_vllm.target`), and does not need vLLM.
"""

from sync_plugin_vllm.clients import EngineError, HttpClient
from sync_plugin_vllm.target import EngineStatus, VllmTarget
from sync_plugin_vllm.votes import AsleepError, NotLoadedError

__version__ = "0.1.0"

__all__ = [
    "AsleepError",
    "EngineError",
    "EngineStatus",
    "HttpClient",
    "NotLoadedError",
    "VllmTarget",
    "register",
]


def register() -> None:
    """Register the weight transfer engine ``"sync_core"`` with vLLM, which calls this itself."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.logger import init_logger

    try:
        WeightTransferEngineFactory.register_engine(
            "sync_core", "sync_plugin_vllm.engine", "SyncCoreEngine"
        )
    except ValueError:
        # vLLM may load its plugins more than once in a process.
        init_logger(__name__).debug("the weight transfer engine 'sync_core' is registered already")
