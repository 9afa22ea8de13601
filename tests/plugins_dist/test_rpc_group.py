"""Worker group `rpc`: what every group does, in worlds that the tests begin."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import pytest
import torch
from tests.plugins_dist.rpc_processes import LocalRpcGroup, end_world
from torch import nn

from sync_core import OptionError, UnknownWorkerError, WorkerLostError
from sync_plugin_dist.rpc_group import RpcGroup
from sync_testing import WorkerGroupConformance, eventually, worker_groups
from sync_testing.worker_groups import Closed, Counter, pid_of

pytestmark = pytest.mark.timeout(60)

# Worker processes cannot import this file by name.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
# By name they can, but that takes each of them seconds.
cloudpickle.register_pickle_by_value(worker_groups)


@pytest.fixture(scope="module", autouse=True)
def _world() -> Iterator[None]:
    yield
    end_world()


@pytest.fixture
def shared() -> Iterator[RpcGroup]:
    """A group for tests that leave it as it is."""
    with LocalRpcGroup(Counter, 2) as group:
        yield group


@pytest.fixture
def group() -> Iterator[RpcGroup]:
    """A group for tests that hurt its workers."""
    with LocalRpcGroup(Counter, 2) as group:
        yield group


def pids(group: RpcGroup) -> list[int]:
    return [group.call(i, pid_of).result() for i in group.worker_ids]


class TestRpcGroup(WorkerGroupConformance):
    group_class = LocalRpcGroup

    @pytest.fixture
    def shared(self) -> Iterator[RpcGroup]:
        """A group for one test: another may have ended the world of those before it."""
        with LocalRpcGroup(Counter, 2) as group:
            yield group


class TestFixedWorld:
    def test_no_worker_can_be_added(self, shared: RpcGroup) -> None:
        with pytest.raises(OptionError, match=r"cannot add a worker.* fixed .*num_workers .*'ray'"):
            shared.add()
        assert shared.worker_ids == (0, 1)

    def test_no_worker_can_be_restarted(self, shared: RpcGroup) -> None:
        before = pids(shared)
        with pytest.raises(OptionError, match=r"cannot restart a worker.* workers='process' or"):
            shared.restart(0)
        with pytest.raises(UnknownWorkerError):
            shared.restart(2)
        assert pids(shared) == before

    def test_there_must_be_one(self) -> None:
        end_world()
        with pytest.raises(OptionError, match=r"not initialised .*init_rpc.* scheme='dist'"):
            RpcGroup(Counter, 1)


class TestDeath:
    def test_an_idle_worker_is_missed(self, group: RpcGroup) -> None:
        victim, _ = pids(group)
        group.remove(1)
        os.kill(victim, signal.SIGTERM)
        assert eventually(lambda: not group.alive(0), 3)
        with pytest.raises(WorkerLostError, match="lost 'worker0', so it cannot run pid_of"):
            group.call(0, pid_of).result(10)

    def test_a_worker_that_dies_while_it_starts(self) -> None:
        def make(worker_id: int) -> None:
            if worker_id == 1:
                os._exit(7)

        with pytest.raises(WorkerLostError, match="worker 1: RPC has lost 'worker1' while"):
            LocalRpcGroup(make, 2)


class TestTravel:
    def test_big_arrays_arrive_and_can_be_written_to(self, shared: RpcGroup) -> None:
        def add(_: object, array: np.ndarray, tensor: torch.Tensor) -> tuple[np.ndarray, object]:
            array += 1
            return array, tensor.add_(1)

        array, tensor = np.arange(4_000_000), torch.arange(4_000_000.0)
        grown, raised = shared.call(0, add, array, tensor).result(30)
        assert np.array_equal(grown, array + 1)
        assert isinstance(raised, torch.Tensor)
        assert torch.equal(raised, tensor + 1)
        grown += 1

    def test_modules(self, shared: RpcGroup) -> None:
        policy = nn.Linear(300, 300)
        policy.weight.requires_grad = False
        arrived = shared.call(1, lambda _, policy: policy, policy).result(30)
        assert torch.equal(arrived.weight, policy.weight)
        assert arrived.bias.requires_grad
        assert not arrived.weight.requires_grad


def start(source: str, *args: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", source, *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


JOIN = """
import os, signal, sys, threading, time
from torch.distributed import rpc

