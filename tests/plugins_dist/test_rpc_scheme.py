"""The scheme `rpc` does what every scheme does, whether its workers connect or are called."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from sync_core.testing import CalledSchemeConformance, SchemeConformance
from sync_core.testing.schemes.pool import Pool

pytestmark = pytest.mark.timeout(90)


class TestRpc(SchemeConformance):
    scheme = "rpc"

    @pytest.fixture(autouse=True)
    def rpc_world(self, pool: Pool) -> None:
        """A sender of the scheme is made in a process that has joined a world of torch RPC."""
        pool.make_ready()


class TestCalledRpc(CalledSchemeConformance):
    scheme = "rpc"
    options = {"model_id": "__main__:hosted.model"}

    @staticmethod
    def introduce(worker: Any) -> str:
        vars(sys.modules["__main__"])["hosted"] = worker
        return f"worker{worker.worker_id}"
