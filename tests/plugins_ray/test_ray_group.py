"""Worker group `ray`: what every group does, and how actors die, travel, find a place and end."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn, cast

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import pytest
import ray
import torch

from sync_core import (
    OptionError,
    RemoteCallError,
    WorkerLostError,
    WorkerTimeoutError,
)
from sync_core.testing import WorkerGroupConformance, worker_groups
from sync_core.testing.worker_groups import eventually, wait_for
from sync_plugin_ray.group import RayGroup, usual_options

pytestmark = pytest.mark.timeout(120)

# Actors cannot import this file by name.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
# By name they can, but importing torch for it takes each actor seconds.
cloudpickle.register_pickle_by_value(worker_groups)


class TestRayGroup(WorkerGroupConformance):
    group_class = RayGroup


def pid_of(_: object) -> int:
    return os.getpid()


def pids(group: RayGroup) -> list[int]:
    return [group.call(i, pid_of).result() for i in group.worker_ids]


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def gone(*workers: int) -> bool:
    return eventually(lambda: not any(map(is_running, workers)))


def sleep(_: object, started: Path) -> None:
    started.touch()
    time.sleep(60)


@pytest.fixture(scope="module")
def shared() -> Iterator[RayGroup]:
    """A group for tests that leave it as it is."""
    with RayGroup(lambda worker_id: worker_id, 2, remote_configs={"num_cpus": 0}) as group:
        yield group


@pytest.fixture
def group() -> Iterator[RayGroup]:
    """A group for tests that hurt its workers."""
    with RayGroup(lambda worker_id: worker_id, 2) as group:
        yield group


class TestDeath:
    def test_a_killed_worker_is_lost_alone(self, group: RayGroup, tmp_path: Path) -> None:
        _, victim = pids(group)
        running = group.call(1, sleep, tmp_path / "started")
        waiting = group.call(1, pid_of)
        wait_for(tmp_path / "started")
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(WorkerLostError) as caught:
            running.result(10)
        assert str(caught.value) == "worker 1: its actor died while running sleep"
        assert isinstance(caught.value.__cause__, ray.exceptions.RayActorError)
        with pytest.raises(WorkerLostError, match="its actor died before it could run pid_of"):
            waiting.result(10)
        assert eventually(lambda: not group.alive(1))
        assert group.alive(0)
        assert group.worker_ids == (0, 1)
        with pytest.raises(WorkerLostError, match=r"cannot run pid_of; restart\(1\) of its group"):
            group.call(1, pid_of).result(10)
        group.restart(1)
        assert pids(group)[1] != victim

    def test_a_death_is_noticed_without_a_call(self, group: RayGroup) -> None:
        os.kill(pids(group)[0], signal.SIGKILL)
        assert eventually(lambda: not group.alive(0))
        assert group.alive(1)

    def test_a_worker_that_dies_while_it_starts_leaves_nothing(self, tmp_path: Path) -> None:
        def make(worker_id: int) -> None:
            (tmp_path / str(os.getpid())).touch()
            if worker_id == 1:
                os._exit(7)

        with pytest.raises(WorkerLostError, match=r"worker 1: its actor died while running .*make"):
            RayGroup(make, 2)
        assert gone(*(int(path.name) for path in tmp_path.iterdir()))

    def test_a_factory_that_cannot_be_pickled_starts_nothing(self, shared: RayGroup) -> None:
        lock = shared._lock
        with pytest.raises(RemoteCallError, match=r"its factory .* cannot be pickled") as caught:
            RayGroup(lambda _: lock, 2)
        assert isinstance(caught.value.__cause__, TypeError)


class TestStop:
    def test_a_stopped_process_is_ended_too(self, group: RayGroup, tmp_path: Path) -> None:
        workers = pids(group)
        frozen = group.call(0, sleep, tmp_path / "frozen")
        wait_for(tmp_path / "frozen")
        os.kill(workers[0], signal.SIGSTOP)
        assert group.alive(0)
        start = time.monotonic()
        group.stop(2.0)
        assert time.monotonic() - start < 2.5
        with pytest.raises(WorkerLostError, match="was stopped while running"):
            frozen.result(1)
        assert gone(*workers)

    def test_a_forgotten_group_ends_its_actors(self) -> None:
        group = RayGroup(lambda worker_id: worker_id, 1)
        workers = pids(group)
        del group
        gc.collect()
        assert gone(*workers)

    def test_a_group_forgotten_in_a_thread_of_ray_ends_its_actors(self) -> None:
        held = [RayGroup(lambda worker_id: worker_id, 1)]
        workers = pids(held[0])
        call: Any = ray.remote(lambda: time.sleep(0.5)).options(num_cpus=0).remote()
        # Ray runs the callback in the thread that handles the replies to its own calls.
        call.future().add_done_callback(lambda _: held.clear())
        assert gone(*workers)
        assert not held


class Unpicklable:
    def __reduce__(self) -> NoReturn:
        raise TypeError("stays where it is")


class StaysAway:
    """Can be pickled, and unpickled in no process but the one that it names."""

    def __init__(self, home: int) -> None:
        self.home = home

    def __getstate__(self) -> int:
        return self.home

    def __setstate__(self, home: int) -> None:
        if os.getpid() != home:
            raise ValueError("not here")


class TestTravel:
    def test_an_argument_that_cannot_be_pickled(self, shared: RayGroup) -> None:
        call = shared.call(0, repr, Unpicklable())
        with pytest.raises(RemoteCallError, match=r"^worker 0: repr or its arguments cannot be p"):
            call.result(5)
        assert shared.call(0, abs).result(5) == 0

    def test_an_argument_that_cannot_be_unpickled(self, shared: RayGroup) -> None:
        call = shared.call(0, repr, StaysAway(os.getpid()))
        with pytest.raises(RemoteCallError, match=r"repr or its arguments .* worker: .*not here"):
            call.result(5)
        assert shared.call(0, abs).result(5) == 0

    def test_a_result_that_cannot_be_pickled(self, shared: RayGroup) -> None:
        call = shared.call(0, lambda _: Unpicklable())
        with pytest.raises(RemoteCallError, match=r"lambda> returned a value .* be pickled: Type"):
            call.result(5)

    def test_a_result_that_cannot_be_unpickled(self, shared: RayGroup) -> None:
        call = shared.call(0, lambda _: StaysAway(os.getpid()))
        with pytest.raises(RemoteCallError, match=r"returned a value .* unpickled here: .*not he"):
            call.result(5)

    def test_an_exception_that_cannot_be_pickled(self, shared: RayGroup) -> None:
        def fail(_: object) -> NoReturn:
            raise ValueError(Unpicklable())

        with pytest.raises(RemoteCallError, match=r"fail raised ValueError") as caught:
            shared.call(0, fail).result(5)
        assert caught.value.__cause__ is None
        assert "in fail" in str(caught.value)

    def test_a_keyboard_interrupt_leaves_no_one_waiting(self, shared: RayGroup) -> None:
        def interrupt(_: object) -> NoReturn:
            raise KeyboardInterrupt

        with pytest.raises(RemoteCallError, match="interrupt raised KeyboardInterrupt"):
            shared.call(0, interrupt).result(5)
        assert shared.alive(0)

    def test_results_are_copies_that_can_be_written_to(self, shared: RayGroup) -> None:
        sent = np.zeros(1_000_000)
        tensor = torch.zeros(1_000_000)
        call = shared.call(0, lambda _, *given: given, sent, tensor)
        # The array that was passed is unchanged.
        sent += 1
        array, returned = call.result(60)
        array += 2
        returned += 2
        assert array.mean() == returned.mean() == 2

    def test_calls_of_a_worker_share_a_thread(self, shared: RayGroup) -> None:
        calls = [shared.call(0, lambda _: threading.get_ident()) for _ in range(5)]
        assert len({call.result(5) for call in calls}) == 1


class TestResources:
    def test_equal_shares(self) -> None:
        options = usual_options(16)
        assert 0 < options["num_cpus"] <= 0.5
        assert options["num_gpus"] == 0
        assert 0 < options["memory"] <= 2 * 1024**3
        assert usual_options(0)["num_gpus"] == 0

    def test_configs_for_each_worker(self) -> None:
        def assigned(_: object) -> Any:
            context: Any = ray.get_runtime_context()
            return context.get_assigned_resources()

        configs: list[dict[str, Any]] = [{"num_cpus": 2}, {"num_cpus": 0.5, "memory": 0}]
        with RayGroup(lambda worker_id: worker_id, 2, remote_configs=configs) as group:
            first, second = (group.call(i, assigned).result() for i in (0, 1))
            assert first["CPU"] == 2
            assert second == {"CPU": 0.5}

    @pytest.mark.parametrize("count", [1, 3])
    def test_too_few_or_too_many_configs(self, count: int) -> None:
        with pytest.raises(ValueError, match=rf"{count} entries for 2 workers; give one for each"):
            RayGroup(repr, 2, remote_configs=[{}] * count)

    def test_an_option_that_is_the_groups_own(self) -> None:
        with pytest.raises(OptionError, match=r"'max_restarts', which the worker group decides"):
            RayGroup(repr, 2, remote_configs={"max_restarts": 3})

    def test_a_config_that_is_not_a_mapping(self) -> None:
        for configs in (3, [3], "num_cpus"):
            with pytest.raises(TypeError, match=r"remote_configs .*{'num_cpus': 1}"):
                RayGroup(repr, 1, remote_configs=cast(Any, configs))

    def test_an_option_that_ray_does_not_have(self) -> None:
        with pytest.raises(ValueError, match="num_cpu"):
            RayGroup(repr, 1, remote_configs={"num_cpu": 1})

    def test_more_than_the_cluster_has(self) -> None:
        wanted = {"num_cpus": 1000}
        with pytest.raises(
            WorkerTimeoutError,
            match=r"worker 0: did not start within 1 s: it demands {'num_cpus': 1000.*, and the "
            r"cluster has .*'CPU': 8.*; give remote_configs=",
        ):
            RayGroup(repr, 1, timeout=1, remote_configs=wanted)

    def test_a_cluster_without_a_free_cpu_still_takes_workers(self) -> None:
        cluster: Any = ray

        def free() -> float:
            return float(cluster.available_resources().get("CPU", 0))

        with RayGroup(repr, 1, remote_configs={"num_cpus": 8}) as group:
            assert eventually(lambda: free() == 0)
            with RayGroup(lambda worker_id: worker_id, 1) as other:
                assert other.add() == 1
            group.stop()


def test_without_ray_the_error_says_what_to_install() -> None:
    source = """
import sys
sys.modules["ray"] = None
from sync_core.errors import PluginImportError
from sync_core import registry
try:
    registry.find(registry.WORKERS, "ray")
except PluginImportError as error:
    print(error, error.__cause__)
"""
    command = [sys.executable, "-c", source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert "pip install 'ray>=2.50'" in done.stdout
