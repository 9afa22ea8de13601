"""A collector that is saved, and another that continues from there."""

from __future__ import annotations

import ctypes
import io
import itertools
import multiprocessing
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.wrappers import TimeLimit
from tensordict import TensorDict, TensorDictBase
from tests.collector.processes import Renaming
from torch import Tensor, nn

from sync_collector import Collector
from sync_collector.envs import CountingEnv, GymEnv
from sync_collector.episodes import PER_WORKER
from sync_collector.testing import Scale, values
from sync_core import ApplyContext, PendingSend, RemoteCallError, SendError, hookimpl
from sync_plugin_std.workers import gather

pytestmark = pytest.mark.timeout(60)


class Recurrent(nn.Module):
    """Balances a pole, and counts its own steps."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        count = td.get("count", torch.zeros(*td.batch_size, 1))
        index = (td["observation"][..., 2] + self.bias > 0).long()
        td["count"] = count
        td["action"] = nn.functional.one_hot(index, 2)
        td["next"] = TensorDict({"count": count + 1}, batch_size=td.batch_size)
        return td


class Tied(Scale):
    """Has its weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.weight


class Offset(CountingEnv):
    """Observes what a module adds."""

    def __init__(self) -> None:
        super().__init__(100)
        self.transform = [Scale()]

    def step(self, tensordict: TensorDictBase, /) -> TensorDictBase:
        following = super().step(tensordict)["next"]
        following["observation"] += self.transform[0].weight.detach()
        return tensordict


class Whole(nn.Module):
    """Acts with two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Scale(), Scale()

    def forward(self, observation: Tensor) -> Tensor:
        return self.one.forward(observation) + self.other.forward(observation)


class Unsaved:
    """A `CountingEnv` that cannot be saved."""

    batch_size = torch.Size()

    def __init__(self) -> None:
        self._env = CountingEnv(7)

    def reset(self, tensordict: TensorDictBase | None = None, /) -> TensorDictBase:
        return self._env.reset(tensordict)

    def step(self, tensordict: TensorDictBase, /) -> TensorDictBase:
        return self._env.step(tensordict)


class Remade(gymnasium.Wrapper[Any, Any, Any, Any], gymnasium.utils.EzPickle):
    """Pickles as what it was made with."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        gymnasium.utils.EzPickle.__init__(self, env)
        super().__init__(env)


