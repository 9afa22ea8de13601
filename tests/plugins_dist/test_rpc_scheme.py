"""The scheme `rpc` does what every scheme does, as far as its receivers connect by themselves."""

from __future__ import annotations

import pytest

from sync_core.testing import SchemeConformance
from sync_core.testing.schemes.pool import Pool

pytestmark = pytest.mark.timeout(90)


class TestRpc(SchemeConformance):
    scheme = "rpc"

    @pytest.fixture(autouse=True)
    def rpc_world(self, pool: Pool) -> None:
        """A sender of the scheme is made in a process that has joined a world of torch RPC."""
        pool.make_ready()
