"""The pytest plugin of `sync_testing`: registers a mark, and the options of its suite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_SUITE = "sync_testing.suite"


def pytest_addoption(parser: Any) -> None:
    """Add the option of tests that inherit the conformance classes."""
    parser.getgroup("sync_testing", "conformance of sync-core plugins").addoption(
        "--conformance-report",
        metavar="FILE",
        type=Path,
        help="write the results of the conformance classes as JSON",
    )


def pytest_configure(config: Any) -> None:
    """Register the mark for time limits, which pytest-timeout obeys if it is installed."""
    config.addinivalue_line("markers", "timeout(seconds): how long a test may take")
    if path := config.getoption("conformance_report"):
        from sync_testing.report import Reporting

        config.pluginmanager.register(Reporting(path), "sync_conformance_report")


def pytest_load_initial_conftests(early_config: Any, args: list[str]) -> None:
    """Load the suite's options only if the suite is run, because they import torch."""
    if any(argument.startswith(_SUITE) for argument in args):
        early_config.pluginmanager.import_plugin(f"{_SUITE}.options")
