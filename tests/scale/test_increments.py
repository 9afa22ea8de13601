"""Increments: what is refused, what a report says, and the rule of partial updates beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sync_core import (
    Delivery,
    OptionError,
    Payload,
    Receiver,
    ReceiverTransport,
    Sender,
    SendError,
    SenderTransport,
    SendReport,
    TransportContext,
    WorkerState,
    hookimpl,
)
from sync_plugin_scale import Increments
from sync_plugin_std import select
from sync_testing import Loopback, LoopbackSender

NAMES = ("a", "b", "c")


class Far(Loopback):
    """As if its workers were elsewhere."""

    capabilities = Loopback.capabilities | {"cross_process"}


def weights(value: float = 0.0) -> dict[str, Tensor]:
    return {name: torch.full((50,), value) for name in NAMES}


def send(sender: Sender, *receivers: Receiver, **arguments: Any) -> SendReport:
    pending = sender.send_async(**arguments)
    while not pending.done():
        for receiver in receivers:
            receiver.receive(0)
    return pending.wait(10.0)


@pytest.mark.parametrize(
    ("scheme", "options", "message"),
    [
        ("none", {}, "scheme 'none' .* moves nothing"),
        ("thread", {}, "scheme 'thread' .* does not leave this process"),
        ("shm", {"zero_copy": True}, "'increments::shm' .*cannot zero_copy"),
        ("shm", {"below": "yes"}, "below must be a number between 0 and 1, got .yes."),
    ],
)
def test_what_is_refused(scheme: str, options: dict[str, Any], message: str) -> None:
    def make() -> Sender:
        below = options.pop("below", 0.3)
        return Sender(Increments(scheme, below), weights(), num_workers=1, **options)

    with pytest.raises(OptionError, match=message):
        make()


def test_a_report_says_what_travelled() -> None:
    model = weights()
    with Sender(Increments(Far()), model, num_workers=2) as sender:
        receivers = [Receiver(sender.address(i), weights(1.0)) for i in range(2)]
        first = send(sender, *receivers)
        assert {(r.base, r.changed) for r in first.workers.values()} == {(0, 1.0)}
        model["b"][4] += 1
        second = send(sender, *receivers, worker_ids=[0])
        assert second.workers[0].base == 1
        assert 0 < second.workers[0].changed < 0.01
        assert second.nbytes < first.workers[0].nbytes / 2
        model["b"][:] += 1
        third = send(sender, *receivers)
        assert {r.base for r in third.workers.values()} == {0}


def test_whole_versions_from_time_to_time() -> None:
    model = weights()
    with Sender(Increments(Far(), whole_every=2), model, num_workers=1) as sender:
        receiver = Receiver(sender.address(0), weights(1.0))
        bases = []
        for _ in range(5):
            bases.append(send(sender, receiver).workers[0].base)
            model["a"][0] += 1
    assert bases == [0, 1, 0, 3, 0]


def test_bytes_between_tensors_do_not_matter_to_a_whole_version() -> None:
    model, copy = weights(), weights(1.0)
    with Sender(Increments(Far(), whole_every=1), model, num_workers=1) as sender:
        receiver = Receiver(sender.address(0), copy)
        send(sender, receiver)
        transport: Any = receiver._connection.transport
        transport.kept.body.fill(77)
        send(sender, receiver)
        assert torch.equal(copy["c"], model["c"])


def test_a_whole_version_that_is_damaged_on_its_way_is_an_error_once() -> None:
    class DamagingSender(LoopbackSender):
        def send(self, payload: Payload, worker_ids: Any) -> Mapping[int, Delivery]:
            deliveries = super().send(payload, worker_ids)
            wanted = self.roster.wanted(0)
            assert wanted is not None
            if payload.version == 1:
                wanted.content.tensors[1][3] = 9.0
            return deliveries

    class Damaging(Far):
        @hookimpl
        def create_transport(
            self, context: TransportContext
        ) -> SenderTransport | ReceiverTransport:
            if context.side == "sender":
                return DamagingSender(context)
            return super().create_transport(context)

    model, copy = weights(), weights(1.0)
    with Sender(Increments(Damaging()), model, num_workers=1) as sender:
        receiver = Receiver(sender.address(0), copy)
        with pytest.raises(SendError, match="has the checksum"):
            send(sender, receiver)
        assert copy["b"][3] == 1.0
        assert send(sender, receiver).workers[0].base == 0
        assert torch.equal(copy["b"], model["b"])


OPERATIONS = st.one_of(
    st.tuples(st.just("send"), st.sampled_from([None, (0,), (1,)])),
    st.tuples(st.just("a"), st.sampled_from([None, (0,), (1,)])),
    st.tuples(st.just("b"), st.sampled_from([None, (0,), (1,)])),
    st.tuples(st.just("by hand"), st.sampled_from([None, (0,), (1,)])),
    st.tuples(st.just("miss"), st.sampled_from([(0,), (1,)])),
    st.tuples(st.just("come back"), st.sampled_from([(0,), (1,)])),
)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(OPERATIONS, max_size=8), st.booleans())
def test_the_rule_against_a_model_that_keeps_every_version(
    operations: list[tuple[str, Any]], increments: bool
) -> None:
    """After each send, a worker that is reported as updated has all that its version is made of."""
    model = weights()
    # The weights given so far, of which every version consists.
    given_so_far = weights()
    versions: dict[int, dict[str, Tensor]] = {}
    copies = [weights(-1.0), weights(-1.0)]
    scheme = Increments(Far()) if increments else Far()
    with Sender(scheme, model, num_workers=2, layers=[select("*")], timeout=10) as sender:
        receivers = [Receiver(sender.address(i), copies[i]) for i in range(2)]
        for number, (kind, ids) in enumerate(operations, start=1):
            if kind == "come back":
                copies[ids[0]] = weights(-1.0)
                receivers[ids[0]] = Receiver(sender.address(ids[0]), copies[ids[0]])
                continue
            part: Any = None
            if kind in NAMES:
                model[kind][number] = number
                part = {kind: model[kind]}
            elif kind == "by hand":
                model["c"][number] = number
                part = {"c": model["c"].clone()}
            else:
                model["a"][number] = -number
            given_so_far.update({k: v.clone() for k, v in (part or model).items()})
            versions[number_of(sender)] = {k: v.clone() for k, v in given_so_far.items()}
            if kind == "miss":
                with pytest.raises(SendError):
                    sender.send_async(part, ids).wait(0.0)
                continue
            report = send(sender, *receivers, weights=part, worker_ids=ids)
            for worker_id in report.updated:
                check(copies[worker_id], versions[report.version])
            for worker_id, status in sender.workers.items():
                if status.state is WorkerState.CURRENT and status.version:
                    check(copies[worker_id], versions[status.version])


def number_of(sender: Sender) -> int:
    """The version that the next send makes."""
    return sender.version + 1


def check(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert all(torch.equal(found[name], expected[name]) for name in NAMES)
