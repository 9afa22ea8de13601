"""More than one machine: three nodes here, with an object store each."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytestmark = pytest.mark.long

WORDS = ["workers", "removed", "joined", "pulled"]


@pytest.mark.timeout(240)
def test_weights_cross_to_a_node_once_and_nodes_come_and_go(
    run_script: Callable[[str, float], list[str]],
) -> None:
    said = [line for line in run_script("three_nodes.py", 220) if line.split()[0] in WORDS]
    assert [line.split()[0] for line in said] == WORDS
    assert said[0] == "workers 4 copies 3"
