"""Conformance by inheritance: test classes for plugins, for use with pytest.

Reading begins at `sync_testing.schemes`, the cases of transports.
"""

import pytest

# Before the import, or pytest would not explain their failures.
pytest.register_assert_rewrite(
    "sync_testing.layers",
    "sync_testing.schemes",
    "sync_testing.worker_groups",
)

from sync_testing.layers import LayerConformance, LayerPairConformance  # noqa: E402
from sync_testing.schemes import CalledSchemeConformance, SchemeConformance  # noqa: E402
from sync_testing.worker_groups import WorkerGroupConformance  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    "CalledSchemeConformance",
    "LayerConformance",
    "LayerPairConformance",
    "SchemeConformance",
    "WorkerGroupConformance",
    "__version__",
]
