"""Options of a worker: limits, random frames, exploration, devices, environments."""

from __future__ import annotations

import functools
import inspect
import threading
from typing import Any

import gymnasium
import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from tensordict.nn.probabilistic import interaction_type, set_interaction_type
from torch import Tensor, nn

from sync_collector import BatchOptions, Collector, WorkerOptions
from sync_collector.batch_requests import RandomFrames
from sync_collector.collector_worker import WorkerSpec
from sync_collector.envs import CountingEnv
from sync_collector.options import options_of_workers
from sync_collector.rollout import Devices, Rollout, RolloutOptions
from sync_collector.testing import Scale, long_episodes, values
from sync_collector.worker_pool import WorkerPool
from sync_core import ModelError, OptionError, RemoteCallError
from sync_core.registry import WORKERS, find

pytestmark = pytest.mark.timeout(60)


class OddName(nn.Module):
    """Takes a TensorDict under a name that says nothing of it."""

    def forward(self, frame: Any) -> Any:
        return frame.set("action", frame["observation"] * 2)


class Likely(nn.Module):
    """Gives an action, and how likely it was."""

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(observation), torch.ones_like(observation)


class Movable(CountingEnv):
    """Remembers where it was moved."""

    moved: Any = None

    def to(self, device: torch.device) -> Movable:
        self.moved = device
        return self


def inline(*args: Any, **options: Any) -> Collector:
    given = {"scheme": "thread", "workers": "inline", "frames_per_batch": 4, **options}
    return Collector(*args, **given)


def normal() -> nn.Module:
    scale = TensorDictModule(
        lambda seen: (torch.zeros_like(seen), torch.ones_like(seen)),
        in_keys=["observation"],
        out_keys=["loc", "scale"],
    )
    draw = ProbabilisticTensorDictModule(
        in_keys=["loc", "scale"],
        out_keys=["action"],
        distribution_class=torch.distributions.Normal,
        default_interaction_type=InteractionType.DETERMINISTIC,
    )
    policy: nn.Module = ProbabilisticTensorDictSequential(scale, draw)
    return policy


def test_trajectories_of_a_limited_length() -> None:
    with inline(long_episodes, Scale(), max_frames_per_traj=3, total_frames=12) as collector:
        batches = list(collector)
    assert [values(batch, "observation") for batch in batches] == [
        [0, 1, 2, 0], [1, 2, 0, 1], [2, 0, 1, 2],
    ]  # fmt: skip
    assert values(batches[0], "next", "truncated") == [False, False, True, False]


def test_a_reset_for_each_batch() -> None:
    with inline(long_episodes, Scale(), reset_at_each_iter=True, total_frames=8) as collector:
        batches = list(collector)
    assert [values(batch, "observation") for batch in batches] == [[0, 1, 2, 3]] * 2
    assert [batch["collector", "traj_ids"].tolist() for batch in batches] == [[0] * 4, [1] * 4]
    assert not any(batch["next", "done"].any() for batch in batches)


def test_a_batch_that_was_cut_short_is_no_reason_for_a_reset() -> None:
    interrupt = [False, False, True]

    class Interrupted(CountingEnv):
        def step(self, tensordict: TensorDictBase, /) -> TensorDictBase:
            if interrupt and interrupt.pop(0):
                raise KeyboardInterrupt
            return super().step(tensordict)

    made = Rollout(
        Interrupted(100), None, 0, RolloutOptions(frames_per_batch=4, reset_at_each_iter=True)
    )
    with pytest.raises(KeyboardInterrupt):
        made.collect()
    assert values(made.collect(), "observation") == values(made.collect(), "observation")


@pytest.mark.parametrize("sync", [True, False])
def test_random_frames_of_all_workers(sync: bool) -> None:
    options = {"num_workers": 2, "sync": sync, "frames_per_batch": 8, "total_frames": 48}
    with inline(long_episodes, Scale(), init_random_frames=9, **options) as collector:
        batches = list(collector)
    random = [values(batch, "action") for batch in batches]
    flat = torch.tensor(random).reshape(-1)
    # A batch is random or it is not, with all its parts: the first number that is 9 or more.
    assert int((flat != 0).sum()) == 16
    assert not flat[24:].any()


