"""Automatic updates of workers, the lag of batches, and the warning when none are sent."""

from __future__ import annotations

import itertools
import threading
import warnings
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from sync_collector import Collector
from sync_collector import testing as collectors
from sync_collector.auto_update import AutoUpdate, StaleWatch
from sync_collector.envs import CountingEnv
from sync_collector.worker_pool import PoolWorker
from sync_core import (
    SendError,
    SendReport,
    WorkerError,
    WorkerLostError,
    WorkerResult,
)

pytestmark = pytest.mark.timeout(60)


class Scale(collectors.Scale):
    """Is seen to change, as a policy that is trained."""

    def set(self, weight: float) -> None:
        with torch.no_grad():
            self.weight.fill_(weight)


def collector(policy: Any = None, **options: Any) -> Collector:
    options = {
        "scheme": "thread",
        "workers": "thread",
        "num_workers": 2,
        "frames_per_batch": 4,
        "timeout": 20.0,
        **options,
    }
    return Collector(lambda: CountingEnv(1000), policy, **options)


def acted(batch: Any) -> list[float]:
    return sorted(batch["action"].unique().tolist())


def owner(batch: Any) -> int:
    return int(batch["collector", "traj_ids"][0]) >> 32


@pytest.mark.parametrize("workers", ["inline", "thread"])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"update_after_each_batch": True}, [0, 1, 2, 3, 4, 5, 6]),
        ({"max_weight_update_interval": 0}, [0, 1, 2, 3, 4, 5, 6]),
        ({"max_weight_update_interval": 1}, [0, 1, 2, 3, 4, 5, 6]),
        ({"max_weight_update_interval": 3}, [0, 0, 0, 3, 3, 3, 6]),
    ],
)
def test_all_workers_are_refreshed_every_so_many_batches(
    workers: str, options: Any, expected: list[int]
) -> None:
    policy = Scale()
    with collector(policy, workers=workers, sync=True, **options) as made:
        for step, weight in enumerate(expected, 1):
            assert acted(next(made)) == [weight]
            policy.set(float(step))


def test_an_update_by_hand_begins_the_count_anew() -> None:
    policy = Scale()
    with collector(policy, sync=True, max_weight_update_interval=2) as made:
        seen = []
        for step in range(1, 7):
            if step == 2:
                made.update_policy_weights_()
            seen += acted(next(made))
            policy.set(float(step))
        assert seen == [0, 1, 1, 3, 3, 5]


class Refused:
    """Weights that reach no worker."""

    def __init__(self, error: WorkerError) -> None:
        self.on_update: list[Any] = []
        self.required = {0: {"policy": 1}}
        self._workers = {0: WorkerResult(version=None, seconds=0.0, nbytes=0, error=error)}

    def refresh(self, worker_ids: Any) -> Any:
        return SimpleNamespace(worker_ids=worker_ids, version=1)

    def settle(self, _: Any) -> None:
        raise SendError(SendReport(version=1, seconds=0.0, workers=self._workers))


@pytest.mark.parametrize(
    ("error", "raises"), [(WorkerLostError(0, "died"), False), (WorkerError(0, "refused"), True)]
)
def test_who_died_and_was_replaced_since_is_no_failure(error: WorkerError, raises: bool) -> None:
    alive: Any = lambda worker_id: True  # noqa: E731
    worker = PoolWorker(0)
    pool: Any = SimpleNamespace(
        workers={0: worker}, joined=[worker], alive=alive, on_join=[], lock=threading.RLock()
    )
    released: list[int] = []
    requests: Any = SimpleNamespace(
        hold=lambda _: None, require=lambda *_: None, release=released.append, on_stale=[]
    )
    weights: Any = Refused(error)
    auto_update = AutoUpdate(1, pool, requests, weights)
    auto_update.delivered(0)
    auto_update.refresh()
    assert released == [0]
    with pytest.raises(SendError) if raises else nullcontext():
        auto_update.settle()


