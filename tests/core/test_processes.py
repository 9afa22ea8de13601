"""Processes for workers: what they have from the one that asks, and what is left of them."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sync_plugin_std.workers import (
    WorkerProcess,
    fork_server_pids,
    processes,
    start_process,
)
from sync_plugin_std.workers.processes import FreshProcess
from sync_testing import descendants, eventually

pytestmark = pytest.mark.timeout(60)

linux = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that only ``sys.path`` leads to; its function writes to a descriptor."""
    (tmp_path / "worker_program.py").write_text(
        "import os, random, sys, time\n"
        "import numpy\n"
        "def evaluate(descriptor, expression):\n"
        "    os.write(descriptor, str(eval(expression)).encode())\n"
        "def fail(): raise ValueError('worker_program failed')\n"
        "def show(text): print(text)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return "worker_program"


@contextmanager
def evaluating(program: str, expression: str) -> Iterator[tuple[int, WorkerProcess]]:
    reading, writing = os.pipe()
    process = start_process(f"{program}:evaluate", expression, fds=[writing])
    os.close(writing)
    try:
        yield reading, process
    finally:
        os.close(reading)
        process.send_signal(signal.SIGKILL)
        assert process.exited(20)


def evaluate(program: str, expression: str) -> str:
    with evaluating(program, expression) as (reading, _):
        return os.read(reading, 10_000).decode()


def test_it_has_what_this_process_has_now(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate(program, "0")
    monkeypatch.setenv("SYNC_TEST_ODD", "é\udc80 =")
    monkeypatch.chdir(tmp_path)
    assert evaluate(program, "ascii(os.environ['SYNC_TEST_ODD'])") == ascii("é\udc80 =")
    assert evaluate(program, "os.getcwd()") == str(tmp_path)
    monkeypatch.delenv("SYNC_TEST_ODD")
    assert evaluate(program, "'SYNC_TEST_ODD' in os.environ") == "False"
    assert evaluate(program, "sys.stdin.read()") == ""


@linux
def test_it_has_what_takes_long_to_load(program: str) -> None:
    importlib.import_module("tensordict")
    loaded = "sorted({'torch', 'tensordict'} & set(sys.modules))"
    assert evaluate(program, loaded) == "['tensordict', 'torch']"


def test_what_is_read_when_torch_is_loaded(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate(program, "0")
    before = descendants()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert evaluate(program, "__import__('torch').get_num_threads()") == "1"
    # What forked until then has been replaced, and was not a worker.
    assert eventually(lambda: descendants() <= before)


def test_its_output_goes_where_that_of_this_process_goes(
    program: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert start_process(f"{program}:show", "out").exited(30)
    process = start_process(f"{program}:fail")
    assert process.exited(30)
    assert process.returncode == 1
    said = capfd.readouterr()
    assert said.out == "out\n"
    assert "ValueError: worker_program failed" in said.err


def test_no_two_draw_the_same_random_numbers(program: str) -> None:
    drawn = "(random.random(), numpy.random.random())"
    first, second = (eval(evaluate(program, drawn)) for _ in range(2))
    assert first[0] != second[0]
    assert first[1] != second[1]


def test_how_it_ended(program: str) -> None:
    with evaluating(program, "time.sleep(60)") as (_, process):
        assert not process.exited(0)
        assert process.returncode is None
        process.send_signal(signal.SIGKILL)
        assert process.exited(20)
        assert process.returncode == -signal.SIGKILL
        assert process.epitaph() == "killed by SIGKILL"
        process.send_signal(signal.SIGTERM)


def test_what_may_have_ended_it_by_a_fault_of_memory_is_named(program: str) -> None:
    with evaluating(program, "time.sleep(60)") as (_, process):
        process.send_signal(signal.SIGSEGV)
        assert process.exited(20)
        told = process.epitaph()
        assert told.startswith("killed by SIGSEGV (with zero_copy=True, a write to a parameter")
        assert "type zero_copy=False. So does a layer or a load= function" in told


def test_no_descriptor_is_left(program: str) -> None:
    evaluate(program, "0")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        evaluate(program, "0")
    assert len(os.listdir("/proc/self/fd")) == before


@linux
@pytest.mark.long
def test_the_reply_to_an_interrupted_request_is_not_read_by_the_next(program: str) -> None:
    evaluate(program, "0")

    def signal_servers(number: signal.Signals) -> None:
        for pid in fork_server_pids():
            os.kill(pid, number)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal_servers(signal.SIGSTOP)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            start_process("os:getpid")
    finally:
        signal_servers(signal.SIGCONT)
        signal.signal(signal.SIGALRM, before)
    with evaluating(program, "os.getpid()") as (reading, process):
        assert os.read(reading, 100) == str(process.pid).encode()


@linux
@pytest.mark.long
def test_a_request_that_was_asked_again_of_another_server_is_served_once(program: str) -> None:
    late = int(evaluate(program, "os.getppid()"))
    server = processes._current._server
    assert server is not None
    server._control.settimeout(0.1)
    reading, writing = os.pipe()
    os.kill(late, signal.SIGSTOP)
    try:
        process = start_process(f"{program}:evaluate", "'once '", fds=[writing])
    finally:
        os.kill(late, signal.SIGCONT)
        os.close(writing)
    with open(reading) as lines:
        assert lines.read() == "once "
    assert process.exited(30)


def test_a_fresh_interpreter(program: str) -> None:
    reading, writing = os.pipe()
    process = FreshProcess(f"{program}:evaluate", ["os.getppid()"], [writing])
    os.close(writing)
    assert os.read(reading, 100) == str(os.getpid()).encode()
    os.close(reading)
    assert process.exited(30)
    assert process.epitaph() == "exited with code 0"


@linux
class TestForkServer:
    def test_many_start_in_the_time_of_one(self, program: str) -> None:
        evaluate(program, "0")
        parents = {evaluate(program, "os.getppid()") for _ in range(3)}
        assert len(parents) == 1
        assert parents != {str(os.getpid())}

    def test_killed_it_is_replaced_and_what_it_forked_lives(self, program: str) -> None:
        with evaluating(program, "time.sleep(60)") as (_, process):
            os.kill(int(evaluate(program, "os.getppid()")), signal.SIGKILL)
            assert evaluate(program, "1 + 1") == "2"
            assert not process.exited(0)
            process.send_signal(signal.SIGTERM)
            assert process.exited(20)
            assert process.epitaph() == "has ended"

    def test_in_a_fork_of_this_process(self, program: str) -> None:
        ours = evaluate(program, "os.getppid()")
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                os.write(writing, evaluate(program, "os.getppid()").encode())
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        os.close(writing)
        theirs = os.read(reading, 100).decode()
        os.close(reading)
        assert theirs not in ("", ours)
        assert evaluate(program, "os.getppid()") == ours
        deadline = time.monotonic() + 10
        while Path(f"/proc/{theirs}").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
