"""Metrics in a meter of OpenTelemetry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from opentelemetry import metrics
from opentelemetry.metrics import Meter, MeterProvider

if TYPE_CHECKING:
    from sync_plugin_std.layers.metrics import Instrument

_Add = Callable[[float, dict[str, str]], None]


def exporter(
    provider: MeterProvider | None, instruments: Sequence[Instrument]
) -> Callable[[Instrument, float, dict[str, str]], None]:
    """Return the recorder of a provider; None for the global one."""
    meter = metrics.get_meter("sync_core", meter_provider=provider)
    made = {each.name: _make(each, meter) for each in instruments}

    def record(instrument: Instrument, value: float, labels: dict[str, str]) -> None:
        made[instrument.name](value, labels)

    return record


def _make(instrument: Instrument, meter: Meter) -> _Add:
    name, unit, text = instrument.name, instrument.unit, instrument.help
    if instrument.kind == "counter":
        return meter.create_counter(name, unit, text).add
    if instrument.kind == "histogram":
        return meter.create_histogram(name, unit, text).record
    return meter.create_gauge(name, unit, text).set
