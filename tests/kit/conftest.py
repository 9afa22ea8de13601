"""Fixtures of the searches."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture
def no_garbage() -> Iterator[None]:
    """Collect no garbage meanwhile, for searches that make many objects, none of them in cycles."""
    gc.disable()
    yield
    gc.enable()
