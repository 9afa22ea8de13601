"""Worker processes: what kills them, what they never outlive, and what travels to them."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.resource_sharer import DupFd
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import pytest
import torch
from torch import nn

from sync_core import WorkerLostError
from sync_plugin_std.workers import ProcessGroup
from sync_testing import eventually, worker_groups
from sync_testing.worker_groups import pid_of, sleep, wait_for

pytestmark = pytest.mark.timeout(90)

# Worker processes cannot import this file by name.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
# By name they can, but importing torch for it takes each of them seconds.
cloudpickle.register_pickle_by_value(worker_groups)


def is_running(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def pids(group: ProcessGroup) -> list[int]:
    return [group.call(i, pid_of).result() for i in group.worker_ids]


def spin(_: object, started: Path) -> NoReturn:
    started.touch()
    while True:
        pass


def start_script(source: str, **options: Any) -> subprocess.Popen[str]:
    """Pipe a script to ``python -``, which leaves no file that workers could import again."""
    script = subprocess.Popen(
        [sys.executable, "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )
    assert script.stdin is not None
    script.stdin.write(source)
    script.stdin.close()
    # Otherwise communicate() would use it.
    script.stdin = None
    return script


@pytest.fixture(scope="module")
def shared() -> Iterator[ProcessGroup]:
    """A group for tests that leave it as it is."""
    with ProcessGroup(lambda worker_id: worker_id, 2) as group:
        yield group


@pytest.fixture
def group() -> Iterator[ProcessGroup]:
    """A group for tests that hurt its workers."""
    with ProcessGroup(lambda worker_id: worker_id, 2) as group:
        yield group


class TestDeath:
    def test_an_exit_is_told_by_its_code(self, group: ProcessGroup) -> None:
        with pytest.raises(WorkerLostError, match=r"worker 0: exited with code 3 while running"):
            group.call(0, lambda _: os._exit(3)).result(5)

    def test_a_forked_grandchild_does_not_hide_a_death(self, group: ProcessGroup) -> None:
        def fork(_: object) -> int:
            pid = os.fork()
            if not pid:
                time.sleep(60)
                os._exit(0)
            return pid

        grandchild = group.call(0, fork).result(5)
        with pytest.raises(WorkerLostError, match="killed by SIGTERM"):
            group.call(0, lambda _: os.kill(os.getpid(), signal.SIGTERM)).result(5)
        # Nor does it outlive the worker.
        assert eventually(lambda: not is_running(grandchild))

    @pytest.mark.parametrize("stubborn", [False, True])
    def test_what_a_worker_has_started_ends_with_it(
        self, group: ProcessGroup, stubborn: bool
    ) -> None:
        def start(_: object) -> int:
            program = "trap '' TERM; sleep 60 & wait; wait" if stubborn else "sleep 60"
            return subprocess.Popen(["/bin/sh", "-c", program]).pid

        started = group.call(0, start).result(5)
        os.kill(pids(group)[0], signal.SIGKILL)
        assert eventually(lambda: not is_running(started))
        assert group.alive(1)

    def test_sigterm_closes_what_is_hosted(self, tmp_path: Path) -> None:
        class Host:
            def __init__(self, worker_id: int) -> None:
                self.worker_id = worker_id

            def close(self) -> None:
                (tmp_path / str(self.worker_id)).touch()

        with ProcessGroup(Host, 2) as group:
            workers = pids(group)
            busy = group.call(0, sleep, tmp_path / "began")
            wait_for(tmp_path / "began")
            for worker in workers:
                os.kill(worker, signal.SIGTERM)
            with pytest.raises(WorkerLostError, match="killed by SIGTERM while running sleep"):
                busy.result(5)
            assert eventually(lambda: not any(map(is_running, workers)))
        assert {path.name for path in tmp_path.iterdir()} == {"0", "1", "began"}

    def test_a_worker_that_dies_while_it_starts_leaves_nothing(self, tmp_path: Path) -> None:
        def make(worker_id: int) -> None:
            (tmp_path / str(os.getpid())).touch()
            if worker_id == 1:
                os._exit(7)

        with pytest.raises(WorkerLostError, match="worker 1: exited with code 7 while running"):
            ProcessGroup(make, 2)
        assert not any(is_running(int(path.name)) for path in tmp_path.iterdir())


class TestStop:
    def test_a_stopped_worker_and_a_stubborn_one(self, group: ProcessGroup, tmp_path: Path) -> None:
        def ignore_sigterm(_: object, started: Path) -> None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            spin(_, started)

        workers = pids(group)
        frozen = group.call(0, sleep, tmp_path / "frozen")
        stubborn = group.call(1, ignore_sigterm, tmp_path / "stubborn")
        wait_for(tmp_path / "frozen")
        wait_for(tmp_path / "stubborn")
        os.kill(workers[0], signal.SIGSTOP)
        assert group.alive(0)
        start = time.monotonic()
        group.stop(2.0)
        assert time.monotonic() - start < 20
        assert not any(map(is_running, workers))
        for call in (frozen, stubborn):
            with pytest.raises(WorkerLostError, match="was stopped while running"):
                call.result(1)

    def test_leaves_no_process_thread_or_descriptor(self) -> None:
        def used() -> tuple[int, int]:
            return threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))

        before = used()
        group = ProcessGroup(lambda worker_id: worker_id, 2)
        workers = pids(group)
        group.remove(0)
        group.add()
        os.kill(workers[1], signal.SIGKILL)
        group.stop()
        assert used() == before
        for worker in workers:
            with pytest.raises(ProcessLookupError):
                os.kill(worker, 0)

    def test_workers_run_their_exit_handlers(self, tmp_path: Path) -> None:
        def make(worker_id: int) -> None:
            atexit.register((tmp_path / str(worker_id)).touch)

        with ProcessGroup(make, 2):
            pass
        assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}


SCRIPT = """
import os, sys, time
from sync_plugin_std.workers.process_group import ProcessGroup

