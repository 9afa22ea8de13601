"""A collector whose workers are Ray actors: what every group does, and a buffer in an actor."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import cloudpickle  # type: ignore[import-untyped]
import pytest
import ray
from torch import Tensor, nn

from sync_collector import BatchOptions, Collector
from sync_collector import testing as collectors
from sync_collector.testing import CollectorConformance, FrameList, Scale, long_episodes
from sync_core import (
    ClosedError,
    ModelError,
    OptionError,
    PendingSend,
    RemoteCallError,
    Sender,
    WorkerGroup,
)
from sync_plugin_ray.group import RayGroup
from sync_testing.worker_groups import wait_for

pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]

# Actors cannot import this file by name; the other they can, with pytest, which takes seconds.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(collectors)


class Seat:
    """The object that an actor hosts: one for each collector."""

    def __init__(self) -> None:
        self.hosted: Any = None

    def take(self, factory: Callable[[int], Any], worker_id: int) -> None:
        self.hosted = factory(worker_id)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return function(self.hosted, *args)

    def wait(self, path: Path) -> None:
        while not path.exists():
            time.sleep(0.01)


class LentGroup(WorkerGroup):
    """Actors of a Ray group that outlives the collector: each takes seconds to import it."""

    capabilities: ClassVar[frozenset[str]] = RayGroup.capabilities - {"restart", "add"}
    lender: ClassVar[RayGroup]

    def __init__(
        self, factory: Callable[[int], Any], num_workers: int, *, timeout: float = 60.0
    ) -> None:
        self._ids = tuple(range(num_workers))
        self._stopped = False
        for call in [self.lender.call(i, Seat.take, factory, i) for i in self._ids]:
            call.result(timeout)

    @property
    def worker_ids(self) -> tuple[int, ...]:
        return self._ids

    def call(
        self, worker_id: int, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        if self._stopped:
            raise ClosedError("this group was stopped")
        return self.lender.call(worker_id, Seat.run, partial(function, **kwargs), args)

    def alive(self, worker_id: int) -> bool:
        return not self._stopped and self.lender.alive(worker_id)

    def stop(self, timeout: float | None = None) -> None:
        del timeout
        self._stopped = True
        for call in [self.lender.call(i, Seat.take, lambda _: None, i) for i in self._ids]:
            call.result(60)

    def add(self) -> int:
        raise OptionError("only so many are lent")

    def restart(self, worker_id: int) -> None:
        raise OptionError("they are not ours to end")

    def remove(self, worker_id: int) -> None:
        raise OptionError("they are not ours to end")


@pytest.fixture(scope="module", autouse=True)
def lender() -> Iterator[None]:
    with RayGroup(lambda _: Seat(), 2, remote_configs={"num_cpus": 1}) as LentGroup.lender:
        yield


class TestRay(CollectorConformance):
    scheme = "ray"
    workers = LentGroup


class Slow(Scale):
    """Tells whether its weight is left alone while it does something."""

    def changes_in(self, seconds: float) -> bool:
        before = self.weight.item()
        time.sleep(seconds)
        return self.weight.item() != before


@pytest.fixture
def collector() -> Iterator[Collector]:
    options: dict[str, Any] = {"scheme": "ray", "workers": LentGroup, "num_workers": 2}
    with Collector(long_episodes, Slow(), frames_per_batch=4, sync=True, **options) as collector:
        yield collector


def test_workers_at_rest_commit_though_their_calls_wait(
    collector: Collector, tmp_path: Path
) -> None:
    next(collector)
    waiting = [LentGroup.lender.call(i, Seat.wait, tmp_path / "release") for i in (0, 1)]
    assert collector.update_policy_weights_().updated == (0, 1)
    assert not any(call.done() for call in waiting)
    (tmp_path / "release").touch()
    assert next(collector)["policy_version"].unique().tolist() == [1]


def test_workers_at_work_commit_after_that(collector: Collector) -> None:
    with ThreadPoolExecutor() as threads:
        at_work = threads.submit(collector.cascade_execute, "policy.changes_in", 1.0)
        time.sleep(0.3)
        assert collector.update_policy_weights_(Slow(1.0)).updated == (0, 1)
        assert at_work.result() == [False, False]
    assert collector.cascade_execute("policy.weight.item") == [1.0, 1.0]


class InAnActor:
    """A replay buffer that is the same one wherever it travels."""

    def __init__(self) -> None:
        self.actor: Any = ray.remote(num_cpus=0)(FrameList).remote()

    def extend(self, batch: Any) -> None:
        ray.get(self.actor.extend.remote(batch))

    def frames(self) -> int:
        return int(ray.get(self.actor.frames.remote()))


def test_actors_write_to_a_replay_buffer_in_an_actor() -> None:
    buffer = InAnActor()
    with Collector(
        long_episodes,
        Scale(),
        scheme="ray",
        worker_options={"remote_configs": {"num_cpus": 1}},
        num_workers=1,
        frames_per_batch=4,
        replay_buffer=buffer,
        batch=BatchOptions(extend_in_workers=True),
    ) as collector:
        assert next(collector) is None
        collector.start()
        collector.update_policy_weights_()
        while buffer.frames() < 40:
            time.sleep(0.02)
        with collector.pause():
            assert collector.stats().frames == buffer.frames()


@pytest.mark.timeout(240)
def test_who_joins_and_commits_by_itself_is_not_waited_for() -> None:
    actors = {"remote_configs": {"num_cpus": 0}}
    options: dict[str, Any] = {"scheme": "ray", "worker_options": actors, "num_workers": 2}
    with Collector(
        long_episodes, Scale(), frames_per_batch=6, sync=True, timeout=100, **options
    ) as collector:
        collector.update_policy_weights_(worker_ids=0)
        collector.add_workers()
        assert next(collector)["policy_version"].unique().tolist() == [0, 1, 2]
        configs = [{"num_cpus": 0, "runtime_env": {"env_vars": {"WHICH": name}}} for name in "ab"]
        made = [long_episodes, long_episodes]
        assert collector.add_collectors(made, remote_configs=configs) == (3, 4)
        which = [collector._pool.call(i, lambda _: os.environ.get("WHICH")) for i in (2, 3, 4)]
        assert [call.result(30) for call in which] == [None, "a", "b"]


class Looked:
    """The weights of a policy, during whose pickling something is sent.

    Args:
        weight: the policy's.
        folder: where a file tells that it travels, and another one that something was sent.
    """

    def __init__(self, weight: Tensor, folder: Path) -> None:
        self._weight, self._folder = weight, folder

    def __deepcopy__(self, memo: dict[int, Any]) -> Looked:
        return Looked(self._weight.clone(), self._folder)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[float]]:
        (self._folder / "travels").touch()
        wait_for(self._folder / "sent")
        return float, (self._weight.item(),)


class Open(Scale):
    def look(self, folder: Path) -> Looked:
        return Looked(self.weight, folder)


def test_what_a_call_returns_is_as_it_was_then(tmp_path: Path) -> None:
    with (
        Collector(
            long_episodes,
            Open(),
            scheme="ray",
            workers=LentGroup,
            frames_per_batch=4,
            timeout=30,
        ) as collector,
        ThreadPoolExecutor(1) as beside,
    ):
        looking = beside.submit(collector.cascade_execute, "policy.look", tmp_path)
        wait_for(tmp_path / "travels")
        collector.update_policy_weights_(Scale(1.0))
        (tmp_path / "sent").touch()
        assert looking.result() == [0.0]
        assert collector.cascade_execute("policy.weight.item") == [1.0]


def test_pipes_do_not_reach_actors() -> None:
    with pytest.raises(
        OptionError, match=r"'mp' .* open file, and worker group 'ray' .* cannot pass"
    ):
        Collector(long_episodes, Scale(), scheme="mp", workers="ray", frames_per_batch=4)


def test_processes_need_a_cluster() -> None:
    options: dict[str, Any] = {"scheme": "ray", "workers": "process", "frames_per_batch": 4}
    with pytest.raises(RemoteCallError, match=r"Ray does not run in this one; call ray\.init"):
        Collector(long_episodes, Scale(), **options)

    def in_the_cluster(address: str = ray.get_runtime_context().gcs_address) -> Any:
        ray.init(address=address, log_to_driver=False)
        return long_episodes()

    with Collector(in_the_cluster, Scale(), **options) as collector:
        assert collector.update_policy_weights_().updated == (0,)


class WithCritic(Scale):
    def __init__(self, value: float) -> None:
        super().__init__(value)
        self.critic = filled(value)


def test_schemes_of_the_page_for_users_of_torchrl() -> None:
    policy = WithCritic(1.0)
    with Collector(
        long_episodes,
        policy,
        weight_sync_schemes={"policy": "ray", "policy.critic": "shm"},
        workers=LentGroup,
        frames_per_batch=2,
        sync=True,
    ) as collector:
        policy.set(3.0)
        policy.critic.weight.data.fill_(4.0)
        assert collector.update_policy_weights_().updated == (0,)
        assert next(collector)["action"].flatten().tolist() == [3.0, 3.0]
        (state,) = collector.cascade_execute("policy.state_dict")
        assert state["critic.weight"].unique().tolist() == [4.0]


class Transform:
    """An actor of the user's, which holds a model that environments call."""

    def __init__(self) -> None:
        self.module = nn.Linear(2, 1)
        self.transform_module = nn.Linear(2, 1)

    def sums(self) -> list[float]:
        return [each.weight.sum().item() for each in (self.module, self.transform_module)]


