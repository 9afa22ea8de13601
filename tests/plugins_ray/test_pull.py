"""Scheme `ray` with `num_workers`: receivers that ask a mailbox, from anywhere in the cluster."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
import pickle
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, cast

import pytest
import ray
import torch
from ray import cloudpickle
from tests.plugins_ray.agents import linear, start, values_of

from sync_core import (
    Address,
    ApplyError,
    MembershipEvent,
    Payload,
    Receiver,
    Sender,
    SenderLostError,
    SendError,
    WorkerLostError,
    WorkerState,
    WorkerTimeoutError,
)
from sync_plugin_ray import liveness
from sync_plugin_ray.mailbox import Event, Gone, Mailbox, MailboxOffer
from sync_plugin_scale import Pool
from sync_testing import eventually

pytestmark = pytest.mark.timeout(120)

# Actors cannot import this file by name.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@ray.remote
def serve(address: Address) -> tuple[list[int | None], set[float]]:
    """Receive until the sender has gone."""
    model, versions = linear(), []
    receiver = Receiver(address, model)
    try:
        while True:
            versions.append(receiver.receive())
    except SenderLostError:
        return versions, values_of(model)


@pytest.mark.long
def test_receivers_in_tasks_see_every_version_and_the_end() -> None:
    with Sender("ray", linear(), num_workers=2) as sender:
        tasks = [serve.remote(sender.address(i)) for i in sender.all_worker_ids()]
        for version in (1, 2, 3):
            assert sender.send(linear(version)).updated == (0, 1)
    assert ray.get(tasks) == [([1, 2, 3], {3.0})] * 2


@pytest.mark.parametrize("width", [3, 300])
def test_receivers_in_actors(actors: list[Any], width: int) -> None:
    with Sender("ray", linear(width=width), num_workers=2, layers=["bf16"]) as sender:
        for i, worker in enumerate(actors):
            ray.get(worker.connect.remote(sender.address(i), width))
        for version in (1, 2):
            calls = [worker.receive.remote() for worker in actors]
            assert sender.send(linear(version, width)).updated == (0, 1)
            assert ray.get(calls) == [(version, {float(version)})] * 2


@pytest.mark.parametrize(("width", "number"), [(300, 16), (1000, 2), (2000, 1)])
def test_small_versions_stay_with_the_sender_for_a_while(
    kept: Callable[[], int], width: int, number: int
) -> None:
    model = linear(width=width)
    with Sender("ray", model, num_workers=1) as sender:
        for _ in range(18):
            with pytest.raises(SendError):
                sender.send_async().wait(0.0)
        assert eventually(lambda: kept() == number, 30)


def test_a_receiver_in_the_driver_polls() -> None:
    model = linear()
    with Sender("ray", linear(1.0), num_workers=1) as sender:
        receiver = Receiver(sender.address(0), model)
        begin = time.perf_counter()
        assert receiver.receive(timeout=0) is None
        assert time.perf_counter() - begin < 10
        pending = sender.send_async()
        assert receiver.receive() == 1
        assert pending.wait().updated == (0,)
        assert receiver.receive(timeout=0) is None
    assert values_of(model) == {1.0}
    with pytest.raises(SenderLostError):
        receiver.receive()


@contextmanager
def standing_still(sender: Sender) -> Iterator[None]:
    """Stop the sender's mailbox."""
    mailbox = sender.address(0).endpoint.mailbox
    pid = ray.get(mailbox.__ray_call__.remote(lambda _: os.getpid()))
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_mailbox_that_stands_still_holds_up_no_look() -> None:
    sender = Sender("ray", linear(1.0), num_workers=1)
    with sender, Receiver(sender.address(0), linear()) as receiver:
        assert receiver.receive(timeout=0) is None
        with standing_still(sender):
            assert [receiver.receive(timeout=0) for _ in range(100)] == [None] * 100
        pending = sender.send_async()
        assert eventually(lambda: receiver.receive(timeout=0) == 1, 30)
        assert pending.wait().updated == (0,)


def test_a_send_that_has_returned_is_what_the_mailbox_offers() -> None:
    with Sender("ray", linear(1.0), num_workers=1) as sender, ThreadPoolExecutor(1) as threads:
        with standing_still(sender):
            sending = threads.submit(sender.send_async)
            assert not wait([sending], timeout=0.2).done
        pending = sending.result(20)
        with Receiver(sender.address(0), linear()) as receiver:
            assert receiver.receive(timeout=1) == 1
        assert pending.wait().updated == (0,)


def test_a_mailbox_that_stands_still_keeps_no_send() -> None:
    with Sender("ray", linear(1.0), num_workers=1) as sender, standing_still(sender):
        begin = time.monotonic()
        with pytest.raises(SendError, match="did not confirm"):
            sender.send(timeout=0.1)
        assert time.monotonic() - begin < 10


