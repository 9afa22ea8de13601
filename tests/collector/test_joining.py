"""Workers of a collector that are added, join and are removed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from tests.collector.processes import MODELS, Pid, Renaming, collector, kill, versions
from torch import Tensor

from sync_collector import WorkerOptions
from sync_collector.collector_worker import detached_copy
from sync_collector.envs import CountingEnv
from sync_collector.episodes import PER_WORKER
from sync_collector.testing import Scale, long_episodes, values
from sync_core import (
    LayoutMismatchError,
    ModelError,
    OptionError,
    RemoteCallError,
    SendReport,
    UnknownWorkerError,
)
from sync_testing import eventually

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("leaves_no_process")]


def seat(batch: TensorDictBase) -> int:
    (found,) = (batch["collector", "traj_ids"] // PER_WORKER).unique().tolist()
    return int(found)


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
        seats = set(range(5))
        assert eventually(lambda: {seat(batch) for batch in tuple(batches)} == seats)
        with made.pause():
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


class Whole(torch.nn.Module):
    """Acts with itself and a part."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.rest = Scale(), Scale()

    def forward(self, observation: Tensor) -> Tensor:
        return 10 * self.part.weight + self.rest.weight.expand(observation.shape)


ALL, ONE = None, 1
WHOLE, PART = "policy", "policy.part"


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ([(WHOLE, ALL), (WHOLE, ONE)], 22.0),
        ([(WHOLE, ALL), (PART, ALL)], 21.0),
        ([(WHOLE, ALL), (PART, ONE)], 21.0),
        ([(PART, ALL), (WHOLE, ALL)], 22.0),
        ([(PART, ALL), (WHOLE, ONE)], 22.0),
        ([(PART, ONE), (WHOLE, ONE)], 22.0),
        ([(PART, ONE), (WHOLE, ALL)], 22.0),
        ([(WHOLE, ONE), (PART, ALL)], 21.0),
        ([(PART, ALL)], 10.0),
    ],
)
def test_who_joins_after_updates_of_some_or_of_parts_has_no_unsent_weights(
    sent: list[tuple[str, int | None]], expected: float, given: bool
) -> None:
    policy, trained = Whole(), Whole()
    models: dict[str, Any] = {"weight_sync_schemes": {WHOLE: "thread", PART: "thread"}}
    options: dict[str, Any] = {"workers": "inline", "num_workers": 2, "sync": True, **models}
    with collector(policy=policy, scheme=None, frames_per_batch=2, **options) as made:
        source = trained if given else policy
        for step, (name, worker_ids) in enumerate(sent, 1):
            source.part.set(step)
            if name == WHOLE:
                source.rest.set(step)
            weights = (source if name == WHOLE else source.part) if given else None
            made.update_policy_weights_(weights, model_id=name, worker_ids=worker_ids)
        source.part.set(9.0)  # a training step that was not sent
        source.rest.set(9.0)
        made.add_workers()
        assert values(next(made), "action")[1:] == [[expected], [expected]]


def test_who_joins_after_an_update_of_some_by_another_name_of_the_weights() -> None:
    policy = Renaming()
    options: dict[str, Any] = {"scheme_options": {"strategy": "state_dict"}, "sync": True}
    with collector(policy=policy, num_workers=2, frames_per_batch=2, **options) as made:
        policy.set(1.0)
        made.update_policy_weights_(worker_ids=1)
        policy.set(9.0)
        made.add_workers()
        assert values(next(made), "action") == [[0.0], [1.0], [1.0]]


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
        longest: list[Any] = [WorkerOptions(max_frames_per_traj=1), {}]
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


def test_a_worker_that_cannot_join_is_served_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(worker_id: int) -> None:
        raise RuntimeError(f"worker {worker_id} is not welcome")

    with collector(policy=Scale(), num_workers=2) as made:
        monkeypatch.setattr(made._pool, "on_join", [*made._pool.on_join, failing])
        with pytest.raises(RuntimeError, match="not welcome"):
            made.add_workers()
        assert made.update_policy_weights_().updated == (0, 1)


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
