"""`LaunchedGroup`: all workers start or none, and none is left alive."""

from __future__ import annotations

import gc
import os
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar

import pytest

from sync_core import ClosedError, WorkerTimeoutError
from sync_plugin_std.workers import LaunchedGroup, Launcher


class Worker:
    def __init__(self, worker_id: int) -> None:
        self.worker_id = worker_id
        self.alive = True
        self.ready: Future[None] = Future()

    def call(self, function: Any, args: Any, kwargs: Any) -> Future[Any]:
        raise NotImplementedError


class Diary(Launcher[Worker]):
    """Writes down what it is asked for; workers of the ids in ``late`` are never ready."""

    def __init__(self, late: Collection[int] = ()) -> None:
        self.late = late
        self.entries: list[tuple[str, list[int]]] = []
        self.unreachable = False

    def launch(self, worker_ids: Sequence[int]) -> Iterator[Worker]:
        for worker_id in worker_ids:
            worker = Worker(worker_id)
            if worker_id not in self.late:
                worker.ready.set_result(None)
            yield worker

    def end(self, workers: Collection[Worker], timeout: float) -> None:
        self.entries.append(("end", [worker.worker_id for worker in workers]))
        for worker in workers:
            worker.alive = False

    def close(self, workers: Collection[Worker], timeout: float) -> None:
        super().close(workers, timeout)
        self.entries.append(("closed", []))

    def check(self) -> None:
        if self.unreachable:
            raise ClosedError("its cluster is gone")

    def explain_delay(self, worker: Worker) -> str:
        return f": there is no room for worker {worker.worker_id}"


class Group(LaunchedGroup[Worker]):
    capabilities: ClassVar[frozenset[str]] = frozenset({"add", "restart"})

    def __init__(self, launcher: Diary, num_workers: int = 2) -> None:
        super().__init__(launcher, num_workers, timeout=0.1)


def test_a_group_that_cannot_start_is_closed_whole() -> None:
    diary = Diary(late=[1])
    with pytest.raises(WorkerTimeoutError, match=r"worker 1: .* within 0.1 s: there is no room"):
        Group(diary, 3)
    assert diary.entries == [("end", [0, 1, 2]), ("closed", [])]


def test_a_worker_that_cannot_be_added_is_ended_alone() -> None:
    diary = Diary(late=[2])
    group = Group(diary)
    with pytest.raises(WorkerTimeoutError):
        group.add()
    assert diary.entries == [("end", [2])]
    assert group.worker_ids == (0, 1)
    assert group.add() == 3


def test_a_worker_that_is_not_ready_again_is_dead() -> None:
    diary = Diary()
    group = Group(diary)
    diary.late = [0]
    with pytest.raises(WorkerTimeoutError):
        group.restart(0)
    assert [group.alive(i) for i in group.worker_ids] == [False, True]
    diary.late = []
    group.restart(0)
    assert group.alive(0)


def test_what_cannot_be_reached_is_closed() -> None:
    diary = Diary()
    group = Group(diary)
    diary.unreachable = True
    for use in (group.add, lambda: group.restart(0), lambda: group.call(0, repr)):
        with pytest.raises(ClosedError, match="its cluster is gone"):
            use()
    assert diary.entries == []


def test_a_forgotten_group_is_closed() -> None:
    diary = Diary()
    Group(diary).add()
    gc.collect()
    assert diary.entries == [("end", [0, 1, 2]), ("closed", [])]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_process_closes_nothing() -> None:
    diary = Diary()
    group = Group(diary)
    if not (child := os.fork()):
        group.stop()
        del group
        gc.collect()
        os._exit(len(diary.entries))
    assert os.waitpid(child, 0)[1] == 0
    group.stop()
    assert len(diary.entries) == 2
