"""A version that some workers try, and that all get then, or that is taken back."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest
import torch

from sync_core import OptionError, Receiver, Sender, SenderLostError, SendError, SyncError
from sync_plugin_scale import Canary, TwoPhase
from sync_testing import eventually

pytestmark = pytest.mark.timeout(60)


class Fleet:
    """A sender and three workers that receive, each in a thread."""

    def __init__(self, ends: ExitStack) -> None:
        self.model = torch.nn.Linear(8, 4)
        self.ends = ends
        self.sender = ends.enter_context(Sender("two_phase::thread", self.model, num_workers=3))
        self.threads = ThreadPoolExecutor(8)
        self.models: list[torch.nn.Linear] = []
        self.receivers: list[Receiver] = []
        # The version at which the last worker raises.
        self.raises_at = 0
        for worker_id in range(3):
            self.serve(worker_id)

    def serve(self, worker_id: int) -> None:
        """Let a worker receive until the sender is gone."""
        self.models.append(torch.nn.Linear(8, 4))
        address = self.sender.address(worker_id)
        commits = self._raise_if_asked if worker_id == 2 else None
        self.receivers.append(Receiver(address, self.models[-1], on_commit=commits))
        self.threads.submit(self._receive, self.receivers[-1])

    def _raise_if_asked(self, version: int) -> None:
        if version == self.raises_at:
            raise RuntimeError("worker 2 raises once it has the version")

    def fill(self, value: float) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(value)

    def begin(self) -> Canary:
        """Send 1.0 to all; 2.0 is what comes next."""
        canary = Canary(self.sender)
        self.fill(1.0)
        canary.send()
        self.fill(2.0)
        return canary

    def values(self) -> list[float]:
        """The value of each worker, all of whose elements are that."""
        found = [
            {float(x) for p in model.parameters() for x in p.detach().unique()}
            for model in self.models
        ]
        assert all(len(values) == 1 for values in found)
        return [values.pop() for values in found]

    def close(self) -> None:
        self.sender.close()
        self.threads.shutdown()
        for receiver in self.receivers:
            receiver.close()

    @staticmethod
    def _receive(receiver: Receiver) -> None:
        with suppress(SenderLostError):
            while True:
                with suppress(RuntimeError):
                    receiver.receive()


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with ExitStack() as ends:
        made = Fleet(ends)
        ends.callback(made.close)
        yield made


def test_a_version_that_is_taken_back(fleet: Fleet) -> None:
    canary = Canary(fleet.sender)
    fleet.fill(1.0)
    assert canary.send().updated == (0, 1, 2)
    fleet.fill(2.0)
    assert canary.try_on([0, 2]).updated == (0, 2)
    assert canary.trying == (0, 2)
    assert fleet.values() == [2.0, 1.0, 2.0]
    fleet.fill(3.0)  # the trainer goes on
    report = canary.take_back()
    assert (report.version, report.updated) == (3, (0, 2))
    assert fleet.values() == [1.0, 1.0, 1.0]
    assert dict(canary.restores) == {3: 1}
    assert not canary.trying


def test_a_version_that_is_promoted(fleet: Fleet) -> None:
    canary = fleet.begin()
    canary.try_on([1])
    fleet.fill(3.0)
    assert canary.promote().updated == (0, 1, 2)
    assert fleet.values() == [2.0, 2.0, 2.0]
    assert not canary.restores
    # What all have now is what a trial is taken back to.
    canary.try_on([1])
    assert fleet.values() == [2.0, 3.0, 2.0]
    canary.take_back()
    assert fleet.values() == [2.0, 2.0, 2.0]
    assert canary.restores == {5: 3}


def test_a_worker_that_leaves_during_a_trial(fleet: Fleet) -> None:
    canary = Canary(fleet.sender)
    canary.send()
    canary.try_on([0])
    fleet.sender.remove_worker(0)
    assert canary.take_back().workers == {}
    assert canary.trying == ()


def test_a_trial_that_fails_is_none(fleet: Fleet) -> None:
    canary = Canary(fleet.sender)
    canary.send()
    late = fleet.sender.add_worker()
    with pytest.raises(SendError, match="did not confirm"):
        canary.try_on([0, late], timeout=0.3)
    assert canary.trying == ()
    assert canary.try_on([0]).updated == (0,)


@pytest.mark.parametrize("worker_ids", [[2], [0, 2]])
def test_a_trial_is_taken_back_also_from_a_worker_that_raised_once_it_had_it(
    fleet: Fleet, worker_ids: list[int]
) -> None:
    canary = fleet.begin()
    fleet.raises_at = 2
    with pytest.raises(SendError, match="worker 2: has version 2"):
        canary.try_on(worker_ids)
    assert canary.trying == tuple(worker_ids)
    assert canary.take_back().updated == tuple(worker_ids)
    assert fleet.values() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("in_time", [(0,), ()])
def test_a_trial_is_taken_back_also_from_a_worker_that_committed_it_late(
    in_time: tuple[int, ...],
) -> None:
    model, copies = torch.nn.Linear(8, 4), [torch.nn.Linear(8, 4) for _ in range(2)]
    scheme = TwoPhase("thread", failed="leave_out")
    with ThreadPoolExecutor() as threads, Sender(scheme, model, num_workers=2) as sender:
        receivers = [Receiver(sender.address(i), copy) for i, copy in enumerate(copies)]
        canary = Canary(sender)

        def receive(*worker_ids: int) -> list[Future[int | None]]:
            return [threads.submit(receivers[i].receive, 30.0) for i in worker_ids]

        received = receive(0, 1)
        canary.send()
        assert [each.result() for each in received] == [1, 1]
        before = copies[1].weight.clone()
        with torch.no_grad():
            model.weight.add_(1.0)
        received = receive(*in_time)
        with pytest.raises(SendError, match="worker 1: did not confirm"):
            canary.try_on([0, 1], timeout=1.0)
        # The late ones may commit it yet.
        assert canary.trying == (0, 1)
        received += receive(*(i for i in (0, 1) if i not in in_time))
        assert [each.result() for each in received] == [2, 2]
        assert not torch.equal(copies[1].weight, before)
        received = receive(0, 1)
        assert canary.take_back().updated == (0, 1)
        assert [each.result() for each in received] == [3, 3]
        assert torch.equal(copies[1].weight, before)


@pytest.mark.parametrize("scheme", ["thread", "shm"])
@pytest.mark.parametrize("call", ["try_on", "take_back", "promote"])
def test_a_worker_is_lost_after_the_decision(scheme: str, call: str) -> None:
    model, copies = torch.nn.Linear(8, 4), [torch.nn.Linear(8, 4) for _ in range(2)]
    with ThreadPoolExecutor() as threads, Sender(TwoPhase(scheme), model, num_workers=2) as sender:
        receivers = [Receiver(sender.address(i), copy) for i, copy in enumerate(copies)]
        canary = Canary(sender)

        def receive(*worker_ids: int) -> list[Future[int | None]]:
            return [threads.submit(receivers[i].receive, 30.0) for i in worker_ids]

        received = receive(0, 1)
        canary.send()
        assert [each.result() for each in received] == [1, 1]
        before = copies[0].weight.clone()
        with torch.no_grad():
            model.weight.add_(1.0)
        if call != "try_on":
            received = receive(1)
            canary.try_on([1])
            assert received[0].result() == 2
        version = sender.version + 1
        received = receive(0) if call == "promote" else []

        def stage_and_leave() -> None:
            # Returns when the sender has decided.
            assert receivers[1].stage(30.0) == version
            receivers[1].close()

        left = threads.submit(stage_and_leave)
        with pytest.raises(SendError, match="worker 1"):
            canary.try_on([1], timeout=10.0) if call == "try_on" else getattr(canary, call)(10.0)
        left.result()
        assert [each.result() for each in received] == [version] * len(received)
        on_trial = (0, 1) if call == "promote" else (1,)
        assert canary.trying == on_trial
        receivers[1] = Receiver(sender.address(1), copies[1])
        assert receivers[1].receive(30.0) == version
        assert torch.equal(copies[1].weight, before) is (call == "take_back")
        may_have = () if call == "take_back" else on_trial
        assert eventually(lambda: canary.trying == may_have)
        # Also where each has the old weights again, the trial ends by a call that returns.
        taken = receive(*on_trial)
        assert canary.take_back().updated == on_trial
        assert [each.result() for each in taken] == [version + 1] * len(on_trial)
        assert torch.equal(copies[1].weight, before)
        assert torch.equal(copies[0].weight, before)
        assert not canary.trying
        also = {version: 1} if call == "take_back" else {}
        assert canary.restores == {**also, version + 1: 1}


def test_a_promotion_that_fails_for_one_is_taken_back_from_all(fleet: Fleet) -> None:
    canary = fleet.begin()
    canary.try_on([0])
    fleet.raises_at = 3
    with pytest.raises(SendError, match="worker 2: has version 3"):
        canary.promote()
    assert fleet.values() == [2.0, 2.0, 2.0]
    assert canary.trying == (0, 1, 2)
    assert canary.take_back().updated == (0, 1, 2)
    assert fleet.values() == [1.0, 1.0, 1.0]
    assert canary.restores == {4: 1}


def test_a_trial_returns_to_what_a_send_has_brought_that_failed_for_one(fleet: Fleet) -> None:
    canary = fleet.begin()
    fleet.raises_at = 2
    with pytest.raises(SendError, match="worker 2: has version 2"):
        canary.send()
    fleet.fill(3.0)
    canary.try_on([0])
    canary.take_back()
    assert fleet.values() == [2.0, 2.0, 2.0]


def test_calls_in_a_wrong_order(fleet: Fleet) -> None:
    canary = Canary(fleet.sender)
    with pytest.raises(SyncError, match=r"call canary.send\(\) before"):
        canary.try_on([0])
    with pytest.raises(SyncError, match=r"call try_on\(\[…\]\) before"):
        canary.promote()
    canary.send()
    canary.try_on([0])
    with pytest.raises(SyncError, match=r"call promote\(\) or take_back\(\)"):
        canary.send()


def test_a_sender_whose_workers_commit_alone() -> None:
    with (
        Sender("thread", torch.nn.Linear(2, 2), num_workers=1) as sender,
        pytest.raises(OptionError, match="two_phase::thread"),
    ):
        Canary(sender)
