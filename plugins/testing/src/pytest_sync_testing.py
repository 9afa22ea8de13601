"""Gives pytest what `sync_testing` needs: a mark, and options where its suite is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_SUITE = "sync_testing.suite"


def pytest_addoption(parser: Any) -> None:
    """Add an option for tests that inherit the conformance classes, under its own name."""
    parser.getgroup("sync_testing", "conformance of sync-core plugins").addoption(
        "--conformance-report",
        metavar="FILE",
        type=Path,
        help="write the results of the conformance classes as JSON",
    )


def pytest_configure(config: Any) -> None:
    """Let a case say how long it may take, also where pytest-timeout, which obeys, is not there."""
    config.addinivalue_line("markers", "timeout(seconds): how long a test may take")
    if path := config.getoption("conformance_report"):
        from sync_testing.report import Reporting

        config.pluginmanager.register(Reporting(path), "sync_conformance_report")


def pytest_load_initial_conftests(early_config: Any, args: list[str]) -> None:
    """Import what needs torch in no other run."""
    if any(argument.startswith(_SUITE) for argument in args):
        early_config.pluginmanager.import_plugin(f"{_SUITE}.options")
