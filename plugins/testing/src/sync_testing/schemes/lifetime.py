"""Cases: senders and workers start and end without leaving anything behind."""

from __future__ import annotations

import ctypes
import gc
import os
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch import nn

from sync_core import (
    RemoteCallError,
    SenderLostError,
    SendError,
    UnknownWorkerError,
    Update,
    WorkerState,
    WorkerTimeoutError,
    hookimpl,
)
from sync_core.errors import AddressError
from sync_plugin_scale import Pool
from sync_plugin_std import select
from sync_plugin_std.workers import fork_server_pids
from sync_testing.expectations import MEMBERS, NO_NEWS, RECEIVED, REPORT, VALUES
from sync_testing.processes import descendants
from sync_testing.schemes.models import fill, make_policy
from sync_testing.schemes.pool import SchemeCases, SharedGroup, Start, Workers, ended
from sync_testing.schemes.worker import Worker
from sync_testing.worker_groups import count_threads, eventually


class LifetimeCases(SchemeCases):
    """Workers that join and leave, and senders that close."""

    @pytest.mark.usefixtures("parallel")
    def test_receivers_learn_that_the_sender_closed(self, start: Start) -> None:
        workers = start(make_policy(), 1)
        waiting = workers.submit(0, self.slack)
        time.sleep(0.2)
        workers.sender.close()
        with pytest.raises(RemoteCallError) as failure:
            ended([waiting], "receive() of a worker whose sender has closed")
        assert isinstance(failure.value.__cause__, SenderLostError), (
            "a receiver must learn that its sender has closed"
        )

    def test_a_worker_keeps_its_weights_when_the_sender_is_gone(
        self, start: Start, zero_copy: bool
    ) -> None:
        workers = start(make_policy(4.0), 1, zero_copy=zero_copy)
        workers.send()
        workers.sender.close()
        assert workers.pool.call(0, Worker.values) == {4.0}, VALUES
        workers.pool.call(0, Worker.leave, 5.0)
        assert workers.pool.call(0, Worker.values) == {5.0}, VALUES

    def test_a_worker_that_joins_late_gets_the_newest_version(self, start: Start) -> None:
        self.need("late_join")
        workers = start(make_policy(8.0), 1)
        workers.send()
        new = workers.sender.add_worker()
        assert new == 1, MEMBERS
        workers.connect(new)
        assert workers.receive(new) == 1, RECEIVED
        assert workers.values() == [{8.0}, {8.0}], VALUES
        assert workers.send().updated == (0, 1), REPORT

    def test_a_version_that_was_sent_to_no_worker_reaches_the_first(self, start: Start) -> None:
        self.need("late_join")
        self.need_one_sender()
        workers = start(make_policy(8.0), 1)
        workers.sender.remove_worker(0)
        try:
            Pool(workers.sender)
        except AddressError:
            pytest.skip("workers cannot share an address")
        assert workers.sender.send().updated == (), REPORT
        workers.connect(workers.sender.add_worker())
        assert workers.receive(1) == 1, (
            "send(payload, []) must keep the version for the workers that join later"
        )
        assert workers.pool.call(1, Worker.values) == {8.0}, VALUES

    @pytest.mark.usefixtures("asking", "parallel")
    def test_no_send_waits_for_a_worker_that_joins_and_never_answers(self, start: Start) -> None:
        self.need("late_join")
        workers = start(make_policy(1.0), 1)
        sender = workers.sender
        workers.send()
        joined = sender.add_worker(joining=True)
        workers.connect(joined)
        begin = time.perf_counter()
        pending = sender.send_async()
        received = workers.submit(0, workers.patience)
        report = pending.wait()
        assert (report.updated, report.joining) == ((0,), (joined,)), REPORT
        assert time.perf_counter() - begin < self.slack, "the send waited for a worker that joins"
        assert ended([received], "receive()") == [2], RECEIVED
        assert workers.receive(joined) == 2, RECEIVED
        assert eventually(lambda: not sender.workers[joined].joining), (
            "sends must wait for a worker that has committed a version"
        )
        assert workers.send().updated == (0, joined), REPORT

    @pytest.mark.usefixtures("parallel")
    def test_a_worker_that_shares_its_address_joins_again(
        self, start: Start, zero_copy: bool
    ) -> None:
        self.need("late_join")
        self.need_one_sender()
        policy = make_policy(1.0)
        workers = start(policy, 1, zero_copy=zero_copy)
        pool, sender = workers.pool, workers.sender
        try:
            pool.call(1, Worker.connect, Pool(sender).address())
        except AddressError:
            pytest.skip("workers cannot share an address")
        assert workers.send().updated == (0, 1), REPORT

        def is_current(worker_id: int) -> bool:
            return sender.workers[worker_id].state is WorkerState.CURRENT

        for value, joined in ((2.0, 2), (3.0, 3)):
            fill(policy, value)
            sender.remove_worker(joined - 1)
            assert workers.send(worker_ids=[0]).updated == (0,), REPORT
            assert pool.call(1, Worker.receive, self.slack) == value, (
                "a worker that was removed must be admitted again when it receives"
            )
            assert pool.call(1, Worker.values) == {value}, VALUES
            assert eventually(partial(is_current, joined), self.slack), MEMBERS

    def test_a_worker_that_is_removed(self, start: Start) -> None:
        workers = start(make_policy(1.0))
        workers.sender.remove_worker(0)
        assert workers.sender.all_worker_ids() == (1,), MEMBERS
        with pytest.raises(UnknownWorkerError):
            workers.sender.send(worker_ids=0)
        assert workers.send().updated == (1,), REPORT

    def test_a_worker_that_is_removed_gets_nothing_more(self, start: Start) -> None:
        policy = make_policy(1.0)
        workers = start(policy)
        workers.send()
        workers.sender.remove_worker(0)
        fill(policy, 2.0)
        pending = workers.sender.send_async()
        workers.receive(1)
        assert pending.wait().updated == (1,), REPORT
        with suppress(RemoteCallError):
            assert workers.receive(0, timeout=0.1) is None, NO_NEWS
        assert workers.pool.call(0, Worker.values) == {1.0}, VALUES

    def test_removing_a_worker_ends_what_is_on_its_way_to_it(self, start: Start) -> None:
        workers = start(make_policy(1.0))
        pending = workers.sender.send_async()
        workers.sender.remove_worker(0)
        assert workers.receive(1) == 1, RECEIVED
        with pytest.raises(SendError) as failure:
            pending.wait()
        report = failure.value.report
        assert report.updated == (1,), REPORT
        assert not isinstance(report.workers[0].error, WorkerTimeoutError), (
            "the send of a removed worker must end at once, not at the deadline"
        )

    @pytest.mark.usefixtures("alone")
    def test_an_id_may_be_removed_and_added_again(self, start: Start) -> None:
        self.need("late_join")
        policy = make_policy(1.0)
        workers = start(policy)
        workers.send()
        for value in (2.0, 3.0):
            workers.sender.remove_worker(0)
            assert workers.sender.add_worker(0) == 0, MEMBERS
            workers.connect(0)
            assert workers.receive(0) == value - 1, RECEIVED
            fill(policy, value)
            pending = workers.sender.send_async()
            assert [workers.receive(i) for i in (0, 1)] == [value] * 2, RECEIVED
            assert pending.wait().updated == (0, 1), REPORT
            assert workers.values() == [{value}] * 2, VALUES

    @pytest.mark.usefixtures("asking", "lasting")
    def test_an_answer_of_a_worker_that_was_removed_counts_for_no_other(self, start: Start) -> None:
        self.need("late_join")
        workers = start(make_policy(1.0), 1)
        workers.stage_what_is_given_up()
        workers.sender.remove_worker(0)
        workers.sender.add_worker(0)
        address = workers.sender.address(0)
        assert workers.pool.call(0, Worker.commit_after_another, address) == 1, RECEIVED
        assert not eventually(lambda: workers.sender.workers[0].version > 0, 0.2), (
            "an answer of a removed worker must not count for the one that has its id now"
        )
        assert workers.send().updated == (0,), REPORT

    def test_a_late_worker_gets_what_went_to_all(self, start: Start) -> None:
        self.need("late_join")
        policy = make_policy(1.0)
        workers = start(policy)
        workers.send()
        # More versions than a scheme might keep.
        for worker_id, value in ((0, 2.0), (1, 3.0), (0, 4.0)):
            fill(policy, value)
            workers.send(worker_ids=[worker_id])
        workers.connect(workers.sender.add_worker())
        assert workers.receive(2) == 1, RECEIVED
        assert workers.values() == [{4.0}, {3.0}, {1.0}], VALUES

    def test_a_late_worker_gets_what_was_sent_while_another_was_removed(self, start: Start) -> None:
        self.need("late_join")
        self.need_one_sender()
        policy, removal = make_policy(1.0), _Removal()
        workers = start(policy, layers=[removal])
        workers.send()
        fill(policy, 2.0)
        removal.act = partial(workers.sender.remove_worker, 1)
        pending = workers.sender.send_async()
        assert workers.receive(0) == 2, RECEIVED
        with suppress(SendError):
            pending.wait()
        workers.connect(workers.sender.add_worker())
        assert workers.receive(2) == 2, RECEIVED
        assert workers.pool.call(2, Worker.values) == {2.0}, VALUES
        # The removed worker no longer counts.
        fill(policy, 3.0)
        assert workers.send().updated == (0, 2), REPORT
        workers.connect(workers.sender.add_worker(1))
        assert workers.receive(1) == 3, RECEIVED

    def test_a_late_worker_after_a_partial_update_gets_a_whole_version(self, start: Start) -> None:
        self.need("late_join")
        self.need_one_sender()
        workers = start(make_policy(1.0), 1, layers=[select("*")])
        workers.send()
        workers.send({"0.bias": torch.full((4,), 6.0)})
        workers.connect(workers.sender.add_worker())
        received = workers.receive(1, timeout=0.5)
        assert workers.pool.call(1, Worker.values) == ({0.0} if received is None else {1.0, 6.0}), (
            VALUES
        )
        if received is None:
            assert workers.sender.workers[1].state is not WorkerState.CURRENT, (
                "a worker that has not committed the version must not count as current"
            )
        workers.send({"2.bias": torch.full((2,), 7.0)})
        assert workers.values() == [{1.0, 6.0, 7.0}] * 2, VALUES

    def test_a_late_worker_may_take_an_id_of_its_own(self, start: Start) -> None:
        self.need("late_join")
        workers = start(make_policy(1.0), 1)
        assert workers.sender.add_worker(2) == 2, MEMBERS
        workers.connect(2)
        assert workers.send().updated == (0, 2), REPORT

    def test_a_worker_that_comes_back_gets_the_newest_version(self, start: Start) -> None:
        workers = start(make_policy(1.0))
        workers.send()
        workers.pool.call(0, Worker.leave, 7.0)
        workers.connect(0)
        assert workers.receive(0) == 1, RECEIVED
        assert workers.values() == [{1.0}, {1.0}], VALUES
        assert workers.send().updated == (0, 1), REPORT

    @pytest.mark.usefixtures("lasting")
    def test_a_worker_that_left_holds_nobody_up(self, start: Start) -> None:
        workers = start(make_policy(1.0), timeout=2.0)
        workers.send()
        workers.pool.call(0, Worker.leave, 7.0)
        begin = time.perf_counter()
        pending = workers.sender.send_async()
        assert time.perf_counter() - begin < min(self.slack, 2.0), (
            "send_async() waited for a worker"
        )
        assert workers.receive(1) == 2, RECEIVED
        with pytest.raises(SendError) as failure:
            pending.wait()
        assert failure.value.report.updated == (1,), REPORT
        assert time.perf_counter() - begin < 2.0 + self.slack, "the send must end by its deadline"

    @pytest.mark.usefixtures("asking")
    def test_closing_a_receiver_wakes_a_thread_that_waits_in_it(self, start: Start) -> None:
        workers = start(make_policy(3.0), 1)
        ended = workers.pool.call(0, Worker.hang_up_while_waiting, self.slack)
        assert ended == "ClosedError", "close() must end a receive() that waits in another thread"
        workers.connect(0)
        assert workers.send().updated == (0,), REPORT
        assert workers.values() == [{3.0}], VALUES

    @pytest.mark.usefixtures("asking")
    def test_a_thread_that_looks_waits_for_none_that_waits(self, start: Start) -> None:
        workers = start(make_policy(3.0), 1)
        assert workers.pool.call(0, Worker.look_while_waiting, self.slack), (
            "receive(0) must not wait for a receive() in another thread"
        )

    def test_workers_come_and_go_while_versions_are_sent(self, start: Start) -> None:
        self.need("late_join")
        workers = start(make_policy(1.0), 1)
        ended = threading.Event()
        failures: list[BaseException] = []

        def come_and_go() -> None:
            try:
                while not ended.is_set():
                    workers.sender.remove_worker(workers.sender.add_worker())
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=come_and_go)
        thread.start()
        try:
            for _ in range(20):
                pending = workers.sender.send_async(timeout=10.0)
                workers.receive(0)
                with suppress(SendError):
                    # Other workers fail: they were removed, or have not connected in time.
                    pending.wait(0.5)
        finally:
            ended.set()
            thread.join()
        assert not failures, "no thread may fail"
        assert workers.send().updated == (0,), REPORT

    def test_closing_ends_a_pending_send(self, start: Start) -> None:
        workers = start(make_policy(1.0), 1)
        pending = workers.sender.send_async()
        begin = time.perf_counter()
        workers.sender.close()
        with pytest.raises(SendError):
            pending.wait()
        assert time.perf_counter() - begin < self.slack, (
            "close() must end the sends that are pending"
        )

    @pytest.mark.parametrize("pending", [False, True], ids=["idle", "pending"])
    def test_closing_waits_for_no_worker(self, start: Start, pending: bool) -> None:
        workers = start(make_policy(1.0))
        workers.send()
        if pending:
            workers.sender.send_async()
        begin = time.perf_counter()
        workers.sender.close()
        assert time.perf_counter() - begin < self.slack, "close() waited for a worker that lives"

    def test_nothing_is_left_behind(self, pool: SharedGroup) -> None:
        if not Path("/proc/self/fd").exists():
            pytest.skip("what a process has open is looked up in /proc, which is not there")
        pool.make_ready()
        # Objects that are made once and kept, such as torch's threads, must exist before.
        self._use(pool)
        before, names = _resources(pool), _shared_memory()
        for _ in range(3):
            self._use(pool)
        self._check_released(before, lambda: _resources(pool))
        self._check_no_files(lambda: _left_since(names))

    def test_a_send_that_was_pending_leaves_nothing_behind(self, pool: SharedGroup) -> None:
        if not Path("/proc/self/fd").exists():
            pytest.skip("what a process has open is looked up in /proc, which is not there")
        pool.make_ready()
        self._use(pool, pending=True)
        before, names = _resources(pool), _shared_memory()
        self._use(pool, pending=True)
        self._check_released(before, lambda: _resources(pool))
        self._check_no_files(lambda: _left_since(names))

    def test_no_file_is_left_in_the_temporary_directory(self, pool: SharedGroup) -> None:
        pool.make_ready()
        # Objects that are made once and kept, such as sockets, are made before.
        self._use(pool)
        with _temporary_directory(pool) as directory:
            self._use(pool, pending=True)
            self._check_no_files(lambda: _files(directory))

    def test_versions_that_are_over_are_released(self, start: Start) -> None:
        if not hasattr(ctypes.CDLL(None), "mallinfo2"):
            pytest.skip("what a process has allocated is asked of glibc, 2.33 or newer")
        policy = nn.Linear(512, 512)
        workers = start(policy, 1, make=partial(nn.Linear, 512, 512))

        def send(versions: int) -> None:
            for _ in range(versions):
                fill(policy, workers.sender.version + 1.0)
                workers.send()

        def allocated() -> tuple[int, int]:
            return _allocated(), workers.pool.call(0, lambda _: _allocated())

        send(8)  # as many as a scheme may keep
        before = allocated()
        send(16)
        assert eventually(
            lambda: all(now - had < 4 << 20 for now, had in zip(allocated(), before, strict=True)),
            self.slack,
        ), (
            "a version that no worker can ask for must be released, but 16 versions of 1 MB took "
            + " and ".join(
                f"{(now - had) >> 20} MB in {place}"
                for place, now, had in zip(_PLACES, allocated(), before, strict=False)
            )
        )

    def test_what_was_forgotten_is_released(self, pool: SharedGroup) -> None:
        if not Path("/proc/self/fd").exists():
            pytest.skip("what a process has open is looked up in /proc, which is not there")
        pool.make_ready()
        self._use(pool)
        before = [_own_resources()]
        sender = self.sender(make_policy(), 2)
        Workers(sender, pool).send()
        del sender
        for worker_id in (0, 1):
            pool.call(worker_id, Worker.reset)
        self._check_released(before, lambda: [_own_resources()])

    def _check_released(
        self, before: list[dict[str, int]], count: Callable[[], list[dict[str, int]]]
    ) -> None:
        """Check that every process has the same resources as before."""
        assert eventually(lambda: count() == before, self.slack), (
            "closed senders and receivers must release what they had: "
            + "; ".join(
                f"{place} has {now[what]} {what}, had {had[what]} before"
                for place, had, now in zip(_PLACES, before, count(), strict=False)
                for what in had
                if had[what] != now[what]
            )
        )

    def _check_no_files(self, left: Callable[[], Collection[str]]) -> None:
        assert eventually(lambda: not left(), self.slack), (
            f"closed senders and receivers must remove their files: {', '.join(sorted(left()))}"
        )

    def _use(self, pool: SharedGroup, *, pending: bool = False) -> None:
        for zero_copy in (False, True) if self.can("zero_copy") else (False,):
            with self.sender(make_policy(), 2, zero_copy=zero_copy) as sender:
                Workers(sender, pool).send()
                if pending:
                    sender.send_async()
        for worker_id in (0, 1):
            pool.call(worker_id, Worker.reset)