class Holding(gymnasium.Env[Any, Any]):
    """Holds something that does not pickle."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, held: Any) -> None:
        self.held = held


def cart_pole() -> GymEnv:
    return GymEnv("CartPole-v1")


def two_cart_poles() -> GymEnv:
    return GymEnv("CartPole-v1", num_envs=2)


def collector(env: Any, policy: Any = None, **options: Any) -> Collector:
    options = {"scheme": "thread", "workers": "inline", "frames_per_batch": 12, **options}
    return Collector(env, policy, **options)


def saved(made: Collector) -> Mapping[str, Any]:
    """The state of a collector, as it comes back from a file."""
    file = io.BytesIO()
    torch.save(made.state_dict(), file)
    file.seek(0)
    state: Mapping[str, Any] = torch.load(file, weights_only=False)
    return state


@pytest.mark.parametrize(
    ("env", "policy", "options"),
    [
        (lambda: CountingEnv(5), Scale, {"num_workers": 3}),
        (lambda: CountingEnv([2, 7], num_envs=2), Scale, {"workers": "thread"}),
        (cart_pole, Recurrent, {"num_workers": 2, "sync": True}),
        (two_cart_poles, Recurrent, {"workers": "thread", "max_frames_per_traj": 9}),
        (cart_pole, lambda: None, {"num_workers_per_collector": 2, "init_random_frames": 30}),
        (cart_pole, Scale, {"init_random_frames": 1000, "update_after_each_batch": True}),
        (cart_pole, lambda: None, {"workers": "process"}),
    ],
)
def test_going_on_is_exact(
    env: Callable[[], Any], policy: Callable[[], Any], options: dict[str, Any]
) -> None:
    if options.get("workers") == "process":
        options = {"scheme": "shm", **options}
    with collector(env, policy(), **options) as made:
        made.set_seed(11)
        for _ in range(3):
            next(made)
            made.update_policy_weights_()
        state = saved(made)
        expected = [next(made) for _ in range(4)]
        stats = made.stats()
    with collector(env, policy(), **options) as made:
        next(made)
        made.load_state_dict(state)
        found = [next(made) for _ in range(4)]
        assert made.stats().frames == stats.frames
        assert made.stats().batches == stats.batches == 7
        assert made.stats().version == stats.version
    for one, other in zip(expected, found, strict=True):
        assert (one == other).all()


@pytest.mark.parametrize("made_before", [0, 1, 3])
def test_random_frames_that_a_new_seed_drops_are_made_up_for(made_before: int) -> None:
    options = {"workers": "thread", "num_workers": 2, "init_random_frames": 60}
    with collector(CountingEnv, Scale(5.0), **options) as made:
        next(made)
        state = saved(made)
    random = 12
    over: set[int] = set()
    with collector(CountingEnv, Scale(5.0), **options) as made:
        for _ in range(made_before):
            next(made)
        made.load_state_dict(state)
        made.set_seed(0)
        # Until the policy has acted in both workers: either may be the slower one.
        while len(over) < 2:
            batch = next(made)
            if (batch["action"] == 5.0).all():
                over.add(int(batch["collector", "traj_ids"][0]) // PER_WORKER)
            else:
                random += batch.numel()
    assert random == 60


def test_weights_and_versions() -> None:
    with collector(CountingEnv, Scale(), num_workers=2, frames_per_batch=1) as made:
        made.update_policy_weights_(Scale(1.0))
        made.increment_version()
        made.update_policy_weights_(Scale(3.0), worker_ids=1)
        state = saved(made)
        assert made.stats().version == 3
    policy = Scale(9.0)
    with collector(CountingEnv, policy, num_workers=2, frames_per_batch=1) as made:
        made.update_policy_weights_()
        made.load_state_dict(state)
        assert policy.weight.item() == 9.0
        seen = [next(made) for _ in range(2)]
        assert [batch["action"].item() for batch in seen] == [1.0, 3.0]
        assert [batch["policy_version"].item() for batch in seen] == [2, 3]
        assert made.stats().version == 3
        made.update_policy_weights_()
        made.add_workers()
        seen = [next(made) for _ in range(3)]
        assert [batch["action"].item() for batch in seen] == [9.0] * 3
        assert [batch["policy_version"].item() for batch in seen] == [4] * 3


def test_versions_do_not_fall_where_an_older_state_is_loaded() -> None:
    with collector(CountingEnv, Scale(), frames_per_batch=1) as made:
        made.update_policy_weights_(Scale(1.0))
        state = saved(made)
        for weight in (2.0, 3.0):
            made.update_policy_weights_(Scale(weight))
        made.load_state_dict(state)
        seen = [next(made)]
        assert (made.stats().version, made.stats().lag) == (3, 2)
        assert made.update_policy_weights_(Scale(4.0)).version == 4
        seen.append(next(made))
    assert [batch["action"].item() for batch in seen] == [1.0, 4.0]
    assert [batch["policy_version"].item() for batch in seen] == [1, 4]


@pytest.mark.parametrize("several", [False, True])
def test_reports_have_the_version_that_frames_have(several: bool) -> None:
    class Refuses:
        @hookimpl(wrapper=True)
        def apply_weights(self, update: Any, model: Any, context: ApplyContext) -> Any:
            yield
            raise ValueError("not this one")

    def frames(made: Collector) -> list[int]:
        return list(next(made)["policy_version"].unique().tolist())

    def make(*layers: Any) -> Collector:
        one: dict[str, Any] = {"scheme": "thread", "layers": layers}
        both = {"policy": one, "env.transform[0]": "thread"}
        schemes = {"scheme": None, "weight_sync_schemes": both} if several else one
        return collector(Offset, Scale(), sync=True, frames_per_batch=2, **schemes)

    with make() as made:
        made.increment_version()
        report = made.update_policy_weights_()
        assert (report.version, report.updated, report.workers[0].version) == (2, (0,), 2)
        assert frames(made) == [2]
        state = saved(made)
    with make() as made:
        made.load_state_dict(state)
        pending = made.update_policy_weights_(model_id="policy", blocking=False)
        assert isinstance(pending, PendingSend)
        assert pending.version == pending.wait().version == made.stats().version == 3
        assert frames(made) == [3]
    with make(Refuses()) as made:
        made.load_state_dict(state)
        with pytest.raises(SendError, match=r"^version 3 did not reach") as caught:
            made.update_policy_weights_(model_id="policy")
        assert caught.value.report.version == 3


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        (Tied, {}),
        (Renaming, {"scheme_options": {"strategy": "state_dict"}}),
        (Scale, {"scheme": None, "weight_sync_schemes": {"env.transform[0]": "thread"}}),
    ],
)
def test_weights_of_any_kind(policy: Callable[[], Any], options: dict[str, Any]) -> None:
    names = options.get("weight_sync_schemes", {"policy"})

    def update(made: Collector, weight: float) -> None:
        model = policy()
        model.set(weight)
        made.update_policy_weights_(weights_dict=dict.fromkeys(names, model))

    with collector(Offset, policy(), **options) as made:
        update(made, 3.0)
        next(made)
        state = saved(made)
        expected = next(made)
        update(made, 5.0)
        made.load_state_dict(state)
        assert (next(made) == expected).all()
    with collector(Offset, policy(), **options) as made:
        made.load_state_dict(state)
        assert (next(made) == expected).all()


def test_weights_of_what_is_no_module() -> None:
    stats = {"mean": torch.zeros(1)}
    schemes = {"policy": "thread", "stats": "thread"}
    options = {"scheme": None, "weight_sync_schemes": schemes, "models": {"stats": stats}}
    with collector(CountingEnv, Scale(), **options) as made:
        stats["mean"].fill_(3.0)
        made.update_policy_weights_()
        state = saved(made)
    stats["mean"].fill_(5.0)
    with collector(CountingEnv, Scale(), **options) as made:
        made.load_state_dict(state)
        assert made.cascade_execute("stats") == [{"mean": torch.tensor([3.0])}]


def test_weights_whose_memory_is_lent_to_a_part_of_the_policy() -> None:
    policy = Whole()
    options = {
        "scheme": None,
        "workers": "process",
        "weight_sync_schemes": {"policy.other": {"scheme": "shm", "zero_copy": True}},
        "models": {"policy.other": policy.other},
        "frames_per_batch": 1,
        "sync": True,
    }
    with collector(CountingEnv, policy, **options) as made:
        for weight in (2.0, 4.0):
            policy.other.set(weight)
            made.update_policy_weights_()
            if weight == 2.0:
                state = saved(made)
        made.load_state_dict(state)
        assert next(made)["action"].item() == 2.0
        made.update_policy_weights_()
        assert next(made)["action"].item() == 4.0


def test_the_version_of_the_trainers_own_policy() -> None:
    with collector(CountingEnv, Scale(), scheme="none") as made:
        next(made)
        made.update_policy_weights_()
        state = saved(made)
        assert next(made)["policy_version"].unique().tolist() == [1]
    with collector(CountingEnv, Scale(), scheme="none") as made:
        made.load_state_dict(state)
        assert next(made)["policy_version"].unique().tolist() == [1]
        assert made.stats().lag == 0
        made.update_policy_weights_()
        assert next(made)["policy_version"].unique().tolist() == [2]


@pytest.mark.parametrize("options", [{"num_workers": 1}, {"num_workers": 2, "sync": True}])
def test_the_state_of_another_kind_of_collector(options: dict[str, Any]) -> None:
    with collector(CountingEnv, num_workers=2) as made:
        state = saved(made)
    with collector(CountingEnv, **options) as made:
        with pytest.raises(ValueError, match=r"num_workers=2|give it the same frames_per_batch"):
            made.load_state_dict(state)
        assert next(made)["observation"].flatten()[0] == 0


def test_the_state_of_other_models_changes_nothing() -> None:
    with collector(CountingEnv, Scale(7.0), num_workers=2) as made:
        made.update_policy_weights_()
        state = saved(made)
    wider = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1))
    with collector(CountingEnv, wider, num_workers=2) as made:
        next(made)
        with pytest.raises(ValueError, match=r"(?s)that of other models: .*not in the model"):
            made.load_state_dict(state)
        with pytest.raises(ValueError, match="not a state of a collector"):
            made.load_state_dict({})
        assert (made.stats().version, made.stats().frames) == (0, 12)
        made.update_policy_weights_()
        next(made)
        assert next(made)["policy_version"].unique().tolist() == [1]


def test_an_environment_that_cannot_be_saved() -> None:
    with collector(Unsaved, Scale(), frames_per_batch=3) as made:
        next(made)
        with pytest.warns(UserWarning, match=r"workers \[0\] cannot be saved") as told:
            state = saved(made)
        assert told[0].filename == __file__
        following = next(made)
    with collector(Unsaved, Scale(), frames_per_batch=3) as made:
        made.load_state_dict(state)
        batch = next(made)
    assert following["observation"].flatten().tolist() == [3, 4, 5]
    assert batch["observation"].flatten().tolist() == [0, 1, 2]
    assert batch["collector", "traj_ids"].tolist() == [1, 1, 1]


class FailsOnce(CountingEnv):
    """Fails in the seventh step of all that are made."""

    def __init__(self, steps: Iterator[int]) -> None:
        super().__init__(100)
        self._all = steps

    def step(self, tensordict: TensorDictBase, /) -> TensorDictBase:
        if next(self._all) == 6:
            raise ValueError("the simulator is not reachable")
        return super().step(tensordict)


@pytest.mark.parametrize("remedy", ["restart", "drop"])
def test_a_state_where_a_batch_has_failed(remedy: str) -> None:
    steps = itertools.count()
    make = [lambda: FailsOnce(steps), lambda: CountingEnv(100)]
    options: dict[str, Any] = {"workers": "thread", "sync": True, "frames_per_batch": 8}
    with collector(make, Scale(), num_workers=2, on_worker_failure=remedy, **options) as made:
        next(made)
        made._requests.ask(0)
        with pytest.raises(RemoteCallError):
            gather({0: made._pool.workers[0].batch}, 30.0, "fail")  # type: ignore[dict-item]
        assert len(made.state_dict()["workers"]) == (1 if remedy == "drop" else 2)
        batch = next(made)
    assert values(batch, "observation")[-1] == [4.0, 5.0, 6.0, 7.0]
    assert len(batch) == (1 if remedy == "drop" else 2)


def test_a_worker_that_failed_in_a_batch_begins_new_episodes_from_a_state() -> None:
    steps = itertools.count()
    make = [lambda: CountingEnv(100), lambda: FailsOnce(steps)]
    options: dict[str, Any] = {"num_workers": 2, "frames_per_batch": 4}
    with collector(make, Scale(), on_worker_failure="quarantine", **options) as made:
        for _ in range(4):
            next(made)
        with pytest.warns(UserWarning, match=r"workers \[1\] cannot be saved"):
            state = saved(made)
    with collector(make, Scale(), **options) as made:
        made.load_state_dict(state)
        batches = [next(made) for _ in range(2)]
    seen = {int(b["collector", "traj_ids"][0]) // PER_WORKER: b for b in batches}
    assert values(seen[1], "observation") == [0, 1, 2, 3]
    assert values(seen[1], "next", "observation") == [1, 2, 3, 4]
    assert values(seen[0], "observation")[0] > 0


def test_a_seed_for_a_worker_that_hangs_while_another_is_replaced() -> None:
    may_step = threading.Event()

    class Hangs(CountingEnv):
        def step(self, tensordict: TensorDictBase, /) -> TensorDictBase:
            may_step.wait(60)
            return super().step(tensordict)

    options: dict[str, Any] = {"workers": "thread", "on_worker_failure": "restart", "timeout": 1.0}
    with collector(lambda: Hangs(100), Scale(), frames_per_batch=2, **options) as made:
        pool, joins = made._pool, list[bool]()

        def replace() -> None:
            # As where a worker is replaced: the second lock is taken when it joins.
            with pool._replacing:
                may_begin.set()
                while pool.lock.acquire(blocking=False):
                    pool.lock.release()
                joins.append(pool.lock.acquire(timeout=30))
                pool.lock.release()
            may_step.set()

        may_begin = threading.Event()
        made._requests.ask(0)
        thread = threading.Thread(target=replace)
        thread.start()
        assert may_begin.wait(30)
        assert made.set_seed(0) == 1
        thread.join()
    assert joins == [True]


def test_gym_environments_that_do_not_pickle_what_they_are_doing() -> None:
    class Reconstructed(gymnasium.Env[Any, Any], gymnasium.utils.EzPickle):
        observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
        action_space = gymnasium.spaces.Discrete(2)

    class Local(gymnasium.Env[Any, Any]):
        observation_space = Reconstructed.observation_space
        action_space = Reconstructed.action_space

    assert GymEnv(Reconstructed).save_state() is None
    assert GymEnv(lambda: TimeLimit(Remade(gymnasium.make("CartPole-v1")), 5)).save_state() is None
    assert GymEnv(Local).save_state() is None
    assert cart_pole().save_state() is not None


@pytest.mark.parametrize(
    "make",
    [
        lambda: lambda: None,
        threading.Lock,
        multiprocessing.get_context("fork").Lock,
        lambda: ctypes.pointer(ctypes.c_int(3)),
    ],
    ids=["function", "thread-lock", "process-lock", "pointer"],
)
def test_gym_environments_that_hold_what_does_not_pickle(make: Callable[[], Any]) -> None:
    assert GymEnv(lambda: Holding(make())).save_state() is None
    assert GymEnv(lambda: Holding(None)).save_state() is not None


def test_after_the_last_batch() -> None:
    with collector(CountingEnv, Scale(), total_frames=24) as made:
        assert len(list(itertools.islice(made, 2))) == 2
        state = saved(made)
    with collector(CountingEnv, Scale(), total_frames=24) as made:
        made.load_state_dict(state)
        assert list(made) == []
    with collector(CountingEnv, Scale(), total_frames=48) as made:
        made.load_state_dict(state)
        assert len(made) == 4
        first, _ = made
        assert int(first["collector", "traj_ids"].min()) == PER_WORKER


def test_after_ctrl_c() -> None:
    calls = itertools.count()

    class Interrupted(CountingEnv):
        def step(self, tensordict: TensorDictBase, /) -> TensorDictBase:
            if next(calls) == 5:
                raise KeyboardInterrupt
            return super().step(tensordict)

    with collector(lambda: Interrupted(100), Scale(), frames_per_batch=8) as made:
        with pytest.raises(KeyboardInterrupt):
            next(made)
        state = saved(made)
        first = next(made)["observation"].flatten().tolist()
    with collector(lambda: CountingEnv(100), Scale(), frames_per_batch=8) as made:
        made.load_state_dict(state)
        assert next(made)["observation"].flatten().tolist() == first == list(range(8))
        assert next(made)["observation"].flatten().tolist() == list(range(8, 16))
