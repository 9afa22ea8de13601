"""Collects experience with workers, and keeps their policies fresh."""

from sync_collector.collector import Collector
from sync_collector.delivery import CollectorStats
from sync_collector.evaluation import Evaluation
from sync_collector.options import BatchOptions, WorkerOptions
from sync_collector.torchrl_names import TorchRLArguments
from sync_plugin_std.workers import preload

preload("sync_collector.collector_worker")

__version__ = "0.1.0"

__all__ = [
    "BatchOptions",
    "Collector",
    "CollectorStats",
    "Evaluation",
    "TorchRLArguments",
    "WorkerOptions",
]