@pytest.mark.parametrize("interval", [1, 3])
def test_only_the_worker_that_delivered_is_refreshed(interval: int) -> None:
    policy = Scale()
    made_by: dict[int, list[float]] = {0: [], 1: []}
    sent: list[tuple[int, ...]] = []
    with collector(policy, max_weight_update_interval=interval) as made:
        made._weights.on_update.append(lambda ids: sent.append(tuple(ids)))
        for step in itertools.count(1):
            batch = next(made)
            worker_id = owner(batch)
            assert len(acted(batch)) == 1
            made_by[worker_id] += acted(batch)
            policy.set(float(step))
            if min(map(len, made_by.values())) > 2 * interval:
                break
    assert set(sent) == {(0,), (1,)}
    for weights in made_by.values():
        # Never more batches with the same weights than were allowed.
        assert all(len(list(same)) <= interval for _, same in itertools.groupby(weights))
        assert weights == sorted(weights)


def test_several_models_are_refreshed_too() -> None:
    policy, critic = Scale(), Scale()
    options: dict[str, Any] = {
        "scheme": None,
        "weight_sync_schemes": {"policy": "thread", "critic": "thread"},
        "models": {"critic": critic},
    }
    with collector(policy, **options, sync=True, update_after_each_batch=True) as made:
        for step in range(1, 4):
            assert acted(next(made)) == [step - 1]
            policy.set(float(step))
            critic.set(float(step))
        assert [weight.item() for weight in made.cascade_execute("critic.weight")] == [2.0, 2.0]


def test_a_policy_without_weights_needs_no_refreshing() -> None:
    with collector(None, update_after_each_batch=True) as made:
        for _ in range(5):
            next(made)
        assert made.stats().version == 0


def test_lag() -> None:
    with collector(Scale(), sync=True) as made:
        assert (made.stats().lag, made.stats().mean_lag, made.stats().max_lag) == (0, 0.0, 0)
        next(made)
        for _ in range(3):
            made.update_policy_weights_(worker_ids=0)
        next(made)
        made.update_policy_weights_()
        next(made)
        stats = made.stats()
        assert (stats.lag, stats.mean_lag, stats.max_lag) == (0, 1.0, 3)


@pytest.mark.parametrize(
    "change", ["in place", "load_state_dict", "optimizer", "fused", "data", "memory"]
)
def test_who_forgets_to_update_is_warned_once(change: str) -> None:
    policy = Scale()
    with collector(policy) as made:
        next(made)
        if change == "in place":
            policy.set(1.0)
        elif change == "load_state_dict":
            policy.load_state_dict(Scale(1.0).state_dict())
        elif change in ("optimizer", "fused"):
            policy.weight.grad = torch.ones(1)
            torch.optim.SGD(policy.parameters(), 0.1, fused=change == "fused").step()
        elif change == "data":
            policy.weight.data.fill_(1.0)
        else:
            policy.weight.data = torch.ones(1)
        with pytest.warns(UserWarning, match=r"type collector\.update_policy_weights_\(\)") as seen:
            next(made)
        assert seen[0].filename == __file__
        policy.set(2.0)
        next(made)


def test_the_lag_of_a_policy_that_is_never_sent() -> None:
    policy, lags = Scale(), []
    with collector(policy, sync=True) as made:
        next(made)
        lags.append(made.stats().lag)
        for value in (1.0, 2.0, 2.0, 3.0):
            policy.set(value)
            with pytest.warns(match="has changed") if value == 1.0 else nullcontext():
                next(made)
            lags.append(made.stats().lag)
        assert lags == [0, 1, 2, 2, 3]
        assert made.stats().max_lag == 3
        made.update_policy_weights_()
        next(made)
        next(made)
        assert made.stats().lag == 0


