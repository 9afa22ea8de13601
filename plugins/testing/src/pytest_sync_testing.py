"""Gives pytest what `sync_testing` needs: a mark, and options where its suite is run."""

from __future__ import annotations

from typing import Any

_SUITE = "sync_testing.suite"


def pytest_configure(config: Any) -> None:
    """Let a case say how long it may take, also where pytest-timeout, which obeys, is not there."""
    config.addinivalue_line("markers", "timeout(seconds): how long a test may take")


def pytest_load_initial_conftests(early_config: Any, args: list[str]) -> None:
    """Import what needs torch in no other run."""
    if any(argument.startswith(_SUITE) for argument in args):
        early_config.pluginmanager.import_plugin(f"{_SUITE}.options")
