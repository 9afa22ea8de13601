"""Weights pass from the trainer to its workers, and nothing else passes between them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sync_core import SendError
from sync_core.models import consolidate
from sync_core.testing.schemes.base import SchemeCases, Start
from sync_core.testing.schemes.models import fill, fingerprints, make_policy, specimens
from sync_core.testing.schemes.worker import Worker


class IsolationCases(SchemeCases):
    """Of the trainer from its workers, and of these from each other."""

    def test_a_step_after_send_async_changes_nothing_that_arrives(
        self, start: Start, zero_copy: bool
    ) -> None:
        policy = make_policy(1.0)
        workers = start(policy, zero_copy=zero_copy)
        pending = workers.sender.send_async()
        fill(policy, 9.0)
        calls = [workers.submit(worker_id) for worker_id in (0, 1)]
        assert pending.wait().updated == (0, 1)
        assert [call.result(30) for call in calls] == [1, 1]
        assert workers.values() == [{1.0}, {1.0}]

    def test_a_consolidated_model_is_sent_like_any_other(
        self, start: Start, zero_copy: bool
    ) -> None:
        policy = consolidate(make_policy())
        workers = start(policy, zero_copy=zero_copy)
        for value in (1.0, 2.0):
            fill(policy, value)
            pending = workers.sender.send_async()
            fill(policy, 9.0)
            calls = [workers.submit(worker_id) for worker_id in (0, 1)]
            assert pending.wait().updated == (0, 1)
            assert [call.result(30) for call in calls] == [value, value]
            assert workers.values() == [{value}, {value}]

    def test_a_step_after_the_commit_changes_no_worker(self, start: Start, zero_copy: bool) -> None:
        policy = make_policy(1.0)
        workers = start(policy, zero_copy=zero_copy)
        workers.send()
        fill(policy, 9.0)
        assert workers.values() == [{1.0}, {1.0}]

    def test_what_a_worker_views_is_never_overwritten(self, start: Start) -> None:
        self.need("zero_copy")
        policy = make_policy(1.0)
        workers = start(policy, 1, zero_copy=True)
        workers.send()
        for value in range(2, 7):
            fill(policy, float(value))
            with pytest.raises(SendError):
                workers.sender.send_async().wait(0.0)
            assert workers.values() == [{1.0}]
        assert workers.receive(0) == 6
        assert workers.values() == [{6.0}]

    def test_a_worker_that_shares_its_memory_gets_newer_versions(
        self, start: Start, zero_copy: bool
    ) -> None:
        policy = make_policy()
        workers = start(policy, 1, zero_copy=zero_copy)
        for value in range(1, 9):
            fill(policy, float(value))
            assert workers.send().updated == (0,)
            assert workers.values() == [{float(value)}]
            if value == 2:
                # As queues of torch.multiprocessing do; torch moves what is shared elsewhere.
                workers.pool.call(0, lambda worker: worker.model.share_memory() and None)

    def test_what_came_in_inference_mode_can_be_trained(
        self, start: Start, zero_copy: bool
    ) -> None:
        policy = make_policy()
        workers = start(policy, 1, zero_copy=zero_copy)
        for value in (2.0, 3.0):
            fill(policy, value)
            pending = workers.sender.send_async()
            assert workers.pool.call(0, Worker.infer, Worker.receive)
            pending.wait()
        assert workers.pool.call(0, Worker.gradients) == {6.0}
        workers.pool.call(0, Worker.infer, Worker.hang_up)
        assert workers.pool.call(0, Worker.gradients) == {6.0}

    def test_the_trainers_module_is_never_altered(self, start: Start) -> None:
        policy = make_policy(1.0)
        tensors = (*policy.parameters(), *policy.buffers())
        pointers = [tensor.data_ptr() for tensor in tensors]
        workers = start(policy)
        workers.send()
        workers.pool.call(0, Worker.leave, 3.0)
        assert not any(parameter.is_shared() for parameter in policy.parameters())
        assert [tensor.data_ptr() for tensor in tensors] == pointers
        assert all((parameter == 1).all() for parameter in policy.parameters())

    def test_the_trainers_bits_and_versions_stay(self, start: Start) -> None:
        weights = specimens(1)
        before, versions = fingerprints(weights), _versions(weights)
        workers = start(weights, 1, make=lambda: specimens(0))
        workers.send()
        assert fingerprints(weights) == before
        assert _versions(weights) == versions

    def test_the_trainer_goes_on_learning(self, start: Start) -> None:
        policy = make_policy(1.0)
        optimizer = torch.optim.Adam(policy.parameters(), lr=0.1)
        workers = start(policy, 1)
        for _ in range(3):
            loss = policy(torch.rand(4, 3)).sum()
            loss.backward()
            gradients = [parameter.grad for parameter in policy.parameters()]
            workers.send()
            assert [parameter.grad for parameter in policy.parameters()] == gradients
            optimizer.step()
            optimizer.zero_grad()
        workers.send()
        assert workers.fingerprints() == [fingerprints(policy)]

    def test_a_write_by_one_worker_is_seen_by_no_other(self, start: Start) -> None:
        policy = make_policy(1.0)
        workers = start(policy)
        workers.send()
        workers.pool.call(0, lambda worker: fill(worker.model, 5.0))
        assert workers.values() == [{5.0}, {1.0}]
        assert all((parameter == 1).all() for parameter in policy.parameters())
        workers.send()
        assert workers.values() == [{1.0}, {1.0}]

    def test_the_workers_parameters_stay_what_they_are(self, start: Start) -> None:
        workers = start(make_policy(1.0), 1)

        def kinds(worker: Worker) -> list[tuple[int, bool, bool]]:
            parameters = list(worker.model.parameters())
            return [(id(p), p.requires_grad, p.grad_fn is None) for p in parameters]

        before = workers.pool.call(0, kinds)
        workers.send()
        assert workers.pool.call(0, kinds) == before
        assert all(leaf and learned for _, learned, leaf in before)


def _versions(weights: dict[str, Tensor]) -> dict[str, int]:
    return {name: tensor._version for name, tensor in weights.items()}
