"""The parts of a collector, each alone: loops, conventions, workers, requests, weights."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from sync_collector import Collector
from sync_collector.batch_requests import BatchRequests
from sync_collector.collector_worker import CollectorWorker
from sync_collector.devices import Devices
from sync_collector.envs import CountingEnv, GymEnv
from sync_collector.policy_module import module_of
from sync_collector.rollout import BatchRequest, Rollout, RolloutOptions
from sync_collector.schedules import FirstReady, Synchronous
from sync_collector.testing import Scale, long_episodes
from sync_collector.trajectories import PER_WORKER
from sync_collector.worker_pool import WorkerPool
from sync_collector.worker_spec import WorkerSpec
from sync_core import (
    ApplyContext,
    ModelError,
    OptionError,
    PendingSend,
    RemoteCallError,
    SendError,
    SendReport,
    WorkerLostError,
    hookimpl,
    registry,
)

pytestmark = pytest.mark.timeout(60)


class Slow(CountingEnv):
    """Takes 20 ms for a step."""

    def __init__(self) -> None:
        super().__init__(100_000)

    def step(self, tensordict: TensorDictBase, /) -> TensorDictBase:
        time.sleep(0.02)
        return super().step(tensordict)


def values(batch: TensorDictBase, *key: str) -> list[Any]:
    return list(batch[key].squeeze(-1).tolist())


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


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
        _until(lambda: len(requests) == 1)
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


@pytest.mark.parametrize(("scheme", "workers"), [("thread", "thread"), ("shm", "process")])
def test_a_commit_in_the_middle_of_a_batch(scheme: str, workers: str) -> None:
    policy = Scale()
    options: dict[str, Any] = {"scheme": scheme, "workers": workers, "frames_per_batch": 25}
    with Collector(Slow, policy, num_workers=1, **options) as collector:
        next(collector)
        time.sleep(0.1)
        policy.set(1.0)
        report = collector.update_policy_weights_()
        assert collector._requests.busy(0)
        assert report.updated == (0,)
        batch = next(collector)
    versions = batch["policy_version"].tolist()
    assert versions == sorted(versions)
    assert set(versions) == {0, 1}
    assert values(batch, "action") == versions


@pytest.mark.parametrize(("scheme", "workers"), [("thread", "thread"), ("shm", "process")])
def test_weights_that_come_with_the_last_step_of_a_batch(
    scheme: str, workers: str, tmp_path: Path
) -> None:
    steps, may_end = tmp_path / "steps", tmp_path / "may_end"

    class Waits(CountingEnv):
        def step(self, tensordict: TensorDictBase, /) -> TensorDictBase:
            if self._steps.item() == 1:
                steps.touch()
                _until(may_end.exists)
            return super().step(tensordict)

    options: dict[str, Any] = {"scheme": scheme, "workers": workers, "num_workers": 1}
    with Collector(lambda: Waits(100), Scale(), frames_per_batch=1, **options) as collector:
        next(collector)
        _until(steps.exists)
        pending = collector.update_policy_weights_(blocking=False)
        assert isinstance(pending, PendingSend)
        may_end.touch()
        # No other batch is asked for, in which the worker would look for weights.
        assert pending.wait().updated == (0,)
        assert [next(collector)["policy_version"].item() for _ in range(2)] == [0, 1]


def test_a_sender_that_is_lost_costs_no_batch() -> None:
    options: dict[str, Any] = {"scheme": "thread", "workers": "thread", "frames_per_batch": 25}
    with Collector(Slow, Scale(), num_workers=1, **options) as collector:
        next(collector)
        assert collector.sender is not None
        collector.sender.close()
        assert values(next(collector), "observation") == list(range(25, 50))


class Refuses:
    """A layer that keeps the first version from being committed."""

    @hookimpl(wrapper=True)
    def apply_weights(self, update: Any, model: Any, context: ApplyContext) -> Any:
        if context.version == 1:
            raise ValueError("not this one")
        return (yield)


def test_an_error_in_the_middle_of_a_batch_is_told() -> None:
    options: dict[str, Any] = {"scheme": "thread", "workers": "thread", "layers": [Refuses()]}
    with Collector(Slow, Scale(), frames_per_batch=25, **options) as collector:
        next(collector)
        time.sleep(0.1)
        began = time.perf_counter()
        with pytest.raises(SendError, match="not this one"):
            collector.update_policy_weights_()
        assert time.perf_counter() - began < 0.4
        assert values(next(collector), "observation") == list(range(25, 50))
        assert collector.update_policy_weights_().updated == (0,)


def test_an_error_in_the_middle_of_a_batch_is_none_of_the_next_update() -> None:
    options: dict[str, Any] = {"scheme": "thread", "workers": "thread", "layers": [Refuses()]}
    with Collector(Slow, Scale(), frames_per_batch=25, **options) as collector:
        next(collector)
        with pytest.raises(SendError, match="not this one"):
            collector.update_policy_weights_()
        while collector._requests.busy(0):
            time.sleep(0.01)
        assert collector.update_policy_weights_().updated == (0,)
        assert next(collector)["policy_version"].unique().tolist() == [0]
        assert next(collector)["policy_version"].unique().tolist() == [2]


def test_updates_that_are_not_waited_for() -> None:
    policy = Scale()
    options: dict[str, Any] = {"scheme": "thread", "frames_per_batch": 2}
    with Collector(Slow, policy, **options) as collector:
        pending = collector.update_policy_weights_(blocking=False)
        assert isinstance(pending, PendingSend)
        policy.set(2.0)
        collector.update_policy_weights_(blocking=False)
        assert collector.update_policy_weights_().updated == (0,)
        assert pending.wait().version == 1
        assert collector.stats().version == 3
        assert values(next(collector), "action") == [2.0] * 2


def test_collection_goes_on_while_an_update_is_under_way() -> None:
    committed = threading.Event()

    class HoldsUpOne:
        @hookimpl(wrapper=True)
        def apply_weights(self, context: ApplyContext) -> Any:
            if context.worker_id == 1:
                assert committed.wait(30)
            return (yield)

    policy = Scale()
    options: dict[str, Any] = {"scheme": "thread", "workers": "thread", "num_workers": 2}
    with Collector(
        Slow, policy, frames_per_batch=10, sync=False, layers=[HoldsUpOne()], **options
    ) as collector:
        next(collector)
        policy.set(1.0)
        pending = collector.update_policy_weights_(blocking=False)
        assert isinstance(pending, PendingSend)
        # One batch of each may have begun before; what comes then is of the worker that continues.
        batches = [next(collector) for _ in range(5)]
        assert not pending.done()
        assert {batch["policy_version"][0].item() for batch in batches[-2:]} == {1}
        committed.set()
        assert pending.wait().updated == (0, 1)


def test_weights_by_name() -> None:
    options: dict[str, Any] = {"scheme": "thread", "frames_per_batch": 2}
    with Collector(long_episodes, Scale(), **options) as collector:
        collector.update_policy_weights_(weights_dict={"policy": Scale(3.0)})
        assert values(next(collector), "action") == [3.0] * 2
        with pytest.raises(KeyError, match="no model 'critic'"):
            collector.update_policy_weights_(weights_dict={"critic": Scale()})
        with pytest.raises(ValueError, match="leave out model_id"):
            collector.update_policy_weights_(model_id="policy", weights_dict={"policy": Scale()})


def test_versions_that_came_another_way() -> None:
    options: dict[str, Any] = {"scheme": "thread", "frames_per_batch": 2, "sync": True}
    with Collector(long_episodes, Scale(), **options) as collector:
        assert collector.sender is not None
        assert collector.sender.collector is collector
        collector.sender.increment_version()
        assert next(collector)["policy_version"].unique().tolist() == [1]
        collector.update_policy_weights_()
        assert next(collector)["policy_version"].unique().tolist() == [2]
        assert collector.stats().lag == 0


def test_workers_that_join_get_the_newest_weights() -> None:
    policy = Scale()
    options: dict[str, Any] = {"scheme": "shm", "num_workers": 2, "frames_per_batch": 4}
    with Collector(long_episodes, policy, sync=True, **options) as collector:
        collector.increment_version()
        collector.update_policy_weights_(Scale(3.0))
        collector._pool.restart(0)
        collector._pool.add()
        batch = next(collector)
        assert values(batch, "action") == [[3.0] * 2] * 3
        assert batch["policy_version"].unique().tolist() == [2]
        report = collector.update_policy_weights_()
        assert isinstance(report, SendReport)
        assert report.updated == (0, 1, 2)


net = Scale()


@pytest.mark.parametrize(
    "wrap", [lambda p: p.forward, functools.partial, lambda p: functools.partial(p.forward)]
)
def test_the_module_in_a_policy_is_found(wrap: Callable[[Any], Any]) -> None:
    policy = Scale(1.0)
    options: dict[str, Any] = {"scheme": "thread", "frames_per_batch": 2}
    with Collector(long_episodes, wrap(policy), **options) as collector:
        policy.set(5.0)
        assert collector.update_policy_weights_().updated == (0,)
        assert values(next(collector), "action") == [5.0] * 2


class Agent:
    def __init__(self) -> None:
        self.net = Scale()

    def act(self, observation: Tensor) -> Tensor:
        return torch.as_tensor(self.net(observation))

    __call__ = act


class Held:
    """Holds what it acts with where a module is not seen at once."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held

    def __call__(self, observation: Tensor) -> Tensor:
        held = self.held
        while not callable(held):
            held = held[0]
        return torch.as_tensor(held(observation))


