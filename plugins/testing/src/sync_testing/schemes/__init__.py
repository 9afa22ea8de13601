"""Conformance of schemes: `SchemeConformance` and `CalledSchemeConformance`."""

from __future__ import annotations

from sync_testing.schemes.called import CalledSchemeConformance
from sync_testing.schemes.delivery import DeliveryCases
from sync_testing.schemes.faults import FaultCases
from sync_testing.schemes.increments import IncrementCases
from sync_testing.schemes.lifetime import LifetimeCases
from sync_testing.schemes.protocol import CombinationCases, ProtocolCases
from sync_testing.schemes.values import IsolationCases, ValueCases

__all__ = ["CalledSchemeConformance", "SchemeConformance"]


class SchemeConformance(
    DeliveryCases,
    ValueCases,
    IsolationCases,
    ProtocolCases,
    CombinationCases,
    LifetimeCases,
    FaultCases,
    IncrementCases,
):
    """Inherit and set `scheme`; what a scheme cannot do is skipped by its capabilities.

    Three workers are started for the first class of a test file that needs them, serve all its
    classes with the same worker group, and end with the file.

    Attributes:
        scheme: the name of an installed scheme, or a plugin object.
        options: options of the scheme.
        group: the name or the class of the worker group; None for the one that a `Collector`
            takes for this scheme.
        slack: how much longer than it should a call may take on a busy machine, in seconds.

    Example:
        >>> class TestMyScheme(SchemeConformance):  # doctest: +SKIP
        ...     scheme = "my_scheme"
    """