@pytest.mark.parametrize("width", [3, 300])
def test_whoever_has_looked_gets_the_newest(width: int) -> None:
    model = linear(width=width)
    sender = Sender("ray", linear(width=width), num_workers=1)
    with sender, Receiver(sender.address(0), model) as receiver:
        assert receiver.receive(timeout=0) is None
        for version in (1, 2):
            with pytest.raises(SendError):
                sender.send_async(linear(version, width)).wait(0.0)
        assert eventually(lambda: receiver.receive(timeout=0) == 2, 20)
        for version in (3, 4):
            assert receiver.receive(timeout=0) is None
            timer = threading.Timer(0.1, sender.send_async, (linear(version, width),))
            timer.start()
            assert receiver.receive(timeout=20) == version
            timer.join()
            sender.wait_async()
            assert values_of(model) == {float(version)}


def test_whoever_waits_gets_the_newest_also_right_after_others() -> None:
    sender = Sender("ray", linear(), num_workers=1)
    with sender, Receiver(sender.address(0), linear()) as receiver:
        assert receiver.receive(timeout=0) is None
        for _ in range(10):
            for _ in range(2):
                sender.send_async().abandon()
            assert receiver.receive(timeout=20) == sender.version


def test_workers_are_added_and_removed_by_another_thread_during_a_send() -> None:
    model = linear()
    with Sender("ray", linear(1.0), num_workers=2) as sender, ThreadPoolExecutor(1) as threads:
        store = cast("Any", sender._pipeline.transport)._store
        put = store.put

        added = []

        def put_while_workers_change(payload: Payload) -> Any:
            threads.submit(sender.remove_worker, 1).result(20)
            # It waits until the send has begun.
            added.append(threads.submit(sender.add_worker))
            return put(payload)

        store.put = put_while_workers_change
        with Receiver(sender.address(0), model) as receiver:
            pending = sender.send_async()
            assert receiver.receive() == 1
            with pytest.raises(SendError, match="was removed from the sender") as caught:
                pending.wait()
            assert added[0].result(20) == 2
        assert caught.value.report.updated == (0,)
        assert list(caught.value.report.failed) == [1]
    assert values_of(model) == {1.0}


def test_whoever_comes_late_gets_the_newest() -> None:
    with Sender("ray", linear(), num_workers=2, timeout=1) as sender:
        address = pickle.loads(cloudpickle.dumps(sender.address(1)))
        for version in (1, 2):
            with pytest.raises(SendError) as caught:
                sender.send(linear(version))
            assert isinstance(caught.value.report.failed[0].error, WorkerTimeoutError)
        model = linear()
        with Receiver(address, model, timeout=20) as receiver:
            assert receiver.receive() == 2
        assert values_of(model) == {2.0}
        added = sender.add_worker()
        with Receiver(sender.address(added), model, timeout=20) as receiver:
            assert receiver.receive() == 2


def test_zero_copy(actors: list[Any]) -> None:
    sender = Sender("ray", linear(width=300), num_workers=1, zero_copy=True)
    ray.get(actors[0].connect.remote(sender.address(0), 300))
    for version in (1, 2, 3):
        call = actors[0].receive.remote()
        sender.send(linear(version, 300))
        assert ray.get(call) == (version, {float(version)})
    sender.close()
    assert ray.get(actors[0].disconnect.remote()) == {3.0}


@pytest.mark.parametrize("size", [20_000, 2_200_000], ids=["its only one", "one of its two"])
def test_a_lost_object_is_put_again(lost: Any, size: int) -> None:
    def put_and_lose(payload: Payload) -> Any:
        publication = put(payload)
        publication.data = [lost, *publication.data[1:]]
        return publication

    weights = {name: torch.ones(size) for name in "ab"}
    model = {name: torch.zeros(size) for name in "ab"}
    with Sender("ray", weights, num_workers=1) as sender:
        store = cast("Any", sender._pipeline.transport)._store
        put, store.put = store.put, put_and_lose
        with Receiver(sender.address(0), model) as receiver:
            pending = sender.send_async()
            assert receiver.receive() == 1
            assert pending.wait().updated == (0,)
    assert all(map(torch.equal, model.values(), weights.values()))


def test_an_apply_that_fails_is_told_and_kept_apart(actors: list[Any]) -> None:
    with Sender("ray", linear(1.0), num_workers=2) as sender:
        receiver = Receiver(sender.address(0), "model", context=object())
        ray.get(actors[1].connect.remote(sender.address(1)))
        call = actors[1].receive.remote()
        pending = sender.send_async()
        with pytest.raises(Exception, match="has no 'model'"):
            receiver.receive()
        with pytest.raises(SendError, match="has no 'model'") as caught:
            pending.wait()
        assert isinstance(caught.value.report.failed[0].error, ApplyError)
        assert ray.get(call) == (1, {1.0})
        receiver.close()


