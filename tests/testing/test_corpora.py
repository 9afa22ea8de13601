"""Coverage leads the search for inputs to faults that changes at random do not reach."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from sync_testing.corpora import explore

CORPUS = [b'{"version": 1, "held": [0], "reason": "left"}']


class PlantedError(Exception):
    """A fault that is four steps deep."""


def read(data: bytes) -> None:
    content = json.loads(data)
    if not isinstance(content, dict) or "version" in content:
        raise ValueError("not that")
    if not isinstance(content.get("held"), dict):
        raise TypeError("not those")
    if content.get("reason") is not None:
        raise ValueError("not so")
    if isinstance(content.get("type"), list):
        raise PlantedError


def search(seed: int, packages: tuple[str, ...]) -> bool:
    """Return whether the fault is found."""
    try:
        explore(
            read,
            CORPUS,
            expected=(ValueError, TypeError),
            rounds=5000,
            seed=seed,
            packages=packages,
        )
    except AssertionError as error:
        return isinstance(error.__cause__, PlantedError)
    return False


def test_coverage_leads_to_a_fault_that_is_several_steps_deep() -> None:
    guided = [search(seed, (__name__,)) for seed in range(5)]
    blind = [search(seed, ("no module of this name",)) for seed in range(5)]
    assert sum(guided) > sum(blind), (guided, blind)


@pytest.mark.parametrize(
    ("read", "seconds", "message"),
    [
        (lambda _: bytearray(200 << 20), 60.0, "took 2.* bytes"),
        (lambda _: sum(range(10**7)), 0.01, "took .* s"),
    ],
    ids=["memory", "time"],
)
def test_what_costs_much_is_reported(
    read: Callable[[bytes], object], seconds: float, message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        explore(read, [b"x"], seconds=seconds)
