"""A collector keeps several models fresh, each by its own scheme, and commits them together."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from sync_collector import Collector
from sync_collector.envs import CountingEnv
from sync_core import (
    LayoutMismatchError,
    ModelError,
    OptionError,
    PendingSend,
    RemoteCallError,
    SendError,
    SendReport,
    UnknownWorkerError,
    hookimpl,
)
from sync_plugin_std import Interval

pytestmark = pytest.mark.timeout(60)


class Scale(nn.Module):
    """Acts with its weight, whatever it sees."""

    def __init__(self, weight: float = 0.0, size: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), weight))

    def forward(self, observation: Tensor) -> Tensor:
        return self.weight.sum().expand(observation.shape)

    def set(self, weight: float) -> None:
        with torch.no_grad():
            self.weight.fill_(weight)


class Advised(Scale):
    """Acts with the sum of its weight and its critic's."""

    def __init__(self, critic: Scale) -> None:
        super().__init__()
        # In a list, so that the critic's weights are not the policy's.
        self.advisers = [critic]

    def forward(self, observation: Tensor) -> Tensor:
        return super().forward(observation) + self.advisers[0].forward(observation)


class Refusing(Scale):
    """Has a state that cannot be set while the world's flag is raised."""

    refuse = False

    def get_extra_state(self) -> Tensor:
        return torch.zeros(1)

    def set_extra_state(self, state: Any) -> None:
        del state
        if Refusing.refuse:
            raise RuntimeError("this critic refuses")


class Transformed(CountingEnv):
    """Has modules in the way that environments with transforms have them."""

    def __init__(self) -> None:
        super().__init__(1000)
        self.transform = [Scale(1.0), Scale(2.0)]


SCHEMES = {"policy": "thread", "critic": "shm"}


def collector(policy: Any = None, critic: Any = None, **options: Any) -> Collector:
    critic = critic or Scale()
    options = {
        "weight_sync_schemes": SCHEMES,
        "models": {"critic": critic},
        "num_workers": 2,
        "frames_per_batch": 4,
        "timeout": 50.0,
        **options,
    }
    return Collector(lambda: CountingEnv(1000), policy or Advised(critic), **options)


def weights(made: Collector, path: str) -> list[float]:
    return [round(weight.item(), 3) for weight in made.cascade_execute(path)]


@pytest.mark.parametrize(
    ("workers", "schemes"),
    [
        ("inline", SCHEMES),
        ("thread", {"policy": "thread", "critic": {"scheme": "shm", "zero_copy": True}}),
        ("thread", {"policy": "shm", "critic": {"scheme": "shm", "layers": ["bf16"]}}),
        ("process", {"policy": "shm", "critic": "mp"}),
    ],
)
def test_two_models_by_two_schemes(workers: str, schemes: Any) -> None:
    critic = Scale()
    policy = Advised(critic)
    with collector(policy, critic, workers=workers, weight_sync_schemes=schemes, sync=True) as made:
        assert not next(made)["action"].any()
        assert list(made.senders) == ["critic", "policy"] or list(made.senders) == list(schemes)
        policy.set(1.0)
        critic.set(4.0)
        report = made.update_policy_weights_()
        assert isinstance(report, SendReport)
        assert (report.updated, report.version) == ((0, 1), 1)
        assert report.nbytes >= 8
        # The policy's copy uses the worker's copy of the critic.
        batch = next(made)
        assert batch["action"].unique().tolist() == [5.0]
        assert batch["policy_version"].unique().tolist() == [1]

        critic.set(7.0)
        assert made.update_policy_weights_(model_id="critic").updated == (0, 1)
        policy.set(2.0)
        assert weights(made, "critic.weight") == [7.0, 7.0]
        assert weights(made, "policy.weight") == [1.0, 1.0]
        assert made.update_policy_weights_(worker_ids=1, model_id="policy").updated == (1,)
        assert weights(made, "policy.weight") == [1.0, 2.0]
        made.update_policy_weights_(weights_dict={"policy": Scale(9.0), "critic": None})
        assert weights(made, "policy.weight") == [9.0, 9.0]
        made.update_policy_weights_({"weight": torch.tensor([3.0])})
        assert weights(made, "policy.weight") == [3.0, 3.0]
        assert made.stats().version == 4


