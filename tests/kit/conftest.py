"""Fixtures of the searches."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def no_garbage() -> Iterator[None]:
    """Collect no garbage meanwhile, for searches that make many objects, none of them in cycles."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module")
def mutants() -> Iterator[Any]:
    """The module of broken schemes."""
    folder = str(Path(__file__).with_name("mutants"))
    sys.path.insert(0, folder)
    yield __import__("schemes")
    sys.path.remove(folder)
    del sys.modules["schemes"]
