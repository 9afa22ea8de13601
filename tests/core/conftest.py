"""Fixtures of several tests of the core."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from importlib import import_module

import pytest

from sync_core import registry


@pytest.fixture
def pytester(request: pytest.FixtureRequest) -> pytest.Pytester:
    """Runs pytest inside this process, and leaves torch fit for the tests that come after it."""
    # torch loads it when tensors are compared, and it cannot be loaded twice in one process:
    # pytester forgets the modules that came since it was made.
    import_module("torch.distributed.tensor")
    made: pytest.Pytester = request.getfixturevalue("pytester")
    return made


@pytest.fixture
def without_dist(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if sync-plugin-dist were not installed."""
    installed = registry.installed
    monkeypatch.setattr(
        registry,
        "installed",
        lambda group: [
            entry
            for entry in installed(group)
            if entry.dist is None or entry.dist.name != "sync-plugin-dist"
        ],
    )


@pytest.fixture
def no_garbage() -> Iterator[None]:
    """Collect no garbage meanwhile, for searches that make many objects, none of them in cycles."""
    gc.disable()
    yield
    gc.enable()
