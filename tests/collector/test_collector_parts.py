"""The parts of a collector, each alone: loops, conventions, workers, requests, weights."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from sync_collector import Collector
from sync_collector.batch_requests import BatchRequests
from sync_collector.collector_worker import CollectorWorker, WorkerSpec
from sync_collector.envs import CountingEnv, GymEnv
from sync_collector.episodes import PER_WORKER
from sync_collector.rollout import BatchRequest, Devices, Rollout, RolloutOptions
from sync_collector.schedules import FirstReady, Synchronous
from sync_collector.testing import Scale, long_episodes, values
from sync_collector.worker_pool import WorkerPool
from sync_core import (
    RemoteCallError,
    WorkerLostError,
    registry,
)
from sync_testing import eventually

pytestmark = pytest.mark.timeout(60)


def group_class(name: str) -> Any:
    return registry.find(registry.WORKERS, name).object


def pool(group: str = "inline", env_fn: Any = long_episodes, num_workers: int = 2) -> WorkerPool:
    options = RolloutOptions(frames_per_batch=2, owns_process=group == "process")

    def spec(worker_id: int, seat: int) -> WorkerSpec:
        return WorkerSpec(seat=seat, env_fn=env_fn, policy=Scale(), options=options)

    return WorkerPool(group_class(group), spec, num_workers, 30.0)


def with_interruption(env: Any, method: str) -> Any:
    """The environment, interrupted before the seventh call of a method."""
    count = itertools.count(1)
    call = getattr(env, method)

    def interrupted(*args: Any) -> Any:
        if next(count) == 7:
            raise KeyboardInterrupt
        return call(*args)

    setattr(env, method, interrupted)
    return env


def interrupted_gym() -> Any:
    env = GymEnv("CartPole-v1")
    env.set_seed(0)
    return with_interruption(env, "step_arrays")


def interrupted_counting() -> Any:
    return with_interruption(CountingEnv(3), "step")


@pytest.mark.parametrize(("env_fn", "width"), [(interrupted_gym, 2), (interrupted_counting, 1)])
def test_no_frame_is_lost_to_ctrl_c(env_fn: Callable[[], Any], width: int) -> None:
    asked: list[int] = []

    def policy(observation: Tensor) -> Tensor:
        asked.append(len(asked))
        return torch.tensor([len(asked) % 2, 1 - len(asked) % 2])[:width]

    options: dict[str, Any] = {"scheme": "none", "frames_per_batch": 10}
    with Collector(env_fn, policy, **options) as collector:
        with pytest.raises(KeyboardInterrupt):
            next(collector)
        batch = next(collector)
        assert len(asked) == 10
        following = batch["next", "observation"][:-1]
        goes_on = ~batch["next", "done"][:-1].squeeze(-1)
        assert torch.equal(batch["observation"][1:][goes_on], following[goes_on])
        assert collector.stats().frames == 10


def test_a_new_seed_drops_a_batch_that_was_cut_short() -> None:
    made = Rollout(interrupted_counting(), None, 0, RolloutOptions(frames_per_batch=10))
    with pytest.raises(KeyboardInterrupt):
        made.collect()
    made.set_seed(50)
    assert values(made.collect(), "observation")[:4] == [50, 51, 52, 50]


def test_random_actions_by_order() -> None:
    made = Rollout(long_episodes(), Scale(7.0), 0, RolloutOptions(frames_per_batch=3))
    assert values(made.collect(), "action") == [7.0] * 3
    assert 7.0 not in values(made.collect(BatchRequest(random=True)), "action")


def env_of(step: Callable[[], dict[Any, Any]], **attributes: Any) -> Any:
    """An environment that gives with every step what ``step`` returns."""

    class Env:
        batch_size = torch.Size()

        def reset(self, tensordict: TensorDictBase | None = None, /) -> TensorDictBase:
            return TensorDict({"observation": torch.zeros(1)}, batch_size=[])

        def step(self, tensordict: TensorDictBase, /) -> TensorDictBase:
            made = TensorDict({"observation": torch.ones(1)}, batch_size=[])
            return tensordict.set("next", made.update(step()))

        def rand_action(self, tensordict: TensorDictBase, /) -> TensorDictBase:
            return tensordict.set("action", torch.zeros(1))

    env = Env()
    for name, value in attributes.items():
        setattr(env, name, value)
    return env


@pytest.mark.parametrize("names", [["done"], ["terminated"], ["truncated"], ["done", "truncated"]])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_flags_and_reward_of_any_form(names: list[str], shape: tuple[int, ...]) -> None:
    env = env_of(
        lambda: {
            "reward": torch.ones(shape, dtype=torch.float64),
            **{name: torch.ones(shape, dtype=torch.bool) for name in names},
        }
    )
    batch = Rollout(env, None, 0, RolloutOptions(frames_per_batch=2)).collect()
    assert batch["next", "reward"].dtype == torch.float32
    ends = {"done": True, "terminated": "truncated" not in names, "truncated": "truncated" in names}
    for name, end in ends.items():
        assert batch["next", name].tolist() == [[end]] * 2
        assert batch[name].tolist() == [[False]] * 2
    assert batch["next", "reward"].shape == (2, 1)
    assert batch["collector", "traj_ids"].tolist() == [0, 1]
    assert values(batch, "observation") == [0, 0]


def test_nested_flags() -> None:
    env = env_of(
        lambda: {"a": {"reward": torch.ones(()), "done": torch.ones(1, dtype=torch.bool)}},
        done_keys=[("a", "done")],
        reward_keys=[("a", "reward")],
    )
    batch = Rollout(env, None, 0, RolloutOptions(frames_per_batch=2)).collect()
    assert batch["next", "a", "reward"].tolist() == [[1.0], [1.0]]
    assert batch["next", "a", "terminated"].all()
    assert not batch["a", "done"].any()
    assert batch["collector", "traj_ids"].tolist() == [0, 1]
    assert "done" not in batch


def test_a_part_that_is_done_while_the_others_go_on() -> None:
    class Parts(CountingEnv):
        done_keys = ("done", ("part", "done"))

        def step(self, tensordict: Any, /) -> Any:
            stepped = super().step(tensordict)
            stepped["next", "part", "done"] = stepped["next", "observation"] >= 2
            return stepped

    batch = Rollout(Parts(4), None, 0, RolloutOptions(frames_per_batch=6)).collect()
    assert batch["next", "part", "done"].flatten().int().tolist() == [0, 1, 1, 1, 0, 1]
    # A reset gives none, so the first steps of episodes have none, and no step has.
    assert not batch["part", "done"].any()

    class Given(Parts):
        def reset(self, *args: Any) -> Any:
            return super().reset(*args).set(("part", "done"), torch.zeros(1, dtype=torch.bool))

    batch = Rollout(Given(4), None, 0, RolloutOptions(frames_per_batch=6)).collect()
    assert batch["part", "done"].flatten().tolist() == [False, False, True, True, False, False]
    assert batch["part", "terminated"].shape == (6, 1)
    assert not batch["done"].any()


def test_an_environment_without_flags() -> None:
    made = Rollout(env_of(dict), None, 0, RolloutOptions(frames_per_batch=2))
    with pytest.raises(KeyError, match=r"Env gives none of 'done', 'terminated', 'truncated'"):
        made.collect()


@pytest.mark.parametrize("group", ["inline", "thread", "process"])
def test_seats_are_never_used_again(group: str) -> None:
    workers = pool(group)
    joined: list[int] = []
    workers.on_join.append(joined.append)
    try:
        workers.restart(1)
        assert workers.add() == 2
        workers.remove(0)
        assert workers.ids == (1, 2)
        assert joined == [1, 2]
        calls: dict[int, Future[Any]] = workers.call_all(CollectorWorker.collect, BatchRequest())
        seats = {
            i: call.result(30)["collector", "traj_ids"][0].item() // PER_WORKER
            for i, call in calls.items()
        }
        assert seats == {1: 2, 2: 3}
    finally:
        workers.stop()


@pytest.mark.parametrize("group", ["inline", "thread", "process"])
def test_a_worker_that_took_a_place_and_could_not_join_does_not_work(group: str) -> None:
    def refuse(worker_id: int) -> None:
        raise ValueError(f"no weights for {worker_id}")

    workers = pool(group)
    workers.on_join.append(refuse)
    try:
        with pytest.raises(ValueError, match="no weights for 1"):
            workers.restart(1)
        assert (workers.alive(0), workers.alive(1)) == (True, False)
        with pytest.raises(WorkerLostError, match=r"could not join: no weights for 1"):
            workers.call(1, CollectorWorker.collect, BatchRequest()).result(30)
        workers.on_join.clear()
        workers.restart(1)
        assert workers.alive(1)
        call: Future[Any] = workers.call(1, CollectorWorker.collect, BatchRequest())
        assert values(call.result(30), "observation") == [0, 1]
    finally:
        workers.stop()


@pytest.mark.parametrize("group", ["inline", "process"])
def test_a_worker_that_takes_a_place_is_not_among_all_before_it_has_joined(group: str) -> None:
    workers = pool(group)
    calls: dict[int, Future[bool]] = {}
    workers.on_join.append(lambda _: calls.update(workers.call_all(CollectorWorker.midway, 0)))
    try:
        workers.restart(1)
        assert not calls[0].result(30)
        with pytest.raises(WorkerLostError, match="worker 1: is being replaced"):
            calls[1].result(30)
        assert not any(
            call.result(30) for call in workers.call_all(CollectorWorker.midway, 0).values()
        )
    finally:
        workers.stop()


@pytest.mark.parametrize("group", ["inline", "process"])
def test_what_cannot_be_built(group: str) -> None:
    def broken() -> CountingEnv:
        raise ValueError("no pole")

    with pytest.raises(RemoteCallError) as caught:
        pool(group, broken)
    message = str(caught.value)
    assert message.startswith("worker 0: CollectorWorker.build raised ValueError: no pole\n")
    assert "in broken" in message
    assert "WorkerSpec" not in message.splitlines()[0]


def test_a_worker_that_cannot_be_added() -> None:
    envs: list[Any] = [long_episodes, long_episodes, GymEnv]

    def made() -> Any:
        return envs.pop(0)()

    workers = pool("inline", made)
    with pytest.raises(RemoteCallError, match="raised TypeError"):
        workers.add()
    assert workers.ids == (0, 1)
    workers.stop()


def test_the_text_of_a_recipe_is_short() -> None:
    options = RolloutOptions(frames_per_batch=1)
    assert repr(WorkerSpec(seat=3, env_fn=CountingEnv, options=options)) == "WorkerSpec(seat=3)"


def test_a_policy_from_another_process_is_not_copied_again() -> None:
    policy = Scale()
    for owns_process, copied in ((True, False), (False, True)):
        options = RolloutOptions(frames_per_batch=1, owns_process=owns_process)
        spec = WorkerSpec(seat=0, env_fn=CountingEnv, policy=policy, options=options)
        assert (spec.make_models()[0] is not policy) == copied


def test_a_worker_that_is_held_back() -> None:
    workers = pool("thread", num_workers=1)
    requests = BatchRequests(workers, 1.0)
    requests.hold(0)
    requests.ask(0)
    assert len(requests) == 1
    assert not requests.busy(0)
    requests.release(0)
    with requests.settled():
        assert requests.made().keys() == {0}
    taken = requests.take_first()
    assert taken is not None
    assert values(taken.batch, "observation") == [0, 1]
    assert len(requests) == 0
    workers.stop()


def test_a_batch_that_is_dropped_while_it_is_waited_for() -> None:
    may_step = threading.Event()

    class Waiting(CountingEnv):
        def step(self, tensordict: TensorDictBase, /) -> TensorDictBase:
            may_step.wait(30)
            return super().step(tensordict)

    workers = pool("thread", Waiting)
    requests = BatchRequests(workers, 30.0)
    schedule = FirstReady(workers, requests)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(schedule.next_batch, 2)
        assert eventually(lambda: len(requests) == 1)
        requests.drop(0)
        may_step.set()
        # It was the only one, and is asked for again.
        assert waiting.result(30).worker_id == 0
    with pytest.raises(StopIteration):
        schedule.next_batch(0)
    workers.stop()


def test_parts_that_do_not_fit_are_kept() -> None:
    envs = [long_episodes, lambda: CountingEnv(9, num_envs=2)]
    options: dict[str, Any] = {"scheme": "none", "frames_per_batch": 8, "sync": True}
    with Collector(envs, **options) as collector:
        for _ in range(2):
            with pytest.raises(ValueError, match=r"\[4\] for worker 0 and \[2, 2\] for worker 1"):
                next(collector)
        parts = collector._requests.wait_all()
        assert values(parts[0], "observation") == [0, 1, 2, 3]
        assert collector.stats().frames == 0


def test_parts_on_several_devices() -> None:
    def spec(worker_id: int, seat: int) -> WorkerSpec:
        devices = Devices.of(storing=("cpu", "meta")[worker_id])
        options = RolloutOptions(frames_per_batch=4, devices=devices)
        return WorkerSpec(seat=seat, env_fn=long_episodes, options=options)

    workers = WorkerPool(group_class("inline"), spec, 2, 30.0)
    with pytest.raises(ValueError, match=r"on cpu for worker 0 and .* on meta for worker 1"):
        Synchronous(workers, BatchRequests(workers, 1.0)).next_batch(None)
    workers.stop()
