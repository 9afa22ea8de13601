"""Metrics in a registry of prometheus-client."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

if TYPE_CHECKING:
    from sync_plugin_std.layers.metrics import Instrument

# From a small model in one process to a large one over a network.
_BUCKETS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)

_Metric = Counter | Gauge | Histogram
# A registry takes each name once, and several senders may have one registry.
_made: WeakKeyDictionary[CollectorRegistry, dict[str, _Metric]] = WeakKeyDictionary()
_lock = threading.Lock()


def exporter(
    registry: CollectorRegistry | None, instruments: Sequence[Instrument]
) -> Callable[[Instrument, float, dict[str, str]], None]:
    """Return what records values in a registry; None for the global one."""
    chosen = prometheus_client.REGISTRY if registry is None else registry
    with _lock:
        if chosen not in _made:
            _made[chosen] = _make_all(instruments, chosen)
        metrics = _made[chosen]

    def record(instrument: Instrument, value: float, labels: dict[str, str]) -> None:
        metric = metrics[instrument.name].labels(**labels)
        if isinstance(metric, Counter):
            metric.inc(value)
        elif isinstance(metric, Histogram):
            metric.observe(value)
        else:
            metric.set(value)

    return record


def _make_all(instruments: Sequence[Instrument], registry: CollectorRegistry) -> dict[str, _Metric]:
    made: dict[str, _Metric] = {}
    try:
        for instrument in instruments:
            made[instrument.name] = _make(instrument, registry)
    except BaseException:
        # After a failure, another attempt must find them free.
        for metric in made.values():
            registry.unregister(metric)
        raise
    return made


def _make(instrument: Instrument, registry: CollectorRegistry) -> _Metric:
    name, text, labels = instrument.name, instrument.help, instrument.labels
    if instrument.kind == "counter":
        return Counter(name, text, labels, registry=registry)
    if instrument.kind == "histogram":
        return Histogram(name, text, labels, registry=registry, buckets=_BUCKETS)
    return Gauge(name, text, labels, registry=registry)
