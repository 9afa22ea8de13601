"""Which tests may run at the same time, when there are several processes to run them."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep a file together, as its tests share workers; and all that share one Ray."""
    for item in items:
        group = "ray" if "plugins_ray" in item.path.parts else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
