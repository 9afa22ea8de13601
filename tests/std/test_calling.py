"""Transports that call their workers: versions, failures, and workers that come and go."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sync_core import (
    BindContext,
    Layout,
    OptionError,
    Payload,
    PluginNotFoundError,
    ReceiverTransport,
    Sender,
    SendError,
    SenderTransport,
    TransportContext,
    WorkerError,
    WorkerState,
    hookimpl,
)
from sync_core.transports import Notice
from sync_plugin_std.calls import (
    CalledReceivers,
    CalledWorker,
    CallingTransport,
    DeliveryOutcome,
    DeliveryRequest,
    HandedTransport,
    PointToPointTransport,
)
from sync_testing import eventually
from sync_testing.fuzz import VALUES

pytestmark = pytest.mark.timeout(60)


class Agent:
    """A worker in this process, with its own thread for calls."""

    def __init__(self) -> None:
        self.policy = linear(0.0)
        self.requests: list[DeliveryRequest] = []
        self.fails: list[Exception] = []
        self._receivers = CalledReceivers()
        self.thread = ThreadPoolExecutor(1)

    def call(self, request: DeliveryRequest, content: Any) -> Future[DeliveryOutcome]:
        return self.thread.submit(self._deliver, request, content)

    def begin_again(self) -> None:
        """Be as another process would be."""
        self.policy, self._receivers = linear(0.0), CalledReceivers()

    def value(self) -> float:
        return self.policy.weight[0, 0].item()

    def _deliver(self, request: DeliveryRequest, content: Any) -> DeliveryOutcome:
        self.requests.append(request)
        if self.fails:
            raise self.fails.pop()
        return self._receivers.deliver(request, content, context=self, where="in an agent")


class Calls(CallingTransport):
    def call(
        self, worker: CalledWorker, request: DeliveryRequest, content: Any
    ) -> Future[DeliveryOutcome]:
        called: Future[DeliveryOutcome] = worker.handle.call(request, content)
        return called

    def explain(
        self, worker: CalledWorker, content: Any, error: Exception
    ) -> DeliveryOutcome | WorkerError:
        if isinstance(error, ConnectionError):
            return DeliveryOutcome(known=False)
        if isinstance(error, KeyError):
            raise ZeroDivisionError("no way to explain it")
        return super().explain(worker, content, error)


class CallsScheme:
    capabilities = frozenset({"late_join"})

    @hookimpl
    def create_transport(self, context: TransportContext) -> SenderTransport | ReceiverTransport:
        if isinstance(context.endpoint, HandedTransport):
            return context.endpoint
        return Calls(context, context.workers)


def linear(value: float) -> nn.Linear:
    module = nn.Linear(2, 2)
    for parameter in module.parameters():
        nn.init.constant_(parameter, value)
    return module


@pytest.fixture
def agents() -> Iterator[list[Agent]]:
    made = [Agent(), Agent()]
    yield made
    for agent in made:
        agent.thread.shutdown()


def to(agents: list[Agent], value: float = 1.0, **options: Any) -> Sender:
    return Sender(CallsScheme(), linear(value), workers=agents, timeout=10.0, **options)


def test_a_receiver_is_made_once(agents: list[Agent]) -> None:
    with to(agents) as sender:
        for value in (1.0, 2.0):
            assert sender.send(linear(value)).updated == (0, 1)
            assert [agent.value() for agent in agents] == [value] * 2
        addresses = [request.address for request in agents[0].requests]
        assert [address is None for address in addresses] == [False, True]
    assert eventually(lambda: [r.version for r in agents[0].requests] == [1, 2, 0])
    assert "sync-calls" not in {thread.name for thread in threading.enumerate()}


def test_workers_without_handles_are_refused() -> None:
    with pytest.raises(OptionError, match=r"got 0 for 2; type: Sender\(…, workers=\[…\]\)"):
        Sender(CallsScheme(), linear(1.0), num_workers=2)


def test_requests_do_not_print_their_token() -> None:
    assert "c0ffee" not in repr(DeliveryRequest(token="c0ffee", model_id="policy"))


def test_a_call_that_is_made_again(agents: list[Agent]) -> None:
    agents[0].fails = [ConnectionError(), ConnectionError()]
    with to(agents) as sender:
        assert sender.send().updated == (0, 1)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("out of order"), "worker 0: could not run the delivery: out of order"),
        (KeyError("k"), r"could not run the delivery: 'k'; then .* ZeroDivisionError\('no way"),
    ],
)
def test_an_error_of_a_call_fails_its_send_and_no_other(
    agents: list[Agent], error: Exception, message: str
) -> None:
    agents[0].fails = [error]
    with to(agents) as sender:
        with pytest.raises(SendError, match=message) as failure:
            sender.send()
        assert failure.value.report.updated == (1,)
        assert sender.send(linear(2.0)).updated == (0, 1)


def test_an_error_of_the_transport_ends_no_thread(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [OSError("no descriptor")]

    def raise_once(*_: object) -> None:
        if errors:
            raise errors.pop()

    monkeypatch.setattr(Calls, "joined", raise_once)
    with to(agents[:1]) as sender:
        with pytest.raises(SendError, match="result of its call is lost: OSError"):
            sender.send()
        assert sender.send(linear(2.0)).updated == (0,)


@pytest.mark.parametrize(
    "made",
    [lambda v: v, DeliveryOutcome, lambda v: DeliveryOutcome(known=v)],
    ids=["", "answer", "known"],
)
@pytest.mark.long
def test_a_worker_whose_calls_return_what_they_should_not(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch, made: Callable[[Any], Any]
) -> None:
    with to(agents) as sender:
        for number, value in enumerate(VALUES):
            with monkeypatch.context() as patch:
                patch.setattr(agents[1], "_deliver", lambda *_, value=value: made(value))
                pending = sender.send_async(linear(float(number)))
                healthy = pending.unanswered.get(0)
                assert healthy is None or healthy.wait(60.0)
                with suppress(SendError):
                    pending.wait(0.2)
                assert agents[0].value() == float(number)
                assert sender.workers[0].state == "current"
        assert sender.send(linear(-1.0)).updated == (0, 1)


@pytest.mark.parametrize("known", [False, 0, None])
def test_a_worker_that_makes_no_receiver_is_not_called_without_end(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch, known: Any
) -> None:
    monkeypatch.setattr(agents[0], "_deliver", lambda *_: DeliveryOutcome(known=known))
    with to(agents[:1]) as sender, pytest.raises(SendError, match="and has no receiver"):
        sender.send()


def test_the_newer_of_two_senders_takes_over(agents: list[Agent]) -> None:
    with to(agents) as old:
        old.send()
        with to(agents[:1], 2.0) as new:
            new.send()
            with pytest.raises(SendError, match="in an agent: another sender has taken over 'pol"):
                old.send()
        assert eventually(lambda: not agents[0].requests[-1].version)
        assert old.send(linear(3.0)).updated == (0, 1)


class NotInstalled:
    """A layer that its sender has, and no worker."""

    def bind(self, context: BindContext) -> NotInstalled:
        if context.side == "receiver":
            raise PluginNotFoundError("there is no such layer here")
        return self

    @hookimpl(wrapper=True)
    def apply_weights(self) -> Generator[None, bool, bool]:
        return (yield)


def test_a_sender_that_could_not_take_over_gives_the_place_back(agents: list[Agent]) -> None:
    with to(agents) as old:
        old.send()
        with to(agents[:1], layers=[NotInstalled()]) as new:
            for _ in range(2):
                with pytest.raises(SendError, match="in an agent: PluginNotFoundError: there is"):
                    new.send()
        assert eventually(lambda: not agents[0].requests[-1].version)
        assert old.send(linear(3.0)).updated == (0, 1)


def test_a_model_that_does_not_fit_is_not_said_to_be_current(agents: list[Agent]) -> None:
    with to(agents[:1]) as first:
        first.send()
    agents[0].policy = nn.Linear(3, 3)
    with to(agents[:1]) as second:
        for _ in range(2):
            with pytest.raises(SendError, match="in an agent: "):
                second.send()


def test_a_late_worker_gets_the_newest_version(agents: list[Agent]) -> None:
    with to(agents[:1], 4.0) as sender:
        sender.send()
        assert sender.add_worker(worker=agents[1]) == 1
        assert eventually(lambda: sender.workers[1].version == 1)
        assert agents[1].value() == 4.0


def test_a_lost_worker_is_called_again_without_another_send(agents: list[Agent]) -> None:
    with to(agents[:1], 4.0) as sender:
        sender.send()
        states: list[WorkerState | None] = []
        sender.subscribe(lambda event: states.append(event.after))
        agents[0].begin_again()
        transport = sender._pipeline.transport
        assert isinstance(transport, CallingTransport)
        transport.lose(0, "has ended")
        transport.lose(1, "is not served")
        found = [WorkerState.LOST, WorkerState.BEHIND, WorkerState.CURRENT]
        assert eventually(lambda: states == found)
        assert agents[0].value() == 4.0


def test_a_worker_that_is_lost_during_a_call_is_not_called_twice(agents: list[Agent]) -> None:
    with to(agents[:1], 4.0) as sender:
        sender.send()
        goes_on = threading.Event()
        agents[0].thread.submit(goes_on.wait, 30)
        pending = sender.send_async()
        transport = sender._pipeline.transport
        assert isinstance(transport, CallingTransport)
        transport.lose(0, "has ended")
        assert eventually(lambda: sender.workers[0].state == "lost")
        goes_on.set()
        assert pending.wait().updated == (0,)
        assert sender.send().updated == (0,)
        assert [request.version for request in agents[0].requests] == [1, 2, 3]


@pytest.mark.parametrize("on_failure", ["raise", "drop"])
def test_the_only_worker_is_replaced(agents: list[Agent], on_failure: Any) -> None:
    with Sender(
        CallsScheme(), linear(1.0), workers=agents[:1], timeout=10.0, on_failure=on_failure
    ) as sender:
        agents[0].fails = [ValueError("is broken")]
        if on_failure == "drop":
            for _ in range(2):
                with pytest.raises(SendError, match=r"sender\.add_worker\(worker=…\)") as failure:
                    sender.send()
                assert failure.value.report.dropped == (0,)
        else:
            sender.remove_worker(0)
        assert sender.all_worker_ids() == ()
        with pytest.raises(OptionError, match=r"by their handles: add_worker\(worker=…\)"):
            sender.add_worker()
        added = sender.add_worker(worker=agents[1])
        assert sender.send().updated == (added,)
        assert agents[1].value() == 1.0


def test_no_transport_is_made_when_all_workers_were_removed(agents: list[Agent]) -> None:
    with Sender(CallsScheme(), workers=agents[:1]) as sender:
        sender.remove_worker(0)
        with pytest.raises(OptionError, match="all workers were removed"):
            sender.send(linear(1.0))
        sender.add_worker(worker=agents[1])
        assert sender.send(linear(2.0)).updated == (1,)


class Posted(PointToPointTransport):
    def address(self, worker_id: int) -> None: ...

    def send_to(self, worker_id: int, payload: Payload) -> None: ...


class Asks(Posted):
    """Asks whether it may give up, when the test says so."""

    def __init__(self) -> None:
        self.began, self.goes_on = threading.Event(), threading.Event()
        self.told: queue.Queue[bool] = queue.Queue()
        self.notices: queue.Queue[tuple[int, Notice]] = queue.Queue()
        super().__init__([0, 1], lambda *notice: self.notices.put(notice))

    def send_to(self, worker_id: int, payload: Payload) -> None:
        self.began.set()
        self.goes_on.wait(30)
        self.told.put(self.superseded(worker_id))


@pytest.mark.parametrize("returns", [False, True])
def test_what_is_sent_to_a_removed_worker_is_given_up(returns: bool) -> None:
    transport = Asks()
    transport.send(Payload.from_bytes(payload_bytes(), 1), [0])
    assert transport.began.wait(30)
    transport.remove_worker(0)
    if returns:
        transport.add_worker(0)
    transport.goes_on.set()
    assert transport.told.get(timeout=30)
    transport.close()


def test_late_commits_and_those_of_added_workers_are_reported() -> None:
    transport = Asks()
    late = transport.send(Payload.from_bytes(payload_bytes(), 1), [0])[0]
    assert transport.began.wait(30)
    newest = transport.send(Payload.from_bytes(payload_bytes(), 2), [0, 1])
    transport.goes_on.set()
    assert transport.notices.get(timeout=30) == (0, Notice("acknowledged", 1))
    assert all(delivery.wait(30) for delivery in newest.values())
    assert not late.ended
    transport.add_worker(2)
    assert transport.notices.get(timeout=30) == (2, Notice("acknowledged", 2))
    transport.close()


@contextmanager
def meanwhile(function: Callable[[], None]) -> Iterator[None]:
    """Call a function again and again in a thread."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.is_set():
            function()

    with ThreadPoolExecutor(1) as threads:
        repeating = threads.submit(repeat)
        try:
            yield
        finally:
            ended.set()
        repeating.result()


