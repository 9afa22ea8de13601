"""Faults of `dist` in the middle of a transfer."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, ClassVar

import cloudpickle  # type: ignore[import-untyped]
import psutil  # type: ignore[import-untyped]
import pytest
import torch
from torch import Tensor

from sync_core import (
    CapacityError,
    Receiver,
    Sender,
    SenderLostError,
    SendError,
    WorkerLostError,
    WorkerTimeoutError,
)
from sync_core.transports import Block
from sync_plugin_dist.process_group import Link
from sync_testing import count_threads, eventually
from sync_testing.faults import few_descriptors
from sync_testing.schemes import SchemeCases, SharedGroup, Start, Worker, Workers

pytestmark = [pytest.mark.long, pytest.mark.timeout(60)]

# Worker processes cannot import this file by name.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

# What fits into no socket's buffer.
LARGE = 6_000_000


class Gated(Tensor):
    """Weights that have something done while they are packed."""

    gate: Callable[[], None]

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if "copy" in function.__name__:
            cls.gate()
        return super().__torch_function__(  # type: ignore[no-untyped-call]
            function, types, args, kwargs or {}
        )


def gated(tensor: Tensor, gate: Callable[[], None]) -> Tensor:
    kind = type("Gated", (Gated,), {"gate": staticmethod(gate)})
    made: Tensor = Tensor._make_subclass(kind, tensor)
    return made


def weights_of(value: float, gate: Callable[[], None] | None = None) -> dict[str, Tensor]:
    """48 MB, and between one half and the other something that a gate may guard."""
    names = {"first": LARGE, "gate": 9, "last": LARGE}
    weights = {name: torch.full((size,), value) for name, size in names.items()}
    if gate is not None:
        weights["gate"] = gated(weights["gate"], gate)
    return weights


def once(action: Callable[[], object]) -> Callable[[], None]:
    """Do it when what was packed before is on its way."""
    done = threading.Event()

    def act() -> None:
        if not done.is_set():
            done.set()
            time.sleep(0.3)
            action()

    return act


def begin_with(workers: Workers) -> None:
    """Deliver a first version, and take the time that it takes."""
    pending = workers.sender.send_async(timeout=30.0)
    for call in [workers.submit(worker_id, 30.0) for worker_id in (0, 1)]:
        call.result(30)
    assert pending.wait().updated == (0, 1)


def held(worker: Worker) -> set[float]:
    """The values in a model that is not a module."""
    return {float(end) for t in worker.model.values() for end in (t.min(), t.max())}


class HurtCases(SchemeCases):
    """One of two workers is hurt, or the trainer.

    Attributes:
        timeout: of the sender to a worker that is stopped, in seconds.
        patience: how much of that the others may have to wait.
        late: what is said of that worker.
        loss: what is said of a worker that died.
        asks: whether a worker asks for what it is offered, and so notices a stopped trainer.
    """

    scheme = "dist"
    asks: ClassVar[bool] = True
    timeout: ClassVar[float]
    patience: ClassVar[float]
    late: ClassVar[str]
    loss: ClassVar[str]

    @pytest.fixture(autouse=True)
    def nothing_is_left(self, pool: SharedGroup) -> Any:
        """Of this process's own, however a case ends."""
        pool.make_ready()
        # Objects that are made once and kept, such as torch's threads, must exist before.
        with dist(weights_of(1.0), **self.options) as sender, receiver_of(sender) as receiver:
            pending = sender.send_async()
            receiver.receive()
            pending.wait()
        time.sleep(0.2)
        before = resources()
        yield
        assert eventually(lambda: set(resources()) <= set(before), 10), (before, resources())

    @pytest.fixture
    def left(self) -> int:
        """Return how many descriptors there still are, where there are too few."""
        return 0

    def test_a_worker_that_is_stopped_in_the_middle(self, start: Start) -> None:
        workers = start(weights_of(1.0), make=lambda: weights_of(0.0), timeout=self.timeout)
        begin_with(workers)
        calls = [workers.submit(worker_id, 20.0) for worker_id in (0, 1)]
        stop = once(lambda: workers.pool.signal(0, signal.SIGSTOP))
        begin = time.monotonic()
        try:
            with pytest.raises(SendError) as failure:
                workers.sender.send(weights_of(2.0, stop))
            assert time.monotonic() - begin < self.timeout + 20
            report = failure.value.report
            assert report.updated == (1,)
            error = report.workers[0].error
            assert isinstance(error, WorkerTimeoutError)
            assert self.late in str(error)
            assert report.workers[1].seconds < self.timeout * self.patience
            assert calls[1].result(30) == 2
            assert workers.pool.call(1, held) == {2.0}
        finally:
            workers.pool.signal(0, signal.SIGCONT)
        assert calls[0].result(30) == 2
        assert workers.pool.call(0, held) == {2.0}
        assert workers.send(weights_of(3.0)).updated == (0, 1)
        assert [workers.pool.call(i, held) for i in (0, 1)] == [{3.0}] * 2

    def test_a_worker_that_is_killed_in_the_middle(self, start: Start) -> None:
        workers = start(weights_of(1.0), make=lambda: weights_of(0.0), timeout=6.0)
        begin_with(workers)
        calls = [workers.submit(worker_id, 20.0) for worker_id in (0, 1)]
        kill = once(lambda: workers.pool.signal(0, signal.SIGKILL))
        with pytest.raises(SendError) as failure:
            workers.sender.send(weights_of(2.0, kill))
        report = failure.value.report
        assert report.updated == (1,)
        error = report.workers[0].error
        assert isinstance(error, WorkerLostError)
        assert self.loss in str(error)
        assert calls[1].result(30) == 2
        assert workers.pool.call(1, held) == {2.0}
        assert workers.send(weights_of(3.0), worker_ids=[1]).updated == (1,)

    def test_a_worker_without_descriptors_says_so(self, start: Start, left: int) -> None:
        workers = start(weights_of(1.0), make=lambda: weights_of(0.0), timeout=self.timeout)
        calls = [workers.pool.submit(0, starved, left), workers.submit(1, 20.0)]
        with pytest.raises(SendError, match="ulimit -n") as failure:
            workers.sender.send()
        assert failure.value.report.updated == (1,)
        with pytest.raises(Exception, match="ulimit -n"):
            calls[0].result(30)
        assert calls[1].result(30) == 1
        assert workers.send(weights_of(3.0)).updated == (0, 1)

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
    def test_a_trainer_in_the_middle(self, pool: SharedGroup, number: signal.Signals) -> None:
        address = pool.call(0, train, self.options)
        target = weights_of(0.0)
        with Receiver(address, target, timeout=3.0) as receiver:
            sending = pool.submit(0, send, 1.0, None)
            assert receiver.receive(20.0) == 1
            sending.result(30)
            sending = pool.submit(0, send, 2.0, number)
            if number == signal.SIGSTOP and not self.asks:
                assert receiver.receive(1.0) is None
                pool.signal(0, signal.SIGKILL)
            begin = time.monotonic()
            with pytest.raises(SenderLostError):
                serve(receiver)
            # One receive() may wait for an offer, and then has its own deadline.
            assert time.monotonic() - begin < 18
        if number == signal.SIGSTOP and self.asks:
            pool.signal(0, signal.SIGKILL)
        assert all((tensor == 1).all() for tensor in target.values())