def helper(observation: Tensor) -> Any:
    return net(observation)


def closing_over() -> Callable[[Tensor], Any]:
    policy = Scale()
    return lambda observation: policy(observation) + 0


@pytest.mark.parametrize(
    "policy",
    [
        closing_over(),
        lambda observation: net(observation) + 0,
        lambda observation, model=net: model(observation),
        functools.partial(lambda model, observation: model(observation), net),
        Agent(),
        Agent().act,
        Held(Scale()),
        Held([Scale()]),
        Held({0: Scale()}),
        Held(Agent()),
        Held(helper),
        helper,
        lambda observation: helper(observation) + 0,
    ],
)
def test_a_policy_that_would_never_be_fresh(policy: Any) -> None:
    options: dict[str, Any] = {"frames_per_batch": 2, "workers": "inline"}
    with pytest.raises(ModelError, match=r"uses a Scale.*give the collector the module itself"):
        Collector(long_episodes, policy, scheme="thread", **options)
    # Where workers share the trainer's objects, any function is fresh.
    with Collector(long_episodes, policy, scheme="none", **options) as collector:
        next(collector)


def test_policies_without_modules() -> None:
    assert module_of(None) is None
    assert module_of(lambda td: td.net) is None
    assert module_of(functools.partial(torch.add, torch.ones(1))) is None


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"policy_factory": Scale}, OptionError, "use scheme='thread'"),
        ({"create_env_fn": CountingEnv()}, TypeError, "pass a function that makes it"),
        ({"policy_factory": Scale(), "scheme": "thread"}, TypeError, "policy_factory=lambda: Sc"),
        ({"policy_factory": [Scale, 3], "num_workers": 2, "scheme": "thread"}, TypeError, "not 3"),
        ({"create_env_fn": []}, ValueError, "num_workers is 0"),
        ({"policy": [Scale(), Scale()]}, TypeError, r"policy is a list, .* policy_factory=\[…\]"),
        ({"policy": Scale}, TypeError, r"policy is the class Scale, .* type Scale\(…\)"),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    options = {"create_env_fn": CountingEnv, "frames_per_batch": 2, "scheme": "none", **options}
    with pytest.raises(error, match=message):
        Collector(**options)