def test_parts_of_a_batch_are_random_together() -> None:
    policy = TensorDictModule(Likely(), in_keys=["observation"], out_keys=["action", "log_prob"])
    options = {"num_workers": 2, "sync": True, "frames_per_batch": 8, "total_frames": 24}
    with inline(long_episodes, policy, init_random_frames=3, **options) as collector:
        assert ["log_prob" in batch for batch in collector] == [False, True, True]


def test_random_frames_that_a_lost_worker_was_asked_for() -> None:
    pools = [WorkerPool(find(WORKERS, "inline").object, spec, 2, 10.0) for _ in range(4)]

    def asked(random_frames: RandomFrames, *ids: int) -> list[bool]:
        return [random_frames.ask(random_frames.pool.workers[i]) for i in ids]

    alone = RandomFrames(pools[0], 8)
    assert asked(alone, 0, 1, 0) == [True, True, False]
    alone.take_back(pools[0].workers[1])
    assert asked(alone, 1, 0) == [True, False]
    together = RandomFrames(pools[1], 5, together=True)
    assert asked(together, 0, 1, 0) == [True, True, False]
    together.take_back(pools[1].workers[1])
    assert asked(together, 1, 1, 0) == [False, False, False]
    first, second = (RandomFrames(pool, 3, together=True) for pool in pools[2:])
    assert asked(first, 0) == [True]
    second.load_state_dict(first.state_dict())
    assert asked(second, 1, 0) == [True, False]
    for pool in pools:
        pool.stop()


def spec(worker_id: int, seat: int) -> WorkerSpec:
    return WorkerSpec(seat=seat, env_fn=long_episodes, options=RolloutOptions(frames_per_batch=4))


def test_policies_draw_unless_told_otherwise() -> None:
    def actions(**options: Any) -> list[Any]:
        with inline(long_episodes, normal(), total_frames=4, **options) as collector:
            return values(next(collector), "action")

    assert 0 not in actions()
    assert actions(exploration_type="deterministic") == [0] * 4
    before = interaction_type()
    assert actions(exploration_type=InteractionType.MEAN) == [0] * 4
    assert interaction_type() is before


@pytest.mark.skipif(
    "thread_local" not in inspect.signature(set_interaction_type).parameters,
    reason="before tensordict 0.15 there is one exploration type for all threads",
)
def test_workers_in_threads_leave_the_trainer_its_own_exploration() -> None:
    acting, go_on = threading.Event(), threading.Event()
    seen: list[Any] = []

    def act(observation: Tensor) -> Tensor:
        seen.append(interaction_type())
        acting.set()
        go_on.wait(10)
        return torch.zeros(1)

    with inline(long_episodes, act, workers="thread", num_workers=2) as collector:
        caller = threading.Thread(target=collector.next)
        caller.start()
        assert acting.wait(10)
        here = interaction_type()
        go_on.set()
        caller.join()
    assert here is None
    assert set(seen) == {InteractionType.RANDOM}


@pytest.mark.parametrize(
    "policy",
    [nn.LazyLinear(1), nn.Sequential(nn.LazyLinear(3), nn.Tanh(), nn.LazyLinear(1))],
)
def test_lazy_policies_have_shapes_before_they_are_sent(policy: nn.Module) -> None:
    with inline(long_episodes, policy) as collector:
        assert next(policy.parameters()).shape[1] == 1
        next(collector)
        assert collector.update_policy_weights_().version == 1
        assert set(values(next(collector), "policy_version")) == {1}


def test_a_lazy_policy_is_shaped_by_a_batch_where_it_acts_for_one() -> None:
    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            # Flatten would take the channels of an image that is alone for a batch.
            self.layers = nn.Sequential(nn.Flatten(), nn.LazyLinear(1))

        def forward(self, observation: Tensor) -> Tensor:
            image = observation.unsqueeze(-1).expand(*observation.shape[:-1], 2, 5)
            action: Tensor = self.layers(image)
            return action

    with Collector(
        CountingEnv, Images(), scheme="none", num_workers_per_collector=3, frames_per_batch=6
    ) as collector:
        assert next(collector)["action"].shape == (3, 2, 1)