class WireCases(HurtCases):
    """Workers that are sent weights, for which either end needs descriptors."""

    @pytest.fixture(params=[0, 5])
    def left(self, request: pytest.FixtureRequest) -> int:
        return int(request.param)

    def test_a_trainer_without_descriptors_waits_for_some(
        self, start: Start, left: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        workers = start(weights_of(1.0), make=lambda: weights_of(0.0), timeout=20.0)
        calls = [workers.submit(worker_id, 20.0) for worker_id in (0, 1)]
        with few_descriptors(left):
            pending = workers.sender.send_async()
            assert eventually(lambda: "ulimit -n" in caplog.text)
            assert not pending.done()
        assert pending.wait().updated == (0, 1)
        assert [call.result(30) for call in calls] == [1, 1]


class TestInMemory(HurtCases):
    asks = False
    timeout = 4.0
    patience = 0.9
    late = "in time?"
    loss = "is gone: the other side closed the connection"


class TestOverGloo(WireCases):
    options: ClassVar[Mapping[str, Any]] = {"shared_memory": False}
    timeout = 4.0
    patience = 0.9
    late = "in time?"
    loss = "is gone: the other side closed the connection"


class TestBroadcast(WireCases):
    options: ClassVar[Mapping[str, Any]] = {"topology": "broadcast"}
    timeout = 8.0
    patience = 1.0
    late = "in time? (the group was made without it, for workers: 1)"
    loss = "the group is made again without it, for workers: 1"


def starved(worker: Worker, left: int) -> int | None:
    """Receive with so few descriptors left."""
    with few_descriptors(left):
        return worker.receive(20.0)


def serve(receiver: Receiver) -> None:
    while True:
        receiver.receive(20.0)


def serve_until_the_end(receiver: Receiver) -> None:
    with suppress(SenderLostError):
        serve(receiver)


def train(worker: Worker, options: Mapping[str, Any]) -> Any:
    """Make a sender in a worker."""
    sender = Sender("dist", weights_of(0.0), num_workers=1, **options)
    worker.model = sender
    return sender.address(0)


def send(worker: Worker, value: float, number: signal.Signals | None) -> None:
    """Send from a worker, and have its process hurt in the middle."""
    gate = None if number is None else once(lambda: os.kill(os.getpid(), number))
    worker.model.send(weights_of(value, gate))


def resources() -> tuple[str, ...]:
    """Return what a process has."""
    process = psutil.Process()
    listening = [c.laddr for c in process.net_connections("tcp") if c.status == "LISTEN"]
    threads = [f"thread {i}" for i in range(count_threads())]
    return *map(str, listening), *threads, *(f"fd {i}" for i in range(process.num_fds()))


def dist(model: Any, **options: Any) -> Sender:
    return Sender("dist", model, num_workers=1, **options)


def receiver_of(sender: Sender) -> Receiver:
    return Receiver(sender.address(0), weights_of(0.0))


SENT: list[dict[str, Any]] = [{"shared_memory": False}, {"topology": "broadcast"}]


@pytest.mark.parametrize("options", [{}, *SENT], ids=str)
class TestPacking:
    def test_weights_that_cannot_be_packed(self, options: dict[str, Any]) -> None:
        def fail() -> None:
            raise RuntimeError("cannot be read")

        target = weights_of(0.0)
        with (
            dist(weights_of(1.0), **options) as sender,
            Receiver(sender.address(0), target) as receiver,
        ):
            pending = sender.send_async()
            assert receiver.receive() == 1
            pending.wait()
            received: list[int | None] = []
            waiting = threading.Thread(target=lambda: received.append(receiver.receive(20.0)))
            waiting.start()
            with pytest.raises(SendError, match="cannot be read"):
                sender.send(weights_of(8.0, once(fail)))
            assert all((tensor == 1).all() for tensor in target.values())
            # The one that waits does not notice, and gets the next version.
            assert not received
            assert sender.send(weights_of(3.0)).updated == (0,)
            waiting.join()
            assert received == [3]
            assert all((tensor == 3).all() for tensor in target.values())
            with pytest.raises(SendError, match="cannot be read"):
                sender.send(weights_of(8.0, once(fail)))
            assert receiver.receive(0) is None

    def test_closed_meanwhile(self, options: dict[str, Any]) -> None:
        target = weights_of(0.0)
        with (
            dist(weights_of(1.0), **options) as sender,
            Receiver(sender.address(0), target) as receiver,
        ):
            lost: list[BaseException] = []

            def wait() -> None:
                try:
                    serve(receiver)
                except SenderLostError as error:
                    lost.append(error)

            serving = threading.Thread(target=wait)
            serving.start()
            with pytest.raises(SendError, match="the sender was closed"):
                sender.send(weights_of(2.0, once(sender.close)))
            serving.join()
            assert "the sender was closed" in str(lost)
        assert all((tensor == 0).all() for tensor in target.values())


@pytest.mark.parametrize("options", SENT, ids=str)
def test_what_was_given_up_has_its_memory_to_itself(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collective may continue writing to it, while a later version comes."""
    allocated: list[int] = []
    allocate = Link.allocate

    def noted(link: Link, nbytes: int) -> Block:
        allocated.append(threading.get_ident())
        return allocate(link, nbytes)

    def fail() -> None:
        raise RuntimeError("cannot be read")

    monkeypatch.setattr(Link, "allocate", noted)
    with (
        dist(weights_of(1.0), **options) as sender,
        Receiver(sender.address(0), weights_of(0.0)) as receiver,
    ):
        serving = threading.Thread(target=serve_until_the_end, args=(receiver,))
        serving.start()
        sender.send()
        assert allocated.count(serving.ident or 0) == 1
        with pytest.raises(SendError, match="cannot be read"):
            sender.send(weights_of(8.0, once(fail)))
        sender.send(weights_of(3.0))
        assert allocated.count(serving.ident or 0) == 2
        sender.close()
        serving.join()


@pytest.mark.parametrize("options", SENT, ids=str)
def test_a_worker_without_memory_for_a_version_says_so(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, allocate = threading.get_ident(), Link.allocate

    def none_left(link: Link, nbytes: int) -> Block:
        if threading.get_ident() == mine:
            raise CapacityError(f"{nbytes} bytes of memory cannot be allocated")
        return allocate(link, nbytes)

    weights = weights_of(0.0)
    with (
        dist(weights_of(1.0), **options) as sender,
        Receiver(sender.address(0), weights) as receiver,
    ):
        with monkeypatch.context() as patch:
            patch.setattr(Link, "allocate", none_left)
            pending = sender.send_async()
            with pytest.raises(CapacityError):
                receiver.receive()
        with pytest.raises(SendError, match=r"keeps the one it had(?s:.*)cannot be allocated"):
            pending.wait()
        pending = sender.send_async()
        assert receiver.receive() == 2
        assert pending.wait().updated == (0,)
        assert weights["last"].eq(1.0).all()
