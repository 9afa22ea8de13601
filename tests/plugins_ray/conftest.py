"""One Ray for the tests in this folder: it starts once, and ends with the last of them."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import cloudpickle
from tests.plugins_ray.agents import Other, start

from sync_plugin_ray.group import RayGroup
from sync_plugin_ray.store import StoredVersion
from sync_testing import eventually
from sync_testing.schemes import borrow_pool

# Actors cannot import this file by name.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="session", autouse=True)
def one_ray() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        # Workers inherit it, and find the chaos kit there.
        chaos = str(Path(__file__).parents[1] / "chaos")
        patch.setenv("PYTHONPATH", chaos, prepend=os.pathsep)
        ray.init(
            num_cpus=8,
            include_dashboard=False,
            logging_level=logging.WARNING,
            log_to_driver=False,
            object_store_memory=512 * 1024**2,
        )
    # Started for the first class of cases that needs it.
    with borrow_pool(RayGroup):
        yield
    ray.shutdown()


@pytest.fixture(scope="module", autouse=True)
def ends_what_it_starts() -> None:
    """Check no file alone: Ray and its actors serve them all, and end with the last of them."""


@pytest.fixture(scope="session")
def agents() -> list[Any]:
    """Three actors for tests that leave them alive: starting one takes seconds."""
    return start(3)


@pytest.fixture
def actors(agents: list[Any]) -> list[Any]:
    """Two of them, as new."""
    ray.get([actor.reset.remote() for actor in agents])
    return agents[:2]


@pytest.fixture
def large(agents: list[Any]) -> list[Any]:
    """All of them, whose policies are too large to travel inside a call."""
    ray.get([actor.reset.remote(300) for actor in agents])
    return agents


@pytest.fixture(scope="session")
def other() -> Any:
    """An actor of another class."""
    return ray.remote(Other).options(num_cpus=0).remote()


@pytest.fixture
def run_script() -> Callable[[str, float], list[str]]:
    """Run a script of this folder in its own process, and give the lines that it prints.

    A process has one Ray, and the tests share theirs. One that is late says where it stands.
    """

    def run(name: str, timeout: float) -> list[str]:
        script = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", str(Path(__file__).with_name(name))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        late = threading.Timer(timeout, script.send_signal, [signal.SIGABRT])
        late.start()
        printed, complaints = script.communicate()
        late.cancel()
        assert script.returncode == 0, printed + complaints
        return printed.splitlines()

    return run


@pytest.fixture
def kept() -> Callable[[], int]:
    """Return how many versions that were put since the test began are still there.

    Those of tests before may go at any moment.
    """
    before = weakref.WeakSet(_stored())
    return lambda: sum(each not in before for each in _stored())


@pytest.fixture(scope="session")
def lost() -> Any:
    """A reference to an object that was lost with its owner."""
    owner: Any = ray.remote(_Owner).options(num_cpus=0).remote()
    (reference,) = ray.get(owner.put.remote())
    ray.kill(owner)
    assert eventually(lambda: _is_lost(reference), 30)
    return reference


class _Owner:
    def put(self) -> list[Any]:
        return [ray.put(bytes(10**6))]


def _is_lost(reference: Any) -> bool:
    try:
        ray.get(reference, timeout=5)
    except ray.exceptions.ObjectLostError:
        return True
    return False


def _stored() -> list[StoredVersion]:
    gc.collect()
    return [each for each in gc.get_objects() if isinstance(each, StoredVersion)]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Let no test elsewhere find the processes of Ray among its own."""
    if nextitem is None or "plugins_ray" not in nextitem.path.parts:
        ray.shutdown()
