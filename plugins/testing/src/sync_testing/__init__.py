"""Conformance by inheritance: test classes for plugins, for use with pytest.

Reading begins at `sync_testing.schemes`, the cases of transports. Beside the classes there is what
the tests of a plugin need: `eventually`, `descendants`, `interrupted`, `Loopback`.
"""

import pytest

# Before the import, or pytest would not explain their failures.
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
