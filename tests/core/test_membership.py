"""The members of a sender, and the notifications about them."""

from __future__ import annotations

import gc
import logging
import queue
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from torch import nn

from sync_core import (
    Delivery,
    MembershipEvent,
    PendingSendError,
    Receiver,
    SendContext,
    Sender,
    SendError,
    UnknownWorkerError,
    Update,
    WorkerError,
    WorkerLostError,
    WorkerState,
    WorkerTimeoutError,
    hookimpl,
)
from sync_core.sending.membership import Membership
from sync_core.transports import Notice
from sync_plugin_std import Interval


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def send(members: Membership, version: int, *worker_ids: int) -> dict[int, Delivery]:
    deliveries = {i: Delivery(i, version, nbytes=8) for i in worker_ids or members.ids}
    members.sent(version, deliveries)
    return deliveries


def state(members: Membership, worker_id: int = 0) -> str:
    return str(members.statuses[worker_id].state)


def seat(members: Membership) -> int:
    return members.statuses[0].seat


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def members(clock: Clock) -> Membership:
    return Membership([0], timeout=2.0, clock=clock)


def test_the_life_of_a_worker(members: Membership) -> None:
    seen = [state(members)]
    members.notify(0, Notice("connected"))
    seen.append(state(members))
    delivery = send(members, 1)[0]
    seen.append(state(members))
    delivery.acknowledge()
    seen.append(state(members))
    send(members, 2)[0].fail(WorkerTimeoutError(0, "is silent"))
    seen.append(state(members))
    members.notify(0, Notice("lost", reason="it is gone"))
    seen.append(state(members))
    assert seen == ["connecting", "current", "behind", "current", "suspect", "lost"]
    status = members.statuses[0]
    assert (status.version, status.wanted, status.failures) == (1, 2, 1)
    assert str(status.error) == "worker 0: it is gone"


def test_a_new_receiver_has_nothing(members: Membership) -> None:
    send(members, 1)[0].acknowledge()
    members.notify(0, Notice("connected"))
    assert (state(members), members.statuses[0].version) == ("behind", 0)


def test_versions_that_were_never_sent_are_not_believed(members: Membership) -> None:
    send(members, 1)
    members.notify(0, Notice("acknowledged", version=7))
    assert (state(members), members.statuses[0].version) == ("connecting", 0)


def test_news_of_nobody_is_ignored(members: Membership) -> None:
    members.notify(5, Notice("connected"))
    assert members.ids == (0,)


def test_quarantine_doubles_and_ends(members: Membership, clock: Clock) -> None:
    waits = []
    for version in range(1, 8):
        send(members, version)[0].fail(WorkerTimeoutError(0, "is silent"))
        members.quarantine(0, seat(members))
        waits.append(members.statuses[0].retry_at - clock.now)
        # No send waits meanwhile, and failures then do not count.
        unwaited = Delivery(0, version, nbytes=8)
        assert members.sent(version, {0: unwaited}) == {0: "quarantine"}
        unwaited.fail(WorkerLostError(0, "is gone"))
        clock.now = members.statuses[0].retry_at
    assert waits == [2.0, 4.0, 8.0, 16.0, 32.0, 32.0, 32.0]
    tried = Delivery(0, 8, nbytes=8)
    assert members.sent(8, {0: tried}) == {}
    tried.acknowledge()
    assert (state(members), members.statuses[0].failures) == ("current", 0)
    assert members.take_returned([0]) == (0,)
    assert members.take_returned([0]) == ()


def test_a_worker_in_quarantine_comes_back_by_the_newest_version(members: Membership) -> None:
    first = send(members, 1)[0]
    first.fail(WorkerTimeoutError(0, "is silent"))
    members.quarantine(0, seat(members))
    second = send(members, 2)[0]
    first.acknowledge()
    assert state(members) == "quarantined"
    second.acknowledge()
    assert state(members) == "current"


