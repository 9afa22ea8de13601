"""Pools whose workers come and go by one address."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sync_core import (
    ClosedError,
    OptionError,
    Receiver,
    Sender,
    SenderLostError,
    SendError,
    SendReport,
    WorkerState,
)
from sync_plugin_scale import Pool, Sharded
from sync_testing import eventually

pytestmark = pytest.mark.timeout(60)


class Replica:
    """A worker in a thread, which checks each version that it commits."""

    def __init__(self, address: Any) -> None:
        self.model = nn.Linear(3, 2)
        self.versions: list[int] = []
        self.error: BaseException | None = None
        self._leave = threading.Event()
        self._address = address
        self.ready = threading.Event()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            with Receiver(self._address, self.model) as receiver:
                self.worker_id = receiver.worker_id
                while not self._leave.is_set():
                    version = receiver.receive(timeout=0.1)
                    if version is not None:
                        assert (self.model.weight == version).all()
                        assert (self.model.bias == version).all()
                        self.versions.append(version)
                        self.ready.set()
        except SenderLostError:
            pass
        except BaseException as error:
            self.error = error
            self.ready.set()

    def leave(self) -> None:
        self._leave.set()
        self.thread.join(20)


def fill(model: nn.Module, value: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


@pytest.mark.parametrize("scheme", ["thread", "shm", "dist", "file"])
def test_a_pool_grows_and_shrinks_while_versions_are_sent(scheme: str, tmp_path: Any) -> None:
    policy = nn.Linear(3, 2)
    options: dict[str, Any] = {"directory": str(tmp_path)} if scheme.endswith("file") else {}
    sends = 200 if scheme == "shm" else 40
    with Sender(scheme, policy, num_workers=0, **options) as sender:
        fill(policy, 1)
        address = Pool(sender).address()
        replicas = [Replica(address) for _ in range(2)]
        wait_until_there(sender, 2)
        for version in range(1, sends + 1):
            fill(policy, version)
            report = sender.send()
            assert report.version == version
            assert report.failed == {}
            for worker_id, status in sender.workers.items():
                assert status.state is not WorkerState.CURRENT or status.version == version, (
                    worker_id
                )
            if version in range(sends // 8, sends // 8 + 4):
                replicas.append(Replica(address))
                assert replicas[-1].ready.wait(20)
            if version in range(sends * 3 // 4, sends * 3 // 4 + 5):
                replicas[0].leave()
                assert replicas.pop(0).error is None
        assert sender.all_worker_ids() == (replicas[0].worker_id,)
        replicas[0].leave()
        assert replicas[0].versions[-1] == sends
        assert replicas[0].error is None


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("thread", {}),
        ("chunked::thread", {}),
        ("shm", {}),
        ("shm", {"layers": ["select"]}),
        ("dist", {}),
        ("increments::dist", {}),
        ("chunked::dist", {}),
        ("dist", {"topology": "broadcast"}),
        ("file", {}),
        ("increments::file", {}),
    ],
    ids=str,
)
def test_a_worker_that_comes_after_the_first_send_gets_that_version(
    scheme: str, options: dict[str, Any], tmp_path: Any
) -> None:
    policy = nn.Linear(3, 2)
    more: dict[str, Any] = {"directory": str(tmp_path)} if scheme == "file" else {}
    with Sender(scheme, policy, num_workers=0, **options, **more) as sender:
        address = Pool(sender).address()
        for version in (1, 2):
            fill(policy, version)
            report = sender.send()
            assert (report.version, report.updated) == (version, ())
        assert sender.send(worker_ids=[]).version == 2
        first = Replica(address)
        assert first.ready.wait(20)
        first.leave()
        assert (first.error, first.versions) == (None, [2])
        wait_until_there(sender, 0)
        fill(policy, 3)
        assert sender.send().updated == ()
        second = Replica(address)
        assert second.ready.wait(20)
        fill(policy, 4)
        assert sender.send().updated == (second.worker_id,)
        second.leave()
        assert (second.error, second.versions) == (None, [3, 4])


def test_a_sender_whose_workers_have_ids_sends_nothing_without_them() -> None:
    with Sender("thread", nn.Linear(3, 2), num_workers=0) as sender:
        assert sender.send().version == 0


def wait_until_there(sender: Sender, count: int) -> None:
    there = threading.Event()

    def look(event: object) -> None:
        states = [status.state for status in sender.workers.values()]
        if len(states) == count and WorkerState.CONNECTING not in states:
            there.set()

    unsubscribe = sender.subscribe(look)
    look(None)
    assert there.wait(20)
    unsubscribe()


def test_many_workers_that_come_at_once_are_all_admitted() -> None:
    policy = nn.Linear(3, 2)
    fill(policy, 1)
    with Sender("thread", policy, num_workers=0) as sender:
        address = Pool(sender).address()
        replicas = [Replica(address) for _ in range(20)]
        wait_until_there(sender, 20)
        report = sender.send()
        assert len(report.updated) == 20
        assert sorted(replica.worker_id for replica in replicas) == sorted(report.updated)
    for replica in replicas:
        replica.leave()
        assert replica.error is None


def test_a_worker_that_is_silent_is_removed_and_the_others_are_updated() -> None:
    policy = nn.Linear(3, 2)
    fill(policy, 1)
    with Sender("thread", policy, num_workers=0, timeout=1.0) as sender:
        address = Pool(sender).address()
        good = Replica(address)
        wait_until_there(sender, 1)
        silent = Receiver(address, nn.Linear(3, 2))
        wait_until_there(sender, 2)
        report = sender.send()
        assert report.updated == (good.worker_id,)
        assert report.dropped == (silent.worker_id,)
        assert sender.all_worker_ids() == (good.worker_id,)
        assert silent.receive() == 1
        assert sender.all_worker_ids() == (good.worker_id, silent.worker_id) == (0, 2)
        assert sender.workers[2].state is WorkerState.CURRENT
    with pytest.raises(SenderLostError, match="the sender was closed"):
        silent.receive()
    with pytest.raises(ClosedError):
        silent.receive()
    good.leave()


def test_one_that_joins_and_never_answers_delays_no_send_and_is_removed() -> None:
    policy = nn.Linear(3, 2)
    with Sender("shm", policy, num_workers=0, timeout=2.0) as sender:
        address = Pool(sender).address()
        good = Replica(address)
        wait_until_there(sender, 1)
        fill(policy, 1)
        assert sender.send().updated == (good.worker_id,)

        def update() -> SendReport:
            fill(policy, sender.version + 1)
            return sender.send()

        with Receiver(address, nn.Linear(3, 2)) as silent:
            begin = time.monotonic()
            for _ in range(2):
                report = update()
                assert (report.updated, report.joining) == ((good.worker_id,), (silent.worker_id,))
            assert time.monotonic() - begin < 1.5, "a send waited for it until its deadline"
            removed = silent.worker_id
            assert eventually(lambda: update().dropped == (removed,))
            assert sender.all_worker_ids() == (good.worker_id,)
            good.leave()
            # It joins again.
            assert silent.receive() == sender.version
        assert good.error is None


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("thread", {}),
        ("chunked::thread", {}),
        ("shm", {"layers": ["select"]}),
        ("shm", {"zero_copy": True}),
        ("increments::dist", {}),
        ("dist", {"topology": "broadcast"}),
        ("file", {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("background", [False, True])
def test_a_worker_that_has_committed_too_late_is_current_when_it_joins_again(
    scheme: str, options: dict[str, Any], background: bool, tmp_path: Any
) -> None:
    policy, model = nn.Linear(3, 2), nn.Linear(3, 2)
    more: dict[str, Any] = {"directory": str(tmp_path)} if scheme == "file" else {}
    with Sender(scheme, policy, num_workers=0, **options, **more) as sender:
        receiver = Receiver(Pool(sender).address(), model, background=background)
        pending = sender.send_async()
        assert receiver.stage() == 1
        assert pending.wait(0.0).dropped == (0,)
        receiver.load()
        assert receiver.confirm() == 1

        def is_current() -> bool:
            # Its version comes again; a busy machine may take more than one call for that.
            assert receiver.receive(0.5) is None
            return sender.workers[1].state is WorkerState.CURRENT

        assert eventually(is_current, 30)
        fill(policy, 2)
        pending = sender.send_async()
        assert receiver.receive() == 2
        assert pending.wait().updated == (1,)
        receiver.close()


def test_a_model_that_is_replaced_after_its_worker_has_joined_again_gets_the_version() -> None:
    policy, worker = nn.Linear(3, 2), SimpleNamespace(policy=nn.Linear(3, 2))
    fill(policy, 1)
    with Sender("thread", policy, num_workers=0) as sender:
        receiver = Receiver(Pool(sender).address(), "policy", context=worker)
        pending = sender.send_async()
        assert receiver.receive(30) == 1
        pending.wait()
        sender.remove_worker(0)

        def is_current() -> bool:
            assert receiver.receive(0.5) is None
            return sender.workers[1].version == 1

        assert eventually(is_current, 30)
        worker.policy = nn.Linear(3, 2)
        assert receiver.receive(0) == 1
        assert torch.equal(worker.policy.weight, policy.weight)
        receiver.close()


def test_a_worker_that_is_not_admitted_again_is_closed() -> None:
    policy = nn.Linear(3, 2)
    with Sender("thread", policy, num_workers=0) as sender:
        pool = Pool(sender)
        receiver = Receiver(pool.address(), nn.Linear(3, 2))
        pool.close()
        sender.remove_worker(receiver.worker_id)
        with pytest.raises(SenderLostError, match="was removed from the sender"):
            receiver.receive()
        with pytest.raises(ClosedError):
            receiver.receive()


def test_the_sender_says_what_has_the_address_for_all() -> None:
    message = r"type Pool\(sender\)\.address\(\)"
    with (
        Sender("thread", nn.Linear(1, 1), num_workers=1) as sender,
        pytest.raises(OptionError, match=message),
    ):
        sender.address()


def test_senders_that_no_worker_can_join_later_say_so() -> None:
    model = nn.Linear(1, 1)
    with Sender("none", model, num_workers=1) as sender, pytest.raises(OptionError) as caught:
        Pool(sender)
    assert "serves no workers that come later" in str(caught.value)
    with (
        Sender(Sharded("thread", 0, 1), model, num_workers=1) as sender,
        pytest.raises(OptionError, match="give the id of a worker"),
    ):
        Pool(sender)


def test_a_trainer_that_counts_from_the_start_again_is_refused() -> None:
    policy, model = nn.Linear(1, 1), nn.Linear(1, 1)
    before = model.weight.clone()
    with Sender("thread", policy, num_workers=1, timeout=5.0) as sender:
        receiver = Receiver(sender.address(0), model, version=7)
        assert receiver.version == 7
        pending = sender.send_async()
        assert receiver.receive(timeout=0.1) is None
        with pytest.raises(SendError, match=r"(?s)version 1 is not beyond version 7.*version=7"):
            pending.wait()
        assert torch.equal(model.weight, before)
        pending = sender.send_async(version=8)
        assert receiver.receive() == 8
        assert pending.wait().updated == (0,)