@pytest.mark.parametrize(("random", "batches"), [(-1, 5), (12, 6)])
def test_an_optimizer_without_updates_gives_a_warning(random: int, batches: int) -> None:
    policy = Scale()
    optimizer = torch.optim.SGD(policy.parameters())
    with collector(policy, init_random_frames=random) as made, warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(batches):
            next(made)
        with pytest.raises(UserWarning, match=r"^an optimizer has .* after 5 batches the workers"):
            next(made)
        for _ in range(8):
            next(made)
    assert optimizer.param_groups


def test_a_policy_that_is_not_trained_gives_no_warning() -> None:
    policy, other = Scale(), Scale()
    optimizer = torch.optim.SGD(other.parameters())
    with collector(policy) as made, warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(8):
            next(made)
    assert optimizer.param_groups


def test_resuming_after_an_update_gives_no_warning() -> None:
    policy, resumed = Scale(), Scale()
    with collector(policy) as made:
        policy.weight.data = torch.ones(1)
        made.update_policy_weights_()
        next(made)
        state, weights = made.state_dict(), policy.state_dict()
    for models_first in (True, False):
        with collector(resumed) as made, warnings.catch_warnings():
            warnings.simplefilter("error")
            if models_first:
                resumed.load_state_dict(weights)
            made.load_state_dict(state)
            resumed.load_state_dict(weights)
            assert next(made)["action"].unique().tolist() == [1.0]
            next(made)


@pytest.mark.parametrize("updated", [False, True])
def test_a_change_after_a_resume_gives_a_warning(updated: bool) -> None:
    policy = Scale()
    with collector(policy) as made:
        policy.set(1.0)
        made.update_policy_weights_()
        next(made)
        state = made.state_dict()
    with collector(policy) as made:
        if updated:
            made.update_policy_weights_()
        made.load_state_dict(state)
        next(made)
        policy.set(2.0)
        with pytest.warns(UserWarning, match="the policy has changed"):
            next(made)


class Layouts(Scale):
    """Has tensors of many layouts beside its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.large = torch.nn.Parameter(torch.zeros(100, 1000))
        self.transposed = torch.nn.Parameter(torch.zeros(30, 40).t())
        self.bfloat16s = torch.nn.Parameter(torch.zeros(300, dtype=torch.bfloat16))
        self.register_buffer("nan", torch.full((), torch.nan))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("expanded", torch.zeros(1).expand(5))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("sparse", torch.eye(3).to_sparse())
        self.register_buffer("meta", torch.zeros(3, device="meta"))


@pytest.mark.parametrize("name", ["large", "transposed", "bfloat16s", "nan", "steps"])
def test_values_of_tensors_of_any_layout_are_compared(name: str) -> None:
    policy = Layouts()
    weights = SimpleNamespace(on_update=[])
    watch = StaleWatch(cast(Any, weights), {"policy": policy})
    watch.look()
    getattr(policy, name).data.add_(1).nan_to_num_(2.0)
    with pytest.warns(UserWarning, match="the policy has changed"):
        watch.look()
    watch.look()


def test_a_policy_that_was_made_in_inference_mode() -> None:
    with torch.inference_mode():
        policy = Scale(3.0)
    with collector(policy) as made:
        next(made)
        made.update_policy_weights_()
        assert next(made)["action"].unique().tolist() == [3.0]


def test_who_updates_is_not_warned() -> None:
    policy = Scale()
    with collector(policy) as made:
        policy.set(1.0)
        made.update_policy_weights_()
        policy.set(2.0)
        next(made)
    with collector(policy) as made:
        made.increment_version()
        policy.set(3.0)
        next(made)
    with collector(policy, scheme="none") as made:
        policy.set(4.0)
        next(made)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_weight_update_interval": -2}, "give 0 or more, or -1 for never"),
        ({"max_weight_update_interval": 5, "update_after_each_batch": True}, "leave one of them"),
        ({"policy_factory": Scale, "update_after_each_batch": True}, "come from policy_factory"),
    ],
)
def test_bad_arguments(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        collector(**options)
