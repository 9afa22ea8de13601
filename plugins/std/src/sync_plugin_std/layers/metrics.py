"""The layer ``metrics``: the result of every send, for Prometheus and for OpenTelemetry."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from sync_core import Reporter, SendReport
from sync_core.errors import RequirementError


@dataclass(frozen=True, slots=True)
class Instrument:
    """One metric.

    Args:
        name: as Prometheus spells it, without the ``_total`` of counters.
        kind: what is done with a value: added, put into a histogram, or remembered.
        help: one sentence.
        labels: the names of its labels.
        unit: of its values.
    """

    name: str
    kind: Literal["counter", "histogram", "gauge"]
    help: str
    labels: tuple[str, ...]
    unit: str = "1"


_WHICH = ("scheme", "model_id")
_SENDS = Instrument(
    "sync_sends", "counter", "Sends, by outcome: ok or failed.", (*_WHICH, "outcome")
)
_WORKERS = Instrument(
    "sync_worker_updates",
    "counter",
    "Workers addressed, by result.",
    (*_WHICH, "outcome"),
)
_BYTES = Instrument("sync_delivered_bytes", "counter", "Bytes delivered to workers.", _WHICH, "By")
_INCREMENTS = Instrument(
    "sync_worker_increments",
    "counter",
    "Workers updated, by what travelled: whole versions or increments.",
    (*_WHICH, "kind"),
)
_CHANGED = Instrument(
    "sync_changed_ratio",
    "gauge",
    "The share of the newest version that travelled to the worker that needed most of it.",
    _WHICH,
)
_VERSION = Instrument("sync_version", "gauge", "The newest version sent.", _WHICH)
_SECONDS = Instrument("sync_send_seconds", "histogram", "From the call to its end.", _WHICH, "s")
_PHASES = Instrument(
    "sync_phase_seconds",
    "histogram",
    "Phases of sends: prepare, publish and pack of each, the others of each worker updated.",
    (*_WHICH, "phase"),
    "s",
)
_OUTCOMES = ("updated", "skipped", "failed", "dropped", "quarantined", "restarted", "joining")
INSTRUMENTS = (_SENDS, _WORKERS, _BYTES, _INCREMENTS, _CHANGED, _VERSION, _SECONDS, _PHASES)

#: Takes a value for an instrument, with its labels.
Record = Callable[[Instrument, float, dict[str, str]], None]


class Metrics(Reporter):
    """Exports the result of every send: ``Sender(…, layers=["metrics"])``.

    To Prometheus where prometheus-client is installed, to OpenTelemetry where its API is: what
    that does with them is for its SDK to say. Any number of senders may share one, or have their
    own for the same registry. Workers are counted, and not named, since names of workers that come
    and go would be metrics without end.

    Args:
        registry: a ``prometheus_client.CollectorRegistry``; None for the global one.
        meter_provider: an OpenTelemetry ``MeterProvider``; None for the global one.

    Raises:
        RequirementError: neither is installed, or not the one that was given.

    Example:
        >>> from prometheus_client import CollectorRegistry
        >>> from sync_core import Sender
        >>> from torch import nn
        >>> registry = CollectorRegistry()
        >>> metrics = Metrics(registry)
        >>> with Sender("none", nn.Linear(4, 2), num_workers=1, layers=[metrics]) as sender:
        ...     report = sender.send()
        >>> registry.get_sample_value(
        ...     "sync_sends_total", {"scheme": "none", "model_id": "policy", "outcome": "ok"})
        1.0
    """

    def __init__(self, registry: Any = None, meter_provider: Any = None) -> None:
        self._exporters = [
            exporter
            for exporter in (_prometheus(registry), _opentelemetry(meter_provider))
            if exporter is not None
        ]
        if not self._exporters:
            raise RequirementError(
                'Metrics needs pip install "sync-plugin-std[prometheus]", or '
                'pip install "sync-plugin-std[opentelemetry]"'
            )

    def __call__(self, report: SendReport) -> None:
        """Record a report."""
        which = {"scheme": report.scheme, "model_id": report.model_id}
        for instrument, value, labels in _points(report):
            for record in self._exporters:
                record(instrument, value, which | labels)


def _points(report: SendReport) -> Iterator[tuple[Instrument, float, dict[str, str]]]:
    if not report.workers.keys() - set(report.skipped):
        yield _WORKERS, len(report.skipped), {"outcome": "skipped"}
        return
    failed = any(result.error for result in report.workers.values())
    yield _SENDS, 1, {"outcome": "failed" if failed else "ok"}
    for outcome in _OUTCOMES:
        yield _WORKERS, len(getattr(report, outcome)), {"outcome": outcome}
    yield _BYTES, report.nbytes, {}
    updated = [report.workers[worker_id] for worker_id in report.updated]
    increments = sum(bool(result.base) for result in updated)
    yield _INCREMENTS, len(updated) - increments, {"kind": "whole"}
    yield _INCREMENTS, increments, {"kind": "increment"}
    if updated:
        yield _CHANGED, max(result.changed for result in updated), {}
    yield _VERSION, report.version, {}
    yield _SECONDS, report.seconds, {}
    yield _PHASES, report.prepare_seconds, {"phase": "prepare"}
    yield _PHASES, report.publish_seconds, {"phase": "publish"}
    yield _PHASES, report.pack_seconds, {"phase": "pack"}
    for worker_id in report.updated:
        result = report.workers[worker_id]
        for phase in ("stage", "commit", "pause"):
            yield _PHASES, getattr(result, f"{phase}_seconds"), {"phase": phase}
        if result.deliver_seconds is None:
            yield _PHASES, result.acknowledge_seconds, {"phase": "deliver and acknowledge"}
        else:
            yield _PHASES, result.deliver_seconds, {"phase": "deliver"}
            yield _PHASES, result.acknowledge_seconds, {"phase": "acknowledge"}


def _prometheus(registry: Any) -> Record | None:
    try:
        from sync_plugin_std.layers._prometheus import exporter
    except ImportError as error:
        if registry is None:
            return None
        raise RequirementError(
            'a registry needs pip install "sync-plugin-std[prometheus]"'
        ) from error
    return exporter(registry, INSTRUMENTS)


def _opentelemetry(meter_provider: Any) -> Record | None:
    try:
        from sync_plugin_std.layers._opentelemetry import exporter
    except ImportError as error:
        if meter_provider is None:
            return None
        raise RequirementError(
            'a meter_provider needs pip install "sync-plugin-std[opentelemetry]"'
        ) from error
    return exporter(meter_provider, INSTRUMENTS)
