"""Cases: values arrive unchanged, and later changes in the trainer do not affect them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sync_core import Layout, ModelError, SendError
from sync_core.models import ComputedWeights, Strategy, TensorStream, consolidate
from sync_testing.expectations import RECEIVED, REPORT, TRAINER, VALUES
from sync_testing.schemes.models import (
    Tied,
    annotated,
    convolutional,
    fill,
    fingerprints,
    frozen,
    growing,
    huge,
    large,
    make_policy,
    many_small,
    nested,
    parametrised,
    recurrent,
    specimens,
    stateful,
)
from sync_testing.schemes.pool import SchemeCases, SharedGroup, Start, Workers, ended
from sync_testing.schemes.worker import Worker

#: If set, a model of more than 2 GiB is tested, with several copies in memory.
HUGE = "SYNC_CONFORMANCE_HUGE"

Prints = dict[str, str]


class ValueCases(SchemeCases):
    """Values arrive bit by bit: they are compared as bits, not as numbers."""

    @pytest.fixture(scope="class", params=[False, True], ids=["copy", "zero_copy"])
    @classmethod
    def arrived(cls, request: pytest.FixtureRequest, pool: SharedGroup) -> Iterator[list[Any]]:
        """Return the tensors sent in two versions and those received, for one model."""
        cls.need_travelling()
        if request.param:
            cls.need("zero_copy")
        pool.make_ready()
        with cls.sender(specimens(1), 1, zero_copy=request.param) as sender:
            workers = Workers(sender, pool, partial(specimens, 0))
            versions: list[tuple[Prints, Prints]] = []
            for weights in (specimens(1), specimens(2)):
                workers.send(weights)
                versions.append((fingerprints(weights), workers.fingerprints()[0]))
            yield versions

    @pytest.mark.parametrize("name", list(specimens(0)))
    def test_every_bit_arrives(self, arrived: list[tuple[Prints, Prints]], name: str) -> None:
        assert [got[name] for _, got in arrived] == [sent[name] for sent, _ in arrived], VALUES

    def test_5000_tensors(self, start: Start, zero_copy: bool) -> None:
        workers = start(many_small(1), 1, make=partial(many_small, 0), zero_copy=zero_copy)
        for weights in (many_small(1), many_small(2)):
            assert workers.send(weights).updated == (0,), REPORT
            assert workers.fingerprints() == [fingerprints(weights)], VALUES

    @pytest.mark.parametrize("layers", [["checksum"], ["readback"]])
    def test_what_is_verified_arrives(
        self, start: Start, layers: list[str], zero_copy: bool
    ) -> None:
        pytest.importorskip("xxhash", reason="checksums need sync-core[verify]")
        make = partial(specimens, 0)
        workers = start(specimens(1), 1, make=make, zero_copy=zero_copy, layers=layers)
        for weights in (specimens(1), specimens(2)):
            assert workers.send(weights).updated == (0,), REPORT
            assert workers.fingerprints() == [fingerprints(weights)], VALUES

    def test_extras_arrive_beside_the_weights(self, start: Start, zero_copy: bool) -> None:
        workers = start(make_policy(1.0), 1, zero_copy=zero_copy)
        for step in (1, 2):
            extras = {"step": torch.tensor(step), "scales": torch.full((2, 3), step / 2)}
            assert workers.send(make_policy(float(step)), extras=extras).updated == (0,), REPORT
            assert workers.values() == [{float(step)}], VALUES
            found = workers.pool.call(0, Worker.extras)
            # A worker that the sender calls by its handle has its receiver elsewhere.
            assert found in (None, fingerprints(extras)), VALUES
        assert workers.send(make_policy(3.0)).updated == (0,), REPORT
        assert workers.pool.call(0, Worker.extras) in (None, {}), VALUES

    def test_tensors_that_are_made_one_by_one_arrive(self, start: Start, zero_copy: bool) -> None:
        workers = start(specimens(1), make=partial(specimens, 0), zero_copy=zero_copy)
        extras = {"step": torch.tensor(1)}
        assert workers.send(_Made(specimens(1)), extras=extras).updated == (0, 1), REPORT
        assert workers.fingerprints() == [fingerprints(specimens(1))] * 2, VALUES
        half = len(specimens(2)) // 2
        with pytest.raises(ModelError, match="no memory for the next tensor"):
            workers.sender.send_async(_Made(specimens(2), half))
        assert workers.fingerprints() == [fingerprints(specimens(1))] * 2, (
            "a version whose tensors could not all be made must be committed nowhere"
        )
        assert workers.send(_Made(specimens(3))).updated == (0, 1), REPORT
        assert workers.fingerprints() == [fingerprints(specimens(3))] * 2, VALUES

    def test_a_large_model_arrives_at_all_workers(self, start: Start, zero_copy: bool) -> None:
        first, second = large(1), large(2)
        workers = start(first, make=partial(large, 0), zero_copy=zero_copy)
        for weights in (first, second):
            assert workers.send(weights).updated == (0, 1), REPORT
            assert workers.fingerprints() == [fingerprints(weights)] * 2, VALUES

    def test_tensors_stay_where_they_are(self, start: Start) -> None:
        workers = start(_wide(1), 1, make=partial(_wide, 0))
        before = workers.pool.call(0, Worker.addresses)
        for seed in (1, 2):
            assert workers.send(_wide(seed)).updated == (0,), REPORT
        assert workers.fingerprints() == [fingerprints(_wide(2))], VALUES
        assert workers.pool.call(0, Worker.addresses) == before, (
            "a model must be written where it lies: other code may read its tensors by address"
        )

    # Allocating five copies takes time, whatever limit a plugin sets for its tests.
    @pytest.mark.timeout(600)
    def test_more_than_2_gib(self, start: Start) -> None:
        if HUGE not in os.environ:
            pytest.skip(f"set {HUGE}=1 where there is memory for it")
        weights = huge(1)
        workers = start(weights, 1, make=partial(huge, 0), timeout=300.0)
        assert workers.send().updated == (0,), REPORT
        assert workers.fingerprints() == [fingerprints(weights)], VALUES

    @pytest.mark.parametrize(
        "make",
        [stateful, annotated, growing, parametrised, nested, recurrent, convolutional, frozen],
    )
    def test_every_kind_of_module(
        self, start: Start, make: Callable[[int], nn.Module], zero_copy: bool
    ) -> None:
        if make is growing:
            self.need_one_sender()
        workers = start(make(1), 1, make=partial(make, 0), zero_copy=zero_copy)
        for seed in (1, 2):
            workers.send(make(seed))
            assert workers.fingerprints() == [fingerprints(make(seed))], VALUES

    def test_tied_tensors_stay_tied(self, start: Start, zero_copy: bool) -> None:
        workers = start(Tied(1), 1, make=partial(Tied, 0), zero_copy=zero_copy)
        for seed in (1, 2):
            workers.send(Tied(seed))
            assert workers.fingerprints() == [fingerprints(Tied(seed))], VALUES
            assert workers.pool.call(0, lambda worker: worker.model.is_tied()), VALUES

    @pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
    def test_both_ways_to_read_a_module(self, start: Start, strategy: str) -> None:
        workers = start(nested(1), 1, make=partial(nested, 0), strategy=strategy)
        workers.send()
        assert workers.fingerprints() == [fingerprints(nested(1))], VALUES

    def test_several_models_are_one_version(self, start: Start, zero_copy: bool) -> None:
        def models(seed: int) -> dict[str, Any]:
            return {
                "actor": Tied(seed),
                "critic": {"head": recurrent(seed)},
                "step": torch.tensor(seed),
            }

        workers = start(models(1), 1, make=partial(models, 0), zero_copy=zero_copy)
        for seed in (1, 2):
            sent = models(seed)
            workers.send(sent)
            for name in ("actor", "critic"):
                got = workers.pool.call(0, lambda worker, name: _prints(worker.model[name]), name)
                assert got == _prints(sent[name]), VALUES
            assert workers.pool.call(0, lambda worker: int(worker.model["step"])) == seed, VALUES


def _prints(model: Any) -> Prints:
    return fingerprints(model["head"] if isinstance(model, dict) else model)


def _wide(seed: int) -> nn.Module:
    """Return a module of more than 1 MB."""
    torch.manual_seed(seed)
    return nn.Linear(600, 600)


class IsolationCases(SchemeCases):
    """Isolation of the trainer from its workers, and of workers from each other."""

    def test_a_step_after_send_async_changes_nothing_that_arrives(
        self, start: Start, zero_copy: bool
    ) -> None:
        policy = make_policy(1.0)
        workers = start(policy, zero_copy=zero_copy)
        pending = workers.sender.send_async()
        fill(policy, 9.0)
        calls = [workers.submit(worker_id) for worker_id in (0, 1)]
        assert pending.wait().updated == (0, 1), REPORT
        assert ended(calls, "receive()") == [1, 1], RECEIVED
        assert workers.values() == [{1.0}, {1.0}], VALUES

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
            assert pending.wait().updated == (0, 1), REPORT
            assert ended(calls, "receive()") == [value, value], RECEIVED
            assert workers.values() == [{value}, {value}], VALUES

    def test_a_step_after_the_commit_changes_no_worker(self, start: Start, zero_copy: bool) -> None:
        policy = make_policy(1.0)
        workers = start(policy, zero_copy=zero_copy)
        workers.send()
        fill(policy, 9.0)
        assert workers.values() == [{1.0}, {1.0}], VALUES

    def test_what_a_worker_views_is_never_overwritten(self, start: Start) -> None:
        self.need("zero_copy")
        policy = make_policy(1.0)
        workers = start(policy, 1, zero_copy=True)
        workers.send()
        for value in range(2, 7):
            fill(policy, float(value))
            with pytest.raises(SendError):
                workers.sender.send_async().wait(0.0)
            assert workers.values() == [{1.0}], VALUES
        assert workers.receive(0) == 6, RECEIVED
        assert workers.values() == [{6.0}], VALUES

    def test_a_worker_that_shares_its_memory_gets_newer_versions(
        self, start: Start, zero_copy: bool
    ) -> None:
        policy = make_policy()
        workers = start(policy, 1, zero_copy=zero_copy)
        for value in range(1, 9):
            fill(policy, float(value))
            assert workers.send().updated == (0,), REPORT
            assert workers.values() == [{float(value)}], VALUES
            if value == 2:
                # As queues of torch.multiprocessing do: torch moves the tensors to shared memory.
                workers.pool.call(0, lambda worker: worker.model.share_memory() and None)

    def test_what_came_in_inference_mode_can_be_trained(
        self, start: Start, zero_copy: bool
    ) -> None:
        policy = make_policy()
        workers = start(policy, 1, zero_copy=zero_copy)
        for value in (2.0, 3.0):
            fill(policy, value)
            pending = workers.sender.send_async()
            assert workers.pool.call(0, Worker.infer, Worker.receive), RECEIVED
            pending.wait()
        assert workers.pool.call(0, Worker.gradients) == {6.0}, VALUES
        workers.pool.call(0, Worker.infer, Worker.hang_up)
        assert workers.pool.call(0, Worker.gradients) == {6.0}, VALUES

    def test_a_default_device_is_not_where_versions_are_packed(
        self, start: Start, zero_copy: bool
    ) -> None:
        policy, extras = make_policy(), {"step": torch.tensor(1)}
        # Tensors on this device have no values, so using one raises an error, as for a GPU.
        with torch.device("meta"):
            workers = start(policy, 1, zero_copy=zero_copy)
            for value in (2.0, 3.0):
                fill(policy, value)
                pending = workers.sender.send_async(extras=extras)
                call = workers.pool.submit(0, Worker.with_default_device, "meta", Worker.receive)
                assert pending.wait().updated == (0,), REPORT
                assert ended([call], "receive()"), RECEIVED
        assert workers.values() == [{3.0}], VALUES

    def test_the_trainers_module_is_never_altered(self, start: Start) -> None:
        policy = make_policy(1.0)
        tensors = (*policy.parameters(), *policy.buffers())
        pointers = [tensor.data_ptr() for tensor in tensors]
        workers = start(policy)
        workers.send()
        workers.pool.call(0, Worker.leave, 3.0)
        assert not any(parameter.is_shared() for parameter in policy.parameters()), TRAINER
        assert [tensor.data_ptr() for tensor in tensors] == pointers, TRAINER
        assert all((parameter == 1).all() for parameter in policy.parameters()), TRAINER

    def test_the_trainers_bits_and_versions_stay(self, start: Start) -> None:
        weights = specimens(1)
        before, versions = fingerprints(weights), _versions(weights)
        workers = start(weights, 1, make=lambda: specimens(0))
        workers.send()
        assert fingerprints(weights) == before, TRAINER
        assert _versions(weights) == versions, TRAINER

    def test_the_trainer_goes_on_learning(self, start: Start) -> None:
        policy = make_policy(1.0)
        optimizer = torch.optim.Adam(policy.parameters(), lr=0.1)
        workers = start(policy, 1)
        for _ in range(3):
            loss = policy(torch.rand(4, 3)).sum()
            loss.backward()
            gradients = [parameter.grad for parameter in policy.parameters()]
            workers.send()
            assert [parameter.grad for parameter in policy.parameters()] == gradients, TRAINER
            optimizer.step()
            optimizer.zero_grad()
        workers.send()
        assert workers.fingerprints() == [fingerprints(policy)], VALUES

    def test_a_write_by_one_worker_is_seen_by_no_other(self, start: Start) -> None:
        policy = make_policy(1.0)
        workers = start(policy)
        workers.send()
        workers.pool.call(0, lambda worker: fill(worker.model, 5.0))
        assert workers.values() == [{5.0}, {1.0}], VALUES
        assert all((parameter == 1).all() for parameter in policy.parameters()), TRAINER
        workers.send()
        assert workers.values() == [{1.0}, {1.0}], VALUES

    def test_the_workers_parameters_stay_what_they_are(self, start: Start) -> None:
        workers = start(make_policy(1.0), 1)

        def kinds(worker: Worker) -> list[tuple[int, bool, bool]]:
            parameters = list(worker.model.parameters())
            return [(id(p), p.requires_grad, p.grad_fn is None) for p in parameters]

        before = workers.pool.call(0, kinds)
        workers.send()
        assert workers.pool.call(0, kinds) == before, (
            "a commit must keep the kinds of a worker's parameters"
        )
        assert all(leaf and learned for _, learned, leaf in before), (
            "parameters must stay leaves that require gradients"
        )


class _Made(ComputedWeights):
    """Weights whose tensors are made one after the other; optionally fails after some."""

    def __init__(self, weights: dict[str, Tensor], most: int | None = None) -> None:
        super().__init__(weights)
        self._layout, self._most = Layout.of(weights), most

    def read(self, strategy: Strategy) -> TensorStream:
        del strategy
        return TensorStream(self._layout, self._make)

    def _make(self) -> Iterator[Tensor]:
        for count, name in enumerate(self._layout.names):
            if count == self._most:
                raise RuntimeError("no memory for the next tensor")
            yield self.model[name].clone()


def _versions(weights: dict[str, Tensor]) -> dict[str, int]:
    return {name: tensor._version for name, tensor in weights.items()}
