"""Workers of a sharded trainer that come after a version was sent."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch
from tests.scale.test_shards import address_of, like, send_all, trainer, weights
from torch import Tensor

from sync_core import (
    Delivery,
    MembershipEvent,
    Payload,
    Receiver,
    Sender,
    SenderLostError,
    SendError,
    TransportContext,
    WorkerState,
    hookimpl,
)
from sync_plugin_scale import Part, Sharded
from sync_plugin_std.schemes.thread import ThreadReceiver, ThreadScheme, ThreadSender

pytestmark = pytest.mark.timeout(60)


def fill(senders: list[Sender], value: float) -> None:
    for sender in senders:
        for tensor in sender._source.model.values():
            tensor.fill_(value)


def wait_until_current(sender: Sender, worker_id: int) -> None:
    """Wait until the sender knows that a worker has the newest version."""
    current = threading.Event()

    def look(event: MembershipEvent | None) -> None:
        del event
        if sender.workers[worker_id].state is WorkerState.CURRENT:
            current.set()

    unsubscribe = sender.subscribe(look)
    look(None)
    assert current.wait(20)
    unsubscribe()


@pytest.mark.parametrize("scheme", ["thread", "shm", "dist", "file"])
def test_a_late_worker_gets_the_newest_version_of_all_ranks(scheme: str, tmp_path: Any) -> None:
    whole = weights(w=(5, 4), b=(3,))
    options: dict[str, Any] = {"directory": str(tmp_path)} if scheme == "file" else {}
    if scheme == "dist":
        options["shared_memory"] = False
    with (
        trainer(whole, 3, scheme=scheme, timeout=30.0, **options) as senders,
        Receiver(address_of(senders), like(whole)) as first,
    ):
        for version in (1, 2):
            fill(senders, version)
            assert send_all(senders, [first]) == [version]
        fill(senders, 9)  # not sent yet
        for sender in senders:
            sender.add_worker()
        # It wants what no worker has wanted before.
        model = {"w": torch.zeros(5, 2), "b": torch.zeros(3)}
        regions = {"w": ((0, 5), (1, 3))}
        with Receiver(address_of(senders, 1), Part(model, regions)) as late:
            assert late.receive() == 2
            assert all((tensor == 2).all() for tensor in model.values())
            for sender in senders:
                wait_until_current(sender, 1)
                assert sender.workers[1].version == 2
            assert send_all(senders, [first, late]) == [3, 3]
            assert all((tensor == 9).all() for tensor in model.values())


def test_a_worker_that_a_send_has_given_up_gets_that_version() -> None:
    whole = weights(w=(4, 2))
    with (
        trainer(whole, 2, num_workers=2, timeout=4.0) as senders,
        Receiver(address_of(senders, 0), like(whole)) as first,
        ThreadPoolExecutor(2) as sending,
    ):
        sends = [sending.submit(sender.send) for sender in senders]
        assert first.receive(timeout=20.0) == 1
        for rank, send in enumerate(sends):
            with pytest.raises(SendError, match=f"has not said what it wants of rank {rank}"):
                send.result()
        model = like(whole)
        with Receiver(address_of(senders, 1), model) as late:
            assert late.receive(timeout=20.0) == 1
            assert torch.equal(model["w"], whole["w"])
            for sender in senders:
                wait_until_current(sender, 1)


def test_a_late_worker_takes_no_parts_of_two_versions() -> None:
    whole = weights(w=(4, 2))
    with (
        trainer(whole, 2, timeout=20.0) as senders,
        Receiver(address_of(senders), like(whole)) as first,
    ):
        fill(senders, 1)
        send_all(senders, [first])
        # One rank is ahead of the other.
        fill(senders, 2)
        ahead = senders[1].send_async()
        for sender in senders:
            sender.add_worker()
        model = like(whole)
        with Receiver(address_of(senders, 1), model) as late:
            assert late.receive(timeout=0.3) is None
            assert (model["w"] == 0).all()
            for sender in senders:
                assert sender.workers[1].state is not WorkerState.CURRENT
            behind = senders[0].send_async()
            assert [late.receive(), first.receive()] == [2, 2]
            assert (model["w"] == 2).all()
            for pending in (ahead, behind):
                pending.wait()


def test_another_worker_in_the_same_place_is_sent_the_parts_that_it_wants() -> None:
    whole = weights(w=(4, 2))
    with trainer(whole, 2, timeout=20.0) as senders:
        first = Receiver(address_of(senders), like(whole))
        assert send_all(senders, [first]) == [1]
        first.close()
        model = {"w": torch.zeros(2, 2)}
        regions = {"w": ((1, 3), (0, 2))}
        with Receiver(address_of(senders), Part(model, regions)) as other:
            assert other.receive() == 1
            assert torch.equal(model["w"], whole["w"][1:3])


class Late:
    """A worker in a thread, which checks that each version that it commits is whole."""

    def __init__(self, senders: list[Sender], like: dict[str, Tensor]) -> None:
        (self.worker_id,) = {sender.add_worker() for sender in senders}
        self.versions: list[int] = []
        self.error: BaseException | None = None
        self._address = address_of(senders, self.worker_id)
        self._model = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
        self._leaving = threading.Event()
        self.served = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            with Receiver(self._address, self._model) as receiver, suppress(SenderLostError):
                while not self._leaving.is_set():
                    version = receiver.receive(timeout=0.1)
                    if version is not None:
                        assert all((t == version).all() for t in self._model.values()), version
                        self.versions.append(version)
                        self.served.set()
        except BaseException as error:
            self.error = error
        self.served.set()

    def leave(self, senders: list[Sender]) -> None:
        self._leaving.set()
        self._thread.join(20)
        for sender in senders:
            sender.remove_worker(self.worker_id)


def test_workers_come_and_go_while_all_ranks_send() -> None:
    whole = weights(w=(5, 2), b=(4,))
    with trainer(whole, 3, num_workers=0, scheme="shm", timeout=30.0) as senders:
        workers = [Late(senders, whole) for _ in range(2)]
        for version in range(1, 41):
            fill(senders, version)
            pending = [sender.send_async() for sender in senders]
            for each in pending:
                assert each.wait().failed == {}
            if version in range(10, 14):
                workers.append(Late(senders, whole))
                assert workers[-1].served.wait(20)
                assert workers[-1].versions == [version]
            if version in range(30, 35):
                workers[0].leave(senders)
                assert workers.pop(0).error is None
        (last,) = workers
        last.leave(senders)
        assert last.error is None
        assert last.versions[-1] == 40


class Failing(ThreadSender):
    """Raises once when it is given something for this worker."""

    worker_id: int | None = None

    def send(self, payload: Payload, worker_ids: Sequence[int]) -> dict[int, Delivery]:
        if Failing.worker_id in worker_ids:
            Failing.worker_id = None
            raise MemoryError("no room")
        return super().send(payload, worker_ids)


class FailingScheme(ThreadScheme):
    @hookimpl
    def create_transport(self, context: TransportContext) -> Any:
        return Failing(context) if context.side == "sender" else ThreadReceiver(context)


def test_what_cannot_be_sent_to_one_worker_concerns_no_other() -> None:
    whole = weights(w=(4, 2))
    with (
        trainer(whole, 1, scheme=FailingScheme(), timeout=8.0) as (sender,),
        Receiver(address_of([sender]), like(whole)) as first,
        ThreadPoolExecutor(1) as sending,
    ):
        Failing.worker_id = 1
        with pytest.raises(MemoryError):
            sender.add_worker()
        late = sender.add_worker()
        report = sending.submit(sender.send)
        # The late one asks for its parts once the other was sent its own.
        assert first.receive() == 1
        Failing.worker_id = late
        model = {"w": torch.zeros(2, 2)}
        part = Part(model, {"w": ((1, 3), (0, 2))})
        with Receiver(address_of([sender], late), part) as receiver:
            with pytest.raises(SendError, match="worker 2: could not send version 1"):
                report.result()
            assert sender.workers[0].state is WorkerState.CURRENT
            # From the copy of what went to all workers, of which the failed one is not one.
            assert receiver.receive() == 1
            assert torch.equal(model["w"], whole["w"][1:3])
            wait_until_current(sender, late)


def test_without_memory_for_a_copy_late_workers_wait_for_the_next_version(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = weights(w=(4, 2))
    with (
        trainer(whole, 2, timeout=20.0) as senders,
        Receiver(address_of(senders), like(whole)) as first,
    ):
        monkeypatch.setattr("sync_plugin_scale.shards.sender.Block", _NoMemory)
        assert send_all(senders, [first]) == [1]
        assert "no memory to keep version 1 for late workers" in caplog.text
        monkeypatch.undo()
        for sender in senders:
            sender.add_worker()
        model = like(whole)
        with Receiver(address_of(senders, 1), model) as other:
            assert other.receive(timeout=0.2) is None
            assert send_all(senders, [first, other]) == [2, 2]
            assert torch.equal(model["w"], whole["w"])


class _NoMemory:
    """Blocks that cannot be allocated."""

    @staticmethod
    def allocate(nbytes: int) -> None:
        raise MemoryError(nbytes)


def test_the_thread_of_a_sender_that_was_forgotten_ends() -> None:
    whole = weights(w=(4, 2))
    threads = set(threading.enumerate())
    sender = Sender(Sharded("thread", 0, 1), whole, num_workers=1)
    with Receiver(address_of([sender]), like(whole)) as receiver:
        assert send_all([sender], [receiver]) == [1]
        (thread,) = [t for t in threading.enumerate() if t.name == "sync-shards"]
        assert thread not in threads
        del sender
        thread.join(20)
        assert not thread.is_alive()
        with pytest.raises(SenderLostError):
            receiver.receive()