def test_one_that_is_restarted_is_another(members: Membership) -> None:
    delivery = send(members, 1)[0]
    delivery.fail(WorkerLostError(0, "is gone"))
    restarted = seat(members)
    assert members.restart(0, restarted)
    delivery.acknowledge()
    assert state(members) == "restarting"
    members.notify(0, Notice("connected"))
    members.notify(0, Notice("acknowledged", version=1))
    members.restarted(0, restarted)
    assert state(members) == "current"


def test_one_that_was_removed_is_neither_put_aside_nor_restarted(members: Membership) -> None:
    send(members, 1)[0].fail(WorkerLostError(0, "is gone"))
    before = seat(members)
    members.remove(0)
    assert not members.quarantine(0, before)
    members.add(0)
    assert not members.restart(0, before)
    assert state(members) == "connecting"


def test_one_that_cannot_be_restarted_is_tried_again_later(
    members: Membership, clock: Clock
) -> None:
    send(members, 1)[0].fail(WorkerLostError(0, "is gone"))
    assert members.restart(0, seat(members))
    members.not_restarted(0, seat(members), WorkerError(0, "no room"))
    assert members.statuses[0].retry_at == clock.now + 4.0


class Log:
    """Events, as a subscriber gets them."""

    def __init__(self) -> None:
        self.events: queue.Queue[MembershipEvent] = queue.Queue()
        self.threads: set[str] = set()

    def __call__(self, event: MembershipEvent) -> None:
        self.threads.add(threading.current_thread().name)
        self.events.put(event)

    def next(self) -> tuple[Any, Any, int]:
        event = self.events.get(timeout=10)
        return event.before, event.after, event.version


def test_events_in_order_and_without_locks() -> None:
    log, policy = Log(), nn.Linear(2, 1)
    with Sender("thread", policy, num_workers=1) as sender:
        sender.subscribe(lambda _event: sender.workers)
        unsubscribe = sender.subscribe(log)
        receiver = Receiver(sender.address(0), nn.Linear(2, 1))
        assert log.next() == ("connecting", "current", 0)
        pending = sender.send_async()
        assert log.next() == ("current", "behind", 0)
        receiver.receive()
        assert log.next() == ("behind", "current", 1)
        pending.wait()
        receiver.close()
        assert log.next() == ("current", "lost", 1)
        sender.add_worker()
        assert log.next() == (None, "connecting", 0)
        sender.remove_worker(1)
        assert log.next() == ("connecting", None, 0)
        unsubscribe()
        unsubscribe()
        sender.add_worker()
    assert log.threads == {"sync-membership"}
    assert log.events.empty()


def test_a_subscriber_that_raises_breaks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    log = Log()

    def complain(event: MembershipEvent) -> None:
        raise RuntimeError(f"I do not care for {event.after}")

    with Sender("none", nn.Linear(2, 1), num_workers=1) as sender:
        sender.subscribe(complain)
        sender.subscribe(log)
        with caplog.at_level(logging.ERROR, "sync_core"):
            assert sender.send().updated == (0,)
            assert log.next() == ("connecting", "current", 1)
    assert "I do not care for current" in caplog.text


@pytest.mark.parametrize("scheme", ["none", "thread"])
def test_one_that_was_added_is_current_once_it_acts(scheme: str) -> None:
    model = nn.Linear(2, 1)

    def join(sender: Sender, worker_id: int) -> None:
        # With the scheme none, a worker has what the sender has without asking for it.
        with Receiver(sender.address(worker_id), model) as receiver:
            if sender.version and scheme == "thread":
                receiver.receive()
            worker = sender.workers[worker_id]
            assert (worker.state, worker.version) == ("current", worker.wanted)

    with Sender(scheme, model, num_workers=1) as sender:
        join(sender, 0)
        join(sender, sender.add_worker())
        sender.send_async().abandon()
        join(sender, 0)
        join(sender, sender.add_worker())
        # Those that come later are not meant to have what some have.
        sender.send_async(worker_ids=0).abandon()
        join(sender, sender.add_worker())


