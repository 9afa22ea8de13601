"""The moments at which a worker in the middle of a batch looks for weights."""

from __future__ import annotations

import time
from types import SimpleNamespace

from sync_collector.testing import Scale
from sync_collector.worker_models import WorkerModels
from sync_core import (
    Payload,
    ReceiverTransport,
    Sender,
    SenderTransport,
    TransportContext,
    hookimpl,
)
from sync_testing import Loopback, LoopbackReceiver, LoopbackSender


class AsksFirst(LoopbackReceiver):
    """Takes its time to ask for what comes next; whether that has come is seen at once."""

    looks = 0

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        self._asked = False

    def receive(self, timeout: float) -> Payload | None:
        AsksFirst.looks += 1
        if not self._asked:
            time.sleep(0.02)
        payload = super().receive(timeout)
        self._asked = payload is None
        return payload


class AsksAlways(LoopbackReceiver):
    """Takes its time."""

    def receive(self, timeout: float) -> Payload | None:
        time.sleep(0.1)
        return super().receive(timeout)


class Asking(Loopback):
    """The scheme with such a receiver."""

    def __init__(self, receiver_class: type[LoopbackReceiver]) -> None:
        self._receiver_class = receiver_class

    @hookimpl
    def create_transport(self, context: TransportContext) -> SenderTransport | ReceiverTransport:
        return (
            LoopbackSender(context) if context.side == "sender" else self._receiver_class(context)
        )


def looks(models: WorkerModels) -> int:
    """Return how often a worker looks in its next two steps."""
    before = AsksFirst.looks
    models.between_steps()
    models.between_steps()
    return AsksFirst.looks - before


def test_what_it_takes_to_ask_for_weights_is_not_what_a_look_takes() -> None:
    models = WorkerModels(SimpleNamespace(policy=Scale()))
    with Sender(Asking(AsksFirst), Scale(), num_workers=1) as sender:
        models.connect("policy", sender.address(0), single=True)
        # It asks, and looks again: from then on that is known to take no time.
        assert looks(models) == 2
        sender.send_async()
        while models.version == 0:
            models.between_steps()
        assert looks(models) == 2
        models.close()


def test_whoever_is_told_that_something_has_come_looks_at_once() -> None:
    models = WorkerModels(SimpleNamespace(policy=Scale()))
    with Sender(Asking(AsksAlways), Scale(), num_workers=1) as sender:
        models.connect("policy", sender.address(0), single=True)
        # From the second look on it is known how long they take.
        models.between_steps()
        models.between_steps()
        sender.send_async()
        assert models.between_steps() == 0
        models.look_soon()
        assert models.between_steps() == 1
        models.close()