@pytest.mark.long
def test_a_killed_actor_is_noticed_long_before_the_deadline() -> None:
    (worker,) = start(1)
    with Sender("ray", linear(), num_workers=1, timeout=60) as sender:
        pid = ray.get(worker.connect.remote(sender.address(0)))
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(SendError) as caught:
            sender.send()
        assert isinstance(caught.value.report.failed[0].error, WorkerLostError)
        assert f"its actor, which was process {pid}, is gone" in str(caught.value)
        assert caught.value.report.seconds < 30


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.long
def test_a_worker_whose_process_has_ended_is_lost_before_the_next_send(shared: bool) -> None:
    (doomed,) = start(1)
    with Sender("ray", linear(1.0), num_workers=0 if shared else 1) as sender:
        events: list[MembershipEvent] = []
        sender.subscribe(events.append)
        address = Pool(sender).address() if shared else sender.address(0)
        os.kill(ray.get(doomed.connect.remote(address)), signal.SIGKILL)
        assert eventually(lambda: any(e.after is WorkerState.LOST for e in events), 30)
        assert any("has ended" in event.reason for event in events)
        if shared:
            assert eventually(lambda: not sender.all_worker_ids(), 30)


def test_one_receiver_for_each_worker_and_only_with_the_token(actors: list[Any]) -> None:
    with Sender("ray", linear(4.0), num_workers=1) as sender:
        address = sender.address(0)
        with pytest.raises(SenderLostError, match="token"):
            Receiver(dataclasses.replace(address, token="guessed"), linear())
        first = Receiver(address, linear())
        ray.get(actors[0].connect.remote(address))
        with pytest.raises(SenderLostError, match="another receiver"):
            first.receive()
        call = actors[0].receive.remote()
        sender.send()
        assert ray.get(call) == (1, {4.0})
        sender.remove_worker(0)
        with pytest.raises(SenderLostError, match="removed"):
            ray.get(actors[0].receive.remote())


def test_one_more_reader_of_what_an_actor_is_sent(actors: list[Any]) -> None:
    with Sender("ray", linear(6.0), workers=actors[:1]) as sender:
        sender.send()
        model = linear()
        with Receiver(sender.address(0), model) as receiver:
            assert receiver.receive() == 1
            sender.send(linear(7.0))
            assert receiver.receive() == 2
    assert values_of(model) == {7.0}


def test_nothing_is_left() -> None:
    before = {thread.name for thread in threading.enumerate()}
    with Sender("ray", torch.nn.Linear(2, 2), num_workers=1) as sender:
        mailbox = sender.address(0).endpoint.mailbox
    assert {thread.name for thread in threading.enumerate()} <= before
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(mailbox.events.remote(), timeout=30)


def test_a_mailbox_that_died_is_named_at_once() -> None:
    with Sender("ray", linear(), num_workers=1) as sender:
        ray.kill(sender.address(0).endpoint.mailbox)
        assert eventually(lambda: sends_fail_with(sender, "mailbox of its sender is gone"), 30)
        with pytest.raises(SendError, match="make a new Sender") as caught:
            sender.send(timeout=60)
        assert caught.value.report.seconds < 50


def sends_fail_with(sender: Sender, message: str) -> bool:
    with pytest.raises(SendError) as caught:
        sender.send(timeout=1)
    return message in str(caught.value)


def test_updates_of_the_mailbox_may_come_in_any_order() -> None:
    async def newest() -> Any:
        mailbox = Mailbox("token", {0: None})
        joining = asyncio.create_task(mailbox.join("token", Event("joined", 0, reader="reader")))
        for version in (2, 3, 1):
            await mailbox.update(version, {0: MailboxOffer(version, "", [])}, {0: "reader"})
        await joining
        return await mailbox.take(0, "reader", 0)

    assert asyncio.run(newest()).version == 3


def test_a_receiver_of_a_removed_worker_is_not_that_of_one_with_its_id() -> None:
    async def take_after_both() -> Any:
        mailbox = Mailbox("token", {0: None})
        joining = asyncio.create_task(mailbox.join("token", Event("joined", 0, reader="reader")))
        await mailbox.update(1, {0: None}, {0: "reader"})
        await joining
        await mailbox.update(2, {}, {})
        await mailbox.update(3, {0: MailboxOffer(1, "", [])}, {}, {0: "token"})
        await mailbox.answer(Event("answered", 0, 1, reader="reader"))
        assert [event.kind for event in await mailbox.events()] == ["joined"]
        return await mailbox.take(0, "reader", 0)

    assert asyncio.run(take_after_both()) == Gone("worker 0 was removed from the sender")


def test_a_forked_process_closes_its_connection_before_it_collects_garbage() -> None:
    with warnings.catch_warnings():
        # Of threads that the child lacks.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        collected: list[str] = []
        gc.callbacks.append(lambda phase, info: collected.append(phase))
        gc.set_threshold(1)
        collected.clear()
        liveness._close_inherited()
        os._exit(len(collected))
    assert os.waitpid(child, 0)[1] == 0
