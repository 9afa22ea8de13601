"""How the tests share the machine, when several processes run them at the same time."""

from __future__ import annotations

import signal

import pytest


def pytest_configure() -> None:
    """Let what tests start be interrupted, which shells forbid to what runs in the background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Before xdist's own, which reads the groups.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep a file together, as its tests share workers, and all that share one Ray.

    Those over Ray come first: they take longest, and one process runs them meanwhile.
    """
    for item in items:
        group = "ray" if _over_ray(item) else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=_over_ray, reverse=True)


def _over_ray(item: pytest.Item) -> bool:
    return "plugins_ray" in item.path.parts