def test_a_subscriber_may_change_the_sender() -> None:
    with Sender("thread", nn.Linear(2, 1), num_workers=1) as sender:
        done = threading.Event()

        def drop(event: MembershipEvent) -> None:
            if event.after == WorkerState.SUSPECT:
                sender.remove_worker(event.worker_id)
                done.set()

        sender.subscribe(drop)
        with pytest.raises(SendError):
            sender.send(timeout=0.01)
        assert done.wait(10)
        assert sender.workers == {}


def test_no_thread_outlives_its_sender() -> None:
    def named(name: str) -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == name]

    sender = Sender("none", nn.Linear(2, 1), num_workers=1)
    assert named("sync-membership") == []
    subscribe: Callable[..., object] = sender.subscribe
    subscribe(print)
    assert len(named("sync-membership")) == 1
    sender.close()
    assert named("sync-membership") == []


def test_a_receiver_is_closed_by_the_garbage_collector_in_a_thread_with_locks() -> None:
    def clock() -> float:
        # The collector may run wherever something is allocated, as it is under the lock.
        gc.collect()
        return time.monotonic()

    with Sender("thread", nn.Linear(2, 2), num_workers=1, timeout=5) as sender:
        gc.disable()
        try:
            holder: list[object] = [Receiver(sender.address(0), nn.Linear(2, 2))]
            holder.append(holder)
            del holder
            sender._members._clock = clock
            sending = threading.Thread(target=lambda: sender.send_async().abandon(), daemon=True)
            sending.start()
            sending.join(20)
        finally:
            gc.enable()
        assert not sending.is_alive()
        assert sender.workers[0].state == "lost"


def test_one_that_has_answered_by_then_is_not_put_into_quarantine(members: Membership) -> None:
    delivery = send(members, 1)[0]
    delivery.fail(WorkerTimeoutError(0, "is silent"))
    delivery.acknowledge()
    members.quarantine(0, seat(members))
    assert state(members) == "current"
    assert members.take_returned([0]) == (0,)


def test_a_worker_that_two_threads_remove_is_unknown_to_one_of_them() -> None:
    with Sender("thread", nn.Linear(2, 2), num_workers=2) as sender:

        class RemovedMeanwhile:
            def __index__(self) -> int:
                thread = threading.Thread(target=sender.remove_worker, args=(1,))
                thread.start()
                thread.join()
                return 1

        with pytest.raises(UnknownWorkerError, match=r"no worker 1; the workers are \[0\]"):
            sender.remove_worker(RemovedMeanwhile())  # type: ignore[arg-type]
        assert sender.all_worker_ids() == (0,)


def test_a_send_to_none_is_not_meant_for_later_workers() -> None:
    with Sender("thread", nn.Linear(2, 1), num_workers=0, version=7) as sender:
        assert sender.send().version == 7
        sender.add_worker()
        with Receiver(sender.address(0), nn.Linear(2, 1)):
            assert sender.workers[0].wanted == 0
            assert sender.workers[0].state is WorkerState.CURRENT


def test_the_pushes_of_a_removed_worker_are_not_those_of_the_next_with_its_id() -> None:
    layers = [Interval(4)]
    with Sender("thread", nn.Linear(2, 1), num_workers=2, layers=layers, timeout=60) as sender:
        with Receiver(sender.address(0), nn.Linear(2, 1)) as receiver:
            pending = sender.send_async(worker_ids=0)
            assert receiver.receive(30) == 1
            sender.remove_worker(0)
            assert pending.wait().updated == (0,)
        sender.add_worker(0)
        with Receiver(sender.address(0), nn.Linear(2, 1)) as receiver:
            pending = sender.send_async(worker_ids=0)
            assert receiver.receive(0) == 2
            assert pending.wait().updated == (0,)


def test_a_version_that_is_sent_while_a_worker_is_removed_went_to_all() -> None:
    removes, sent = threading.Event(), threading.Event()
    with Sender("thread", nn.Linear(2, 1), num_workers=2, timeout=60) as sender:
        sender.send_async().abandon()
        transport = sender._pipeline.transport
        assert transport is not None
        remove = transport.remove_worker

        def remove_late(worker_id: int) -> None:
            removes.set()
            sent.wait(0.3)
            remove(worker_id)

        transport.remove_worker = remove_late  # type: ignore[method-assign]
        thread = threading.Thread(target=sender.remove_worker, args=(1,))
        thread.start()
        assert removes.wait(30)
        sender.send_async().abandon()
        sent.set()
        thread.join(30)
        with Receiver(sender.address(sender.add_worker()), nn.Linear(2, 1)) as receiver:
            assert receiver.receive(30) == 2