def test_a_version_of_several_models_is_skipped_whole() -> None:
    critic, policy = Scale(), Scale()
    schemes = {"policy": "thread", "critic": {"scheme": "thread", "layers": [Interval(2)]}}
    with collector(policy, critic, workers="thread", weight_sync_schemes=schemes) as made:
        for value in (1.0, 2.0, 3.0):
            policy.set(value)
            critic.set(value)
            report = made.update_policy_weights_()
            assert report.skipped == ((0, 1) if value == 2.0 else ())
            assert report.updated == (() if value == 2.0 else (0, 1))
            held = 1.0 if value == 2.0 else value
            assert weights(made, "policy.weight") == [held] * 2
            assert weights(made, "critic.weight") == [held] * 2
        # Of one model alone the other's layer has no say.
        assert made.update_policy_weights_(model_id="policy").updated == (0, 1)


@pytest.mark.parametrize(
    "options", [{}, {"weight_sync_schemes": {"policy": "thread"}, "models": {}}], ids=["two", "one"]
)
def test_a_policy_that_has_changed_names_the_way_out(options: dict[str, Any]) -> None:
    policy = Scale()
    with collector(policy, workers="thread", **options) as made:
        made.update_policy_weights_()
        policy.weight = nn.Parameter(torch.ones(2))
        message = r"nothing was sent(?s:.*)collector.shutdown\(\), and make a new Collector"
        with pytest.raises(LayoutMismatchError, match=message):
            made.update_policy_weights_()


def test_models_by_paths() -> None:
    policy = Scale()
    schemes = {"policy": "thread", "env.transform[1]": "thread"}
    options: dict[str, Any] = {"workers": "thread", "num_workers": 2, "frames_per_batch": 2}
    with Collector(Transformed, policy, weight_sync_schemes=schemes, **options) as made:
        with pytest.raises(ModelError, match=r"no weights of 'env.transform\[1\]'"):
            made.update_policy_weights_(model_id="env.transform[1]")
        update = {"policy": Scale(1.0), "env.transform[1]": Scale(5.0)}
        assert made.update_policy_weights_(weights_dict=update).updated == (0, 1)
        assert weights(made, "env.transform[1].weight") == [5.0, 5.0]
        assert weights(made, "env.transform[0].weight") == [1.0, 1.0]
        assert weights(made, "policy.weight") == [1.0, 1.0]


def test_a_path_that_leads_nowhere() -> None:
    with (
        Collector(
            CountingEnv,
            Scale(),
            weight_sync_schemes={"policy": "thread", "env.transform[0]": "thread"},
            frames_per_batch=2,
        ) as made,
        pytest.raises(RemoteCallError, match=r"env\.transform\[0\]"),
    ):
        made.update_policy_weights_(weights_dict={"env.transform[0]": Scale()})


@pytest.mark.parametrize("names", [("policy", "critic"), ("critic", "policy")])
def test_nothing_is_sent_if_one_source_is_wrong(names: tuple[str, str]) -> None:
    with collector(workers="inline") as made:
        good, bad = names
        update = {good: Scale(5.0), bad: Scale(5.0, size=2)}
        with pytest.raises(LayoutMismatchError):
            made.update_policy_weights_(weights_dict=update)
        assert made.stats().version == 0
        assert weights(made, "critic.weight") == weights(made, "policy.weight") == [0.0, 0.0]


