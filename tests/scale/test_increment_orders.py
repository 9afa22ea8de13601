"""Increments in random orders of sends, misses, deaths and damage, over transports of one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from chaos_kit.increment_orders import run_order

from sync_core import (
    Delivery,
    Payload,
    ReceiverTransport,
    SenderTransport,
    TransportContext,
    hookimpl,
)
from sync_core.transports import Notice
from sync_testing import Loopback, LoopbackSender

pytestmark = pytest.mark.timeout(110)


class Far(Loopback):
    """As if its workers were elsewhere."""

    capabilities = Loopback.capabilities | {"cross_process"}


class Silent(Far):
    """A third party's: it keeps the newest payload for any worker, and reports nothing."""

    @hookimpl
    def create_transport(self, context: TransportContext) -> SenderTransport | ReceiverTransport:
        transport = super().create_transport(context)
        if isinstance(transport, LoopbackSender):
            transport.roster._notify = ignore
        return transport


def ignore(worker_id: int, notice: Notice) -> None: ...


class DamagingSender(LoopbackSender):
    """Changes a byte of every second increment on its way."""

    def send(self, payload: Payload, worker_ids: Sequence[int]) -> Mapping[int, Delivery]:
        deliveries = super().send(payload, worker_ids)
        wanted = self.roster.wanted(worker_ids[0])
        if payload.base and payload.version % 2 and wanted is not None:
            wanted.content.tensors[0][self.place % payload.tensors[0].numel()] ^= 1
            self.place += 1
        return deliveries

    place = 0


class Damaging(Far):
    @hookimpl
    def create_transport(self, context: TransportContext) -> SenderTransport | ReceiverTransport:
        if context.side == "sender":
            return DamagingSender(context)
        return super().create_transport(context)


@pytest.mark.parametrize("scheme", [Far, Silent, Damaging])
def test_every_worker_that_counts_as_current_equals_the_trainer(scheme: Any) -> None:
    for seed in range(8):
        run_order(seed, scheme, {}, at_once=True)


@pytest.mark.parametrize(
    ("scheme", "options"),
    [("file", {"poll": 0.001}), ("dist", {"shared_memory": False}), ("shm", {})],
)
def test_orders_over_real_transports(scheme: str, options: dict[str, Any], tmp_path: Path) -> None:
    if scheme == "file":
        options = {**options, "directory": str(tmp_path)}
    for seed in range(100, 102):
        run_order(seed, partial(str, scheme), options)
