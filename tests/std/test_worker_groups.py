"""The local worker groups do what every group does, and each a little more."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cloudpickle  # type: ignore[import-untyped]
import pytest

from sync_core import WorkerGroup, WorkerLostError
from sync_plugin_std.workers import InlineGroup, ProcessGroup, ThreadGroup
from sync_testing import WorkerGroupConformance, interrupted, worker_groups
from sync_testing.worker_groups import Closed, Counter

pytestmark = pytest.mark.timeout(90)

# Worker processes can import it by name, but that takes each of them seconds.
cloudpickle.register_pickle_by_value(worker_groups)


class TestInlineGroup(WorkerGroupConformance):
    group_class = InlineGroup

    def test_runs_in_the_callers_thread(self, shared: WorkerGroup) -> None:
        assert shared.call(0, lambda _: threading.get_ident()).result() == threading.get_ident()

    def test_a_keyboard_interrupt_is_the_callers_own(self, shared: WorkerGroup) -> None:
        def interrupt(_: Counter) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            shared.call(0, interrupt)

    def test_a_call_of_another_thread_is_not_waited_for_and_closes(self, tmp_path: Path) -> None:
        started, release = threading.Event(), threading.Event()

        def work(_: Counter) -> str:
            started.set()
            release.wait()
            return "done"

        with (
            InlineGroup(lambda worker_id: Closed(worker_id, tmp_path), 1) as group,
            ThreadPoolExecutor(1) as thread,
        ):
            call = thread.submit(group.call, 0, work)
            started.wait()
            group.stop()
            assert not (tmp_path / "0").exists()
            release.set()
            assert call.result(10).result() == "done"
            assert (tmp_path / "0").read_text() == "closed\n"


class TestThreadGroup(WorkerGroupConformance):
    group_class = ThreadGroup

    def test_each_worker_has_a_thread(self, shared: WorkerGroup) -> None:
        calls = [shared.call(i, lambda _: threading.get_ident()) for i in (0, 0, 1)]
        first, again, other = (call.result() for call in calls)
        assert first == again
        assert len({first, other, threading.get_ident()}) == 3

    def test_a_stuck_thread_is_abandoned(self) -> None:
        started, release = threading.Event(), threading.Event()

        def work(_: Counter) -> None:
            started.set()
            release.wait()

        with ThreadGroup(Counter, 2, timeout=0.3) as group:
            stuck = group.call(0, work)
            started.wait()
            group.restart(0)
            assert group.call(0, Counter.see, "new").result() == ["new"]
            with pytest.raises(WorkerLostError, match="worker 0: was stopped, and its thread aba"):
                stuck.result(5)
            group.call(1, work)
            start = time.monotonic()
        assert time.monotonic() - start < 1
        release.set()

    @pytest.mark.timeout(30)
    def test_an_abandoned_thread_is_waited_for_once(self) -> None:
        started, release = threading.Event(), threading.Event()

        def work(_: Counter) -> None:
            started.set()
            release.wait()

        group = ThreadGroup(Counter, 1)
        group.call(0, work)
        started.wait()
        group.stop(0.05)
        # As when the group is forgotten, which may be in a thread that does something else.
        group.stop(3600)
        release.set()


class TestProcessGroup(WorkerGroupConformance):
    group_class = ProcessGroup


@pytest.mark.parametrize("group_class", [ThreadGroup, ProcessGroup])
def test_a_call_that_ctrl_c_interrupts_gives_no_other_its_outcome(
    group_class: type[WorkerGroup],
) -> None:
    with group_class(lambda worker_id: worker_id, 1) as group:
        for moment in range(60):
            with interrupted(moment):
                group.call(0, lambda _: "interrupted")
            assert group.call(0, lambda _, moment: moment, moment).result(10) == moment
