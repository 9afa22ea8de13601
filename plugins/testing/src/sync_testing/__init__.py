"""Conformance tests by inheritance: pytest classes for plugins.

Reading begins at `sync_testing.schemes`, the cases for transports. The package also has helpers for
a plugin's own tests: `eventually`, `descendants`, `interrupted`, `Loopback`.
"""

import pytest

# Before the import: otherwise pytest would not explain failed assertions in these modules.
pytest.register_assert_rewrite(
    "sync_testing.layers",
    "sync_testing.schemes",
    "sync_testing.worker_groups",
)

from sync_testing.cases import Conformance  # noqa: E402
from sync_testing.interrupts import interrupted  # noqa: E402
from sync_testing.layers import LayerConformance, LayerPairConformance  # noqa: E402
from sync_testing.loopback import Loopback, LoopbackReceiver, LoopbackSender  # noqa: E402
from sync_testing.negated import Negated  # noqa: E402
from sync_testing.processes import descendants  # noqa: E402
from sync_testing.schemes import SchemeConformance  # noqa: E402
from sync_testing.schemes.called import CalledSchemeConformance  # noqa: E402
from sync_testing.worker_groups import (  # noqa: E402
    WorkerGroupConformance,
    count_threads,
    eventually,
)

__version__ = "0.1.0"

__all__ = [
    "CalledSchemeConformance",
    "Conformance",
    "LayerConformance",
    "LayerPairConformance",
    "Loopback",
    "LoopbackReceiver",
    "LoopbackSender",
    "Negated",
    "SchemeConformance",
    "WorkerGroupConformance",
    "__version__",
    "count_threads",
    "descendants",
    "eventually",
    "interrupted",
]
