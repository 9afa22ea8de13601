"""What several tests of the core need."""

from __future__ import annotations

import pytest

from sync_core.plugins import registry


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