#: The places in the result of `_resources`, in order.
_PLACES = ("this process", "worker 0", "worker 1")


def _resources(pool: SharedGroup) -> list[dict[str, int]]:
    """Return the resources of this process and of the workers."""
    return [_own_resources(), *(pool.call(i, lambda _: _own_resources()) for i in (0, 1))]


class _Removal:
    """A layer that acts once while a version is prepared, as another thread might."""

    def __init__(self) -> None:
        self.act: Callable[[], object] | None = None

    @hookimpl(wrapper=True)
    def prepare_weights(self) -> Generator[None, Update, Update]:
        act, self.act = self.act, None
        if act is not None:
            act()
        return (yield)


class _MallocInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``; two of its members are used."""

    _fields_ = [
        ("members_0_to_3", ctypes.c_size_t * 4),
        ("hblkhd", ctypes.c_size_t),
        ("members_5_to_6", ctypes.c_size_t * 2),
        ("uordblks", ctypes.c_size_t),
        ("members_8_to_9", ctypes.c_size_t * 2),
    ]


def _allocated() -> int:
    """Return the bytes that this process has allocated, including torch's tensors."""
    gc.collect()
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = _MallocInfo
    info = ask()
    allocated: int = info.hblkhd + info.uordblks
    return allocated


def _own_resources() -> dict[str, int]:
    """Return the numbers of descriptors, threads and child processes of this process."""
    gc.collect()
    return {
        "descriptors": sum(1 for _ in Path("/proc/self/fd").iterdir()),
        "threads": count_threads(),
        "child processes": len(descendants()),
    }


