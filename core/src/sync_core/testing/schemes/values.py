"""Every bit of every kind of tensor arrives as it was sent."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from torch import Tensor

from sync_core.testing.schemes.base import SchemeCases, Start
from sync_core.testing.schemes.models import (
    Tied,
    fingerprints,
    large,
    many_small,
    not_contiguous,
    not_numbers,
    of_every_dtype,
    of_odd_shapes,
)


class ValueCases(SchemeCases):
    """What is sent is told from what was there before by its bits, never by comparing numbers."""

    @pytest.mark.parametrize(
        "make", [of_every_dtype, of_odd_shapes, not_contiguous, not_numbers, many_small]
    )
    def test_every_bit_arrives(
        self, start: Start, make: Callable[[int], dict[str, Tensor]], zero_copy: bool
    ) -> None:
        workers = start(make(1), 1, make=partial(make, 0), zero_copy=zero_copy)
        for weights in (make(1), make(2)):
            assert workers.send(weights).updated == (0,)
            assert workers.fingerprints() == [fingerprints(weights)]

    @pytest.mark.parametrize("verify", ["checksum", "readback"])
    def test_what_is_verified_arrives(self, start: Start, verify: str, zero_copy: bool) -> None:
        pytest.importorskip("xxhash", reason="verify= needs sync-core[verify]")
        make = partial(of_every_dtype, 0)
        workers = start(of_every_dtype(1), 1, make=make, zero_copy=zero_copy, verify="checksum")
        answered = workers.send().workers[0].commit_seconds > 0
        if verify == "readback":
            if not answered:
                pytest.skip("the scheme brings no answers of its workers back")
            workers.sender.close()
            workers = start(of_every_dtype(1), 1, make=make, zero_copy=zero_copy, verify=verify)
        for weights in (of_every_dtype(1), of_every_dtype(2)):
            assert workers.send(weights).updated == (0,)
            assert workers.fingerprints() == [fingerprints(weights)]

    def test_a_large_model_arrives_at_all_workers(self, start: Start, zero_copy: bool) -> None:
        first, second = large(1), large(2)
        workers = start(first, make=partial(large, 0), zero_copy=zero_copy)
        for weights in (first, second):
            assert workers.send(weights).updated == (0, 1)
            assert workers.fingerprints() == [fingerprints(weights)] * 2

    def test_tied_tensors_stay_tied(self, start: Start, zero_copy: bool) -> None:
        workers = start(Tied(1), 1, make=partial(Tied, 0), zero_copy=zero_copy)
        for seed in (1, 2):
            workers.send(Tied(seed))
            assert workers.fingerprints() == [fingerprints(Tied(seed))]
            assert workers.pool.call(0, lambda worker: worker.model.is_tied())
