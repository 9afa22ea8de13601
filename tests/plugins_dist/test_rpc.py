"""The scheme `rpc`: models of RPC workers that run no code of ours."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import signal
import struct
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from types import SimpleNamespace
from typing import Any

import pytest
from tests.plugins_dist.rpc_processes import RpcProcesses
from torch import Tensor, nn
from torch.distributed import rpc

from sync_core import (
    ApplyError,
    CapacityError,
    OptionError,
    Receiver,
    Sender,
    SendError,
    WorkerLostError,
    WorkerTimeoutError,
)
from sync_core.errors import AddressError
from sync_testing import eventually, interrupted
from sync_testing.faults import stop
from sync_testing.schemes import Workers

pytestmark = pytest.mark.timeout(90)

NAMES = ("left", "middle", "right", "rival")

# The contents of the workers' main modules.
MODELS = """
import sync_core
from torch import nn
policy = nn.Linear(3, 2)
nets = {"critic": nn.Linear(3, 2)}
kept = []
"""


class World(RpcProcesses):
    """This process as the trainer, and four workers."""

    def run(self, name: str, expression: str) -> Any:
        """The value of an expression in a worker's main module."""
        code = f"eval({expression!r}, vars(__import__('__main__')))"
        return rpc.rpc_sync(name, eval, args=(code,))

    def values(self, name: str, module: str = "policy") -> set[float]:
        """The values that a module of a worker's main module holds."""
        return values_in(self.run(name, f"{module}.state_dict()"))

    def hold(self, name: str) -> Any:
        """An object in a worker that holds models."""
        nets = {"critic": linear(0.0)}
        return rpc.remote(name, SimpleNamespace, kwargs={"policy": linear(0.0), "nets": nets})

    def signal(self, name: str, number: signal.Signals) -> None:
        self.processes[name].send_signal(number)


@pytest.fixture(scope="module")
def worlds() -> Iterator[list[World]]:
    """The world of the test before, if any."""
    worlds: list[World] = []
    yield worlds
    for world in worlds:
        world.end()


@pytest.fixture
def world(worlds: list[World]) -> World:
    """A world whose members all live; a new one after a test that has ended one."""
    if worlds and not worlds[0].complete:
        worlds.pop().end()
    if not worlds:
        worlds.append(World(NAMES, MODELS))
    return worlds[0]


def linear(value: float) -> nn.Linear:
    """A model of one value."""
    module = nn.Linear(3, 2)
    for parameter in module.parameters():
        nn.init.constant_(parameter, value)
    return module


def values_in(state: dict[str, Tensor]) -> set[float]:
    return {value for tensor in state.values() for value in tensor.flatten().tolist()}


def held(rref: Any) -> tuple[set[float], set[float]]:
    """The values in the policy and in the critic that an object holds."""
    there = rref.to_here()
    return values_in(there.policy.state_dict()), values_in(there.nets["critic"].state_dict())


def to(*workers: Any, value: float = 1.0, **options: Any) -> Sender:
    options = {"model_id": "__main__:policy", "timeout": 30.0, **options}
    return Sender("rpc", linear(value), workers=workers, **options)


def refuse_shared_memory() -> None:
    """Let the kernel refuse `memfd_create` to this thread, as some containers do, for good."""
    number = {"x86_64": 319, "aarch64": 279}[platform.machine()]
    # https://www.kernel.org/doc/html/latest/userspace-api/seccomp_filter.html
    load, if_equal, result = 0x20, 0x15, 0x06
    permission_denied, allowed = 0x0005_0001, 0x7FFF_0000
    steps = [
        (load, 0, 0, 0),
        (if_equal, 0, 1, number),
        (result, 0, 0, permission_denied),
        (result, 0, 0, allowed),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))
    set_no_new_privileges, set_seccomp, filtering = 38, 22, 2
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(set_no_new_privileges, 1, 0, 0, 0) == 0
    assert prctl(set_seccomp, filtering, program, 0, 0) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="seccomp is Linux's")
