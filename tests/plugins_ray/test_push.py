"""Scheme `ray` with `workers=actors`: values, references, versions, failures, lifetime."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray
import torch
from ray import cloudpickle
from tests.plugins_ray.agents import linear, pair, policy_of
from torch import nn

from sync_core import (
    ModelPathError,
    OptionError,
    Sender,
    SendError,
    WorkerState,
)
from sync_testing import eventually

pytestmark = pytest.mark.timeout(120)


# Actors cannot import this file by name.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Module(nn.Module):
    """An actor that is a model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def itself(self) -> nn.Module:
        return self

    def value(self) -> float:
        return self.inner.weight[0, 0].item()


@pytest.mark.parametrize("where", ["policy", "env.transform[0]", "nets['critic']"])
def test_the_object_at_model_id_is_updated_and_no_other(actors: list[Any], where: str) -> None:
    with Sender("ray", linear(2.0), workers=actors, model_id=where) as sender:
        report = sender.send()
    assert report.updated == (0, 1)
    for actor in actors:
        values = ray.get(actor.values.remote())
        assert values.pop(where) == {2.0}
        assert set.union(*values.values()) == {0.0}


def test_a_model_behind_a_method(actors: list[Any]) -> None:
    with Sender("ray", linear(3.0), workers=actors, model_getter="the_model") as sender:
        sender.send()
    assert [policy_of(actor) for actor in actors] == [{3.0}, {3.0}]


def test_a_method_that_is_not_there(actors: list[Any]) -> None:
    with (
        Sender("ray", linear(), workers=actors, model_getter="model") as sender,
        pytest.raises(SendError, match=r"(?s)a Agent.*no method 'model'"),
    ):
        sender.send()


def test_actors_of_several_classes(actors: list[Any], other: Any) -> None:
    with Sender("ray", linear(4.0), workers=[actors[0], other]) as sender:
        assert sender.send().updated == (0, 1)
    assert policy_of(actors[0]) == {ray.get(other.value.remote())} == {4.0}


def test_layers_subsets_and_what_is_given(actors: list[Any]) -> None:
    with Sender("ray", linear(1.0), workers=actors, layers=["bf16"]) as sender:
        sender.send(linear(0.5), worker_ids=1)
        assert [policy_of(actor) for actor in actors] == [{0.0}, {0.5}]
        sender.send_async({"weight": torch.ones(3, 3), "bias": torch.ones(3)}).wait()
        assert [policy_of(actor) for actor in actors] == [{1.0}, {1.0}]


def test_the_trainer_may_go_on_at_once(large: list[Any]) -> None:
    model = linear(1.0, width=300)
    with Sender("ray", model, workers=large) as sender:
        pending = sender.send_async()
        model.weight.data.fill_(9.0)
        model.bias.data.fill_(9.0)
        pending.wait()
        assert [policy_of(actor) for actor in large] == [{1.0}] * 3


@pytest.mark.parametrize(("size", "objects"), [(20_000, 1), (2_200_000, 2)])
def test_the_same_objects_for_all_and_two_versions_at_most(
    agents: list[Any], size: int, objects: int
) -> None:
    ray.get([actor.host.remote(pair(0.0, size)) for actor in agents])
    with Sender("ray", pair(0.0, size), workers=agents) as sender:
        sender.send()
        before = references()
        for version in range(1, 9):
            sender.send(pair(version, size))
            assert references() <= before + objects
        assert ray.get([actor.hosted.remote() for actor in agents]) == [{8.0}] * 3


def references() -> int:
    """Return how many objects this process holds references to."""
    worker: Any = ray._private.worker.global_worker
    return len(worker.core_worker.get_all_reference_counts())


def test_zero_copy_parameters_lie_in_the_store_and_return_to_own_memory(large: list[Any]) -> None:
    actor = large[0]
    model = linear(1.0, width=300)
    sender = Sender("ray", model, workers=[actor], zero_copy=True)
    for version in (1.0, 2.0, 3.0):
        for parameter in model.parameters():
            parameter.data.fill_(version)
        sender.send()
        assert policy_of(actor) == {version}
    assert ray.get(actor.shares_memory.remote())
    ray.get(actor.write_in_place.remote())
    with pytest.raises(SendError, match=r"(?s)'weight'.*in place"):
        sender.send()
    sender.send()
    assert policy_of(actor) == {3.0}
    sender.close()
    assert policy_of(actor) == {3.0}
    assert not ray.get(actor.shares_memory.remote())


def test_actors_come_and_go_while_versions_are_sent(actors: list[Any]) -> None:
    ended = threading.Event()
    with Sender("ray", linear(1.0), workers=actors[:1]) as sender:
        transport = cast("Any", sender._pipeline.transport)

        def come_and_go() -> None:
            # Each time leaves a call to the actor, which the tests after this one wait behind.
            for _ in range(200):
                if ended.is_set():
                    return
                transport.add_worker(1, actors[1])
                transport.remove_worker(1)

        with ThreadPoolExecutor(1) as threads:
            repeating = threads.submit(come_and_go)
            try:
                for _ in range(30):
                    assert sender.send().updated == (0,)
            finally:
                ended.set()
            repeating.result()


def test_an_actor_that_is_the_model() -> None:
    actor: Any = ray.remote(Module).options(num_cpus=0).remote()
    weights = {f"inner.{name}": value for name, value in linear(3.0).state_dict().items()}
    with Sender("ray", weights, workers=[actor], model_getter="itself") as sender:
        assert sender.send().updated == (0,)
        assert ray.get(actor.value.remote()) == 3.0


