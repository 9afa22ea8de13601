"""Cases for schemes that send increments: ``"increments::"`` and the scheme."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from sync_plugin_scale import Increments
from sync_plugin_std import select
from sync_testing.expectations import BASE, RECEIVED, VALUES
from sync_testing.schemes.models import fingerprints, make_policy
from sync_testing.schemes.pool import SchemeCases, Start, Workers
from sync_testing.schemes.worker import Worker
from sync_testing.worker_groups import eventually


def make_wide() -> nn.Linear:
    """Make a model in which a few elements are a small share."""
    torch.manual_seed(0)
    return nn.Linear(60, 50).to(torch.bfloat16)


def make_wide_of_zeros() -> nn.Linear:
    """Make a model of zeros, so that no value is right by chance."""
    model = make_wide()
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def change(model: nn.Module, *positions: int) -> None:
    """Change some elements."""
    flat = next(model.parameters()).detach().view(-1)
    for position in positions:
        flat[position % len(flat)] += 1


class IncrementCases(SchemeCases):
    """Fewer bytes are sent, and the same bits arrive."""

    def test_an_increment_brings_what_changed(self, start: Start) -> None:
        policy, workers = self._start(start)
        whole = workers.send()
        assert {result.base for result in whole.workers.values()} == {0}, (
            "the first version must be whole"
        )
        # Some transports deliver the second version twice.
        for number in range(1, 4):
            change(policy, 7, 100 * number)
            report = workers.send()
            assert {result.base for result in report.workers.values()} == {number}, (
                "an increment must build on the version that the workers hold"
            )
            assert report.nbytes < whole.nbytes / (1 if self.called else 5), (
                "an increment must bring less than a whole version"
            )
            assert workers.fingerprints() == [fingerprints(policy)] * 2, VALUES

    def test_an_increment_after_versions_that_one_worker_missed(self, start: Start) -> None:
        policy, workers = self._start(start)
        workers.send()
        for position in (1, 2):
            change(policy, position)
            workers.send(worker_ids=[0])
        change(policy, 3)
        report = workers.send()
        assert report.workers[1].base == 1, BASE
        assert workers.fingerprints() == [fingerprints(policy)] * 2, VALUES

    @pytest.mark.usefixtures("asking")
    def test_a_worker_that_joins_after_increments_gets_the_version_whole(
        self, start: Start
    ) -> None:
        self.need("late_join")
        policy, workers = self._start(start)
        self._send_twice(workers, policy)
        worker_id = workers.sender.add_worker()
        workers.connect(worker_id, make=make_wide_of_zeros)
        assert workers.receive(worker_id) == 2, RECEIVED
        assert workers.fingerprints() == [fingerprints(policy)] * 3, VALUES
        # The answer belongs to no delivery, so it counts when the transport has received it.
        assert eventually(lambda: workers.sender.workers[worker_id].version == 2, self.slack), (
            "the transport must report by context.notify that a late worker has a version"
        )
        change(policy, 9)
        assert {result.base for result in workers.send().workers.values()} == {2}, (
            "an increment must build on the version that the workers hold"
        )
        assert workers.fingerprints() == [fingerprints(policy)] * 3, VALUES

    @pytest.mark.usefixtures("asking")
    def test_a_worker_that_comes_back_after_increments_gets_the_version_whole(
        self, start: Start
    ) -> None:
        policy, workers = self._start(start)
        self._send_twice(workers, policy)
        workers.pool.call(0, Worker.hang_up)
        workers.connect(0, make=make_wide_of_zeros)
        assert workers.receive(0) == 2, RECEIVED
        assert workers.fingerprints() == [fingerprints(policy)] * 2, VALUES

    @pytest.mark.usefixtures("asking")
    def test_an_increment_with_a_wrong_result_is_followed_by_the_whole_version(
        self, start: Start
    ) -> None:
        policy, workers = self._start(start)
        whole = workers.send().workers[0].nbytes
        workers.pool.call(0, Worker.spoil)
        change(policy, 5)
        report = workers.send()
        assert [report.workers[i].base for i in range(2)] == [0, 1], BASE
        assert report.workers[0].nbytes > whole, (
            "a worker that lacks the base must get a whole version"
        )
        assert workers.fingerprints() == [fingerprints(policy)] * 2, VALUES

    def test_increments_of_partial_updates(self, start: Start) -> None:
        self.need_one_sender()
        policy, workers = self._start(start, layers=[select("*")])
        workers.send()
        first, second, *_ = policy.named_parameters()
        change(policy, 6)
        report = workers.send(dict([first]), [0])
        assert report.workers[0].base == 1, BASE
        with torch.no_grad():
            second[1][1] += 1
        workers.send(dict([second]))
        assert workers.fingerprints() == [fingerprints(policy)] * 2, VALUES

    def _start(self, start: Start, **options: Any) -> tuple[nn.Module, Workers]:
        """Return the model, and two workers with models of the same kind."""
        # Increments are refused within one process, and on top of increments.
        self.need("cross_process")
        if self.can("compares"):
            pytest.skip("the scheme's versions are increments already")
        if self.can("all_or_none"):
            pytest.skip("increments travel inside of it: two_phase::increments::shm")
        scheme: Any = Increments(self.scheme)
        if self.can("joined"):
            # Each of several senders has its own increments.
            scheme = replace(self.scheme, inner=Increments(self.scheme.inner))
        if self.called:
            policy = make_policy()
            return policy, start(policy, scheme=scheme, **options)
        wide = make_wide()
        return wide, start(wide, make=make_wide, scheme=scheme, **options)

    @staticmethod
    def _send_twice(workers: Workers, policy: nn.Module) -> None:
        workers.send()
        change(policy, 8)
        workers.send()