@pytest.mark.parametrize("kind", ["calls", "posted"])
def test_workers_come_and_go_while_versions_are_sent(kind: str) -> None:
    context: Any = SimpleNamespace(
        worker_ids=(0,), token="t", model_id="policy", models=(), timeout=10.0
    )
    context.make_address = lambda **_: None
    context.notify = lambda *_: None
    handle = SimpleNamespace(call=lambda *_: done())
    transport: SenderTransport = Calls(context, [handle]) if kind == "calls" else Posted([0])

    def come_and_go() -> None:
        transport.add_worker(1, handle)
        transport.remove_worker(1)

    payload = Payload.from_bytes(payload_bytes(), 1)
    with meanwhile(come_and_go):
        for _ in range(300):
            deliveries = transport.send(payload, [0, 1])
            assert all(delivery.wait(10) for delivery in deliveries.values())
    assert transport.send(payload, [0])[0].error is None
    gone = transport.send(payload, [1])[1]
    assert gone.wait(10)
    assert "was removed from the sender" in str(gone.error)
    transport.close()


def done() -> Future[DeliveryOutcome]:
    future: Future[DeliveryOutcome] = Future()
    future.set_result(DeliveryOutcome({"version": 1}))
    return future


def payload_bytes() -> bytes:
    tensor = torch.ones(2)
    return Payload(1, Layout.of({"w": tensor}), (tensor,)).to_bytes()
