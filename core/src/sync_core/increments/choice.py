"""``increments="auto"``: compares versions only where that takes less time than sending them whole.

Both ways are measured: a whole version from the time at which it is handed to the transport until
a worker has it, an increment from the begin of the comparison on. Before the first comparison, one
is rehearsed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

import torch

from sync_core.transports.transport import Delivery
from sync_core.weights.block import Block
from sync_core.weights.compare import Comparer
from sync_core.weights.layout import Layout
from sync_core.weights.patch import Patch, checksum, padded_nbytes, shorten, units_of
from sync_core.weights.payload import Payload

# The other way must be faster by this factor before it is tried: figures vary by as much.
_MARGIN = 1.2
# The bytes that are rehearsed, more than caches hold; one element in a hundred changes.
_REHEARSED = 32 << 20
_ONE_IN = 100
# The share of the bytes that an increment is taken to have before there was one.
_EXPECTED = 0.02
# Whole versions after which the seconds of the last increment are out of date.
_OUT_OF_DATE = 64

Way = Literal["whole", "increment"]


@dataclass
class _Measured:
    """A version under way: how it is sent, its bytes, and seconds before and since it travelled."""

    version: int
    way: Way
    nbytes: int
    before: float
    slowest: float = 0.0


class Choice:
    """Measures whole versions and increments, in seconds for each byte of a version.

    Not safe for threads.

    Example:
        >>> choice = Choice()
        >>> for version in (1, 2):
        ...     assert not choice.compares()
        ...     choice.began(version, "whole", nbytes=1000, seconds=0.0)
        ...     choice.took(version, 3.0)
        >>> choice.compares()
        True
    """

    def __init__(self) -> None:
        self._comparing = False
        self._seconds: dict[Way, float] = {}
        self._measured: _Measured | None = None
        # Whole versions since the last increment.
        self._wholes = 0
        # The first version takes longer: workers connect, and memory is touched first.
        self._first = True

    def compares(self) -> bool:
        """Return whether to compare the next version with the one before."""
        whole = self._seconds.get("whole")
        if whole is None:
            return False
        if "increment" not in self._seconds:
            self._seconds["increment"] = rehearse() + _EXPECTED * whole
        increment = self._seconds["increment"]
        ours, other = (increment, whole) if self._comparing else (whole, increment)
        if other * _MARGIN < ours:
            self._comparing = not self._comparing
        return self._comparing

    def began(self, version: int, way: Way | None, *, nbytes: int, seconds: float) -> None:
        """Note that a version is sent, and measure until it has arrived.

        Args:
            version: the version.
            way: how it is sent; None for one that says nothing of either way.
            nbytes: the size of the version, however it is sent.
            seconds: that it has taken so far.
        """
        first, self._first = self._first, False
        self._measured = None
        if way is not None and not first:
            self._measured = _Measured(version, way, max(1, nbytes), seconds)
        self._wholes = 0 if way == "increment" else self._wholes + 1
        if self._wholes > _OUT_OF_DATE:
            self._wholes = 0
            self._seconds.pop("increment", None)

    def took(self, version: int, seconds: float) -> None:
        """Note that a worker has a version, after these seconds on its way."""
        measured = self._measured
        if measured is not None and measured.version == version:
            measured.slowest = max(measured.slowest, seconds)
            total = measured.before + measured.slowest
            self._seconds[measured.way] = total / measured.nbytes


def rehearse(nbytes: int = _REHEARSED) -> float:
    """Return the seconds that it takes to make an increment and to apply it, for each byte.

    Example:
        >>> 0 < rehearse(1 << 16) < 1
        True
    """
    layout = Layout.of_kinds([("weights", torch.bfloat16, (nbytes // 2,))])
    body = units_of(Block.allocate(padded_nbytes(layout)), layout)
    body.fill(0)
    weights = torch.zeros(nbytes // 2, dtype=torch.bfloat16)
    weights[::_ONE_IN] = 1
    comparer, payload = Comparer(layout), Payload(2, layout, (weights,))
    begin = time.perf_counter()
    found = comparer.update(body, payload, limit=len(body))
    gaps = shorten(found.gaps)
    patch = Patch(1, 2, layout.digest, checksum(body), len(body), gaps, found.values)
    patch.apply(body)
    return (time.perf_counter() - begin) / nbytes


def seconds_of(delivery: Delivery, handed_over: float) -> float:
    """Return how long a version was on its way, without waiting for a worker that was busy.

    Writing it into the model is left out: that is the same for both ways.

    Args:
        delivery: one that has ended.
        handed_over: when the transport was given it (`time.perf_counter`).
    """
    answer = delivery.answer
    if answer is not None and answer.stage_seconds:
        return answer.stage_seconds
    committing = 0.0 if answer is None else answer.commit_seconds
    return max(0.0, (delivery.ended_at or handed_over) - handed_over - committing)
