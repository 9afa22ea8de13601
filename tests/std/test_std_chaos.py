"""A sample of the matrix of faults over the standard schemes, and the end of a run of all of it."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
from chaos_kit import ChaosConformance, sample

pytestmark = pytest.mark.long

_FOLDER = Path(__file__).parents[1] / "chaos"


class TestFaults(ChaosConformance):
    counts = {"thread": 8, "shm": 8, "mp": 4}


@pytest.mark.timeout(120)
@pytest.mark.skipif(sys.platform != "linux", reason="orphans are found on Linux only")
def test_a_run_that_is_ended_leaves_no_stopped_worker(tmp_path: Path) -> None:
    seed = next(i for i in itertools.count() if sample("shm", i, 1)[0].trial.startswith("stop"))
    options = ["--schemes", "shm", "--cases", "1", "--seed", str(seed), "--sequences", "0"]
    options += [
        "--reads",
        "0",
        "--journal",
        str(tmp_path / "journal"),
        "--page",
        str(tmp_path / "p"),
    ]
    command = [sys.executable, str(_FOLDER / "guard.py"), str(_FOLDER / "chaos.py"), *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as guard:
        started: set[psutil.Process] = set()
        try:
            while not any(is_stopped(process) for process in started):
                assert guard.poll() is None
                started |= set(psutil.Process(guard.pid).children(recursive=True))
            guard.send_signal(signal.SIGTERM)
            assert guard.wait(20) == 128 + signal.SIGTERM
            assert not [process for process in started if process.is_running()]
        finally:
            for process in (guard, *started):
                if isinstance(process, subprocess.Popen) or process.is_running():
                    process.kill()


def is_stopped(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False