def filled(value: float) -> nn.Linear:
    model = nn.Linear(2, 1)
    for parameter in model.parameters():
        parameter.data.fill_(value)
    return model


@pytest.fixture
def transform() -> Iterator[Any]:
    actor: Any = ray.remote(Transform).options(num_cpus=0).remote()
    yield actor
    ray.kill(actor)


def test_a_model_of_another_actor_is_updated_when_it_is_named(transform: Any) -> None:
    trained = filled(1.0)
    policy = Scale(3.0)
    with Collector(
        long_episodes,
        policy,
        models={"transform_module": trained},
        weight_sync_schemes={"transform_module": {"scheme": "ray", "workers": [transform]}},
        workers="thread",
        frames_per_batch=2,
        sync=True,
    ) as collector:
        first = ray.get(transform.sums.remote())[0]
        assert collector.update_policy_weights_(model_id="transform_module").updated == (0,)
        assert ray.get(transform.sums.remote()) == [first, 2.0]
        # The policy travels as if there were no other model, and alone.
        trained.weight.data.fill_(2.0)
        policy.set(4.0)
        collector.update_policy_weights_()
        assert next(collector)["action"].flatten().tolist() == [4.0, 4.0]
        assert ray.get(transform.sums.remote()) == [first, 2.0]
        pending = collector.update_policy_weights_(
            filled(5.0), model_id="transform_module", blocking=False
        )
        assert isinstance(pending, PendingSend)
        assert pending.wait().updated == (0,)
        assert ray.get(transform.sums.remote()) == [first, 10.0]
        with pytest.raises(ValueError, match="cannot be updated together with other models"):
            collector.update_policy_weights_(
                weights_dict={"policy": None, "transform_module": None}
            )
        sender = collector.senders["transform_module"]
        assert sender.collector is collector
    with pytest.raises(ClosedError):
        sender.send()


