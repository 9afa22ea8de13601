"""Conformance tests of schemes: `SchemeConformance`, and its parts.

A variant of a tested scheme can inherit only the groups of cases in which it differs. A plugin's
own tests can use the workers (`SchemeCases`, `SharedGroup`, `Workers`) and the models.
"""

from __future__ import annotations

from sync_testing.schemes.delivery import DeliveryCases
from sync_testing.schemes.faults import FaultCases
from sync_testing.schemes.increments import IncrementCases
from sync_testing.schemes.lifetime import LifetimeCases
from sync_testing.schemes.models import fill, fingerprints, make_policy
from sync_testing.schemes.orders import OrderCases
from sync_testing.schemes.pool import SchemeCases, SharedGroup, Start, Workers, borrow_pool
from sync_testing.schemes.protocol import CombinationCases, ProtocolCases
from sync_testing.schemes.values import IsolationCases, ValueCases
from sync_testing.schemes.worker import Worker

__all__ = [
    "CombinationCases",
    "DeliveryCases",
    "FaultCases",
    "IncrementCases",
    "IsolationCases",
    "LifetimeCases",
    "OrderCases",
    "ProtocolCases",
    "SchemeCases",
    "SchemeConformance",
    "SharedGroup",
    "Start",
    "ValueCases",
    "Worker",
    "Workers",
    "borrow_pool",
    "fill",
    "fingerprints",
    "make_policy",
]


class SchemeConformance(
    DeliveryCases,
    ValueCases,
    IsolationCases,
    ProtocolCases,
    CombinationCases,
    LifetimeCases,
    FaultCases,
    IncrementCases,
    OrderCases,
):
    """Conformance tests of a scheme: inherit, and set `scheme`; capabilities select the cases.

    Three workers are started for the first class of a test file that needs them. They serve all
    classes of the file with the same worker group, and end with the file.

    Attributes:
        scheme: the name of an installed scheme, or a plugin object.
        options: options of the scheme.
        group: the name or the class of the worker group; None for the group that `Collector` uses
            for this scheme.
        slack: the extra time that a call may take on a busy machine, in seconds.
        sees_past_forks: whether the scheme notices the death of a process although a forked child,
            which holds its connections open, is alive.

    Example:
        >>> class TestMyScheme(SchemeConformance):  # doctest: +SKIP
        ...     scheme = "my_scheme"
    """
