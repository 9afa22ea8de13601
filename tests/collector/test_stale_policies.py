"""The lag of batches, and the warning about workers that are never updated."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.collector.updates import acted, collector
from torch import Tensor

from sync_collector import Collector
from sync_collector.auto_update import StaleWatch
from sync_collector.testing import Scale

pytestmark = pytest.mark.timeout(60)


def _step(policy: Scale, *, fused: bool) -> None:
    policy.weight.grad = torch.ones(1)
    torch.optim.SGD(policy.parameters(), 0.1, fused=fused).step()


def _replace(policy: Scale) -> None:
    policy.weight.data = torch.ones(1)


CHANGES: dict[str, Callable[[Scale], object]] = {
    "in place": lambda policy: policy.set(1.0),
    "load_state_dict": lambda policy: policy.load_state_dict(Scale(1.0).state_dict()),
    "optimizer": lambda policy: _step(policy, fused=False),
    "fused": lambda policy: _step(policy, fused=True),
    "data": lambda policy: policy.weight.data.fill_(1.0),
    "memory": _replace,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_one_warning_without_an_update(change: Callable[[Scale], object]) -> None:
    policy = Scale()
    with collector(policy) as made:
        next(made)
        change(policy)
        with pytest.warns(UserWarning, match=r"type collector\.update_policy_weights_\(\)") as seen:
            next(made)
        assert seen[0].filename == __file__
        policy.set(2.0)
        next(made)


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


def _updated(made: Collector, policy: Scale) -> None:
    policy.set(1.0)
    made.update_policy_weights_()
    policy.set(2.0)


def _counted(made: Collector, policy: Scale) -> None:
    made.increment_version()
    policy.set(1.0)


def _shared(_: Collector, policy: Scale) -> None:
    policy.set(1.0)


def _another_is_trained(*_: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(Scale().parameters())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("use", "scheme"),
    [
        (_updated, "thread"),
        (_counted, "thread"),
        (_shared, "none"),
        (_another_is_trained, "thread"),
    ],
)
def test_no_warning(use: Callable[[Collector, Scale], object], scheme: str) -> None:
    policy = Scale()
    workers = "inline" if scheme == "none" else "thread"
    with collector(policy, scheme=scheme, workers=workers) as made:
        kept = use(made, policy)
        for _ in range(8):
            next(made)
        del kept


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("models_first", [True, False])
def test_resuming_after_an_update_gives_no_warning(models_first: bool) -> None:
    policy, resumed = Scale(), Scale()
    with collector(policy) as made:
        policy.weight.data = torch.ones(1)
        made.update_policy_weights_()
        next(made)
        state, weights = made.state_dict(), policy.state_dict()
    with collector(resumed) as made:
        if models_first:
            resumed.load_state_dict(weights)
        made.load_state_dict(state)
        resumed.load_state_dict(weights)
        assert acted(next(made)) == [1.0]
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
    watch = StaleWatch(cast(Any, SimpleNamespace(on_update=[])), {"policy": policy})
    watch.look()
    getattr(policy, name).data.add_(1).nan_to_num_(2.0)
    with pytest.warns(UserWarning, match="the policy has changed"):
        watch.look()
    watch.look()


class Exploring(Scale):
    """Acts with a rate that is an attribute, beside a buffer and a mode."""

    sent: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.rate, self.unknown = 1.0, float("nan")
        self.register_buffer("sent", torch.ones(()))
        self.dropout = torch.nn.Dropout(0.5)


def test_an_attribute_that_no_update_sends_gives_one_warning() -> None:
    policy = Exploring()
    with collector(policy, sync=True) as made, warnings.catch_warnings():
        warnings.simplefilter("error")
        policy.sent.fill_(0.5)
        policy.eval()
        made.update_policy_weights_()
        policy.rate = 0.5
        with pytest.warns(UserWarning, match=r"^policy\.rate changed from 1\.0 to 0\.5") as seen:
            made.update_policy_weights_()
        assert seen[0].filename == __file__
        policy.rate = 0.25
        made.update_policy_weights_()
    with collector(policy, scheme="none", workers="inline", num_workers=1) as made:
        policy.rate = 1.0
        made.update_policy_weights_()


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