@pytest.mark.parametrize("scheme", ["dist", "rpc"])
def test_a_machine_that_refuses_shared_memory(world: World, scheme: str) -> None:
    def send(**options: Any) -> None:
        with Sender(scheme, linear(5.0), num_workers=1, timeout=20.0, **options) as sender:
            received = linear(0.0)
            with Receiver(sender.address(0), received) as receiver:
                pending = sender.send_async()
                receiver.receive(20.0)
                pending.wait()
            assert values_in(received.state_dict()) == {5.0}

    with ThreadPoolExecutor(1, initializer=refuse_shared_memory) as threads:
        refused = threads.submit(send)
        with pytest.raises(CapacityError, match=r"no shared memory: .*; type shared_memory=False,"):
            refused.result()
        threads.submit(send, shared_memory=False).result()


class TestPlaces:
    def test_a_path_in_a_module(self, world: World) -> None:
        with to("left", rpc.get_worker_info("middle"), value=2.0) as sender:
            assert sender.send().updated == (0, 1)
            assert [world.values(name) for name in ("left", "middle")] == [{2.0}] * 2
            with pytest.raises(AddressError, match="is called by its sender, and needs no"):
                sender.address(0)
        with to("left", value=3.0, model_id="__main__:nets['critic']") as sender:
            sender.send()
        assert world.values("left", "nets['critic']") == {3.0}
        assert world.values("left") == {2.0}

    def test_a_path_in_an_object(self, world: World) -> None:
        rrefs = [world.hold("left"), world.hold("right")]
        workers = [(rpc.get_worker_info("left"), rrefs[0]), ("right", rrefs[1])]
        with to(*workers, value=4.0, model_id="policy") as sender:
            assert sender.send().updated == (0, 1)
        with to(workers[1], value=5.0, model_id="nets['critic']") as sender:
            sender.send()
        assert [held(rref) for rref in rrefs] == [({4.0}, {0.0}), ({4.0}, {5.0})]

    def test_several_models_at_once(self, world: World) -> None:
        rref = world.hold("left")
        for worker, names in (
            (("left", rref), ("policy", "nets['critic']")),
            ("middle", ("__main__:policy", "__main__:nets['critic']")),
        ):
            models = {name: linear(value) for value, name in enumerate(names, start=6)}
            with Sender("rpc", models, workers=[worker]) as sender:
                assert sender.send().updated == (0,)
                weights = {name: linear(value) for value, name in enumerate(names, start=8)}
                assert sender.send(weights_dict=weights).version == 2
        assert held(rref) == ({8.0}, {9.0})
        assert world.values("middle") == {8.0}
        assert world.values("middle", "nets['critic']") == {9.0}

    @pytest.mark.parametrize(
        ("model_id", "message"),
        [
            ("policy", "'policy' says not in which module the model is; type"),
            ("no.such.module:policy", "the worker cannot import 'no.such.module': No module"),
            ("__main__:nobody", "nobody"),
            ("__main__:nets['actor']", "actor"),
        ],
    )
    def test_places_that_are_none(self, world: World, model_id: str, message: str) -> None:
        with to("left", "middle", model_id=model_id) as sender:
            with pytest.raises(SendError, match=message) as failure:
                sender.send()
            error = failure.value.report.workers[1].error
            assert isinstance(error, ApplyError)
            assert "Traceback (most recent call last):" in str(error)

    def test_workers_that_are_none(self, world: World) -> None:
        rref = world.hold("left")
        for worker, message in (
            ("nobody", r"no worker 'nobody'; it knows: 'left', 'middle', 'right'"),
            (("right", rref), r"the rref is of 'left', and not of 'right'"),
            (("left", "policy"), r"is not a RPC worker; workers= takes names, or pairs"),
            (3, r"3 is not a RPC worker"),
        ):
            with pytest.raises(OptionError, match=message):
                to(worker)
        with to("left") as sender:
            with pytest.raises(OptionError, match="knows no worker 'nobody'"):
                sender.add_worker(worker="nobody")
            assert sender.all_worker_ids() == (0,)
            assert sender.send().updated == (0,)


