"""One Ray for the tests in this folder: it starts once, and ends with the last of them."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray

from sync_plugin_ray.store import Publication


@pytest.fixture(scope="session", autouse=True)
def one_ray() -> Iterator[None]:
    ray.init(
        num_cpus=8,
        include_dashboard=False,
        logging_level=logging.WARNING,
        log_to_driver=False,
        object_store_memory=512 * 1024**2,
    )
    yield
    ray.shutdown()


@pytest.fixture
def run_script() -> Callable[[str, float], list[str]]:
    """Run a script of this folder in a process of its own, and give the lines that it prints.

    A process has one Ray, and the tests share theirs.
    """

    def run(name: str, timeout: float) -> list[str]:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name(name))],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


@pytest.fixture
def kept() -> Callable[[], int]:
    """How many versions that were put since the test began are still there.

    Those of tests before may go at any moment.
    """
    before = weakref.WeakSet(_publications())
    return lambda: sum(each not in before for each in _publications())


def _publications() -> list[Publication]:
    gc.collect()
    return [each for each in gc.get_objects() if isinstance(each, Publication)]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Let no test elsewhere find the processes of Ray among its own."""
    if nextitem is None or "plugins_ray" not in nextitem.path.parts:
        ray.shutdown()
