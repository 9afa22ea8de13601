"""Conformance by inheritance: test classes for plugins, for use with pytest.

``pip install 'sync-core[testing]'`` brings what they need.
"""

import pytest

# Before the import, or pytest would not explain their failures.
pytest.register_assert_rewrite(
    "sync_core.testing.layers",
    "sync_core.testing.schemes",
    "sync_core.testing.worker_groups",
)

from sync_core.testing.layers import LayerConformance, LayerPairConformance  # noqa: E402
from sync_core.testing.schemes import CalledSchemeConformance, SchemeConformance  # noqa: E402
from sync_core.testing.worker_groups import WorkerGroupConformance  # noqa: E402

__all__ = [
    "CalledSchemeConformance",
    "LayerConformance",
    "LayerPairConformance",
    "SchemeConformance",
    "WorkerGroupConformance",
]