@pytest.mark.parametrize(
    "call",
    [Sender.add_worker, partial(Sender.advance, version=7), Sender.send],
    ids=["add_worker", "advance", "send"],
)
def test_what_a_layer_calls_while_a_send_is_started_is_refused(
    call: Callable[[Sender], object],
) -> None:
    errors: list[PendingSendError] = []

    class Calling:
        @hookimpl(wrapper=True)
        def prepare_weights(self, context: SendContext) -> Generator[None, Update, Update]:
            if context.version:
                with pytest.raises(PendingSendError, match="set a flag there") as refusal:
                    call(sender)
                errors.append(refusal.value)
            return (yield)

    with Sender("none", nn.Linear(2, 1), num_workers=1, layers=[Calling()]) as sender:
        sender.send()
        assert sender.send().version == 2
        assert errors
        assert sender.all_worker_ids() == (0,)


def test_a_worker_is_removed_before_another_gets_its_id() -> None:
    with Sender("shm", nn.Linear(2, 1), num_workers=1, timeout=60) as sender:
        transport = sender._pipeline.transport
        assert transport is not None
        removes, goes_on, added = threading.Event(), threading.Event(), threading.Event()
        remove = transport.remove_worker

        def remove_late(worker_id: int) -> None:
            removes.set()
            assert goes_on.wait(30)
            remove(worker_id)

        def add() -> None:
            sender.add_worker(0)
            added.set()

        transport.remove_worker = remove_late  # type: ignore[method-assign]
        threads = [threading.Thread(target=sender.remove_worker, args=(0,))]
        threads.append(threading.Thread(target=add))
        threads[0].start()
        assert removes.wait(30)
        threads[1].start()
        # Time for a mistake; otherwise the other thread waits.
        assert not added.wait(0.2)
        goes_on.set()
        for thread in threads:
            thread.join()
        with Receiver(sender.address(0), nn.Linear(2, 1)) as receiver:
            pending = sender.send_async()
            assert receiver.receive(30) == 1
            assert pending.wait().updated == (0,)


def test_a_worker_counts_as_updated_before_its_state_is_noted() -> None:
    layers = [Interval(2)]
    with (
        Sender("thread", nn.Linear(2, 1), num_workers=1, layers=layers, timeout=60) as sender,
        Receiver(sender.address(0), nn.Linear(2, 1)) as receiver,
        ThreadPoolExecutor(1) as pool,
    ):
        pending = sender.send_async()
        with sender._members._lock:
            received = pool.submit(receiver.receive, 60)
            deadline = time.monotonic() + 60
            while not pending.deliveries[0].ended and time.monotonic() < deadline:
                time.sleep(0.001)
            assert pending.wait(0.0).updated == (0,)
        assert received.result(60) == 1
        assert sender.send().skipped == (0,)


def test_a_send_ends_after_all_that_watches_its_deliveries_has_noted_the_outcome() -> None:
    noting, noted = threading.Event(), threading.Event()

    def note(delivery: Delivery, error: WorkerError | None) -> None:
        del delivery, error
        noting.set()
        noted.wait(60)

    with (
        Sender("thread", nn.Linear(2, 1), num_workers=1, timeout=60) as sender,
        Receiver(sender.address(0), nn.Linear(2, 1)) as receiver,
        ThreadPoolExecutor(2) as pool,
    ):
        pending = sender.send_async()
        pending.deliveries[0].watch(note)
        received, sent = pool.submit(receiver.receive, 60), pool.submit(pending.wait)
        assert noting.wait(60)
        try:
            with pytest.raises(TimeoutError):
                sent.result(0.3)
        finally:
            noted.set()
        assert sent.result(60).updated == (0,)
        assert received.result(60) == 1
