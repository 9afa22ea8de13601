"""Several senders send one version: whole, skipped whole, or failed with what failed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

from sync_core import (
    LayoutMismatchError,
    ModelError,
    PendingSendError,
    Receiver,
    Sender,
    SendError,
    SendReport,
    UnknownWorkerError,
    WorkerError,
    WorkerTimeoutError,
)
from sync_plugin_std import Interval, SendGroup, receive_together


class World:
    """A group of two senders, and the workers that commit what these send together."""

    def __init__(self, stack: ExitStack, num_workers: int = 2, **options: Any) -> None:
        self.reports: list[SendReport] = []
        self.models = {"actor": nn.Linear(4, 2), "critic": nn.Linear(4, 1)}
        self.group = SendGroup(
            {
                name: Sender(
                    "thread",
                    model,
                    num_workers=num_workers,
                    model_id=name,
                    timeout=10.0,
                    on_report=self.reports.append,
                    **options,
                )
                for name, model in self.models.items()
            }
        )
        stack.callback(self.group.close)
        self.copies = [
            {"actor": nn.Linear(4, 2), "critic": nn.Linear(4, 1)} for _ in range(num_workers)
        ]
        self.receivers = [
            {
                name: stack.enter_context(Receiver(self.group.senders[name].address(i), copy))
                for name, copy in copies.items()
            }
            for i, copies in enumerate(self.copies)
        ]

    def commit(self, *workers: int) -> None:
        for worker in workers:
            assert receive_together(self.receivers[worker], self.group.versions, 10.0)

    def equal(self, worker: int) -> bool:
        return all(
            torch.equal(self.models[name].weight, copy.weight)
            for name, copy in self.copies[worker].items()
        )


@pytest.fixture
def world() -> Iterator[World]:
    with ExitStack() as stack:
        yield World(stack)


def test_all_of_a_version_in_one_report(world: World) -> None:
    pending = world.group.send_async()
    assert pending.worker_ids == (0, 1)
    assert not pending.done()
    world.commit(0, 1)
    report = pending.wait()
    assert report.updated == (0, 1)
    assert (report.scheme, report.model_id) == ("thread", "actor+critic")
    assert report.nbytes == sum(each.nbytes for each in world.reports)
    assert [each.model_id for each in world.reports] == ["actor", "critic"]
    assert world.equal(0)
    assert world.equal(1)


def test_send_waits_for_the_workers(world: World) -> None:
    thread = threading.Timer(0.1, world.commit, [0])
    thread.start()
    assert world.group.send(worker_ids=[0]).updated == (0,)
    thread.join()


def test_only_the_senders_that_are_named(world: World) -> None:
    pending = world.group.send_async({"critic": None})
    assert world.receivers[0]["critic"].receive() == 1
    assert world.receivers[1]["critic"].receive() == 1
    assert pending.wait().model_id == "critic"
    assert world.group.versions == {"actor": 0, "critic": 1}
    with pytest.raises(ModelError, match=r"no sender 'critc'; its senders are \['actor'"):
        world.group.send({"critc": None})
    with pytest.raises(ModelError, match="nothing to send"):
        world.group.send({})


def test_nothing_is_sent_where_some_weights_do_not_fit(world: World) -> None:
    with pytest.raises(LayoutMismatchError):
        world.group.send({"actor": None, "critic": nn.Linear(3, 1)})
    with pytest.raises(UnknownWorkerError):
        world.group.send(worker_ids=[2])
    assert world.group.versions == {"actor": 0, "critic": 0}


def test_a_worker_that_commits_half_is_late(world: World) -> None:
    pending = world.group.send_async(timeout=0.2)
    world.commit(1)
    world.receivers[0]["actor"].receive()
    with pytest.raises(SendError) as raised:
        pending.wait()
    report = raised.value.report
    assert report.updated == (1,)
    assert isinstance(report.failed[0].error, WorkerTimeoutError)
    # The report of each sender covers its own part.
    assert [each.updated for each in world.reports] == [(0, 1), (1,)]


def test_a_driver_fails_a_worker_for_all_senders(world: World) -> None:
    pending = world.group.send_async()
    world.commit(1)
    pending.deliveries[0].fail(WorkerError(0, "has no GPU"))
    with pytest.raises(SendError, match="has no GPU"):
        pending.wait()
    assert [list(each.failed) for each in world.reports] == [[0], [0]]


def test_what_one_sender_skips_all_skip() -> None:
    with ExitStack() as stack:
        world = World(stack, num_workers=1)
        critic = Sender(
            "thread", world.models["critic"], num_workers=1, layers=[Interval(2)], timeout=10.0
        )
        world.group.senders["critic"].close()
        world.group.senders = {"actor": world.group.senders["actor"], "critic": critic}
        world.receivers[0]["critic"] = stack.enter_context(
            Receiver(critic.address(0), world.copies[0]["critic"])
        )
        updated = []
        for _ in range(4):
            pending = world.group.send_async()
            if pending.worker_ids:
                world.commit(0)
            updated.append(pending.wait().updated)
        assert updated == [(0,), (), (0,), ()]
        assert world.group.versions == {"actor": 2, "critic": 2}


def test_each_sender_sends_to_the_workers_that_it_serves() -> None:
    models = [nn.Linear(1, 1) for _ in range(3)]
    with ExitStack() as stack:
        senders = {}
        for i, model in enumerate(models):
            senders[i] = stack.enter_context(Sender("none", num_workers=1))
            if i:
                senders[i].add_worker(i)
                senders[i].remove_worker(0)
            senders[i].register_model(model)
        group = SendGroup(senders)
        assert group.send().updated == (0, 1, 2)
        assert group.send({1: None, 2: None}).updated == (1, 2)
        assert group.send(worker_ids=2).updated == (2,)
        assert group.versions == {0: 1, 1: 2, 2: 3}


def test_a_quarantined_worker_is_not_waited_for() -> None:
    with ExitStack() as stack:
        world = World(stack, on_failure="quarantine")
        pending = world.group.send_async(timeout=0.1)
        world.commit(1)
        assert pending.wait().quarantined == (0,)
        pending = world.group.send_async()
        world.commit(1)
        report = pending.wait()
        assert (report.updated, report.quarantined) == ((1,), (0,))


def test_a_second_send_waits_for_the_first(world: World) -> None:
    pending = world.group.send_async()
    with pytest.raises(PendingSendError):
        world.group.send_async()
    world.commit(0, 1)
    assert pending.wait().updated == (0, 1)


def test_an_interrupt_leaves_no_send_pending(world: World) -> None:
    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            world.group.send()
    finally:
        signal.signal(signal.SIGALRM, handler)
    pending = world.group.send_async()
    world.commit(0, 1)
    assert pending.wait().updated == (0, 1)


def test_an_interrupt_of_what_is_called_at_the_end_ends_all(world: World) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    world.group.senders["actor"].register_post_hook(interrupt)
    pending = world.group.send_async()
    world.commit(0, 1)
    with pytest.raises(KeyboardInterrupt):
        pending.wait()
    pending = world.group.send_async({"critic": None})
    for receivers in world.receivers:
        receivers["critic"].receive()
    assert pending.wait().updated == (0, 1)
