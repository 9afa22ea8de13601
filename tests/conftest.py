"""Sharing of the machine between several test processes."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings


def pytest_configure() -> None:
    """Let what tests start be interrupted, and join no Ray but its own."""
    # Shells forbid it to what runs in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Ray looks for clusters of the whole machine, of which another test may be ending one.
    os.environ["RAY_ADDRESS"] = "local"
    # On a busy machine, an example may wait a second for its turn.
    settings.register_profile("busy", deadline=None)
    settings.load_profile("busy")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Look for garbage only in what tests make, and not in all modules and tests each time.

    To collect all garbage, as those do that ask whether something is released, would take most of
    a second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with those over Ray: they take longest, and one process runs them meanwhile."""
    items.sort(key=lambda item: _over_ray(item.nodeid), reverse=True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep a file together, as its tests share workers; those over Ray share one Ray."""
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return "ray" if _over_ray(nodeid) else nodeid.split("::", maxsplit=1)[0]

    return Scheduling(config, log)


def _over_ray(nodeid: str) -> bool:
    return nodeid.startswith("tests/plugins_ray/")
