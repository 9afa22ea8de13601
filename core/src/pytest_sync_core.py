"""Gives pytest the options of `sync_core.testing.suite`, when that is what it was asked to run."""

from __future__ import annotations

from typing import Any

_SUITE = "sync_core.testing.suite"


def pytest_load_initial_conftests(early_config: Any, args: list[str]) -> None:
    """Import what needs torch in no other run."""
    if any(argument.startswith(_SUITE) for argument in args):
        early_config.pluginmanager.import_plugin(f"{_SUITE}.options")