name, rank, store = sys.argv[1], int(sys.argv[2]), sys.argv[3]
options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}", rpc_timeout=20)
rpc.init_rpc(name, rank=rank, world_size=4, rpc_backend_options=options)
"""

PEER = f"{JOIN}\nrpc.shutdown()\n"

TRAINER = f"""
{JOIN}
from sync_core import OptionError, WorkerLostError
from sync_plugin_dist import rpc_host
from sync_plugin_dist.rpc_group import RpcGroup

def error(wanted, make, *args, **options):
    try:
        make(*args, **options)
    except wanted as error:
        print(error)

def hosted(_):
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("sync")]

make = lambda worker_id: [worker_id]
error(ValueError, RpcGroup, make, 2)
error(ValueError, RpcGroup, make, 2, names=["right"])
error(ValueError, RpcGroup, make, 1, names=["trainer"])
error(ValueError, RpcGroup, make, 2, names=["left", "left"])

group = RpcGroup(make, 3)
whose = lambda hosted: (hosted[0], rpc.get_worker_info().name)
print([group.call(i, whose).result() for i in group.worker_ids])
error(OptionError, group.add)
with RpcGroup(lambda worker_id: "b", 2, names=["right", "left"]) as other:
    print([other.call(i, whose).result() for i in other.worker_ids])
    print(len(group.call(0, hosted).result()))
time.sleep(0.2)
print(len(group.call(0, hosted).result()))

call = group.call(1, lambda _: os.kill(os.getpid(), signal.SIGKILL))
error(WorkerLostError, call.result, 10)
print(group.alive(0), group.alive(1), group.alive(2))
pid = group.call(2, lambda _: os.getpid()).result()
os.kill(pid, signal.SIGKILL)
time.sleep(2)
print(group.alive(0), group.alive(1), group.alive(2))
group.stop()
print(rpc.rpc_sync("left", os.getpid) > 0)
late = RpcGroup(make, 1, names=["left"])
rpc.shutdown(graceful=False)
error(WorkerLostError, late.call(0, whose).result, 10)
late.stop()
print([thread.name for thread in threading.enumerate()])
"""


# A backslash joins two lines.
EXPECTED = """\
num_workers is 2, and the RPC workers are 3: 'left', 'middle', 'right'; give num_workers=3, \
or names=[…] for some of them
num_workers is 2, and the RPC workers are 1: 'right'; give num_workers=1
no RPC worker 'trainer' besides this process; there are: 'left', 'middle', 'right'
names=['left', 'left'] has a name twice; give each worker once
[(0, 'left'), (1, 'middle'), (2, 'right')]
worker group 'rpc' cannot add a worker, as a torch RPC world is fixed when it begins; give \
more num_workers when you make it, or use workers='process' or 'ray' with scheme='dist'
[('b', 'right'), ('b', 'left')]
2
1
worker 1: RPC has lost 'middle' while running <lambda>
True False True
True False False
True
worker 0: RPC was shut down in this process while running <lambda>
['MainThread']
"""


@pytest.mark.timeout(120)
@pytest.mark.long
def test_a_world_that_the_user_has_begun(tmp_path: Path) -> None:
    names = ("trainer", "left", "middle", "right")
    peers = [start(PEER, names[i], i, tmp_path / "store") for i in (1, 2, 3)]
    trainer = start(TRAINER, "trainer", 0, tmp_path / "store")
    try:
        out, err = trainer.communicate(timeout=110)
    finally:
        for process in (trainer, *peers):
            process.kill()
            process.communicate()
    assert out.splitlines() == EXPECTED.splitlines(), err


def test_where_warnings_are_errors_what_cannot_be_closed_is_not_waited_for(tmp_path: Path) -> None:
    group = LocalRpcGroup(lambda worker_id: Closed(worker_id, tmp_path, fails=True), 2)
    for i in group.worker_ids:
        group.call(i, lambda _: warnings.simplefilter("error", UserWarning)).result(20)
    began = time.monotonic()
    group.stop()
    assert time.monotonic() - began < 20
    assert (tmp_path / "1").read_text() == "closed\n"
    end_world()