@contextmanager
def _temporary_directory(pool: SharedGroup) -> Iterator[Path]:
    """For ``with``: use a folder as the temporary directory of this process and of the workers."""
    with TemporaryDirectory() as folder, ExitStack() as ends:
        ends.callback(_keep_files_in, _keep_files_in(folder))
        for i in (0, 1):
            before = pool.call(i, lambda _, folder: _keep_files_in(folder), folder)
            ends.callback(pool.call, i, lambda _, folder: _keep_files_in(folder), before)
        yield Path(folder)


def _keep_files_in(folder: str | None) -> str | None:
    """Set the temporary directory of this process; return the previous one."""
    before, tempfile.tempdir = tempfile.tempdir, folder
    return before


def _files(directory: Path) -> list[str]:
    """Return the files of a directory."""
    return [str(path) for path in directory.rglob("*") if not path.is_dir()]


def _shared_memory() -> set[str]:
    """Return the files in shared memory, without semaphores, which other programs leave behind."""
    names = {path.name for path in Path("/dev/shm").iterdir()}  # noqa: S108 - only listed
    return {name for name in names if not name.startswith("sem.")}


def _left_since(before: set[str]) -> set[str]:
    """Return the new files in shared memory, without those that unrelated processes use."""
    left = _shared_memory() - before
    ours = {os.getpid(), *descendants(), *fork_server_pids()}
    for maps in Path("/proc").glob("[0-9]*/maps") if left else ():
        if int(maps.parent.name) not in ours:
            with suppress(OSError):
                used = maps.read_text()
                left = {name for name in left if f"/dev/shm/{name}" not in used}  # noqa: S108
    return left