@pytest.mark.parametrize("workers", ["inline", "thread"])
def test_nothing_is_committed_if_one_model_refuses(
    workers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    critic = Refusing()
    with collector(Advised(critic), critic, workers=workers) as made:
        made.update_policy_weights_(weights_dict={"policy": Scale(1.0)})
        monkeypatch.setattr(Refusing, "refuse", True)
        changed = Refusing(5.0)
        with pytest.raises(SendError, match="this critic refuses"):
            made.update_policy_weights_(weights_dict={"policy": Scale(5.0), "critic": changed})
        assert weights(made, "policy.weight") == [1.0, 1.0]
        assert weights(made, "critic.weight") == [0.0, 0.0]
        monkeypatch.setattr(Refusing, "refuse", False)
        made.update_policy_weights_(weights_dict={"policy": Scale(6.0), "critic": changed})
        assert weights(made, "policy.weight") == [6.0, 6.0]
        assert weights(made, "critic.weight") == [5.0, 5.0]


def test_batches_under_way_are_made_with_models_that_belong_together() -> None:
    critic = Scale()
    policy = Advised(critic)
    with collector(policy, critic, workers="thread", frames_per_batch=40) as made:
        for step in range(1, 8):
            policy.set(float(step))
            critic.set(100.0 * step)
            pending = made.update_policy_weights_(blocking=False)
            assert isinstance(pending, PendingSend)
            batch = next(made)
            version = batch["policy_version"].unsqueeze(-1)
            assert torch.equal(batch["action"], 101.0 * version)
            assert pending.wait().updated == (0, 1)


def test_a_worker_that_joins_gets_all_models() -> None:
    with collector(workers="thread", sync=True) as made:
        made.update_policy_weights_(weights_dict={"policy": Scale(1.0)})
        made.update_policy_weights_(weights_dict={"critic": Scale(2.0)})
        made.increment_version()
        made.update_policy_weights_(Scale(3.0), worker_ids=1)
        made.add_workers()
        assert weights(made, "policy.weight") == [1.0, 3.0, 3.0]
        assert weights(made, "critic.weight") == [2.0] * 3
        assert next(made)["policy_version"][:, 0].tolist() == [2, 3, 4]
        assert made.update_policy_weights_().updated == (0, 1, 2)
        made.remove_workers(0)
        assert made.update_policy_weights_().updated == (1, 2)


def test_a_worker_that_joins_after_an_update_that_the_trainer_could_not_send() -> None:
    class Broken:
        broken = False

        @hookimpl(wrapper=True)
        def prepare_weights(self, update: Any, context: Any) -> Any:
            if self.broken:
                raise ValueError("this layer is broken")
            return (yield)

    layer, policy, critic = Broken(), Scale(), Scale()
    schemes = {"critic": {"scheme": "thread", "layers": [layer]}, "policy": "shm"}
    with collector(
        policy, critic, weight_sync_schemes=schemes, workers="thread", sync=True
    ) as made:
        made.update_policy_weights_(weights_dict={"policy": Scale(1.0), "critic": Scale(2.0)})
        layer.broken = True
        with pytest.raises(ValueError, match="this layer is broken"):
            made.update_policy_weights_(weights_dict={"critic": Scale(3.0), "policy": Scale(4.0)})
        layer.broken = False
        policy.set(77.0)
        made.add_workers()
        assert weights(made, "policy.weight") == [1.0] * 3
        assert weights(made, "critic.weight") == [2.0] * 3
        assert next(made)["policy_version"][:, 0].tolist() == [1, 1, 3]
        assert made.update_policy_weights_().updated == (0, 1, 2)
        made.add_workers()
        assert weights(made, "policy.weight") == [77.0] * 4


def test_updates_from_two_threads_wait_for_each_other() -> None:
    policy = Scale()
    schemes: list[dict[str, Any]] = [
        {"scheme": "thread"},
        {"weight_sync_schemes": {"policy": "thread", "critic": "thread"}},
    ]
    for scheme in schemes:
        models = {"critic": Scale()} if "scheme" not in scheme else {}
        with Collector(
            CountingEnv,
            policy,
            **scheme,
            models=models,
            workers="thread",
            num_workers=2,
            frames_per_batch=2,
        ) as made:
            errors: list[BaseException] = []

            def update(made: Collector = made, errors: list[BaseException] = errors) -> None:
                try:
                    for step in range(10):
                        made.update_policy_weights_(blocking=step % 2 == 0)
                except BaseException as error:
                    errors.append(error)

            threads = [threading.Thread(target=update) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert not errors
            assert made.update_policy_weights_().updated == (0, 1)
            assert made.stats().version == 31


@pytest.mark.parametrize(
    "given",
    [Scale(3.0), TensorDict({"weight": torch.tensor([3.0])}), {"weight": torch.tensor([3.0])}],
)
@pytest.mark.parametrize("how", ["positional", "weights", "policy", "model_id", "weights_dict"])
def test_every_way_to_give_weights(given: Any, how: str) -> None:
    with Collector(
        CountingEnv, Scale(), scheme="thread", num_workers=2, frames_per_batch=2
    ) as made:
        if how == "positional":
            made.update_policy_weights_(given)
        elif how == "model_id":
            made.update_policy_weights_(given, model_id="policy")
        elif how == "weights_dict":
            made.update_policy_weights_(weights_dict={"policy": given})
        else:
            made.update_policy_weights_(**{how: given})
        assert weights(made, "policy.weight") == [3.0, 3.0]


def test_ways_that_do_not_go_together() -> None:
    with collector(workers="inline") as made:
        for wrong in (
            {"weights": Scale(), "policy": Scale()},
            {"weights": Scale(), "weights_dict": {"policy": Scale()}},
            {"model_id": "policy", "weights_dict": {"policy": Scale()}},
        ):
            with pytest.raises(ValueError, match=r"give one of|leave out"):
                made.update_policy_weights_(**wrong)
        with pytest.raises(KeyError, match=r"no model 'nope'; the models are: 'policy', 'critic'"):
            made.update_policy_weights_(model_id="nope")
        with pytest.raises(KeyError, match="no model 'nope'"):
            made.update_policy_weights_(weights_dict={"policy": None, "nope": Scale()})
        with pytest.raises(UnknownWorkerError, match="no worker 5"):
            made.update_policy_weights_(worker_ids=5)
        assert made.stats().version == 0


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"scheme": "shm"}, ValueError, "leave out scheme, layers"),
        ({"layers": ["bf16"]}, ValueError, "leave out scheme, layers"),
        ({"weight_sync_schemes": {}}, ValueError, "is empty"),
        ({"weight_sync_schemes": {"policy": {"zero_copy": True}}}, ValueError, "names no scheme"),
        ({"weight_sync_schemes": {"policy": "shm"}}, ValueError, "no scheme keeps fresh"),
        ({"weight_sync_schemes": None}, ValueError, "weight_sync_schemes={'policy': 'shm', 'crit"),
        ({"models": {}}, ValueError, r"models=\{'critic': …\}.*'policy\.critic'"),
        ({"models": {"critic": Scale(), "policy": Scale()}}, ValueError, "collector's own"),
        (
            {"weight_sync_schemes": {"policy": "thread"}, "models": {}},
            ModelError,
            r"'advisers\[0\]\.weight' requires a gradient, and is not registered",
        ),
        (
            {"weight_sync_schemes": {"policy": "none", "critic": "thread"}},
            OptionError,
            "moves nothing",
        ),
    ],
)
def test_bad_arguments(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        collector(**options)


@pytest.mark.parametrize("path", ["critic", "policy.critic"])
@pytest.mark.parametrize("views", [(True, False), (False, True), (True, True)])
def test_zero_copy_of_models_that_share_parameters(path: str, views: tuple[bool, bool]) -> None:
    critic = Scale(1.0)
    policy = Scale()
    policy.critic = critic
    schemes = {
        name: {"scheme": "thread", "zero_copy": zero_copy}
        for name, zero_copy in zip(("policy", path), views, strict=True)
    }
    options = {"weight_sync_schemes": schemes, "models": {path: critic}, "workers": "inline"}
    if views != (True, True):
        with pytest.raises(RemoteCallError, match=r"share parameters.* 'zero_copy': True for both"):
            collector(policy, **options)
        return
    with collector(policy, **options) as made:
        made.update_policy_weights_()
        critic.set(9.0)
        made.update_policy_weights_(model_id=path, worker_ids=0)
        assert made.cascade_execute("policy.critic.weight.item") == [9.0, 1.0]


@pytest.mark.parametrize("workers", ["inline", "thread"])
def test_versions_of_a_part_that_alone_is_sent_are_those_of_the_policy(workers: str) -> None:
    policy = Scale()
    policy.critic = Scale(1.0)
    options: Any = {"weight_sync_schemes": {"policy.critic": "thread"}, "models": {}}
    with collector(policy, workers=workers, sync=True, **options) as made:
        next(made)
        policy.critic.set(2.0)
        assert made.update_policy_weights_().version == made.stats().version == 1
        assert made.sender is made.senders["policy.critic"]
        made.update_policy_weights_(worker_ids=0)
        # Worker 1 has version 1.
        assert next(made)["policy_version"].unique().tolist() == [1, 2]
        assert made.stats().lag == 1
        state = made.state_dict()
    with collector(policy, workers=workers, sync=True, **options) as made:
        made.load_state_dict(state)
        assert made.stats().version == 2
        assert next(made)["policy_version"].unique().tolist() == [1, 2]
        policy.critic.set(3.0)
        assert made.update_policy_weights_().version == 3
        assert next(made)["policy_version"].unique().tolist() == [3]
    options["weight_sync_schemes"] = {"policy": "thread"}
    error = pytest.raises(KeyError, match=r"weight_sync_schemes=.*'policy\.critic': 'shm'}")
    with collector(policy, **options) as made, error:
        made.update_policy_weights_(model_id="policy.critic")


def test_what_a_path_leads_to_is_called_in_every_worker() -> None:
    with collector(Scale(4.0), workers="thread", num_workers=3) as made:
        assert made.cascade_execute("policy.weight.tolist") == [[4.0]] * 3
        assert made.cascade_execute("policy.forward", observation=torch.zeros(2))[2].tolist() == [
            4.0,
            4.0,
        ]
        ids = {id(critic) for critic in made.cascade_execute("critic.eval")}
        assert len(ids) == 3
        with pytest.raises(RemoteCallError, match="takes no arguments"):
            made.cascade_execute("policy.weight", 1)
        with pytest.raises(RemoteCallError, match=r"env\.nothing"):
            made.cascade_execute("env.nothing")


def test_values_come_in_the_order_of_workers() -> None:
    envs = [lambda size=size: CountingEnv(size) for size in (3, 5, 7)]
    with Collector(envs, scheme="none", workers="thread", frames_per_batch=2) as made:
        resets = made.cascade_execute("env.reset")
        assert [reset["observation"].item() for reset in resets] == [0.0] * 3
