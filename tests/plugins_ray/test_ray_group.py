"""Worker group `ray`: what every group does, and how actors die, travel, find a place and end."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import cloudpickle  # type: ignore[import-untyped]
import pytest
import ray

from sync_core import (
    OptionError,
    WorkerLostError,
    WorkerTimeoutError,
)
from sync_plugin_ray.group import RayGroup, usual_options
from sync_testing import WorkerGroupConformance, eventually, worker_groups
from sync_testing.worker_groups import pid_of, sleep, wait_for

pytestmark = pytest.mark.timeout(120)

# Actors cannot import this file by name.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
# By name they can, but importing torch for it takes each actor seconds.
cloudpickle.register_pickle_by_value(worker_groups)


class TestRayGroup(WorkerGroupConformance):
    group_class = RayGroup


def pids(group: RayGroup) -> list[int]:
    return [group.call(i, pid_of).result() for i in group.worker_ids]


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def gone(*workers: int) -> bool:
    return eventually(lambda: not any(map(is_running, workers)))


@pytest.fixture
def group() -> Iterator[RayGroup]:
    """A group for tests that hurt its workers."""
    with RayGroup(lambda worker_id: worker_id, 2) as group:
        yield group


class TestDeath:
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


class TestStop:
    def test_a_stopped_process_is_ended_too(self, group: RayGroup, tmp_path: Path) -> None:
        workers = pids(group)
        frozen = group.call(0, sleep, tmp_path / "frozen")
        wait_for(tmp_path / "frozen")
        os.kill(workers[0], signal.SIGSTOP)
        assert group.alive(0)
        start = time.monotonic()
        group.stop(2.0)
        assert time.monotonic() - start < 20
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

        # Actors that other tests share may hold some.
        with RayGroup(repr, 1, remote_configs={"num_cpus": int(free())}) as group:
            assert eventually(lambda: free() < 1)
            with RayGroup(lambda worker_id: worker_id, 1) as other:
                assert other.add() == 1
            group.stop()


def test_without_ray_the_error_says_what_to_install() -> None:
    source = """
import sys
sys.modules["ray"] = None
from sync_core.errors import PluginError
from sync_core import registry
try:
    registry.find(registry.WORKERS, "ray")
except PluginError as error:
    print(error)
"""
    command = [sys.executable, "-c", source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert "pip install 'ray>=2.50'" in done.stdout
