"""Every chain of our wrapping schemes over our schemes passes the suite, wherever `keeps` allows.

Two of them run with every change: `increments::chunked::shm` in `tests/scale/test_chains.py`, and
`Sharded("thread", 0, 1)`, the trainer of one rank, in `tests/scale/test_shard_conformance.py`.
"""

from __future__ import annotations

from typing import Any

import pytest

from sync_core import OptionError, registry
from sync_plugin_scale import Chunked, Increments, Sharded, TwoPhase
from sync_testing import SchemeConformance

pytestmark = pytest.mark.timeout(180)

#: Those of `ray` are in `test_ray_compositions.py`, which starts one.
INNER = ("thread", "shm", "mp", "dist", "file", "store")


def chains(inner: str) -> dict[str, Any]:
    """The chains over a scheme; chunks are so small that a large model has hundreds."""
    return {
        "Increments": Increments(inner),
        "Chunked": Chunked(inner, mb=0.5),
        "IncrementsInChunks": Increments(Chunked(inner, mb=0.5)),
        "Sharded": Sharded(inner, 0, 1),
        "ShardedIncrements": Sharded(Increments(inner), 0, 1),
        "TwoPhase": TwoPhase(inner),
        "TwoPhaseIncrements": TwoPhase(Increments(inner)),
        "TwoPhaseChunked": TwoPhase(Chunked(inner, mb=0.5)),
        "LeaveOut": TwoPhase(inner, failed="leave_out"),
    }


def is_allowed(chain: Any) -> bool:
    try:
        registry.find(registry.SCHEMES, chain)
    except OptionError:
        return False
    return True


ALLOWED = {
    f"Test{name}Over{inner.capitalize()}": chain
    for inner in INNER
    for name, chain in chains(inner).items()
    if is_allowed(chain)
}
for test, chain in ALLOWED.items():
    body = {"__module__": __name__, "scheme": chain}
    globals()[test] = type(test, (SchemeConformance,), body)


def test_an_increment_is_refused_where_nothing_leaves_the_process() -> None:
    made = {f"Test{name}Over{inner.capitalize()}" for inner in INNER for name in chains(inner)}
    refused = ("Increments", "IncrementsInChunks", "ShardedIncrements", "TwoPhaseIncrements")
    assert made - ALLOWED.keys() == {f"Test{name}OverThread" for name in refused}
