"""Examples in docstrings run as tests, and need not import what every user has imported."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sync_core


@pytest.fixture(autouse=True)
def names_in_examples(doctest_namespace: dict[str, Any]) -> None:
    """Offer torch, and what `from sync_core import *` gives."""
    doctest_namespace.update({name: getattr(sync_core, name) for name in sync_core.__all__})
    doctest_namespace["torch"] = torch
