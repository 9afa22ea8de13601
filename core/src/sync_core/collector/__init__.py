"""Collects experience with workers, and keeps their policies fresh."""

from sync_core.collector.collector import Collector
from sync_core.collector.stats import CollectorStats

__all__ = ["Collector", "CollectorStats"]
