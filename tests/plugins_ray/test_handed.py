"""Scheme `ray`: receivers in actors that may be called at any time are brought their versions."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import ray
import torch
from ray import cloudpickle
from tests.plugins_ray.agents import linear

from sync_core import (
    Address,
    Answer,
    ApplyError,
    ClosedError,
    Payload,
    Receiver,
    Sender,
    SenderLostError,
    SendError,
    WorkerLostError,
)
from sync_plugin_ray import take_calls
from sync_plugin_ray.inbox import Inbox
from sync_plugin_ray.mailbox import MailboxOffer
from sync_plugin_ray.pull import PullSender
from sync_testing import eventually

pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]

# Actors cannot import this file by name.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def weights(fill: float, size: int = 4) -> dict[str, torch.Tensor]:
    return {name: torch.full((size,), float(fill)) for name in "ab"}


class Worker:
    """Hosts models and their receivers; calls of it may take long."""

    def __init__(self) -> None:
        take_calls("weights")
        self.receivers: dict[str, Receiver] = {}
        self.models: dict[str, dict[str, torch.Tensor]] = {}

    def connect(self, address: Address, size: int = 4, name: str = "policy") -> int:
        self.models[name] = weights(0.0, size)
        self.receivers[name] = Receiver(address, self.models[name])
        return os.getpid()

    def receive(self, timeout: float, name: str = "policy") -> tuple[int | None, set[float]]:
        version = self.receivers[name].receive(timeout)
        return version, {v for t in self.models[name].values() for v in t.unique().tolist()}

    def attend(self) -> bool:
        """Receive versions as they arrive."""
        receiver = self.receivers["policy"]
        return receiver.on_arrival(lambda: receiver.receive(0))

    def forget(self) -> bool:
        """Return whether nothing else keeps a receiver."""
        receiver = weakref.ref(self.receivers.pop("policy"))
        gc.collect()
        return receiver() is None

    def look_until(self, version: int) -> int:
        """Return how many looks it takes, between short steps, to have a version."""
        looks = 0
        while self.receivers["policy"].version < version:
            self.receivers["policy"].receive(0)
            time.sleep(0.0005)
            looks += 1
        return looks

    def close_while_waiting(self) -> float:
        """Return how long it takes to leave a receiver in which another thread waits."""
        receiver, ended = self.receivers["policy"], threading.Event()

        def wait() -> None:
            with pytest.raises(ClosedError):
                receiver.receive(60)
            ended.set()

        threading.Thread(target=wait).start()
        time.sleep(0.2)
        begin = time.monotonic()
        receiver.close()
        assert ended.wait(20)
        return time.monotonic() - begin

    def replace(self, name: str = "policy") -> None:
        self.models[name]["a"] = torch.zeros(7)


def start(**options: Any) -> Any:
    worker: Any = ray.remote(concurrency_groups={"weights": 2})(Worker)  # type: ignore[call-overload]
    return worker.options(num_cpus=0, **options).remote()


@pytest.fixture(scope="module")
def pool() -> Iterator[list[Any]]:
    started = [start() for _ in range(2)]
    yield started
    for actor in started:
        ray.kill(actor)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sender], list[int]]:
    """Notes the versions that a sender tells its mailbox of."""

    def note(sender: Sender) -> list[int]:
        versions: list[int] = []
        transport: Any = sender._pipeline.transport
        update = transport._update_mailbox

        def noted() -> Any:
            versions.append(max((each.version for each in transport.roster.owed()), default=0))
            return update()

        monkeypatch.setattr(transport, "_update_mailbox", noted)
        return versions

    return note


@pytest.mark.parametrize("size", [4, 100_000], ids=["in the call", "as an object"])
def test_versions_are_brought_by_calls_alone(
    pool: list[Any], told: Callable[[Sender], list[int]], size: int
) -> None:
    with Sender("ray", weights(0.0, size), num_workers=2) as sender:
        for i, worker in enumerate(pool):
            ray.get(worker.connect.remote(sender.address(i), size))
        versions = told(sender)
        for version in (1, 2, 3):
            calls = [worker.receive.remote(20) for worker in pool]
            assert sender.send(weights(version, size)).updated == (0, 1)
            assert ray.get(calls) == [(version, {float(version)})] * 2
        assert versions == []


def test_a_worker_in_the_middle_of_something_finds_it_at_its_next_look(pool: list[Any]) -> None:
    with Sender("ray", weights(0.0), num_workers=1) as sender:
        ray.get(pool[0].connect.remote(sender.address(0)))
        looking = pool[0].look_until.remote(5)
        for version in range(1, 6):
            assert sender.send(weights(version)).updated == (0,)
        assert ray.get(looking) > 0
        assert ray.get(pool[0].receive.remote(0)) == (None, {5.0})


@pytest.mark.parametrize("size", [4, 100_000], ids=["in the call", "as an object"])
def test_who_is_told_of_a_version_commits_it_at_once(pool: list[Any], size: int) -> None:
    with Sender("ray", weights(0.0, size), num_workers=1) as sender:
        ray.get(pool[0].connect.remote(sender.address(0), size))
        assert ray.get(pool[0].attend.remote())
        for version in (1, 2, 3):
            assert sender.send(weights(version, size)).updated == (0,)
            assert ray.get(pool[0].receive.remote(0)) == (None, {float(version)})
        assert ray.get(pool[0].forget.remote())


@pytest.mark.parametrize("silent", [0, 1])
def test_a_commit_at_once_counts_while_another_worker_is_silent(
    pool: list[Any], silent: int
) -> None:
    with (
        Sender("ray", weights(0.0), num_workers=2, timeout=60.0) as sender,
        ThreadPoolExecutor(1) as threads,
    ):
        for i, worker in enumerate(pool):
            ray.get(worker.connect.remote(sender.address(i)))
        ray.get(pool[1 - silent].attend.remote())
        pending = sender.send_async(weights(1))
        waiting = threads.submit(pending.wait)
        assert pending.deliveries[1 - silent].wait(30.0)
        assert not waiting.done()
        assert ray.get(pool[silent].receive.remote(20)) == (1, {1.0})
        assert waiting.result(60).updated == (0, 1)


def test_what_cannot_be_committed_at_once_is_told(pool: list[Any]) -> None:
    with Sender("ray", weights(0.0), num_workers=1) as sender:
        ray.get(pool[0].connect.remote(sender.address(0)))
        ray.get(pool[0].attend.remote())
        ray.get(pool[0].replace.remote())
        with pytest.raises(SendError, match="could not apply version 1"):
            sender.send(weights(1))


@pytest.mark.parametrize("size", [4, 100_000], ids=["in the call", "as an object"])
def test_a_worker_that_does_not_look_in_time_finds_the_newest(
    pool: list[Any], kept: Callable[[], int], size: int
) -> None:
    with Sender("ray", weights(0.0, size), num_workers=1) as sender:
        ray.get(pool[0].connect.remote(sender.address(0), size))
        for version in (1, 2, 3):
            pending = sender.send_async(weights(version, size))
            # The call that brings it gives up in the middle of this.
            with pytest.raises(SendError):
                pending.wait(0.4 if version == 1 else 0.01)
        # Ray may run the call before the one that brings the newest.
        newest = 0
        while newest < 3:
            version, values = ray.get(pool[0].receive.remote(20))
            assert version > newest
            assert values == {float(version)}
            newest = version
        assert ray.get(pool[0].receive.remote(0)) == (None, {3.0})
        # A receiver that has moved on holds no version back.
        calls = pool[0].receive.remote(20)
        assert sender.send(weights(4, size)).updated == (0,)
        assert ray.get(calls) == (4, {4.0})
    assert eventually(lambda: kept() == 0, 30)


def test_a_call_that_has_returned_makes_room_before_its_event_is_handled(
    pool: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = threading.Event()
    handled = PullSender._handed

    def handle_late(sender: PullSender, *arguments: Any) -> None:
        looked.wait(20.0)
        handled(sender, *arguments)

    monkeypatch.setattr(PullSender, "_handed", handle_late)
    with Sender("ray", weights(0.0), num_workers=1) as sender:
        ray.get(pool[0].connect.remote(sender.address(0)))
        for version in (1, 2, 3):
            with pytest.raises(SendError):
                sender.send_async(weights(version)).wait(0.01)
        assert ray.get(pool[0].receive.remote(0)) == (3, {3.0})
        looked.set()


def test_a_lost_object_is_put_and_brought_again(pool: list[Any], lost: Any) -> None:
    def put_and_lose(payload: Payload) -> Any:
        publication = put(payload)
        publication.data = [lost]
        return publication

    with Sender("ray", weights(0.0, 20_000), num_workers=1) as sender:
        store = cast("Any", sender._pipeline.transport)._store
        put, store.put = store.put, put_and_lose
        ray.get(pool[0].connect.remote(sender.address(0), 20_000))
        call = pool[0].receive.remote(20)
        assert sender.send(weights(1, 20_000)).updated == (0,)
        assert ray.get(call) == (1, {1.0})


def test_an_older_version_that_comes_later_is_not_found() -> None:
    inbox = Inbox("reader")
    with ThreadPoolExecutor(1) as calls:
        bringing = calls.submit(inbox.hand, MailboxOffer(2, "", [b""]), 20.0)
        assert inbox.wait(lambda: False, time.monotonic() + 20)
        # Ray runs the later of two calls first, now and then.
        assert inbox.hand(MailboxOffer(1, "", [b""]), 20.0) is None
        found = inbox.take(0)
        assert found is not None
        assert found.version == 2
        assert inbox.answer(Answer(version=2))
        assert bringing.result(20) == Answer(version=2)
    assert inbox.take(0) is None


def test_a_newer_version_ends_the_wait_for_an_answer() -> None:
    inbox = Inbox("reader")
    with ThreadPoolExecutor(1) as calls:
        older = calls.submit(inbox.hand, MailboxOffer(1, "", [b""]), 20.0)
        assert inbox.wait(lambda: False, time.monotonic() + 20)
        begin = time.monotonic()
        assert inbox.hand(MailboxOffer(2, "", [b""]), 0.0) is None
        assert older.result(20) is None
        assert time.monotonic() - begin < 10
    found = inbox.take(0)
    assert found is not None
    assert found.version == 2
    # An interrupt between the two leaves it there.
    assert inbox.take(0) is found
    assert inbox.take(2) is None


def test_what_cannot_be_committed_is_told_at_once(pool: list[Any]) -> None:
    with Sender("ray", weights(0.0), num_workers=2, timeout=60) as sender:
        for i, worker in enumerate(pool):
            ray.get(worker.connect.remote(sender.address(i)))
        ray.get(pool[0].replace.remote())
        calls = [worker.receive.remote(20) for worker in pool]
        begin = time.monotonic()
        with pytest.raises(SendError, match="could not apply version 1") as caught:
            sender.send(weights(1))
        assert time.monotonic() - begin < 20
        assert isinstance(caught.value.report.failed[0].error, ApplyError)
        assert caught.value.report.updated == (1,)
        with pytest.raises(ray.exceptions.RayTaskError):
            ray.get(calls[0])
        assert ray.get(calls[1]) == (1, {1.0})


def test_an_actor_killed_while_a_call_waits_in_it_is_named() -> None:
    worker = start()
    with Sender("ray", weights(0.0), num_workers=1, timeout=60) as sender:
        pid = ray.get(worker.connect.remote(sender.address(0)))
        pending = sender.send_async(weights(1))
        os.kill(pid, signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(SendError, match=f"which was process {pid}, is gone") as caught:
            pending.wait()
        assert time.monotonic() - begin < 30
        assert isinstance(caught.value.report.failed[0].error, WorkerLostError)
        with pytest.raises(SendError, match="is gone"):
            sender.send(weights(2))


def test_an_actor_that_takes_no_more_calls_fails_at_once() -> None:
    worker = start(max_pending_calls=1)
    with Sender("ray", weights(0.0), num_workers=1, timeout=20) as sender:
        ray.get(worker.connect.remote(sender.address(0)))
        # Ray counts a call for some milliseconds after its result is there.
        assert eventually(lambda: call(worker, "receive", 20.0) is not None, 20)
        with pytest.raises(SendError, match="max_pending_calls") as caught:
            sender.send(weights(1))
        assert caught.value.report.seconds < 15
    ray.kill(worker)


def call(worker: Any, method: str, *args: Any) -> Any:
    """A call of an actor; None where that takes no more."""
    try:
        return getattr(worker, method).remote(*args)
    except ray.exceptions.PendingCallsLimitExceeded:
        return None


def test_an_actor_that_stands_still_gets_the_newest_when_it_goes_on(pool: list[Any]) -> None:
    worker = pool[0]
    with Sender("ray", weights(0.0), num_workers=1) as sender:
        pid = ray.get(worker.connect.remote(sender.address(0)))
        os.kill(pid, signal.SIGSTOP)
        try:
            for version in (1, 2, 3):
                with pytest.raises(SendError):
                    sender.send_async(weights(version)).wait(0.0)
        finally:
            os.kill(pid, signal.SIGCONT)
        pending = sender.send_async(weights(4))
        assert ray.get(worker.look_until.remote(4)) > 0
        assert pending.wait().updated == (0,)


def test_whoever_comes_late_gets_what_calls_have_brought_to_others(
    pool: list[Any], told: Callable[[Sender], list[int]]
) -> None:
    with Sender("ray", weights(0.0), num_workers=2) as sender:
        for i, worker in enumerate(pool):
            ray.get(worker.connect.remote(sender.address(i)))
        versions = told(sender)
        calls = [worker.receive.remote(20) for worker in pool]
        sender.send(weights(1))
        ray.get(calls)
        assert versions == []
        late = weights(0.0)
        with Receiver(sender.address(1), late) as receiver:
            assert receiver.receive(0) == 1
            with pytest.raises(ray.exceptions.RayTaskError, match="another receiver"):
                ray.get(pool[1].receive.remote(20))
            pending = sender.send_async(weights(2))
            assert receiver.receive(20) == 2
            assert ray.get(pool[0].receive.remote(20)) == (2, {2.0})
            assert pending.wait().updated == (0, 1)


def test_more_receivers_than_threads_in_one_actor(pool: list[Any]) -> None:
    names = [f"model {i}" for i in range(5)]
    senders = [Sender("ray", weights(0.0), num_workers=1) for _ in names]
    try:
        for name, sender in zip(names, senders, strict=True):
            ray.get(pool[0].connect.remote(sender.address(0), name=name))
        pending = [sender.send_async(weights(1)) for sender in senders]
        for name in names:
            assert ray.get(pool[0].receive.remote(20, name)) == (1, {1.0})
        assert [each.wait().updated for each in pending] == [(0,)] * 5
    finally:
        for sender in senders:
            sender.close()


def test_who_waits_hears_of_the_end(pool: list[Any]) -> None:
    sender = Sender("ray", weights(0.0), num_workers=2)
    for i, worker in enumerate(pool):
        ray.get(worker.connect.remote(sender.address(i)))
    waiting = [worker.receive.remote(60) for worker in pool]
    sender.remove_worker(0)
    with pytest.raises(ray.exceptions.RayTaskError, match="removed"):
        ray.get(waiting[0], timeout=20)
    sender.close()
    with pytest.raises(ray.exceptions.RayTaskError, match=SenderLostError.__name__):
        ray.get(waiting[1], timeout=20)


def test_a_receiver_is_left_while_another_thread_waits_in_it(pool: list[Any]) -> None:
    with Sender("ray", weights(0.0), num_workers=1) as sender:
        ray.get(pool[0].connect.remote(sender.address(0)))
        assert ray.get(pool[0].close_while_waiting.remote()) < 10


def test_no_call_waits_in_an_asynchronous_actor() -> None:
    class Asynchronous(Worker):
        async def look(self, seconds: float) -> int | None:
            return await asyncio.to_thread(self.receivers["policy"].receive, seconds)

    actor: Any = ray.remote(concurrency_groups={"weights": 2})(Asynchronous)  # type: ignore[call-overload]
    worker = actor.options(num_cpus=0).remote()
    with Sender("ray", weights(0.0), num_workers=1) as sender:
        ray.get(worker.connect.remote(sender.address(0)))
        assert not ray.get(worker.attend.remote())
        seconds = []
        for _ in range(5):
            sender.send_async().abandon()
            begin = time.monotonic()
            pending = sender.send_async()
            seconds.append(time.monotonic() - begin)
            assert ray.get(worker.look.remote(20)) == sender.version
            assert pending.wait().updated == (0,)
    # A call that waits does so for a quarter of a second.
    assert min(seconds) < 0.2
    ray.kill(worker)


def test_an_actor_that_declared_nothing_asks_the_mailbox(
    actors: list[Any], told: Callable[[Sender], list[int]]
) -> None:
    actor = actors[0]
    with Sender("ray", linear(0.0), num_workers=1) as sender:
        ray.get(actor.connect.remote(sender.address(0)))
        assert not ray.get(actor.attend.remote())
        versions = told(sender)
        call = actor.receive.remote(20)
        assert sender.send(linear(1.0)).updated == (0,)
        assert ray.get(call) == (1, {1.0})
        assert versions == [1]