class TestWorkers:
    def test_come_and_go(self, world: World) -> None:
        with to("left", value=11.0) as sender:
            sender.send()
            assert sender.add_worker(worker="right") == 1
            assert eventually(lambda: world.values("right") == {11.0}, 10)
            assert sender.send(linear(12.0)).updated == (0, 1)
            sender.remove_worker(0)
            assert sender.send(linear(13.0)).updated == (1,)
            assert [world.values(name) for name in ("left", "right")] == [{12.0}, {13.0}]
        world.run("right", "[parameter.data.add_(1) for parameter in policy.parameters()] and 0")
        assert world.values("right") == {14.0}

    def test_the_newer_of_two_senders_takes_over(self, world: World) -> None:
        with to("left", value=21.0) as old, to("left", value=22.0) as new:
            old.send()
            assert new.send().updated == (0,)
            with pytest.raises(SendError, match="another sender has taken over '__main__:policy'"):
                old.send()
            old.close()
            assert new.send(linear(23.0)).updated == (0,)
        assert world.values("left") == {23.0}

    def test_the_older_of_two_senders_takes_over_again_at_once(self, world: World) -> None:
        with to("left") as old:
            old.send()
            for value in (24.0, 26.0, 28.0):
                with to("left", value=value) as new:
                    new.send()
                assert old.send(linear(value + 1)).updated == (0,)
                assert world.values("left") == {value + 1}

    def test_an_apply_that_raises(self, world: World) -> None:
        world.run("left", "nets.update(critic=nn.Linear(1, 1))")
        with to("left", "middle", value=31.0, model_id="__main__:nets['critic']") as sender:
            with pytest.raises(SendError) as failure:
                sender.send()
            report = failure.value.report
            assert report.updated == (1,)
            assert isinstance(report.workers[0].error, ApplyError)
            said = str(report.workers[0].error)
            assert "LayoutMismatchError" in said
            assert "Traceback (most recent call last):" in said
            world.run("left", "nets.update(critic=nn.Linear(3, 2))")
            assert sender.send().updated == (0, 1)

    def test_one_whose_calls_return_what_they_should_not(self, world: World) -> None:
        place = "__import__('sync_plugin_dist.rpc_sender').rpc_sender"
        values = "__import__('sync_testing.fuzz').fuzz.VALUES"
        with to("left", "middle") as sender:
            sender.send()
            world.run("left", f"kept.append({place}.deliver)")
            for value in (0, 9, 17, 27):
                made = f"lambda request: {values}[{value}]"
                world.run("left", f"setattr({place}, 'deliver', {made})")
                with pytest.raises(SendError, match="does not answer as agreed"):
                    sender.send(linear(float(value)))
                assert world.values("middle") == {float(value)}
                assert sender.workers[1].state == "current"
            world.run("left", f"setattr({place}, 'deliver', kept.pop())")
            assert sender.send(linear(32.0)).updated == (0, 1)

    def test_one_that_is_stopped_for_a_while(self, world: World) -> None:
        with to("left", "right", value=41.0) as sender:
            sender.send()
            stop(world.processes["left"].pid)
            try:
                for value in (42.0, 43.0, 44.0):
                    report = Workers.give_up(sender.send_async(linear(value)), 0)
                    assert report.updated == (1,)
                    assert isinstance(report.workers[0].error, WorkerTimeoutError)
            finally:
                world.signal("left", signal.SIGCONT)
            assert eventually(lambda: world.values("left") == {44.0}, 10)
            assert sender.send(linear(45.0)).updated == (0, 1)

    @pytest.mark.parametrize("silent", [0, 1])
    def test_an_answer_counts_while_another_worker_is_silent(
        self, world: World, silent: int
    ) -> None:
        with to("left", "middle") as sender, ThreadPoolExecutor(1) as threads:
            sender.send()
            process = world.processes[("left", "middle")[silent]]
            stop(process.pid)
            try:
                pending = sender.send_async(linear(2.0))
                waiting = threads.submit(pending.wait)
                assert pending.deliveries[1 - silent].wait(20.0)
                assert not waiting.done()
            finally:
                process.send_signal(signal.SIGCONT)
            assert waiting.result(30).updated == (0, 1)

    def test_a_worker_whose_call_has_timed_out(self, world: World) -> None:
        with to("left", value=51.0, timeout=1.0) as sender:
            sender.send(timeout=10)
            stop(world.processes["left"].pid)
            try:
                for _ in range(2):
                    with pytest.raises(SendError, match=r"did not confirm .* sender calls it,"):
                        sender.send(linear(52.0))
                time.sleep(1.5)
            finally:
                world.signal("left", signal.SIGCONT)
            assert sender.send(linear(53.0), timeout=10).updated == (0,)
            assert world.values("left") == {53.0}

    def test_newer_versions_overtake(self, world: World) -> None:
        with to("left", "middle", value=61.0) as sender:
            for value in range(62, 72):
                pending = sender.send_async(linear(float(value)))
                with suppress(SendError):
                    pending.wait(0)
            assert eventually(lambda: world.values("left") == world.values("middle") == {71.0}, 10)
            assert sender.send(linear(72.0)).updated == (0, 1)


