"""Collects experience with worker processes, and keeps their policies up to date."""

from typing import TYPE_CHECKING

from sync_core.lazy import lazy_names

if TYPE_CHECKING:
    from sync_collector.collector import Collector
    from sync_collector.delivery import CollectorStats
    from sync_collector.evaluation import Evaluation
    from sync_collector.options import BatchOptions, WorkerOptions
    from sync_collector.torchrl_names import TorchRLArguments

__version__ = "0.1.0"

_MODULES = {
    "sync_collector.collector": ("Collector",),
    "sync_collector.delivery": ("CollectorStats",),
    "sync_collector.evaluation": ("Evaluation",),
    "sync_collector.options": ("BatchOptions", "WorkerOptions"),
    "sync_collector.torchrl_names": ("TorchRLArguments",),
}

__all__ = [
    "BatchOptions",
    "Collector",
    "CollectorStats",
    "Evaluation",
    "TorchRLArguments",
    "WorkerOptions",
]

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
