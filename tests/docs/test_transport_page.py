"""The transport of write-a-transport.md, and one that keeps its own table of workers."""

from __future__ import annotations

import re
import secrets
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakValueDictionary

import pytest

from sync_core import (
    Answer,
    Delivery,
    Payload,
    ReceiverTransport,
    SenderLostError,
    SenderTransport,
    TransportContext,
    WorkerError,
    WorkerLostError,
    hookimpl,
)
from sync_core.transports import Block, Notice
from sync_testing import SchemeConformance

pytestmark = pytest.mark.long
PAGE = Path(__file__).parents[2] / "docs" / "authors" / "write-a-transport.md"


def _of_page() -> Any:
    block = re.search(r"```python\n(# same_process\.py\n.*?)```", PAGE.read_text(), re.DOTALL)
    assert block is not None
    # A module, as addresses name the classes in it when they are pickled.
    sys.modules["same_process"] = module = ModuleType("same_process")
    exec(block[1], module.__dict__)
    return module.SameProcess()


class TestOfThePage(SchemeConformance):
    scheme = _of_page()
    group = "thread"


@dataclass
class _Place:
    """A table of workers, which the old interface left to a transport."""

    payload: Payload | None
    delivery: Delivery | None = None
    reader: object = None
    lost: str | None = None


@dataclass(frozen=True)
class _NoOptions:
    pass


_senders: WeakValueDictionary[str, OldSender] = WeakValueDictionary()


class OldScheme:
    """A scheme of the old interface: `send`, `add_worker` and `remove_worker`, and no roster."""

    capabilities = frozenset({"broadcast", "late_join"})

    @hookimpl
    def create_transport(self, context: TransportContext) -> SenderTransport | ReceiverTransport:
        return OldReceiver(context) if context.side == "receiver" else OldSender(context)


class OldSender(SenderTransport):
    def __init__(self, context: TransportContext) -> None:
        context.parse_options(_NoOptions)
        self.notify = context.notify
        self.news = threading.Condition()
        self.places: dict[int, _Place] = {i: _Place(None) for i in context.worker_ids}
        self._to_all: Payload | None = None
        self._name = secrets.token_hex(8)
        _senders[self._name] = self

    def address(self, worker_id: int) -> str:
        return self._name

    def send(self, payload: Payload, worker_ids: Sequence[int]) -> dict[int, Delivery]:
        block = Block.allocate(payload.nbytes)
        payload.pack(block)
        copy = Payload.unpack(block, payload.version)
        deliveries = {i: Delivery(i, copy.version, copy.nbytes) for i in worker_ids}
        with self.news:
            if deliveries.keys() >= self.places.keys():
                self._to_all = copy
            for worker_id, delivery in deliveries.items():
                place = self.places.get(worker_id)
                if place is None:
                    delivery.fail(WorkerError(worker_id, "was removed from the sender"))
                    continue
                place.payload, place.delivery = copy, delivery
                if place.lost is not None:
                    delivery.fail(WorkerLostError(worker_id, place.lost))
            self.news.notify_all()
        return deliveries

    def add_worker(self, worker_id: int, worker: Any = None) -> None:
        self.places[worker_id] = _Place(self._to_all)

    def remove_worker(self, worker_id: int) -> None:
        with self.news:
            place = self.places.pop(worker_id)
            if place.delivery is not None:
                place.delivery.fail(WorkerError(worker_id, "was removed from the sender"))
            self.news.notify_all()

    def close(self) -> None:
        for worker_id in tuple(self.places):
            self.remove_worker(worker_id)


class OldReceiver(ReceiverTransport):
    def __init__(self, context: TransportContext) -> None:
        sender = _senders.get(context.endpoint)
        if sender is None or context.worker_id not in sender.places:
            raise SenderLostError("the sender was closed, or the worker removed from it")
        self._sender = sender
        self._worker_id = context.worker_id
        self._seen = 0
        self._woken = False
        with sender.news:
            place = sender.places[self._worker_id]
            place.reader, place.lost = self, None
            sender.notify(self._worker_id, Notice("connected"))
            sender.news.notify_all()

    def receive(self, timeout: float) -> Payload | None:
        with self._sender.news:
            self._sender.news.wait_for(lambda: self._woken or self._newer(), timeout)
            payload = self._newer()
            self._seen = self._seen if payload is None else payload.version
            return payload

    def acknowledge(self, answer: Answer) -> None:
        with self._sender.news:
            place = self._sender.places.get(self._worker_id)
            if place is None or place.reader is not self:
                return
            if place.delivery is not None and place.delivery.version == answer.version:
                place.delivery.acknowledge(answer)
            elif answer.error is None:
                self._sender.notify(self._worker_id, Notice("acknowledged", answer.version))

    def wake(self) -> None:
        with self._sender.news:
            self._woken = True
            self._sender.news.notify_all()

    def leave(self, reason: str) -> None:
        with self._sender.news:
            place = self._sender.places.get(self._worker_id)
            if place is not None and place.reader is self and place.lost is None:
                place.lost = reason
                self._sender.notify(self._worker_id, Notice("lost", reason=reason))
                if place.delivery is not None:
                    place.delivery.fail(WorkerLostError(self._worker_id, reason))

    def close(self) -> None:
        self.leave("closed its receiver")

    def _newer(self) -> Payload | None:
        place = self._sender.places.get(self._worker_id)
        if place is None:
            raise SenderLostError("the sender was closed, or the worker removed from it")
        if place.reader is not self:
            raise SenderLostError("another receiver was given the same address")
        newest = place.payload
        return newest if newest is not None and newest.version > self._seen else None


class TestOldInterface(SchemeConformance):
    scheme = OldScheme()
    group = "thread"