def test_an_actor_that_the_trainer_has_is_found_by_its_path(transform: Any) -> None:
    trainer = SimpleNamespace(module=filled(1.0), env=SimpleNamespace(transform=[transform]))
    held = {
        "scheme": "ray",
        "workers": ["env.transform[0]"],
        "context": trainer,
        "model_id": "module",
    }
    empty = {"scheme": "ray", "workers": [transform], "model_id": "module"}
    with Collector(
        long_episodes,
        weight_sync_schemes={"critic": held, "baseline": empty},
        workers="thread",
        frames_per_batch=2,
    ) as collector:
        collector.update_policy_weights_(model_id="critic")
        assert ray.get(transform.sums.remote())[0] == 2.0
        with pytest.raises(ModelError, match=r"no weights of 'baseline'; give Collector mod"):
            collector.update_policy_weights_(model_id="baseline")
        collector.update_policy_weights_(weights_dict={"baseline": filled(3.0)})
        assert ray.get(transform.sums.remote())[0] == 6.0
        assert collector.update_policy_weights_().workers == {}


def new_collector(worker_id: int) -> Collector:
    del worker_id
    return Collector(
        long_episodes,
        Scale(),
        scheme="shm",
        workers="process",
        num_workers=2,
        frames_per_batch=4,
        sync=True,
    )


def received(collector: Collector) -> tuple[dict[str, int], list[float]]:
    versions = dict(collector.receive_weights(timeout=30.0))
    return versions, collector.cascade_execute("policy.weight.item")


def test_weights_reach_processes_by_way_of_an_actor() -> None:
    with (
        Sender("shm", Scale(5.0), num_workers=1) as sender,
        LentGroup(new_collector, 1) as group,
    ):
        address = sender.address(0)
        group.call(0, Collector.register_scheme_receiver, {"policy": address}).result(60)
        for version, weight in enumerate((5.0, 6.0), 1):
            pending = sender.send_async(Scale(weight))
            call = group.call(0, received)
            assert pending.wait().updated == (0,)
            assert call.result(60) == ({"policy": version}, [weight, weight])
        group.call(0, Collector.shutdown).result(60)
