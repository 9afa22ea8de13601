"""The scheme `rpc` does what every scheme does whose sender calls its workers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from tests.plugins_dist.rpc_processes import LocalRpcGroup, end_world
from torch import nn

from sync_core import OptionError, Sender
from sync_testing import CalledSchemeConformance

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(scope="module", autouse=True)
def _world() -> Iterator[None]:
    yield
    end_world()


class TestCalledRpc(CalledSchemeConformance):
    scheme = "rpc"
    group = LocalRpcGroup
    options = {"model_id": "__main__:hosted.model"}

    @staticmethod
    def introduce(worker: Any) -> str:
        vars(sys.modules["__main__"])["hosted"] = worker
        return f"worker{worker.worker_id}"


def test_rpc_that_is_not_initialised() -> None:
    end_world()
    with pytest.raises(OptionError, match=r"RPC is not initialised .* call torch.distributed.rpc"):
        Sender("rpc", nn.Linear(3, 2), workers=["left"], model_id="__main__:policy")
