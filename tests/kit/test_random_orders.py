"""The random orders of the suite find schemes that are broken, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from sync_core import SyncError
from sync_plugin_std.schemes.thread import ThreadScheme
from sync_plugin_std.workers import choose_group
from sync_testing.schemes import OrderCases, SharedGroup, borrow_pool
from sync_testing.schemes.orders import ORDERS

pytestmark = pytest.mark.timeout(300)

#: Those of `mutants/schemes.py` that a few orders show; hundreds show as many more.
FOUND = (
    "CannotAddWorkers",
    "ConfirmsAtOnce",
    "ConfirmsBeforeApplying",
    "CountsLateWorkersItself",
    "DeliversOldestFirst",
    "DropsLateAnswers",
    "ForgetsWhoComesBack",
    "IgnoresWorkerIds",
    "RaisesForWhoeverLeft",
    "ServesNoIdTwice",
    "SwallowsTheWorkersError",
)


@pytest.fixture(scope="module")
def pool() -> Iterator[SharedGroup]:
    with borrow_pool(choose_group(["thread"], "thread")) as pool:
        yield pool


def search(pool: SharedGroup, **attributes: Any) -> None:
    """Run the case of a scheme."""
    cases = type("Cases", (OrderCases,), attributes)
    cases().test_random_orders_of_calls(pool)


@pytest.fixture(autouse=True)
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ORDERS, raising=False)
    monkeypatch.setattr("sync_testing.schemes.orders._FEW", 300)


def test_a_healthy_scheme_passes(pool: SharedGroup) -> None:
    search(pool, scheme=ThreadScheme())


@pytest.mark.parametrize("name", FOUND)
def test_a_mutant_is_found(mutants: Any, pool: SharedGroup, name: str) -> None:
    mutant = getattr(mutants, name)
    with pytest.raises((AssertionError, SyncError, NotImplementedError, ExceptionGroup)):
        # Most are found when something has not happened for so long.
        search(pool, scheme=mutant(), options=mutant.options, slack=0.5)