class TestInterrupts:
    """Ctrl-C at moments of calls, spread over them."""

    def test_the_next_send_works(self, world: World) -> None:
        with to("left", "middle", timeout=10.0) as sender:

            def send(moment: int | None) -> int:
                with interrupted(moment) as moments:
                    sender.send()
                return moments.count

            count = max(send(None) for _ in range(3))
            for moment in range(0, count, max(1, count // 60)):
                send(moment)
                assert sender.send().updated == (0, 1), f"after an interrupt at {moment}"

    @pytest.mark.parametrize("sends", [True, False], ids=["close", "make and close"])
    def test_nothing_is_left(self, world: World, *, sends: bool) -> None:
        before = set(threading.enumerate())

        def make_and_close(moment: int | None) -> int:
            with ExitStack() as stack:
                moments = None if sends else stack.enter_context(interrupted(moment))
                sender = to("left", timeout=10.0)
                if sends:
                    sender.send()
                    moments = stack.enter_context(interrupted(moment))
                sender.close()
            if sends:
                sender.close()
            assert moments is not None
            return moments.count

        count = make_and_close(None)
        for moment in range(0, count, max(1, count // 25)):
            make_and_close(moment)
        gc.collect()
        assert eventually(lambda: not _new_threads(before)), _new_threads(before)


def _new_threads(before: set[threading.Thread]) -> list[str]:
    new = set(threading.enumerate()) - before
    return [thread.name for thread in new if thread.name.startswith("sync")]


class TestEnd:
    """Each of these ends its world."""

    def test_a_worker_that_is_killed(self, world: World) -> None:
        with to("left", "right") as sender:
            sender.send()
            world.signal("right", signal.SIGKILL)
            for value in (81.0, 81.5):
                with pytest.raises(
                    SendError, match=r"worker 1: .*right|worker 1: its process"
                ) as lost:
                    sender.send(linear(value))
                report = lost.value.report
                assert report.seconds < 50
                assert report.updated == (0,)
                assert isinstance(report.workers[1].error, WorkerLostError)
            sender.remove_worker(1)
            assert sender.send(linear(82.0)).updated == (0,)

    def test_the_newer_of_two_senders_is_killed(self, world: World) -> None:
        with to("left") as sender:
            sender.send()
            rival = "sync_core.Sender('rpc', policy, workers=['left'], model_id='__main__:policy')"
            assert world.run("rival", f"kept.append({rival}) or kept[0].send().updated") == (0,)
            with pytest.raises(SendError, match="another sender has taken over"):
                sender.send(linear(83.0))
            world.signal("rival", signal.SIGKILL)
            assert world.processes["rival"].exited(20)
            assert sender.send(linear(84.0)).updated == (0,)
            assert world.values("left") == {84.0}

    def test_rpc_is_shut_down_before_the_sender_is_closed(self, world: World) -> None:
        sender = to("left", "middle", timeout=3.0)
        sender.send()
        unused = to("left", timeout=3.0)
        threads = len(os.listdir("/proc/self/task"))
        rpc.shutdown(graceful=False)
        for each in (sender, unused):
            with pytest.raises(SendError, match="RPC") as failure:
                each.send()
            assert all(
                isinstance(result.error, WorkerLostError)
                for result in failure.value.report.failed.values()
            )
            each.close()
        assert len(os.listdir("/proc/self/task")) < threads
        with pytest.raises(OptionError, match="not initialised"):
            to("left")
