"""Conformance by inheritance: test classes for plugins, for use with pytest.

``pip install 'sync-core[testing]'`` brings what they need.
"""

from typing import TYPE_CHECKING

import pytest

# Before the import, or pytest would not explain their failures.
pytest.register_assert_rewrite(
    "sync_core.testing.chaos",
    "sync_core.testing.collectors",
    "sync_core.testing.layers",
    "sync_core.testing.schemes",
    "sync_core.testing.worker_groups",
)

from sync_core.testing.layers import LayerConformance  # noqa: E402
from sync_core.testing.schemes import CalledSchemeConformance, SchemeConformance  # noqa: E402
from sync_core.testing.worker_groups import WorkerGroupConformance  # noqa: E402

if TYPE_CHECKING:
    from sync_core.testing.collectors import CollectorConformance
else:

    def __getattr__(name: str) -> object:
        # It needs tensordict, for which the workers of the other classes would wait.
        if name == "CollectorConformance":
            from sync_core.testing.collectors import CollectorConformance

            return CollectorConformance
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "CalledSchemeConformance",
    "CollectorConformance",
    "LayerConformance",
    "SchemeConformance",
    "WorkerGroupConformance",
]
