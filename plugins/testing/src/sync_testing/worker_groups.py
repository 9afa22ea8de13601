"""Conformance tests of worker groups: `WorkerGroupConformance`."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, wait
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import numpy as np
import pytest

from sync_core import (
    ClosedError,
    RemoteCallError,
    UnknownWorkerError,
    WorkerGroup,
    WorkerLostError,
    WorkerTimeoutError,
)
from sync_testing.cases import Conformance
from sync_testing.expectations import ALIVE, CALLS, CLOSED, LOST, MEMBERS, RECEIVED, REMOTE_ERROR

__all__ = ["Closed", "Counter", "WorkerGroupConformance", "pid_of", "sleep", "wait_for"]


class CounterError(Exception):
    """Raised by `Counter`; the caller must get the same class."""


class Counter:
    """A hosted object that counts, raises, and ends its process.

    Args:
        worker_id: the worker's id.
    """

    def __init__(self, worker_id: int) -> None:
        self.worker_id = worker_id
        self.seen: list[Any] = []

    def see(self, value: Any, *, twice: bool = False) -> list[Any]:
        """Store a value; return all values so far."""
        self.seen += [value, value] if twice else [value]
        return self.seen[:]

    def fail(self, reason: str) -> None:
        raise CounterError(reason)

    def leave(self) -> None:
        sys.exit(3)


class Closed(Counter):
    """A hosted object that records in a folder when it is closed, and may raise then.

    Args:
        worker_id: the worker's id.
        folder: the folder; one file per worker, with a line for each call.
        fails: whether `close` raises.
    """

    def __init__(self, worker_id: int, folder: Path, *, fails: bool = False) -> None:
        super().__init__(worker_id)
        self._notes = folder / str(worker_id)
        self._fails = fails

    def close(self) -> None:
        with self._notes.open("a") as notes:
            notes.write("closed\n")
        if self._fails:
            raise CounterError("it is stuck")


class Unpicklable:
    """An object that cannot be pickled."""

    def __reduce__(self) -> NoReturn:
        raise TypeError("stays where it is")


class StaysAway:
    """An object that can be unpickled only in one process.

    Args:
        home: the id of the process.
    """

    def __init__(self, home: int) -> None:
        self.home = home

    def __getstate__(self) -> int:
        return self.home

    def __setstate__(self, home: int) -> None:
        if os.getpid() != home:
            raise ValueError("not here")


def pid_of(_: object) -> int:
    """Return the id of the process that a call runs in."""
    return os.getpid()


def sleep(_: object, started: Path, seconds: float = 60.0) -> None:
    """Make a file, then sleep."""
    started.touch()
    time.sleep(seconds)


def wait_for(path: Path) -> str:
    """Wait until a file exists; return its name."""
    while not path.exists():
        time.sleep(0.005)
    return path.name


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Wait until a condition holds; return whether it does in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def python_threads() -> set[threading.Thread]:
    """Return the threads that Python started, without threads of libraries with a callback."""
    return {thread for thread in threading.enumerate() if not thread.name.startswith("Dummy-")}


def count_threads() -> int:
    """Return the number of threads that Python started."""
    return len(python_threads())


class WorkerGroupConformance(Conformance):
    """Conformance tests of a worker group: inherit, and set `group_class`.

    Example:
        >>> class TestMyGroup(WorkerGroupConformance):  # doctest: +SKIP
        ...     group_class = MyGroup
    """

    group_class: ClassVar[type[WorkerGroup]]

    @pytest.fixture(scope="class")
    @classmethod
    def shared(cls) -> Iterator[WorkerGroup]:
        """A group for tests that do not change its members."""
        with cls.group_class(Counter, 2) as group:
            yield group

    @pytest.fixture
    def group(self) -> Iterator[WorkerGroup]:
        """A group for tests that change its members."""
        with self.group_class(Counter, 2) as group:
            yield group

    @pytest.fixture
    def parallel(self) -> None:
        if "parallel" not in self.group_class.capabilities:
            pytest.skip("this group runs every call in the caller's thread")

    @pytest.fixture
    def processes(self) -> None:
        if "cross_process" not in self.group_class.capabilities:
            pytest.skip("this group keeps its objects in the caller's process")

    @pytest.fixture
    def add(self) -> None:
        if "add" not in self.group_class.capabilities:
            pytest.skip("this group cannot get more workers")

    def test_each_worker_hosts_its_own_object(self, shared: WorkerGroup) -> None:
        assert shared.worker_ids == (0, 1), MEMBERS
        calls = [shared.call(i, lambda counter: counter.worker_id) for i in (1, 0)]
        assert [call.result() for call in calls] == [1, 0], CALLS

    def test_calls_to_a_worker_run_in_order(self, shared: WorkerGroup) -> None:
        calls = [shared.call(0, Counter.see, i) for i in range(50)]
        assert calls[-1].result()[-50:] == list(range(50)), CALLS
        assert [call.result()[-1] for call in calls] == list(range(50)), CALLS

    def test_keyword_arguments(self, shared: WorkerGroup) -> None:
        assert shared.call(1, Counter.see, "a", twice=True).result()[-2:] == ["a", "a"], CALLS

    def test_closures(self, shared: WorkerGroup) -> None:
        offset = 10

        def add(counter: Counter) -> int:
            return counter.worker_id + offset

        assert shared.call(1, add).result() == 11, CALLS

    def test_results_are_instances_of_the_callers_classes(self, shared: WorkerGroup) -> None:
        result = shared.call(0, lambda counter: type(counter)(7)).result()
        assert isinstance(result, Counter), CALLS
        assert result.worker_id == 7, CALLS

    def test_an_exception_is_told_in_full(self, shared: WorkerGroup) -> None:
        with pytest.raises(RemoteCallError) as caught:
            shared.call(1, Counter.fail, "no more").result()
        assert caught.value.worker_id == 1, REMOTE_ERROR
        first, *traceback = str(caught.value).splitlines()
        assert "fail" in first, REMOTE_ERROR
        assert "CounterError: no more" in first, REMOTE_ERROR
        assert any("in fail" in line for line in traceback), REMOTE_ERROR
        assert isinstance(caught.value.__cause__, CounterError), REMOTE_ERROR
        assert caught.value.__cause__.args == ("no more",), REMOTE_ERROR

    def test_an_exception_ends_only_its_call(self, shared: WorkerGroup) -> None:
        failing, working = (
            shared.call(0, Counter.fail, ""),
            shared.call(0, lambda counter: counter.worker_id),
        )
        assert isinstance(failing.exception(), RemoteCallError), REMOTE_ERROR
        assert working.result() == 0, CALLS

    def test_system_exit_is_an_exception_like_any_other(self, shared: WorkerGroup) -> None:
        with pytest.raises(RemoteCallError, match="SystemExit"):
            shared.call(0, Counter.leave).result()
        assert shared.alive(0), ALIVE

    def test_a_call_cannot_be_cancelled(self, shared: WorkerGroup) -> None:
        call = shared.call(0, Counter.see, "kept")
        assert not call.cancel(), "a call that was made must run; its future cannot be cancelled"
        assert call.result()[-1] == "kept", CALLS

    @pytest.mark.parametrize("worker_id", [-1, 2, True, "0"])
    def test_an_unknown_worker_is_an_error(self, shared: WorkerGroup, worker_id: Any) -> None:
        with pytest.raises(UnknownWorkerError):
            shared.call(worker_id, repr)
        with pytest.raises(UnknownWorkerError):
            shared.alive(worker_id)

    def test_a_numpy_integer_is_a_worker_id(self, shared: WorkerGroup) -> None:
        worker_id: Any = np.int64(1)
        assert shared.call(worker_id, lambda counter: counter.worker_id).result() == 1, CALLS

    @pytest.mark.usefixtures("parallel")
    def test_the_first_to_finish_comes_first(self, shared: WorkerGroup, tmp_path: Path) -> None:
        calls = [shared.call(i, lambda _, path: wait_for(path), tmp_path / str(i)) for i in (0, 1)]
        for worker_id in (1, 0):
            (tmp_path / str(worker_id)).touch()
            done, _ = wait(calls, 30, return_when=FIRST_COMPLETED)
            (call,) = done
            assert call.result() == str(worker_id), CALLS
            calls.remove(call)

    def test_calls_of_a_worker_share_a_thread(self, shared: WorkerGroup) -> None:
        calls = [shared.call(0, lambda _: threading.get_ident()) for _ in range(10)]
        assert len({call.result() for call in calls}) == 1, RECEIVED

    @pytest.mark.usefixtures("processes")
    def test_what_cannot_travel_fails_its_call_alone(self, shared: WorkerGroup) -> None:
        home = os.getpid()
        calls: list[tuple[str, tuple[Any, ...]]] = [
            ("stays where it is", (repr, Unpicklable())),
            ("not here", (repr, StaysAway(home))),
            ("stays where it is", (lambda _: Unpicklable(),)),
            ("not here", (lambda _: StaysAway(os.getpid()),)),
        ]
        for message, call in calls:
            with pytest.raises(RemoteCallError, match=message) as caught:
                shared.call(0, *call).result(30)
            assert caught.value.worker_id == 0, REMOTE_ERROR
            assert shared.call(0, pid_of).result(30) != home, CALLS

    @pytest.mark.usefixtures("processes")
    def test_an_exception_that_cannot_be_pickled(self, shared: WorkerGroup) -> None:
        def fail(_: object) -> NoReturn:
            raise ValueError(Unpicklable())

        with pytest.raises(RemoteCallError, match="ValueError") as caught:
            shared.call(0, fail).result(30)
        assert caught.value.__cause__ is None
        assert "in fail" in str(caught.value), "the traceback must travel as text"

    @pytest.mark.usefixtures("processes")
    def test_a_keyboard_interrupt_in_a_worker_ends_only_its_call(self, shared: WorkerGroup) -> None:
        def interrupt(_: object) -> NoReturn:
            raise KeyboardInterrupt

        with pytest.raises(RemoteCallError, match="KeyboardInterrupt"):
            shared.call(0, interrupt).result(30)
        assert shared.alive(0), ALIVE

    @pytest.mark.usefixtures("processes")
    def test_arguments_and_results_are_copies(self, shared: WorkerGroup, tmp_path: Path) -> None:
        go, sent = tmp_path / "go", np.zeros(1_000_000)
        shared.call(0, lambda _, path: wait_for(path), go)
        call = shared.call(0, lambda _, array: array, sent)
        sent += 1
        go.touch()
        array = call.result(60)
        array += 2
        assert array.mean() == 2, "an argument must be pickled by call(), before it can change"

    @pytest.mark.usefixtures("add")
    def test_members_come_and_go(self, group: WorkerGroup) -> None:
        assert group.add() == 2, MEMBERS
        assert list(group.worker_ids) == [0, 1, 2], MEMBERS
        assert group.call(2, Counter.see, "new").result() == ["new"], CALLS
        group.remove(2)
        group.remove(0)
        assert list(group.worker_ids) == [1], MEMBERS
        with pytest.raises(UnknownWorkerError):
            group.call(2, repr)
        assert group.add() == 3, MEMBERS
        assert [group.alive(i) for i in group.worker_ids] == [True, True], ALIVE

    def test_restart_makes_a_new_object(self, group: WorkerGroup) -> None:
        if "restart" not in self.group_class.capabilities:
            pytest.skip("this group cannot replace a worker")
        group.call(1, Counter.see, "old").result()
        group.restart(1)
        assert group.worker_ids == (0, 1), MEMBERS
        assert group.alive(1), ALIVE
        assert group.call(1, Counter.see, "new").result() == ["new"], CALLS

    @pytest.mark.usefixtures("processes")
    def test_a_killed_worker_is_lost_alone(self, group: WorkerGroup, tmp_path: Path) -> None:
        victim = group.call(1, pid_of).result()
        running = group.call(1, sleep, tmp_path / "started")
        waiting = group.call(1, pid_of)
        wait_for(tmp_path / "started")
        os.kill(victim, signal.SIGKILL)
        for call, name in ((running, "sleep"), (waiting, "pid_of")):
            with pytest.raises(WorkerLostError, match=name) as caught:
                call.result(30)
            assert caught.value.worker_id == 1, LOST
        assert eventually(lambda: not group.alive(1)), ALIVE
        assert group.alive(0), ALIVE
        assert group.worker_ids == (0, 1), MEMBERS
        restarts = "restart" in self.group_class.capabilities
        with pytest.raises(WorkerLostError, match="pid_of"):
            group.call(1, pid_of).result(30)
        if restarts:
            group.restart(1)
            assert group.call(1, pid_of).result(30) != victim, CALLS
        else:
            group.remove(1)
            assert list(group.worker_ids) == [0], MEMBERS
        assert group.call(0, pid_of).result(30) != victim, CALLS

    @pytest.mark.usefixtures("processes")
    def test_a_factory_that_cannot_be_pickled_starts_nothing(self) -> None:
        stays = Unpicklable()
        with pytest.raises(RemoteCallError, match="stays where it is") as caught:
            self.group_class(lambda _: stays, 2)
        assert isinstance(caught.value.__cause__, TypeError), REMOTE_ERROR

    def test_stop_is_final_and_can_be_repeated(self, group: WorkerGroup) -> None:
        group.stop()
        group.stop(0)
        assert group.worker_ids == (0, 1), MEMBERS
        assert not group.alive(0), ALIVE
        for use in (group.add, lambda: group.call(0, repr), lambda: group.restart(0)):
            with pytest.raises(ClosedError):
                use()

    @pytest.mark.parametrize("end", ["remove", "restart", "stop"])
    def test_what_a_worker_hosts_is_closed_once_when_it_ends(
        self, end: str, tmp_path: Path
    ) -> None:
        if end == "restart" and end not in self.group_class.capabilities:
            pytest.skip("this group cannot replace a worker")
        with self.group_class(lambda worker_id: Closed(worker_id, tmp_path), 2) as group:
            assert group.call(0, Counter.see, 1).result() == [1], CALLS
            group.stop() if end == "stop" else getattr(group, end)(0)
            assert (tmp_path / "0").read_text() == "closed\n", CLOSED
            assert (tmp_path / "1").exists() is (end == "stop"), CLOSED
        assert (tmp_path / "0").read_text() == "closed\n" * (1 + (end == "restart")), CLOSED
        assert (tmp_path / "1").read_text() == "closed\n", CLOSED

    def test_what_a_forgotten_group_hosts_is_closed(self, tmp_path: Path) -> None:
        group = self.group_class(lambda worker_id: Closed(worker_id, tmp_path), 1)
        del group
        gc.collect()
        assert eventually((tmp_path / "0").exists), CLOSED

    def test_what_cannot_be_closed_keeps_nothing_from_ending(self, tmp_path: Path) -> None:
        group = self.group_class(lambda worker_id: Closed(worker_id, tmp_path, fails=True), 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            group.stop()
        assert not group.alive(0), ALIVE
        assert (tmp_path / "1").read_text() == "closed\n", CLOSED

    @pytest.mark.usefixtures("parallel")
    def test_stop_waits_for_no_long_call(self, group: WorkerGroup, tmp_path: Path) -> None:
        started, release, late = (tmp_path / name for name in ("started", "release", "late"))

        def work(_: Counter) -> None:
            started.touch()
            wait_for(release)

        running = group.call(0, work)
        waiting = group.call(0, lambda _: late.touch())
        wait_for(started)
        start = time.monotonic()
        group.stop(2.0)
        assert time.monotonic() - start < 20, (
            "stop() must end within its timeout, by force if need be"
        )
        for call in (running, waiting):
            with pytest.raises(WorkerLostError) as caught:
                call.result(5)
            assert caught.value.worker_id == 0, LOST
        release.touch()
        assert not late.exists(), "a worker that was stopped must not run on"

    @pytest.mark.usefixtures("parallel")
    def test_stop_lets_the_call_in_progress_finish(
        self, group: WorkerGroup, tmp_path: Path
    ) -> None:
        started = tmp_path / "started"

        def work(_: Counter) -> str:
            started.touch()
            time.sleep(0.3)
            return "done"

        call = group.call(0, work)
        wait_for(started)
        group.stop()
        assert call.result(5) == "done", CALLS

    def test_a_factory_that_raises_leaves_nothing(self) -> None:
        before = python_threads()

        def make(worker_id: int) -> Counter:
            if worker_id == 1:
                raise CounterError("no room")
            return Counter(worker_id)

        with pytest.raises(RemoteCallError, match="no room") as caught:
            self.group_class(make, 2)
        assert caught.value.worker_id == 1, REMOTE_ERROR
        assert isinstance(caught.value.__cause__, CounterError), REMOTE_ERROR
        assert eventually(lambda: python_threads() <= before), python_threads() - before

    @pytest.mark.usefixtures("add")
    def test_add_that_fails_leaves_the_group_as_it_was(self) -> None:
        def make(worker_id: int) -> Counter:
            if worker_id == 1:
                raise CounterError("no room")
            return Counter(worker_id)

        with self.group_class(make, 1) as group:
            with pytest.raises(RemoteCallError, match="no room"):
                group.add()
            assert group.worker_ids == (0,), MEMBERS
            assert group.add() == 2, MEMBERS

    @pytest.mark.usefixtures("parallel")
    def test_a_factory_that_takes_too_long_is_given_up(self, tmp_path: Path) -> None:
        release = tmp_path / "release"
        start = time.monotonic()
        with pytest.raises(WorkerTimeoutError):
            self.group_class(lambda _: wait_for(release), 2, timeout=0.5)
        assert time.monotonic() - start < 20, "a group that cannot start must fail at once"
        release.touch()

    def test_a_group_can_begin_without_workers(self) -> None:
        with self.group_class(Counter, 0) as group:
            assert group.worker_ids == (), MEMBERS
            if "add" in self.group_class.capabilities:
                assert group.call(group.add(), Counter.see, 1).result() == [1], CALLS

    def test_fewer_than_no_workers_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="-1"):
            self.group_class(Counter, -1)

    def test_what_is_no_number_of_workers_is_an_error(self) -> None:
        no_number: Any = "2"
        with pytest.raises(TypeError, match="2"):
            self.group_class(Counter, no_number)

    def test_a_forgotten_group_ends_with_its_last_reference(self) -> None:
        before = python_threads()
        group = self.group_class(Counter, 2)
        group.call(0, Counter.see, 1).result()
        del group
        gc.collect()
        assert eventually(lambda: python_threads() <= before), python_threads() - before

    def test_a_callback_may_stop_the_group(self, group: WorkerGroup) -> None:
        stopped = threading.Event()
        call = group.call(0, Counter.see, 1)

        def stop(_: object) -> None:
            group.stop(20)
            stopped.set()

        call.add_done_callback(stop)
        assert stopped.wait(30), "stop() must end within its timeout"
        assert not group.alive(1), ALIVE
