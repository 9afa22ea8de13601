"""The worker group of docs/examples/launched_workers.py conforms, with commands of a shell."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import pytest

from sync_core import RemoteCallError, WorkerLostError, WorkerTimeoutError
from sync_testing import WorkerGroupConformance, eventually, worker_groups

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "launched_workers.py"
sys.path.append(str(EXAMPLE.parent))
launched_workers = importlib.import_module("launched_workers")

pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]

# Workers can import it by name, but that takes each of them seconds.
cloudpickle.register_pickle_by_value(worker_groups)

# The shell stays between the group and the worker, as ssh and srun do.
SHELL = ("sh", "-c", "{worker}; exit $?")


class ByShell(launched_workers.CommandGroup):  # type: ignore[misc, name-defined]
    def __init__(self, factory: Callable[[int], Any], num_workers: int, **options: Any) -> None:
        super().__init__(factory, num_workers, command=SHELL, **options)


class TestByShell(WorkerGroupConformance):
    group_class = ByShell


def test_what_workers_print_is_not_among_the_answers() -> None:
    def talk(_: object) -> str:
        os.write(1, b"not an answer")
        sys.stdout.write("neither is this")
        return sys.stdin.read()

    command = ("env", "SYNC_WORKER={worker_id}", "{worker}")
    with launched_workers.CommandGroup(str, 2, command=command) as group:
        assert group.call(1, talk).result(30) == ""
        assert group.call(1, lambda _: os.environ["SYNC_WORKER"]).result(30) == "1"


def test_workers_end_with_their_trainer(tmp_path: Path) -> None:
    """Also in the middle of a call, and where a command stands between."""
    program = f"""
import os, sys
sys.path.append({str(EXAMPLE.parent)!r})
import launched_workers
group = launched_workers.CommandGroup(str, 1, command={SHELL!r})
print(group.call(0, lambda _: os.getpid()).result(), flush=True)
group.call(0, lambda _: __import__("time").sleep(600))
group.call(0, len)
sys.stdin.read()
"""
    trainer = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert trainer.stdin is not None
    assert trainer.stdout is not None
    with trainer.stdin, trainer.stdout:
        worker = int(trainer.stdout.readline())
        trainer.send_signal(signal.SIGKILL)
        trainer.wait(30)

        def gone() -> bool:
            try:
                os.kill(worker, 0)
            except ProcessLookupError:
                return True
            return False

        assert eventually(gone, 30)


@pytest.mark.parametrize(
    ("command", "error", "message"),
    [
        (("sh", "-c", "exit 7", "{worker}"), WorkerLostError, "sh ended with code 7"),
        (("no-such-command", "{worker}"), FileNotFoundError, "no-such-command"),
        (("sleep", "60", "{worker}"), WorkerTimeoutError, "try by hand: sleep 60 "),
        (("ssh", "node"), ValueError, "command must have '{worker}'"),
    ],
)
def test_a_command_that_starts_no_worker(
    command: tuple[str, ...], error: type[Exception], message: str
) -> None:
    timeout = 1.0 if error is WorkerTimeoutError else 60.0
    program = {} if error is not WorkerTimeoutError else {"program": ("60",)}
    with pytest.raises(error, match=message):
        launched_workers.CommandGroup(str, 1, command=command, timeout=timeout, **program)


def test_a_factory_that_raises() -> None:
    with pytest.raises(RemoteCallError, match="ZeroDivisionError"):
        launched_workers.CommandGroup(lambda worker_id: 1 // worker_id, 1)


def test_the_program() -> None:
    command = [sys.executable, str(EXAMPLE), "sh", "-c", "exec {worker}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert "the workers have it: [True, True]" in done.stdout