def test_the_newer_of_two_senders_has_the_model(actors: list[Any]) -> None:
    first = Sender("ray", linear(1.0), workers=actors)
    first.send()
    with Sender("ray", linear(2.0), workers=actors[:1]) as second:
        second.send()
        with pytest.raises(SendError, match="another sender has taken over") as caught:
            first.send()
        assert caught.value.report.updated == (1,)
        assert policy_of(actors[0]) == {2.0}
        with Sender("ray", linear(7.0), workers=actors, model_id="nets['critic']") as third:
            third.send()
        second.send()
    first.close()


def test_workers_come_and_go(actors: list[Any]) -> None:
    with Sender("ray", linear(5.0), workers=actors[:1]) as sender:
        sender.send()
        assert sender.add_worker(worker=actors[1]) == 1
        assert eventually(lambda: policy_of(actors[1]) == {5.0})
        sender.remove_worker(0)
        sender.send(linear(6.0))
        assert [policy_of(actor) for actor in actors] == [{5.0}, {6.0}]
        assert sender.add_worker(0, worker=actors[0]) == 0
        assert eventually(lambda: policy_of(actors[0]) == {6.0})
        report = sender.send(linear(7.0))
        assert report.updated == (0, 1)
        assert all(result.deliver_seconds is not None for result in report.workers.values())
        with pytest.raises(OptionError, match="add_worker"):
            sender.add_worker()


def test_what_a_late_actor_commits_is_known_before_the_next_send(actors: list[Any]) -> None:
    with Sender("ray", linear(5.0), workers=actors[:1]) as sender:
        sender.send()
        sender.add_worker(worker=actors[1])
        assert eventually(lambda: sender.workers[1].state is WorkerState.CURRENT)
        assert (sender.workers[1].version, policy_of(actors[1])) == (1, {5.0})


def test_actors_are_found_by_paths_in_the_context(actors: list[Any]) -> None:
    held = SimpleNamespace(_actor=actors[0])
    trainer = SimpleNamespace(policy=linear(7.0), env=SimpleNamespace(transform=[held, actors[1]]))
    with Sender("ray", workers=["env.transform[0]"], context=trainer) as sender:
        assert sender.send().updated == (0,)
        sender.add_worker(worker="env.transform[1]")
        assert sender.send().updated == (0, 1)
        with pytest.raises(ModelPathError, match=r"has no '\[2\]'"):
            sender.add_worker(worker="env.transform[2]")
        assert sender.all_worker_ids() == (0, 1)
    assert [policy_of(actor) for actor in actors] == [{7.0}, {7.0}]


def test_several_models_are_committed_all_or_none(agents: list[Any], actors: list[Any]) -> None:
    odd = agents[2]
    ray.get(odd.reset.remote(4))
    critic = "nets['critic']"
    with Sender("ray", workers=[*actors, odd]) as sender:
        with pytest.raises(SendError, match=r"(?s)policy\.weight.*3, 3.*4, 4") as caught:
            sender.send(weights_dict={critic: linear(2.0), "policy": linear(1.0)})
        assert caught.value.report.updated == (0, 1)
        for actor in actors:
            values = ray.get(actor.values.remote())
            assert (values["policy"], values[critic]) == ({1.0}, {2.0})
        values = ray.get(odd.values.remote())
        assert (values["policy"], values[critic]) == ({0.0}, {0.0})


class Zoo(nn.Module):
    """Tensors of every kind."""

    def __init__(self, fill: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3, dtype=torch.bfloat16)
        self.head = nn.Linear(3, 5, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embedding.weight
        self.transposed = nn.Parameter(torch.full((4, 2), float(fill)).t())
        self.register_buffer("scalar", torch.tensor(fill))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("flags", torch.tensor([fill > 0, False]))
        self.register_buffer("wave", torch.full((3,), complex(fill, -1)))
        self.register_buffer("tiny", torch.full((9,), float(fill)).to(torch.float8_e4m3fn))
        self.register_buffer("hidden", torch.full((2,), float(fill)), persistent=False)
        nn.init.constant_(self.embedding.weight, fill)


class Keeper:
    def reset(self) -> None:
        self.policy = Zoo(0)

    def content(self) -> dict[str, Any]:
        tensors = {**self.policy.state_dict(), "hidden": self.policy.hidden}
        return {name: tensor.tolist() for name, tensor in tensors.items()}

    def is_tied(self) -> bool:
        return self.policy.head.weight is self.policy.embedding.weight


@pytest.fixture(scope="module")
def keeper() -> Iterator[Any]:
    actor: Any = ray.remote(Keeper).options(num_cpus=0).remote()
    yield actor
    ray.kill(actor)


@pytest.mark.parametrize("zero_copy", [False, True])
def test_tensors_of_every_kind(keeper: Any, zero_copy: bool) -> None:
    ray.get(keeper.reset.remote())
    zoo = Zoo(3)
    with Sender("ray", zoo, workers=[keeper], zero_copy=zero_copy) as sender:
        sender.send()
        expected = {**zoo.state_dict(), "hidden": zoo.hidden}
        assert ray.get(keeper.content.remote()) == {n: t.tolist() for n, t in expected.items()}
        assert ray.get(keeper.is_tied.remote())


def test_five_thousand_tensors(agents: list[Any]) -> None:
    names = [f"layer{i}" for i in range(5000)]
    actor = agents[0]
    ray.get(actor.host.remote({name: torch.zeros(10) for name in names}))
    with Sender("ray", {n: torch.ones(10) for n in names}, workers=[actor]) as sender:
        sender.send()
        assert sender.send({n: torch.full((10,), 2.0) for n in names}).updated == (0,)
    assert ray.get(actor.hosted.remote()) == {2.0}