@pytest.mark.parametrize(
    ("made", "message"),
    [(None, "made a NoneType, which cannot be called"), (Scale, "made the class Scale")],
)
def test_a_factory_that_makes_no_policy(made: Any, message: str) -> None:
    with pytest.raises(RemoteCallError, match=f"policy_factory {message}"):
        Collector(CountingEnv, policy_factory=lambda: made, scheme="thread", frames_per_batch=2)


@pytest.mark.parametrize("scheme", ["thread", "shm"])
def test_a_shutdown_from_another_thread_ends_the_iteration(scheme: str) -> None:
    workers = {"thread": "thread", "shm": "process"}[scheme]
    options: dict[str, Any] = {"scheme": scheme, "workers": workers, "frames_per_batch": 200}
    collector = Collector(Slow, Scale(), timeout=30.0, **options)
    timer = threading.Timer(0.3, collector.shutdown, args=[1.0])
    timer.start()
    assert list(collector) == []
    timer.join()


def test_an_update_does_not_hang_on_a_worker_that_dies() -> None:
    def fatal() -> CountingEnv:
        class Fatal(Slow):
            def step(self, tensordict: TensorDictBase, /) -> TensorDictBase:
                if self._steps.item() == 5:
                    time.sleep(0.5)
                    os.kill(os.getpid(), signal.SIGKILL)
                return super().step(tensordict)

        return Fatal()

    options: dict[str, Any] = {"scheme": "shm", "frames_per_batch": 4}
    with Collector(fatal, Scale(), num_workers=1, **options) as collector:
        next(collector)
        time.sleep(0.2)
        began = time.perf_counter()
        with pytest.raises(Exception, match="worker 0"):
            collector.update_policy_weights_()
        assert time.perf_counter() - began < 10
