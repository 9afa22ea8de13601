"""Workers of a collector come, die, are replaced and go; and it ends itself, from any state."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import psutil  # type: ignore[import-untyped]
import pytest
import torch
from tensordict import TensorDictBase
from torch import Tensor

from sync_collector import Collector
from sync_collector.envs import CountingEnv
from sync_collector.options import WorkerOptions
from sync_collector.testing import Scale, long_episodes
from sync_collector.trajectories import PER_WORKER
from sync_collector.worker_spec import detached_copy
from sync_core import (
    ClosedError,
    LayoutMismatchError,
    ModelError,
    OptionError,
    RemoteCallError,
    SendReport,
    SkipContext,
    UnknownWorkerError,
    WorkerLostError,
    hookimpl,
)
from sync_core.testing.interrupts import interrupted
from sync_core.testing.processes import descendants

pytestmark = pytest.mark.timeout(60)


class Pid(CountingEnv):
    """Knows the id of its process."""

    def __init__(self) -> None:
        super().__init__(100_000)
        self.pid = os.getpid()


class SlowToMake(Pid):
    """Is made in half a second."""

    def __init__(self) -> None:
        super().__init__()
        time.sleep(0.5)


class Fatal(CountingEnv):
    """Kills its process in its fourth step."""

    def __init__(self) -> None:
        super().__init__(100)

    def step(self, tensordict: TensorDictBase, /) -> TensorDictBase:
        if self._steps.item() == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(tensordict)


def values(batch: TensorDictBase, *key: str) -> list[Any]:
    return list(batch[key].squeeze(-1).tolist())


def versions(batch: TensorDictBase) -> list[int]:
    return list(batch["policy_version"].flatten().tolist())


def seat(batch: TensorDictBase) -> int:
    (found,) = (batch["collector", "traj_ids"] // PER_WORKER).unique().tolist()
    return int(found)


def kill(made: Collector, worker_id: int) -> None:
    """Kill the process that steps a `Pid`, and wait for its end."""
    pids = dict(zip(made.worker_ids, made.cascade_execute("env.pid"), strict=True))
    process = psutil.Process(pids[worker_id])
    assert process.pid in descendants()
    process.kill()
    process.wait(10)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture(autouse=True)
def leaves_no_process() -> Iterator[None]:
    before = descendants()
    yield
    assert not descendants() - before


def collector(env: Any = long_episodes, policy: Any = None, **options: Any) -> Collector:
    options = {"scheme": "thread", "workers": "inline", "frames_per_batch": 4, **options}
    return Collector(env, policy, **options)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_process_ends_no_workers() -> None:
    with Collector(Pid, num_workers=1, frames_per_batch=2, scheme="shm") as collector:
        if not (child := os.fork()):
            # As when it is forgotten, or the process ends.
            collector._close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert next(collector).numel() == 2


@pytest.mark.parametrize("sync", [True, False])
def test_the_number_of_batches(sync: bool) -> None:
    with collector(num_workers=2, sync=sync, total_frames=10) as made:
        assert len(made) == 3
        next(made)
        assert len(made) == len(list(made)) + 1 == 3
    with collector() as made:
        assert made
        with pytest.raises(TypeError, match="give it total_frames"):
            len(made)
    envs = [long_episodes, lambda: CountingEnv(9, num_envs=5)]
    with pytest.warns(UserWarning, match="5 frames"):
        made = collector(envs, total_frames=9)
    with made, pytest.raises(TypeError, match="different sizes"):
        len(made)


def test_workers_end_with_the_last_batch() -> None:
    policy = Scale()
    with collector(policy=policy, workers="process", scheme="shm", total_frames=8) as made:
        seen = []
        for batch in made:
            seen.append(len(descendants()))
            policy.set(1.0)
            # The last round of a training loop is like the others.
            report = made.update_policy_weights_(worker_ids=0)
            assert isinstance(report, SendReport)
            assert report.updated == ((0,) if batch["observation"][0] == 0 else ())
        assert seen[0] > 0
        assert seen[1] == 0
        with pytest.raises(ClosedError):
            made.add_workers()
    assert made.stats().frames == 8


@pytest.mark.parametrize(("scheme", "workers"), [("thread", "inline"), ("mp", "thread")])
def test_more_workers(scheme: str, workers: str) -> None:
    policy = Scale(1.0)
    options: dict[str, Any] = {"scheme": scheme, "workers": workers, "sync": True}
    with collector(policy=policy, frames_per_batch=2, total_frames=11, **options) as made:
        next(made)
        made.update_policy_weights_(Scale(3.0))
        assert len(made) == 6
        assert made.add_workers(create_env_fn=[long_episodes, lambda: CountingEnv(1)]) == (1, 2)
        assert made.worker_ids == (0, 1, 2)
        assert len(made) == 3
        batch = next(made)
        assert batch.batch_size == torch.Size([3, 2])
        assert values(batch, "observation") == [[2, 3], [0, 1], [0, 0]]
        assert values(batch, "action") == [[3.0] * 2] * 3
        assert batch["policy_version"].unique().tolist() == [1]
        report = made.update_policy_weights_()
        assert isinstance(report, SendReport)
        assert report.updated == (0, 1, 2)
        made.remove_workers([0, 1])
        report = made.update_policy_weights_()
        assert isinstance(report, SendReport)
        assert report.updated == (2,)
        assert values(next(made), "observation") == [[0, 0]]
        with pytest.raises(ValueError, match=r"type shutdown\(\)"):
            made.remove_workers(2)
        with pytest.raises(UnknownWorkerError):
            made.remove_workers(0)
        assert made.stats().frames == 10


def test_more_workers_that_act_with_the_trainers_policy() -> None:
    with collector(policy=Scale(2.0), scheme="none", frames_per_batch=2, sync=True) as made:
        made.update_policy_weights_()
        made.update_policy_weights_(worker_ids=0)
        made.add_workers()
        assert versions(next(made)) == [2] * 4
        assert made.stats().lag == 0


class Keeps(Scale):
    """Keeps what it has computed, with the graph of that, and a part of it."""

    last: Any = None

    def forward(self, observation: Tensor) -> Tensor:
        action = super().forward(observation) * 1
        self.last = action, action[:0], action
        return action


@pytest.mark.parametrize("workers", ["inline", "thread", "process"])
def test_more_workers_after_a_training_step(workers: str) -> None:
    policy = Keeps(2.0)
    options: dict[str, Any] = {"workers": workers, "scheme": "shm", "sync": True}
    with collector(policy=policy, frames_per_batch=2, **options) as made:
        next(made)
        policy(torch.ones(1)).sum().backward()
        made.add_workers()
        assert values(next(made), "action") == [[2.0] * 2] * 2
        policy.set(3.0)
        made.update_policy_weights_()
        assert values(next(made), "action") == [[3.0] * 2] * 2
    assert policy.last[0].grad_fn is not None


def test_a_copy_without_graphs_is_otherwise_as_the_original() -> None:
    policy = Keeps(2.0)
    policy(torch.ones(3))
    copied = detached_copy(policy)
    whole, part, again = copied.last
    assert whole is again
    assert whole.tolist() == [2.0] * 3
    assert part.shape == (0,)
    assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    assert whole.untyped_storage().data_ptr() != policy.last[0].untyped_storage().data_ptr()
    assert copied.weight.requires_grad
    assert not whole.requires_grad


def test_a_worker_that_joins_after_updates_of_some() -> None:
    with collector(policy=Scale(), num_workers=2) as made:
        made.update_policy_weights_(Scale(1.0))
        made.update_policy_weights_(Scale(2.0), worker_ids=1)
        assert made.add_collectors(long_episodes, 1) == (2,)
        batches = [next(made) for _ in range(3)]
    assert [values(batch, "action")[0] for batch in batches] == [1.0, 2.0, 2.0]
    assert [batch["policy_version"][0].item() for batch in batches] == [1, 2, 3]


@pytest.mark.parametrize(("workers", "sync"), [("thread", False), ("inline", True)])
def test_workers_that_are_added_while_another_thread_collects(workers: str, sync: bool) -> None:
    batches: list[TensorDictBase] = []
    buffer = SimpleNamespace(extend=batches.append)
    options: dict[str, Any] = {"workers": workers, "sync": sync, "replay_buffer": buffer}
    with collector(policy=Scale(), num_workers=1, scheme="thread", **options) as made:
        made.update_policy_weights_(Scale(7.0))
        made.start()
        for _ in range(4):
            made.add_workers()
            time.sleep(0.05)
        with made.pause():
            assert {seat(batch) for batch in batches} == set(range(5))
            assert {version for batch in batches for version in versions(batch)} == {1}


@pytest.mark.parametrize("models", [{}, {"critic": Scale()}])
def test_a_version_that_is_counted_while_a_worker_joins(models: dict[str, Any]) -> None:
    schemes: dict[str, Any] = {"scheme": "thread"}
    if models:
        schemes = {"scheme": None, "weight_sync_schemes": {"policy": "thread", "critic": "thread"}}
    options: dict[str, Any] = {"workers": "thread", "sync": True, "models": models, **schemes}
    with collector(policy=Scale(), **options) as made:
        counting = threading.Thread(target=made.increment_version)

        def count(_: int) -> None:
            counting.start()
            counting.join(0.2)

        made._pool.on_join.append(count)
        made.add_workers()
        counting.join()
        assert set(versions(next(made))) == {made.stats().version} == {1}


def test_a_worker_that_cannot_be_added() -> None:
    def broken() -> CountingEnv:
        raise ValueError("no pole")

    with collector(policy=Scale()) as made:
        with pytest.raises(RemoteCallError, match="no pole"):
            made.add_workers(create_env_fn=broken)
        assert made.worker_ids == (0,)
        next(made)


def test_workers_that_work_ahead_are_removed() -> None:
    with collector(num_workers=3, workers="thread") as made:
        next(made)
        made.remove_workers([0, 2])
        seen = [seat(next(made)) for _ in range(3)]
    assert seen == [1, 1, 1]


def test_a_dead_worker_is_an_error() -> None:
    options: dict[str, Any] = {"scheme": "shm", "workers": "process"}
    with collector(Pid, Scale(), num_workers=2, **options) as made:
        next(made)
        kill(made, 1)
        with pytest.raises(WorkerLostError, match="worker 1"):
            list(made)
        assert not descendants()
        assert list(made) == []


@pytest.mark.parametrize("sync", [True, False])
def test_a_dead_worker_is_replaced(sync: bool) -> None:
    policy = Scale()
    options: dict[str, Any] = {"scheme": "shm", "workers": "process", "sync": sync}
    options |= {"on_worker_failure": "restart", "total_frames": 40, "num_workers": 2}
    with collector(Pid, policy, **options) as made:
        frames = 0
        made.update_policy_weights_(Scale(1.0))
        seats = set()
        for count, batch in enumerate(made):
            frames += batch.numel()
            ids = batch["collector", "traj_ids"] // PER_WORKER
            seats.update(ids.flatten().tolist())
            # A later worker has never acted with less than this.
            assert (batch["policy_version"][ids > 1] >= 1).all()
            assert torch.equal(batch["action"].squeeze(-1).long(), batch["policy_version"])
            if count == 1:
                kill(made, 1)
                if sync:
                    assert made.state_dict()["frames_per_worker"] == [2, 2]
                    kill(made, 1)
                    report = made.update_policy_weights_(Scale(2.0))
                    assert isinstance(report, SendReport)
                    assert report.updated == (0, 1)
        assert frames == made.stats().frames == 40
        assert seats == ({0, 1, 3} if sync else {0, 1, 2})


def test_a_worker_that_dies_after_its_random_frames_were_delivered() -> None:
    options: dict[str, Any] = {"scheme": "shm", "workers": "process", "num_workers": 2}
    options |= {"sync": True, "init_random_frames": 4, "on_worker_failure": "restart"}
    with collector(Pid, Scale(5.0), **options) as made:
        assert (next(made)["action"] != 5.0).all()
        kill(made, 0)
        made.update_policy_weights_()
        # Those frames are not made again, least of all beside the policy's own.
        assert next(made)["action"].unique().tolist() == [5.0]


MODELS: list[dict[str, Any]] = [
    {"scheme": "shm"},
    {
        "scheme": None,
        "weight_sync_schemes": {"policy": "shm", "critic": "shm"},
        "models": {"critic": Scale()},
    },
]


def goes_on(made: Collector, batches: list[TensorDictBase]) -> bool:
    """Return whether batches come in the background, and updates reach all workers."""
    before = len(batches)
    until(lambda: len(batches) > before + 5)
    return made.update_policy_weights_().updated == made.worker_ids


def test_an_update_while_the_place_of_a_worker_is_taken() -> None:
    batches: list[TensorDictBase] = []
    options: dict[str, Any] = {"workers": "process", "on_worker_failure": "restart", **MODELS[1]}
    options |= {"num_workers": 2, "replay_buffer": SimpleNamespace(extend=batches.append)}
    with collector(SlowToMake, Scale(), **options) as made:
        made.start()
        made.update_policy_weights_()
        kill(made, 1)
        until(lambda: made._pool.workers[1].is_restarting and made._pool.alive(1))
        assert made.update_policy_weights_(Scale(2.0)).updated == (0, 1)
        assert made.cascade_execute("policy.weight.item") == [2.0, 2.0]
        assert goes_on(made, batches)


def test_an_update_of_one_worker_that_has_died() -> None:
    options: dict[str, Any] = {"workers": "process", "num_workers": 2, "sync": True, **MODELS[1]}
    with collector(Pid, Scale(), on_worker_failure="restart", **options) as made:
        made.update_policy_weights_(Scale(1.0))
        kill(made, 1)
        assert made.update_policy_weights_(Scale(2.0), worker_ids=1).updated == (1,)
        assert made.cascade_execute("policy.weight.item") == [1.0, 2.0]
        kill(made, 0)
        assert made.update_policy_weights_(Scale(3.0)).updated == (0, 1)
        assert made.cascade_execute("policy.weight.item") == [3.0, 3.0]


@pytest.mark.parametrize("models", MODELS)
def test_who_joins_acts_with_the_weights_of_the_others_and_not_with_unsent_ones(
    models: dict[str, Any],
) -> None:
    policy = Scale()
    options: dict[str, Any] = {"workers": "process", "num_workers": 2, "sync": True, **models}
    with collector(Pid, policy, on_worker_failure="restart", **options) as made:
        policy.set(5.0)  # a training step that was not sent
        kill(made, 0)
        made.add_workers()
        with pytest.warns(UserWarning, match="the policy has changed"):
            assert next(made)["action"].unique().tolist() == [0.0]
        made.update_policy_weights_(Scale(1.0))
        state = made.state_dict()
        made.update_policy_weights_(Scale(2.0))
        made.load_state_dict(state)
        kill(made, 0)
        batch = next(made)
        assert batch["action"].unique().tolist() == [1.0]
        assert set(versions(batch)) == {1}
    options |= {"workers": "thread", "num_workers": 3, "frames_per_batch": 6}
    with collector(policy=policy, **options) as made:
        made.load_state_dict(state)
        made.add_workers()
        assert next(made)["action"].unique().tolist() == [1.0]
        made.update_policy_weights_(worker_ids=[])
        made.add_workers()
        assert next(made)["action"].unique().tolist() == [1.0]


@pytest.mark.parametrize("to_all", [False, True])
@pytest.mark.parametrize("models", MODELS)
def test_who_joins_after_a_state_was_loaded_has_nothing_that_some_had_before(
    models: dict[str, Any], to_all: bool
) -> None:
    options: dict[str, Any] = {"workers": "thread", "num_workers": 2, "sync": True, **models}
    with collector(policy=Scale(), **options) as made:
        for value in (1.0, 2.0, 3.0):
            made.update_policy_weights_(Scale(value), model_id="policy")
        state = made.state_dict()
    with collector(policy=Scale(), **options, timeout=20.0) as made:
        if to_all:
            made.update_policy_weights_(Scale(4.0), model_id="policy")
        made.update_policy_weights_(Scale(5.0), model_id="policy", worker_ids=0)
        made.load_state_dict(state)
        if "models" in models:
            made.update_policy_weights_(Scale(6.0), model_id="critic", worker_ids=0)
        made.add_workers()
        batch = next(made)
        assert batch["action"].unique().tolist() == [3.0]
        assert set(versions(batch)) == {3}
        assert made.update_policy_weights_(Scale(7.0), model_id="policy").version == 4
        batch = next(made)
        assert batch["action"].unique().tolist() == [7.0]
        assert set(versions(batch)) == {4}


@pytest.mark.parametrize("models", MODELS)
def test_ctrl_c_at_any_moment_of_an_update(models: dict[str, Any]) -> None:
    options: dict[str, Any] = {"workers": "thread", "num_workers": 2, "sync": True, **models}
    with collector(policy=Scale(), timeout=5.0, **options) as made:
        for moment in itertools.count(step=2):
            with interrupted(moment) as moments:
                made.update_policy_weights_()
            begin = time.monotonic()
            assert made.update_policy_weights_(Scale(float(moment))).updated == (0, 1)
            assert time.monotonic() - begin < 4
            if not moments.came:
                break
        assert next(made)["action"].unique().tolist() == [moment]


@pytest.mark.parametrize("sync", [False, True])
def test_ctrl_c_at_any_moment_of_next_loses_no_batch(sync: bool) -> None:
    options: dict[str, Any] = {"workers": "thread", "num_workers": 2, "sync": sync}
    with collector(policy=Scale(), timeout=5.0, **options) as made:
        frames = 0
        for moment in itertools.count(step=3):
            with interrupted(moment) as moments:
                frames += next(made).numel()
            assert made.stats().frames == frames
            if not moments.came:
                break


def test_add_collectors_gives_each_new_worker_several_environments() -> None:
    with collector() as made:
        assert made.add_collectors([long_episodes, long_episodes], 2) == (1, 2)
        shapes = {tuple(next(made).shape) for _ in range(3)}
        assert shapes == {(4,), (2, 2)}


class Twice(Scale):
    """Acts with twice its weight."""

    def forward(self, observation: Tensor) -> Tensor:
        return 2 * super().forward(observation)


def act_with_zero(observation: Tensor) -> Tensor:
    return torch.zeros_like(observation)


def test_add_collectors_with_a_policy_and_options_of_their_own() -> None:
    with collector(policy=Scale(1.0), max_frames_per_traj=100) as made:
        longest: list[WorkerOptions] = [{"max_frames_per_traj": 1}, {}]
        environments = [long_episodes, long_episodes]
        added = made.add_collectors(environments, policy=Twice(9.0), collector_kwargs=longest)
        assert added == (1, 2)
        batches = {seat(batch): batch for batch in (next(made) for _ in range(3))}
        actions = {i: values(batch, "action")[0] for i, batch in batches.items()}
        assert actions == {0: 1.0, 1: 2.0, 2: 2.0}
        truncated = {i: batch["next", "truncated"].any().item() for i, batch in batches.items()}
        assert truncated == {0: False, 1: True, 2: False}
        made.update_policy_weights_(Scale(3.0))
        batches = {seat(batch): batch for batch in (next(made) for _ in range(6))}
        actions = {i: values(batch, "action")[0] for i, batch in batches.items()}
        assert actions == {0: 3.0, 1: 6.0, 2: 6.0}


@pytest.mark.parametrize(
    ("scheme", "options", "error", "message"),
    [
        ("thread", {"policy": torch.nn.Linear(1, 2)}, LayoutMismatchError, "do not fit the model"),
        ("thread", {"policy": Scale}, TypeError, "is the class Scale"),
        ("none", {"policy": Scale()}, OptionError, "the trainer's own policy"),
        ("thread", {"collector_kwargs": {"frames": 3}}, TypeError, "collector_kwargs got 'frames'"),
        ("thread", {"collector_kwargs": [{}, {}]}, ValueError, "has 2 entries for 1 workers"),
        ("thread", {"collector_kwargs": 0}, TypeError, "collector_kwargs is 0"),
        ("thread", {"policy": act_with_zero}, ModelError, "the given policy has no weights"),
        (
            "thread",
            {"remote_configs": {"num_cpus": 1}},
            OptionError,
            "InlineGroup has no 'remote_configs'",
        ),
    ],
)
def test_add_collectors_refuses(
    scheme: str, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with collector(policy=Scale(), scheme=scheme, workers="inline") as made:
        with pytest.raises(error, match=message):
            made.add_collectors(long_episodes, **options)
        assert made.worker_ids == (0,)


@pytest.mark.parametrize(("workers", "scheme"), [("thread", "thread"), ("process", "shm")])
def test_added_policies_fit_those_that_workers_make(workers: str, scheme: str) -> None:
    with collector(policy_factory=Scale, scheme=scheme, workers=workers) as made:
        with pytest.raises(LayoutMismatchError, match="'bias' is in the model"):
            made.add_collectors(long_episodes, policy=torch.nn.Linear(1, 1))
        assert made.add_collectors(long_episodes, policy=Twice(9.0)) == (1,)
        assert made.update_policy_weights_(Scale(3.0)).updated == (0, 1)


def test_an_added_policy_has_weights_only_if_the_others_have() -> None:
    with collector(policy=None, scheme="thread") as made:
        with pytest.raises(ModelError, match="the collector's policy has no weights"):
            made.add_collectors(long_episodes, policy=Scale())
        assert made.worker_ids == (0,)
        assert made.add_collectors(long_episodes, policy=act_with_zero) == (1,)


@pytest.mark.parametrize("called", [lambda policy: policy.forward, partial])
def test_an_added_policy_may_be_a_call_of_a_module(called: Callable[[Any], Any]) -> None:
    with collector(policy=called(Scale(1.0)), scheme="thread") as made:
        assert made.add_collectors(long_episodes, policy=called(Twice(9.0))) == (1,)
        made.update_policy_weights_(Scale(3.0))
        batches = {seat(batch): batch for batch in (next(made) for _ in range(4))}
        assert {i: values(each, "action")[0] for i, each in batches.items()} == {0: 3.0, 1: 6.0}


class InterruptsWhenClosed(CountingEnv):
    """Sends Ctrl-C to the driver, which waits for the worker to end."""

    def close(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        super().close()


def test_ctrl_c_while_workers_end_loses_no_batch() -> None:
    options: dict[str, Any] = {"workers": "thread", "frames_per_batch": 4, "total_frames": 4}
    with collector(InterruptsWhenClosed, Scale(), timeout=5.0, **options) as made:
        with pytest.raises(KeyboardInterrupt):
            next(made)
        assert made.stats().frames == 0
        assert next(made).numel() == made.stats().frames == 4
        assert made.next() is None


class Skipping:
    """Holds back what is not the first push to a worker, or all."""

    def __init__(self, *, first: bool) -> None:
        self.first = first

    @hookimpl
    def skip_update(self, context: SkipContext) -> bool:
        return context.updated or (self.first and context.version > 0)


@pytest.mark.parametrize("first", [False, True])
def test_a_place_is_taken_where_a_layer_holds_pushes_back(first: bool) -> None:
    policy, layer = Scale(), Skipping(first=first)
    options: dict[str, Any] = {"workers": "process", "num_workers": 2, "sync": True, "timeout": 20}
    options |= {"scheme": "shm", "layers": [layer], "on_worker_failure": "restart"}
    with collector(Pid, policy, **options) as made:
        next(made)
        assert made.update_policy_weights_(worker_ids=1).updated == (1,)
        with torch.no_grad():
            policy.weight.fill_(2.0)
        kill(made, 1)
        begin = time.monotonic()
        batch = next(made)
        assert time.monotonic() - begin < 10
        assert batch["policy_version"][1].unique().tolist() == [0 if first else 2]


LATE: list[dict[str, Any]] = [
    {"policy_factory": Scale, "scheme": "shm"},
    {
        "policy": torch.nn.Sequential(Scale()),
        "scheme": None,
        "weight_sync_schemes": {"policy": "shm", "policy[0]": "shm"},
    },
]


@pytest.mark.parametrize("late", LATE)
def test_the_first_weights_of_a_model_when_a_worker_has_died(late: dict[str, Any]) -> None:
    name = "policy" if "policy_factory" in late else "policy[0]"
    options: dict[str, Any] = {"workers": "process", "num_workers": 2, **late}
    with collector(Pid, on_worker_failure="restart", **options) as made:
        next(made)
        kill(made, 0)
        assert made.update_policy_weights_(weights_dict={name: Scale(2.0)}).updated == (0, 1)
        assert made.cascade_execute(f"{name}.weight.item") == [2.0, 2.0]
    with collector(Pid, **options) as made:
        kill(made, 0)
        with pytest.raises(WorkerLostError, match="worker 0"):
            made.update_policy_weights_(weights_dict={name: Scale(2.0)})


def test_a_worker_that_is_removed_while_its_place_is_taken() -> None:
    batches: list[TensorDictBase] = []
    options: dict[str, Any] = {"workers": "process", "on_worker_failure": "restart", **MODELS[0]}
    options |= {"num_workers": 3, "replay_buffer": SimpleNamespace(extend=batches.append)}
    with collector(SlowToMake, Scale(), **options) as made:
        made.start()
        made.update_policy_weights_()
        kill(made, 1)
        until(lambda: made._pool.workers[1].is_restarting and made._pool.alive(1))
        made.remove_workers(1)
        until(lambda: not made._pool.workers[1].is_restarting)
        assert made.worker_ids == (0, 2)
        assert goes_on(made, batches)
        made.add_workers()
        assert goes_on(made, batches)


@pytest.mark.parametrize("on_worker_failure", ["restart", "raise"])
def test_a_worker_that_hangs_is_removed(
    on_worker_failure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[TensorDictBase] = []
    options: dict[str, Any] = {"workers": "process", "scheme": "shm", "timeout": 4.0}
    options |= {"num_workers": 3, "replay_buffer": SimpleNamespace(extend=batches.append)}
    with collector(Pid, Scale(), on_worker_failure=on_worker_failure, **options) as made:
        made.start()
        made.update_policy_weights_()
        remove = made._pool.remove

        def remove_and_linger(worker_id: int) -> None:
            remove(worker_id)
            time.sleep(0.5)

        # The thread that collects learns at once that the worker has ended.
        monkeypatch.setattr(made._pool, "remove", remove_and_linger)
        os.kill(made.cascade_execute("env.pid")[1], signal.SIGSTOP)
        made_before = len(batches)
        until(lambda: len(batches) > made_before + 20)
        made.remove_workers(1)
        assert goes_on(made, batches)


def test_a_worker_that_cannot_join_is_served_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(worker_id: int) -> None:
        raise RuntimeError(f"worker {worker_id} is not welcome")

    with collector(policy=Scale(), num_workers=2) as made:
        monkeypatch.setattr(made._pool, "on_join", [*made._pool.on_join, failing])
        with pytest.raises(RuntimeError, match="not welcome"):
            made.add_workers()
        assert made.update_policy_weights_().updated == (0, 1)


def test_a_place_that_is_lost_again_and_again() -> None:
    options: dict[str, Any] = {"scheme": "shm", "workers": "process", "frames_per_batch": 8}
    with collector(Fatal, on_worker_failure="restart", **options) as made:
        with pytest.raises(WorkerLostError, match="worker 0: died, and so did the 3"):
            next(made)
        assert not descendants()


def test_a_worker_that_dies_before_it_has_taken_a_place(tmp_path: Path) -> None:
    made_so_far = tmp_path / "made"

    def make() -> Pid:
        with made_so_far.open("a") as file:
            file.write("x")
        if made_so_far.read_text() == "xx":
            os.kill(os.getpid(), signal.SIGKILL)
        return Pid()

    options: dict[str, Any] = {"scheme": "shm", "workers": "process", "sync": True}
    with collector(make, Scale(), on_worker_failure="restart", **options) as made:
        next(made)
        kill(made, 0)
        assert made.update_policy_weights_(Scale(2.0)).updated == (0,)
        assert next(made)["action"].unique().tolist() == [2.0]
        assert made_so_far.read_text() == "xxx"


@pytest.mark.parametrize("when", ["seeded", "saved", "loaded"])
def test_a_worker_that_dies_while_all_are_at_rest(when: str, tmp_path: Path) -> None:
    dead = tmp_path / "dead"

    def die(now: str) -> None:
        if now == when and not dead.exists():
            dead.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    class Mortal(CountingEnv):
        def set_seed(self, seed: int, static_seed: bool = False) -> int:
            die("seeded")
            return super().set_seed(seed, static_seed)

        def save_state(self) -> Any:
            die("saved")
            return super().save_state()

        def load_state(self, state: Any) -> None:
            die("loaded")
            super().load_state(state)

    options: dict[str, Any] = {"scheme": "shm", "workers": "process", "sync": True}
    options |= {"num_workers": 2, "on_worker_failure": "restart"}
    with collector(Mortal, Scale(), **options) as made:
        made.update_policy_weights_(Scale(1.0))
        next(made)
        assert made.set_seed(7) == 9
        state = made.state_dict()
        assert dead.exists() == (when != "loaded")
        made.load_state_dict(state)
        assert dead.exists()
        batch = next(made)
        assert set(versions(batch)) == {1}
        assert made.stats().frames == 8
        # A worker that was dead when it was saved has not been seeded since.
        assert batch["observation"][:, 0, 0].tolist() == [7.0, 8.0] or when == "saved"


def test_nobody_joins_while_all_are_saved() -> None:
    saving, joined = threading.Event(), threading.Event()

    class Slow(CountingEnv):
        def save_state(self) -> Any:
            saving.set()
            joined.wait(0.5)
            return super().save_state()

    def add() -> None:
        saving.wait(10)
        made.add_workers()
        joined.set()

    with collector(Slow, Scale(), workers="thread", num_workers=2) as made:
        thread = threading.Thread(target=add)
        thread.start()
        state = made.state_dict()
        assert len(state["workers"]) == len(state["delivery"]["since_update"]) == 2
        thread.join()
        assert made.worker_ids == (0, 1, 2)


def test_what_a_worker_that_is_being_removed_has_made_is_not_saved() -> None:
    with collector(workers="thread", num_workers=2) as made:
        next(made)
        assert len(made.state_dict()["made"]) == 2
        made._pool.remove(0)
        assert [position for position, _ in made.state_dict()["made"]] == [0]


def test_what_can_be_done_about_a_dead_worker() -> None:
    with pytest.raises(ValueError, match="give 'raise' or 'restart'"):
        collector(on_worker_failure="ignore")


@pytest.mark.parametrize("workers", ["inline", "thread"])
def test_seeds(workers: str) -> None:
    options: dict[str, Any] = {"workers": workers, "num_workers": 2, "frames_per_batch": 2}
    with collector(**options) as made:
        next(made)
        assert made.set_seed(100) == 102
        # Nothing that was made before is delivered.
        firsts = {values(next(made), "observation")[0] for _ in range(2)}
        assert firsts <= {100, 101, 102, 103}
        assert made.set_seed(7, static_seed=True) == 7
        assert values(next(made), "observation") == [7, 8]


def test_the_same_seed_gives_the_same_batches_and_workers_differ() -> None:
    options: dict[str, Any] = {"scheme": "shm", "workers": "process", "num_workers": 2}
    with collector(sync=True, **options) as made:
        runs = []
        for _ in range(2):
            made.set_seed(3)
            runs.append(next(made).exclude("collector"))
        assert (runs[0] == runs[1]).all()
        assert values(runs[0], "action")[0] != values(runs[0], "action")[1]
        made.set_seed(4)
        assert values(next(made), "action") != values(runs[0], "action")


def test_shutdown_in_an_event_loop_and_again() -> None:
    made = collector(workers="thread", num_workers=2)
    next(made)
    asyncio.run(made.async_shutdown())
    made.shutdown()
    assert list(made) == []


def test_a_shutdown_of_workers_that_hang_is_bounded() -> None:
    class Hanging(CountingEnv):
        def step(self, tensordict: TensorDictBase, /) -> TensorDictBase:
            time.sleep(30)
            return super().step(tensordict)

    options: dict[str, Any] = {"scheme": "shm", "workers": "process", "timeout": 20.0}
    made = collector(Hanging, Scale(), **options)
    made._requests.ask(0)
    made.update_policy_weights_(blocking=False)
    began = time.monotonic()
    made.shutdown(timeout=1.0)
    assert time.monotonic() - began < 5
    assert not descendants()


class Noted(CountingEnv):
    """Appends a line to a file when it is closed; what made it stays, and so it is not collected.

    Args:
        path: the file.
    """

    kept: ClassVar[list[Noted]] = []

    def __init__(self, path: Path) -> None:
        super().__init__(100)
        self._path = path
        self.kept.append(self)

    def close(self) -> None:
        with self._path.open("a") as file:
            file.write("closed\n")


def closed(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("workers", ["inline", "thread", "process"])
def test_environments_are_closed_once_with_their_workers(
    workers: str, sync: bool, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    options: dict[str, Any] = {"workers": workers, "scheme": "shm", "num_workers": 2, "sync": sync}
    options |= {"num_workers_per_collector": 2, "max_frames_per_traj": 3}
    with collector(lambda: Noted(notes), Scale(), **options) as made:
        next(made)
        made.remove_workers(1)
        assert closed(notes) == 2
    assert closed(notes) == 4
    made.shutdown()
    with collector(lambda: Noted(notes), Scale(), total_frames=8, **options) as made:
        assert sum(batch.numel() for batch in made) >= 8
        assert closed(notes) == 8
    assert closed(notes) == 8


@pytest.mark.parametrize("workers", ["inline", "thread"])
def test_environments_are_closed_where_a_policy_cannot_be_made(
    workers: str, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    functions: list[Any] = [Scale, lambda: 1 / 0]
    options: dict[str, Any] = {"policy_factory": functions, "workers": workers, "num_workers": 2}
    with pytest.raises(RemoteCallError, match="division by zero"):
        collector(lambda: Noted(notes), **options)
    assert closed(notes) == 2


def test_an_environment_is_closed_when_its_stuck_step_has_ended(tmp_path: Path) -> None:
    notes, started, release = tmp_path / "notes", threading.Event(), threading.Event()

    class Stuck(Noted):
        def step(self, tensordict: TensorDictBase, /) -> TensorDictBase:
            started.set()
            release.wait()
            return super().step(tensordict)

    made = collector(lambda: Stuck(notes), Scale(), workers="thread", sync=False)
    made._requests.ask(0)
    started.wait()
    began = time.monotonic()
    made.shutdown(timeout=0.3)
    assert time.monotonic() - began < 2
    assert not closed(notes)
    release.set()
    until(lambda: closed(notes) == 1)


def test_an_environment_that_cannot_be_closed_is_told(tmp_path: Path) -> None:
    notes = tmp_path / "notes"

    class Fails(Noted):
        def close(self) -> None:
            super().close()
            raise OSError("no more")

    raised = r"worker [01]: CollectorWorker\.close raised OSError: no more\n"
    with (
        pytest.warns(UserWarning, match=raised) as warned,
        pytest.raises(ZeroDivisionError),
        collector(lambda: Fails(notes), Scale(), num_workers=2),
    ):
        1 / 0  # noqa: B018
    assert "ZeroDivisionError" not in str(warned[0].message)
    assert closed(notes) == 2


SCRIPT = """
    import os, sys, time
    from sync_collector import Collector
    from sync_collector.envs import CountingEnv

    class Slow(CountingEnv):
        def step(self, tensordict):
            time.sleep(0.2)
            return super().step(tensordict)

    def slow():
        return Slow(100)

    with Collector(slow, scheme="shm", workers="process", num_workers=2, frames_per_batch=50) as c:
        print("ready", flush=True)
        list(c)
"""


def test_ctrl_c_and_another_leave_nothing_behind() -> None:
    script = [sys.executable, "-c", textwrap.dedent(SCRIPT)]
    with subprocess.Popen(
        script, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        workers = psutil.Process(process.pid).children(recursive=True)
        assert len(workers) >= 2
        for _ in range(2):
            time.sleep(0.2)
            os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert "KeyboardInterrupt" in errors
    assert not psutil.wait_procs(workers, 5)[1]
