"""Every bit of every kind of tensor arrives as it was sent."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from sync_core.testing.schemes.base import SchemeCases, Start
from sync_core.testing.schemes.models import (
    Tied,
    annotated,
    convolutional,
    fingerprints,
    frozen,
    huge,
    large,
    many_small,
    nested,
    parametrised,
    recurrent,
    specimens,
    stateful,
)
from sync_core.testing.schemes.pool import Pool, Workers

#: Set it to test a model of more than 2 GiB, of which there are several copies in memory.
HUGE = "SYNC_CONFORMANCE_HUGE"

Prints = dict[str, str]


class ValueCases(SchemeCases):
    """What is sent is told from what was there before by its bits, never by comparing numbers."""

    @pytest.fixture(scope="class", params=[False, True], ids=["copy", "zero_copy"])
    @classmethod
    def arrived(cls, request: pytest.FixtureRequest, pool: Pool) -> Iterator[list[Any]]:
        """What was sent in two versions, and what each became; one model for all kinds."""
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
        assert [got[name] for _, got in arrived] == [sent[name] for sent, _ in arrived]

    def test_5000_tensors(self, start: Start, zero_copy: bool) -> None:
        workers = start(many_small(1), 1, make=partial(many_small, 0), zero_copy=zero_copy)
        for weights in (many_small(1), many_small(2)):
            assert workers.send(weights).updated == (0,)
            assert workers.fingerprints() == [fingerprints(weights)]

    @pytest.mark.parametrize("verify", ["checksum", "readback"])
    def test_what_is_verified_arrives(self, start: Start, verify: str, zero_copy: bool) -> None:
        pytest.importorskip("xxhash", reason="verify= needs sync-core[verify]")
        make = partial(specimens, 0)
        workers = start(specimens(1), 1, make=make, zero_copy=zero_copy, verify="checksum")
        answered = workers.send().workers[0].commit_seconds > 0
        if verify == "readback":
            if not answered:
                pytest.skip("the scheme brings no answers of its workers back")
            workers.sender.close()
            workers = start(specimens(1), 1, make=make, zero_copy=zero_copy, verify=verify)
        for weights in (specimens(1), specimens(2)):
            assert workers.send(weights).updated == (0,)
            assert workers.fingerprints() == [fingerprints(weights)]

    def test_a_large_model_arrives_at_all_workers(self, start: Start, zero_copy: bool) -> None:
        first, second = large(1), large(2)
        workers = start(first, make=partial(large, 0), zero_copy=zero_copy)
        for weights in (first, second):
            assert workers.send(weights).updated == (0, 1)
            assert workers.fingerprints() == [fingerprints(weights)] * 2

    # Whatever limit a plugin sets to its tests, pages for five copies take their time.
    @pytest.mark.timeout(600)
    def test_more_than_2_gib(self, start: Start) -> None:
        if HUGE not in os.environ:
            pytest.skip(f"set {HUGE}=1 where there is memory for it")
        weights = huge(1)
        workers = start(weights, 1, make=partial(huge, 0), timeout=300.0)
        assert workers.send().updated == (0,)
        assert workers.fingerprints() == [fingerprints(weights)]

    @pytest.mark.parametrize(
        "make", [stateful, annotated, parametrised, nested, recurrent, convolutional, frozen]
    )
    def test_every_kind_of_module(
        self, start: Start, make: Callable[[int], nn.Module], zero_copy: bool
    ) -> None:
        workers = start(make(1), 1, make=partial(make, 0), zero_copy=zero_copy)
        for seed in (1, 2):
            workers.send(make(seed))
            assert workers.fingerprints() == [fingerprints(make(seed))]

    def test_tied_tensors_stay_tied(self, start: Start, zero_copy: bool) -> None:
        workers = start(Tied(1), 1, make=partial(Tied, 0), zero_copy=zero_copy)
        for seed in (1, 2):
            workers.send(Tied(seed))
            assert workers.fingerprints() == [fingerprints(Tied(seed))]
            assert workers.pool.call(0, lambda worker: worker.model.is_tied())

    @pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
    def test_both_ways_to_read_a_module(self, start: Start, strategy: str) -> None:
        workers = start(nested(1), 1, make=partial(nested, 0), strategy=strategy)
        workers.send()
        assert workers.fingerprints() == [fingerprints(nested(1))]

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
                assert got == _prints(sent[name])
            assert workers.pool.call(0, lambda worker: int(worker.model["step"])) == seed


def _prints(model: Any) -> Prints:
    return fingerprints(model["head"] if isinstance(model, dict) else model)