class Host:
    def __init__(self, worker_id):
        self.worker_id = worker_id
    def pid(self):
        return os.getpid()

group = ProcessGroup(Host, 2)
print(*(group.call(i, Host.pid).result() for i in group.worker_ids), flush=True)
"""


def first_line(script: subprocess.Popen[str]) -> list[int]:
    assert script.stdout is not None
    return [int(word) for word in script.stdout.readline().split()]


@pytest.mark.long
class TestScripts:
    def test_without_main_guard_or_stop(self) -> None:
        # Nor do its workers load what it does without, and what is slow to load.
        loaded = "assert not group.call(0, lambda _: 'tensordict' in sys.modules).result()"
        script = start_script(SCRIPT + loaded)
        out, err = script.communicate(timeout=60)
        assert (script.returncode, err) == (0, "")
        workers = [int(pid) for pid in out.split()]
        assert len(workers) == 2
        assert not any(map(is_running, workers))

    def test_that_fails(self) -> None:
        script = start_script(SCRIPT + "raise KeyError('oops')")
        out, err = script.communicate(timeout=60)
        assert script.returncode == 1
        assert err.endswith("KeyError: 'oops'\n")
        assert not any(is_running(int(pid)) for pid in out.split())

    @pytest.mark.parametrize("task", ["time.sleep(60)", "[0 for _ in iter(int, 1)]"])
    def test_killed_in_the_middle_of_a_call(self, task: str) -> None:
        # The fork is what a data loader leaves: it has the parent's descriptors, and lives on.
        source = f"""
group.call(0, lambda _: {task})
fork = os.fork()
if fork:
    print(fork, flush=True)
time.sleep(60)
"""
        with start_script(SCRIPT + source) as script:
            workers = first_line(script)
            (fork,) = first_line(script)
            try:
                assert all(map(is_running, workers))
                script.kill()
                script.wait(10)
                assert eventually(lambda: not any(map(is_running, workers)), 5)
                assert is_running(fork)
            finally:
                os.kill(fork, signal.SIGKILL)

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
    @pytest.mark.parametrize("task", ["None", "time.sleep(60)", "stop()"])
    def test_ended_by_a_signal(self, number: signal.Signals, task: str, tmp_path: Path) -> None:
        # As an environment does that has a simulator, idle, in a step, or where one hangs.
        source = f"""
import pathlib, signal, subprocess
def stop():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True: pass
class Simulated(Host):
    def start(self):
        self.simulator = subprocess.Popen(["sleep", "60"])
        return self.simulator.pid
    def close(self):
        pathlib.Path({str(tmp_path)!r}, str(self.worker_id)).touch()
        self.simulator.kill()
