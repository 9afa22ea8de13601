"""Sharded trainers with the options of other senders: `verify`, `on_failure`, reports of both."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from tests.scale.test_late_shards import fill
from tests.scale.test_shards import address_of, like, send_all, trainer, weights
from tests.std.test_checksums import flipping_copies
from torch import nn

from sync_core import (
    CorruptionError,
    ReadbackError,
    Receiver,
    Sender,
    SendError,
    SendReport,
    WorkerState,
)
from sync_core.errors import AddressError
from sync_plugin_scale import Part, Sharded, join_addresses
from sync_plugin_scale.shards.reports import merge_reports

pytestmark = pytest.mark.timeout(60)


def errors_of(pending: Any) -> dict[int, Any]:
    with pytest.raises(SendError) as caught:
        pending.wait()
    return {i: result.error for i, result in caught.value.report.failed.items()}


@pytest.mark.parametrize("layers", [["checksum"], ["readback", "checksum"]])
def test_parts_that_were_changed_on_their_way_are_found(layers: list[str]) -> None:
    whole = weights(w=(4, 2), b=(4,))
    with trainer(whole, 2, layers=layers, timeout=20.0) as senders:
        model = like(whole)
        with Receiver(address_of(senders), model) as receiver:
            assert send_all(senders, [receiver]) == [1]
            assert torch.equal(model["w"], whole["w"])
            fill(senders, 2)
            pending = [sender.send_async() for sender in senders]
            transport = cast("Any", senders[1]._pipeline.transport)
            slot = max(transport._inner._publisher.slots, key=lambda slot: slot.version)
            slot.block.memory[
                8 + int.from_bytes(bytes(slot.block.memory[:8].tolist()), "little")
            ] ^= 1
            with pytest.raises(CorruptionError, match=r"rank 1 has sent.*: 'w\[2:4, 0:2\]' differ"):
                receiver.receive()
            assert all(torch.equal(model[name], whole[name]) for name in whole)
            for each in pending:
                (error,) = errors_of(each).values()
                assert isinstance(error, CorruptionError)
                assert "rank 1 has sent" in str(error)
            assert send_all(senders, [receiver]) == [3]
            assert all((tensor == 2).all() for tensor in model.values())


def test_a_model_that_holds_other_bits_than_were_written_is_bad_for_every_rank() -> None:
    whole = weights(w=(4, 2))
    with trainer(whole, 2, layers=["readback"], timeout=20.0) as senders:
        model = like(whole)
        with Receiver(address_of(senders), model) as receiver:
            pending = [sender.send_async() for sender in senders]
            with flipping_copies(), pytest.raises(ReadbackError, match="'w"):
                receiver.receive()
            for sender, each in zip(senders, pending, strict=True):
                assert isinstance(errors_of(each)[0], ReadbackError)
                assert sender.workers[0].state is WorkerState.BAD
            assert send_all(senders, [receiver]) == [2]
            assert torch.equal(model["w"], whole["w"])


def test_ranks_that_verify_differently_do_not_join() -> None:
    addresses = [
        Sender(
            Sharded("thread", rank, 2, {"w": ((2 * rank, 2 * rank + 2),)}),
            {"w": torch.zeros(2)},
            num_workers=1,
            layers=layers,
        ).address(0)
        for rank, layers in enumerate(((), ("checksum",)))
    ]
    with pytest.raises(AddressError, match="ranks 0 and 1 differ in checksums: False and True"):
        join_addresses(addresses)


def send_to_one(senders: list[Sender], receiver: Receiver) -> SendReport:
    """The report of all ranks of a version that one of the workers commits."""
    pending = [sender.send_async() for sender in senders]
    receiver.receive()
    return merge_reports([each.wait() for each in pending])


def test_a_worker_that_fails_is_dropped_by_every_rank() -> None:
    whole = weights(w=(4, 2))
    with (
        trainer(whole, 2, num_workers=2, on_failure="drop", timeout=20.0) as senders,
        Receiver(address_of(senders, 0), like(whole)) as good,
    ):
        bad = Receiver(address_of(senders, 1), like(whole))
        assert send_all(senders, [good, bad]) == [1, 1]
        bad.close()
        report = send_to_one(senders, good)
        assert (report.updated, report.dropped, report.failed) == ((0,), (1,), {})
        assert "rank 0: closed its receiver" in str(report.workers[1].error)
        assert [sender.all_worker_ids() for sender in senders] == [(0,), (0,)]
        assert send_to_one(senders, good).workers.keys() == {0}


def test_a_worker_in_quarantine_gets_the_newest_version_when_it_comes_back() -> None:
    whole = weights(w=(4, 2))
    with (
        trainer(whole, 2, num_workers=2, on_failure="quarantine", timeout=20.0) as senders,
        Receiver(address_of(senders, 0), like(whole)) as good,
    ):
        bad = Receiver(address_of(senders, 1), like(whole))
        assert send_all(senders, [good, bad]) == [1, 1]
        bad.close()
        for _ in range(2):
            report = send_to_one(senders, good)
            assert (report.updated, report.quarantined, report.failed) == ((0,), (1,), {})
        model = {"w": torch.zeros(1, 2)}
        regions = {"w": ((3, 4), (0, 2))}
        with Receiver(address_of(senders, 1), Part(model, regions)) as back:
            assert back.receive() == 3
            assert torch.equal(model["w"], whole["w"][3:])
            pending = [sender.send_async() for sender in senders]
            assert [good.receive(), back.receive()] == [4, 4]
            report = merge_reports([each.wait() for each in pending])
            assert (report.updated, report.returned) == ((0, 1), (1,))


def test_a_failure_that_one_rank_raises_is_not_hidden_by_another() -> None:
    whole = weights(w=(4, 2))
    with trainer(whole, 2, num_workers=1, on_failure="drop", timeout=20.0) as senders:
        receiver = Receiver(address_of(senders), like(whole))
        send_all(senders, [receiver])
        receiver.close()
        reports = []
        for sender in senders:
            with pytest.raises(SendError) as failure:
                sender.send()
            reports.append(failure.value.report)
        (dropped, other) = reports
        raising = SendReport(
            other.version,
            other.seconds,
            {0: type(other.workers[0])(None, 0.0, 0, other.workers[0].error)},
        )
        assert merge_reports([dropped, other]).dropped == (0,)
        assert merge_reports([raising, dropped]).no_worker_left
        assert merge_reports([dropped, raising]).failed.keys() == {0}
        gone = SendReport(other.version, 0.0, {})
        assert merge_reports([gone, other]).updated == ()


def test_what_changes_alone_has_its_own_sender() -> None:
    """The way that the error about layers that leave tensors out names."""
    policy, model = nn.Linear(4, 4), nn.Linear(4, 4)
    with torch.no_grad():
        policy.weight.zero_()
    before = model.weight.clone()
    scheme = Sharded("thread", 0, 1)
    sender = Sender(scheme, {"bias": policy.bias}, num_workers=1, model_id="adapter")
    with sender, Receiver(address_of([sender]), {"bias": model.bias}) as receiver:
        assert send_all([sender], [receiver]) == [1]
    assert torch.equal(model.bias, policy.bias)
    assert torch.equal(model.weight, before)
