"""Fixtures of several tests of the collector."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sync_testing import descendants


@pytest.fixture
def leaves_no_process() -> Iterator[None]:
    """Fail a test whose workers outlive it."""
    before = descendants()
    yield
    assert not descendants() - before
