"""Fixtures of several tests of the core."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from importlib import import_module

import pytest


@pytest.fixture
def pytester(request: pytest.FixtureRequest) -> pytest.Pytester:
    """Runs pytest inside this process, and leaves torch fit for the tests that come after it."""
    # torch loads it when tensors are compared, and it cannot be loaded twice in one process:
    # pytester forgets the modules that came since it was made.
    import_module("torch.distributed.tensor")
    made: pytest.Pytester = request.getfixturevalue("pytester")
    return made


@pytest.fixture
def no_garbage() -> Iterator[None]:
    """Collect no garbage meanwhile, for searches that make many objects, none of them in cycles."""
    gc.disable()
    yield
    gc.enable()
