"""A trainer of one rank, whose workers have whole models, is a sender as any other."""

from __future__ import annotations

import pytest

from sync_core import (
    Address,
    Ranks,
    ReceiverTransport,
    SenderTransport,
    TransportContext,
    hookimpl,
)
from sync_core.shards.plan import whole
from sync_core.shards.receiver import JoinedReceiver, JoinPlan, RankSource
from sync_core.shards.request import HeldTensor, Holding, Request
from sync_core.shards.sender import ShardedScheme, ShardedSender, inner_stack
from sync_testing.schemes.faults import FaultCases
from sync_testing.schemes.lifetime import LifetimeCases

pytestmark = pytest.mark.timeout(90)

_RANKS = Ranks(0, 1)


class OneRank:
    """The transports of a sharded trainer under addresses that need not be joined."""

    capabilities = frozenset({"broadcast", "late_join"})

    @hookimpl
    def create_transport(self, context: TransportContext) -> SenderTransport | ReceiverTransport:
        """The sender's or a receiver's side."""
        layout = context.layout
        assert layout is not None
        tensors = tuple(
            HeldTensor(spec.name, spec.dtype, whole(spec.shape), spec.shape)
            for spec in layout.specs
        )
        if context.side == "sender":
            holding = Holding(_RANKS, tensors, layout.aliases)
            return ShardedSender(context, "thread", inner_stack("thread")[1], holding)
        address = Address(
            scheme=ShardedScheme("thread", _RANKS),
            layers=(),
            layouts=(),
            options={},
            worker_id=context.worker_id,
            model_id=context.model_id,
            endpoint=context.endpoint,
            token=context.token,
            strategy="tensordict",
            zero_copy=False,
            partial=False,
            cast=False,
            timeout=context.timeout,
            layout=layout,
            source_layout=layout,
        )
        request = Request.of([(i, tensor.region) for i, tensor in enumerate(tensors)])
        source = RankSource(address, request, request.layout(tensors))
        origins = tuple((0, position) for position in range(len(tensors)))
        return JoinedReceiver(context, JoinPlan((source,), layout, origins))


class TestOneRank(FaultCases):
    """Faults, and workers that come late; other cases have partial updates."""

    scheme = OneRank()
    test_workers_come_and_go = LifetimeCases.test_workers_come_and_go_while_versions_are_sent
    test_late = LifetimeCases.test_a_worker_that_joins_late_gets_the_newest_version
    test_late_after_others = LifetimeCases.test_a_late_worker_gets_what_went_to_all
    test_removed_and_added_again = LifetimeCases.test_an_id_may_be_removed_and_added_again
    test_back_again = LifetimeCases.test_a_worker_that_comes_back_gets_the_newest_version