class LazyScale(nn.Module):
    """Acts by a method that is not its ``forward()``."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.LazyLinear(1)

    def act(self, observation: Tensor, scale: float = 1.0) -> Tensor:
        action: Tensor = self.net(observation) * scale
        return action


@pytest.mark.parametrize(
    "act",
    [
        lambda policy: policy.act,
        lambda policy: functools.partial(policy.act, scale=2.0),
        lambda policy: functools.partial(policy.net),
    ],
    ids=["method", "partial method", "partial"],
)
def test_lazy_policies_that_are_called_otherwise(act: Any) -> None:
    policy = LazyScale()
    with inline(long_episodes, act(policy)) as collector:
        assert policy.net.weight.shape == (1, 1)
        assert collector.update_policy_weights_().version == 1
        assert set(values(next(collector), "policy_version")) == {1}


def test_a_lazy_module_whose_forward_is_called_by_itself() -> None:
    with pytest.raises(ModelError, match=r"calls forward\(\) of a lazy module by itself.* call"):
        inline(long_episodes, nn.LazyLinear(1).forward)


def test_lazy_policies_that_workers_make() -> None:
    with inline(CountingEnv, policy_factory=lambda: nn.LazyLinear(1)) as collector:
        assert values(next(collector), "observation") == [0, 1, 2, 3]
        collector.update_policy_weights_(nn.Linear(1, 1))


def test_a_policy_that_is_trusted() -> None:
    with (
        inline(long_episodes, OddName()) as collector,
        pytest.raises(RemoteCallError, match="no attribute 'set'"),
    ):
        next(collector)
    with inline(long_episodes, OddName(), trust_policy=True) as collector:
        assert values(next(collector), "action") == [0, 2, 4, 6]


@pytest.mark.parametrize("sync", [True, False])
def test_several_environments_in_a_worker(sync: bool) -> None:
    options = {"num_workers": 2, "sync": sync, "frames_per_batch": 12}
    with inline(CountingEnv, Scale(), num_workers_per_collector=3, **options) as collector:
        batch = next(collector)
        assert batch.shape == ((2, 3, 2) if sync else (3, 4))
        assert batch.names[-1] == "time"
        # One after the other, over all workers; without sync, it is now the second one's turn.
        assert collector.set_seed(10) == 16
        starts = next(collector)["observation"][..., 0, 0].flatten().tolist()
        assert starts == list(range(10 if sync else 13, 16))


@pytest.mark.parametrize(
    "make",
    [
        lambda: gymnasium.make("Pendulum-v1"),
        lambda: gymnasium.make_vec("Pendulum-v1", num_envs=2, vectorization_mode="sync"),
    ],
)
def test_gymnasium_as_it_is(make: Any) -> None:
    with inline(make) as collector:
        batch = next(collector)
    assert batch.numel() == 4
    assert batch["next", "observation"].shape[-1] == 3


def test_no_environment_at_all() -> None:
    with pytest.raises(RemoteCallError, match="holds no environment"):
        inline(lambda: CountingEnv(num_envs=0))


def test_devices() -> None:
    with inline(long_episodes, Scale()) as collector:
        assert next(collector).device is None
    with inline(Movable, Scale(), device="cpu") as collector:
        assert next(collector).device == torch.device("cpu")
    with inline(long_episodes, Scale(), env_device="cpu", policy_device="cpu") as collector:
        assert next(collector).device == torch.device("cpu")
    with inline(long_episodes, Scale(), env_device="cpu") as collector:
        assert next(collector).device is None
    options = RolloutOptions(frames_per_batch=4, devices=Devices.of(storing="meta"))
    batch = Rollout(CountingEnv(), Scale(), 0, options).collect()
    assert batch.device == batch["next", "observation"].device == torch.device("meta")


def test_an_environment_is_moved() -> None:
    options = RolloutOptions(frames_per_batch=4, devices=Devices.of(env="cpu"))
    env: Any = WorkerSpec(seat=0, env_fn=Movable, options=options).make_env()
    assert env.moved == torch.device("cpu")


def test_a_policy_elsewhere_brings_back_its_action() -> None:
    moved = []

    class Recorded(Tensor):
        def to(self, *args: Any, **kwargs: Any) -> Any:
            moved.append(args[0] if args else kwargs["device"])
            return super().to(*args, **kwargs)

    def act(observation: Any) -> Any:
        return observation.as_subclass(Recorded)

    made = Rollout(
        CountingEnv(),
        act,
        0,
        RolloutOptions(frames_per_batch=2, devices=Devices.of(policy="cpu", env="cpu")),
    )
    assert made.collect()["action"].device.type == "cpu"
    assert moved.count(torch.device("cpu")) >= 2


def test_the_trainers_own_policy_is_not_moved() -> None:
    with pytest.raises(RemoteCallError, match=r"policy\.to"):
        inline(long_episodes, Scale(), scheme="none", policy_device="meta")
    with pytest.raises(OptionError):
        Devices.of(policy="meta").check_shared(Scale())


@pytest.mark.parametrize("argument", ["collector_kwargs", "per_worker"])
def test_options_of_single_workers(argument: str) -> None:
    own = [WorkerOptions(max_frames_per_traj=2), {"reset_at_each_iter": True}]
    with inline(
        long_episodes, Scale(), num_workers=2, max_frames_per_traj=3, **{argument: own}
    ) as collector:
        batches = [next(collector) for _ in range(4)]
    assert [values(batch, "observation") for batch in batches] == [
        [0, 1, 0, 1], [0, 1, 2, 0], [0, 1, 0, 1], [0, 1, 2, 0],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_frames_per_traj": 0}, ValueError, "give 1 or more, or -1"),
        ({"init_random_frames": -2}, ValueError, "init_random_frames is -2"),
        ({"exploration_type": "wild"}, ValueError, "'random'"),
        ({"num_workers_per_collector": 0}, ValueError, "give 1 or more"),
        ({"storing_device": "meta"}, ValueError, "'meta', .* give storing_device='cpu'"),
        ({"device": "meta"}, ValueError, "'meta', .* give storing_device='cpu'"),
        ({"collector_kwargs": {"storing_device": "meta"}}, ValueError, "no values"),
        ({"device": ["cpu", "cpu"]}, ValueError, "2 entries for 1 workers"),
        ({"collector_kwargs": [{}, {}]}, ValueError, "2 entries for 1 workers"),
        ({"collector_kwargs": {"frames_per_batch": 3}}, TypeError, "type one of num_envs"),
        ({"frames_per_trajectory": 3}, TypeError, "no argument 'frames_per_trajectory'; did you"),
        ({"episode_stats": True}, TypeError, r"type batch=BatchOptions\(episode_stats=True\)"),
        ({"num_envs": 2}, TypeError, r"type per_worker=WorkerOptions\(num_envs=2\)"),
        ({"strategy": "state_dict"}, TypeError, "type scheme_options={'strategy': 'state_dict'}"),
        ({"model_id": "policy"}, TypeError, "models are named in weight_sync_schemes="),
        ({"batch": {"split_trajs": True}}, TypeError, r"type batch=sync_collector\.BatchOptions"),
        (
            {"batch": BatchOptions(split_trajs=True), "split_trajs": False},
            ValueError,
            "split_trajs is given twice; leave out split_trajs=False",
        ),
        ({"per_worker": WorkerOptions(), "collector_kwargs": {}}, ValueError, "are the same"),
        ({"stratgy": "state_dict"}, TypeError, "did you mean scheme_options={'strategy': …}"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        inline(long_episodes, Scale(), **options)


def test_devices_that_are_not_given_are_the_one_that_is() -> None:
    base = RolloutOptions(frames_per_batch=4)
    common: Any = {"device": ["cpu", "meta"], "storing_device": "cpu"}
    first, second = options_of_workers(base, 2, common, {"policy_device": "cpu"})
    assert first.devices == Devices.of("cpu")
    assert second.devices == Devices.of("meta", policy="cpu", storing="cpu")