simulated = ProcessGroup(Simulated, 2)
print(*(simulated.call(i, Simulated.pid).result() for i in range(2)), flush=True)
simulators = [simulated.call(i, Simulated.start).result() for i in range(2)]
calls = [simulated.call(i, lambda _: {task}) for i in range(2)]
print(*simulators, flush=True)
time.sleep(60)
"""
        with start_script(SCRIPT + source) as script:
            workers = [*first_line(script), *first_line(script), *first_line(script)]
            script.send_signal(number)
            script.wait(10)
        assert eventually(lambda: not any(map(is_running, workers)), 15)
        closed = set() if task == "stop()" else {"0", "1"}
        assert {path.name for path in tmp_path.iterdir()} == closed

    def test_killed_with_its_workers_says_nothing(self) -> None:
        script = start_script(SCRIPT + "os.kill(os.getpid(), 9)")
        _, err = script.communicate(timeout=60)
        assert (script.returncode, err) == (-signal.SIGKILL, "")

    def test_interrupted_from_the_terminal(self) -> None:
        source = """
call = group.call(0, lambda host: time.sleep(0.5) or "unharmed")
try:
    print(0, flush=True)
    # One long sleep would not notice a signal that comes just before it begins.
    for _ in range(600):
        time.sleep(0.1)
except KeyboardInterrupt:
    print(call.result(), group.alive(1))
"""
        script = start_script(SCRIPT + source, start_new_session=True)
        first_line(script)
        first_line(script)
        os.killpg(script.pid, signal.SIGINT)
        out, err = script.communicate(timeout=60)
        assert (out, err) == ("unharmed True\n", "")


class TestTravel:
    def test_much_in_both_directions_at_once(self, shared: ProcessGroup) -> None:
        big = np.arange(8_000_000)
        calls = [shared.call(0, lambda _, array: array + 1, big) for _ in range(4)]
        for call in calls:
            assert np.array_equal(call.result(60), big + 1)

    def test_a_call_does_not_wait_for_a_worker_that_reads_nothing(
        self, shared: ProcessGroup
    ) -> None:
        pid = pids(shared)[0]
        big = torch.zeros(4_000_000)
        os.kill(pid, signal.SIGSTOP)
        try:
            start = time.monotonic()
            call = shared.call(0, lambda _, tensor: tensor.sum().item(), big)
            assert time.monotonic() - start < 20
            # The tensor that was passed is unchanged.
            big.fill_(1)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert call.result(30) == 0

    def test_tensors_are_copied_and_never_shared(self, shared: ProcessGroup) -> None:
        policy = nn.Linear(300, 300)

        def grow(_: object, policy: nn.Linear) -> nn.Linear:
            with torch.no_grad():
                policy.weight.add_(1)
            return policy

        grown = shared.call(0, grow, policy).result(30)
        assert torch.equal(grown.weight, policy.weight + 1)
        for tensor in (policy.weight, policy.bias, grown.weight):
            assert isinstance(tensor, nn.Parameter)
            assert not tensor.untyped_storage().is_shared()

    def test_file_descriptors_can_be_passed(self, shared: ProcessGroup) -> None:
        read, write = os.pipe()
        try:
            shared.call(0, lambda _, fd: os.write(fd.detach(), b"hello"), DupFd(write)).result(10)
            assert os.read(read, 5) == b"hello"
        finally:
            os.close(read)
            os.close(write)

    def test_modules_are_found_where_the_caller_finds_them(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "only_on_the_callers_path.py").write_text("ANSWER = 42\n")
        monkeypatch.syspath_prepend(tmp_path)
        with ProcessGroup(lambda _: __import__("only_on_the_callers_path").ANSWER, 1) as group:
            assert group.call(0, int).result() == 42

    def test_torch_threads(self, shared: ProcessGroup) -> None:
        cores = len(os.sched_getaffinity(0))
        threads = shared.call(0, lambda _: torch.get_num_threads()).result()
        assert threads <= max(1, cores // 2)
        with ProcessGroup(lambda _: torch.get_num_threads(), 1, torch_threads=1) as group:
            assert group.call(0, int).result() == 1


LATE = """
import time
from sync_plugin_std.workers import ProcessGroup
ProcessGroup(lambda worker_id: [], 1).stop()
try:
    ProcessGroup(lambda worker_id: time.sleep(30), 4, timeout=0.05)
except Exception as error:
    print(error)
"""


def test_workers_that_are_late_leave_no_thread_that_fails() -> None:
    said, complaints = start_script(LATE).communicate(timeout=60)
    assert "did not start within 0.05 s" in said
    assert "Exception in thread" not in complaints
