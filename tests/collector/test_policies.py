"""Policies that a collector takes, and those that it refuses."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.collector.environments import Slow
from torch import Tensor

from sync_collector import Collector
from sync_collector.envs import CountingEnv
from sync_collector.policies import module_of
from sync_collector.testing import Scale, long_episodes
from sync_core import (
    ModelError,
    OptionError,
    RemoteCallError,
)

pytestmark = pytest.mark.timeout(60)


net = Scale()


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
