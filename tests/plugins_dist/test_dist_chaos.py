"""A sample of the matrix of faults over torch.distributed."""

from __future__ import annotations

from chaos_kit import Case, ChaosConformance, Runner
from chaos_kit.plan import Plan


class TestFaults(ChaosConformance):
    counts = {"dist": 2, "dist-gloo": 4, "dist-broadcast": 4, "rpc": 2}

    def test_all_workers_of_a_world_that_is_fixed_die(self, runners: dict[str, Runner]) -> None:
        plan = Plan.of(Case("rpc", "kill before answer", "blocking", 3))
        assert not runners["rpc"].run(plan).complaints
