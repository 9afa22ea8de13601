"""What every layer does: one class, inherited once per layer."""

from __future__ import annotations

from sync_core.testing.layers.company import CompanyCases
from sync_core.testing.layers.history import HistoryCases
from sync_core.testing.layers.values import ValueCases


class LayerConformance(ValueCases, HistoryCases, CompanyCases):
    """Inherit and set `layer`.

    Workers are receivers in this process, fed by a scheme of one page, so a case takes
    milliseconds. A layer that holds pushes back is pushed until it lets one through.

    Attributes:
        layer: the name of an installed layer, or an object.
        tolerance: by how much a floating-point weight may differ after the way, relative to the
            largest weight of its tensor; 0 for a layer that loses nothing.

    Example:
        >>> class TestBFloat16(LayerConformance):
        ...     layer = "bf16"
        ...     tolerance = 2**-8
    """
