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
