"""Scheme `ray` with `workers=actors`: values, references, versions, failures, lifetime."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray
import torch
from ray import cloudpickle
from torch import nn

from sync_core import (
    ApplyError,
    CapacityError,
    ModelPathError,
    OptionError,
    Payload,
    Sender,
    SendError,
    WorkerError,
    WorkerLostError,
    WorkerState,
    WorkerTimeoutError,
)

pytestmark = pytest.mark.timeout(120)

# Actors cannot import this file by name.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def linear(fill: float = 0.0, width: int = 3) -> nn.Linear:
    model = nn.Linear(width, width)
    for parameter in model.parameters():
        parameter.data.fill_(fill)
    return model


def pair(fill: float, size: int) -> dict[str, torch.Tensor]:
    return {name: torch.full((size,), float(fill)) for name in "ab"}


class Env:
    def __init__(self) -> None:
        self.transform = [linear()]


class Agent:
    """Hosts models in every place that a reference may point to."""

    def __init__(self, width: int = 3) -> None:
        self.reset(width)

    def reset(self, width: int = 3) -> None:
        self.policy: Any = linear(width=width)
        self.env = Env()
        self.nets = {"critic": linear()}

    def the_model(self) -> Any:
        return self.policy

    def host(self, policy: Any) -> None:
        self.policy = policy

    def hosted(self) -> set[float]:
        return {v for tensor in self.policy.values() for v in tensor.tolist()}

    def pid(self) -> int:
        return os.getpid()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def values(self) -> dict[str, set[float]]:
        models = {
            "policy": self.policy,
            "env.transform[0]": self.env.transform[0],
            "nets['critic']": self.nets["critic"],
        }
        return {
            name: {v for p in model.parameters() for v in p.detach().flatten().tolist()}
            for name, model in models.items()
        }

    def shares_memory(self) -> bool:
        first, second = (p.untyped_storage().data_ptr() for p in self.policy.parameters())
        return bool(first == second)

    def write_in_place(self) -> None:
        with torch.no_grad():
            self.policy.weight.add_(1)


class Module(nn.Module):
    """An actor that is a model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def itself(self) -> nn.Module:
        return self

    def value(self) -> float:
        return self.inner.weight[0, 0].item()


class Other:
    """Another class, with a model of the same name."""

    def __init__(self) -> None:
        self.policy = linear()

    def value(self) -> float:
        return self.policy.weight[0, 0].item()


def start(number: int, **options: Any) -> list[Any]:
    return [ray.remote(Agent).options(num_cpus=0, **options).remote() for _ in range(number)]


@pytest.fixture(scope="module")
def pool() -> Iterator[list[Any]]:
    """Actors for tests that leave them alive; starting one takes seconds."""
    started = start(3)
    yield started
    for actor in started:
        ray.kill(actor)


@pytest.fixture
def actors(pool: list[Any]) -> list[Any]:
    ray.get([actor.reset.remote() for actor in pool])
    return pool[:2]


@pytest.fixture
def large(pool: list[Any]) -> list[Any]:
    """Three actors whose policies are too large to travel inside a call."""
    ray.get([actor.reset.remote(300) for actor in pool])
    return pool


@pytest.fixture(scope="module")
def other() -> Iterator[Any]:
    actor: Any = ray.remote(Other).options(num_cpus=0).remote()
    yield actor
    ray.kill(actor)


def policy_of(actor: Any) -> set[float]:
    values: dict[str, set[float]] = ray.get(actor.values.remote())
    return values["policy"]


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
    pool: list[Any], size: int, objects: int
) -> None:
    ray.get([actor.host.remote(pair(0.0, size)) for actor in pool])
    with Sender("ray", pair(0.0, size), workers=pool) as sender:
        sender.send()
        before = references()
        for version in range(1, 9):
            sender.send(pair(version, size))
            assert references() <= before + objects
        assert ray.get([actor.hosted.remote() for actor in pool]) == [{8.0}] * 3


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


def test_a_killed_actor_fails_at_once_and_the_others_are_updated(actors: list[Any]) -> None:
    (doomed,) = start(1)
    with Sender("ray", linear(1.0), workers=[doomed, actors[1]]) as sender:
        sender.send()
        os.kill(ray.get(doomed.pid.remote()), signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(SendError) as caught:
            sender.send(linear(2.0))
        assert time.monotonic() - started < 20
        assert isinstance(caught.value.report.failed[0].error, WorkerLostError)
        assert caught.value.report.updated == (1,)
        assert policy_of(actors[1]) == {2.0}


def test_one_model_of_another_shape(pool: list[Any], actors: list[Any]) -> None:
    odd = pool[2]
    ray.get(odd.reset.remote(4))
    with Sender("ray", linear(1.0), workers=[odd, actors[0]]) as sender:
        with pytest.raises(SendError, match=r"(?s)weight.*3, 3.*4, 4") as caught:
            sender.send()
        assert isinstance(caught.value.report.failed[0].error, ApplyError)
        assert policy_of(actors[0]) == {1.0}
        assert policy_of(odd) == {0.0}


def test_a_model_id_that_leads_nowhere(actors: list[Any], other: Any) -> None:
    with Sender("ray", linear(1.0), workers=[actors[0], other], model_id="env.transform[0]") as s:
        with pytest.raises(SendError, match=r"(?s)a Other.*has no 'env'") as caught:
            s.send()
        assert caught.value.report.updated == (0,)


def test_an_actor_in_a_long_call_is_late_and_catches_up(actors: list[Any]) -> None:
    with Sender("ray", linear(1.0), workers=actors) as sender:
        sender.send()
        busy = actors[0].sleep.remote(3)
        with pytest.raises(SendError) as caught:
            sender.send(linear(2.0), timeout=0.5)
        late = caught.value.report.failed[0].error
        assert isinstance(late, WorkerTimeoutError)
        assert "if the sender calls it, take calls in time?" in str(late)
        with pytest.raises(SendError) as caught:
            sender.send(linear(3.0), timeout=0.5)
        assert caught.value.report.updated == (1,)
        ray.get(busy)
        assert eventually(lambda: policy_of(actors[0]) == {3.0})
        assert sender.send(linear(4.0)).updated == (0, 1)


def test_a_restarted_actor_gets_the_version_before_it_counts(actors: list[Any]) -> None:
    (frail,) = start(1, max_restarts=1)
    with Sender("ray", linear(1.0), workers=[frail, actors[1]]) as sender:
        sender.send()
        os.kill(ray.get(frail.pid.remote()), signal.SIGKILL)
        assert sender.send(linear(2.0)).updated == (0, 1)
        assert policy_of(frail) == {2.0}
        frail.sleep.remote(30)
        killer = threading.Timer(0.5, ray.kill, [frail])
        killer.start()
        with pytest.raises(SendError, match="the actor is gone"):
            sender.send(linear(3.0))
        killer.join()


@pytest.mark.parametrize("size", [20_000, 2_200_000], ids=["its only one", "one of its two"])
def test_a_lost_object_is_put_again(pool: list[Any], lost: Any, size: int) -> None:
    ray.get([actor.host.remote(pair(0.0, size)) for actor in pool])

    def put_and_lose(payload: Payload) -> Any:
        publication = put(payload)
        publication.data = [*publication.data[:-1], lost]
        return publication

    with Sender("ray", pair(2.0, size), workers=pool) as sender:
        store = cast("Any", sender._pipeline.transport)._store
        put, store.put = store.put, put_and_lose
        assert sender.send(timeout=30).updated == (0, 1, 2)
    assert ray.get([actor.hosted.remote() for actor in pool]) == [{2.0}] * 3


def test_an_object_that_cannot_be_put_again_fails_one_send(pool: list[Any], lost: Any) -> None:
    ray.get([actor.host.remote(pair(0.0, 20_000)) for actor in pool])

    def refuse(given: list[Any]) -> bool:
        raise ray.exceptions.RaySystemError("the store is broken")

    def put_and_lose(payload: Payload) -> Any:
        publication = put(payload)
        publication.data = [lost]
        publication.put_again = refuse
        return publication

    with Sender("ray", pair(2.0, 20_000), workers=pool, timeout=30) as sender:
        store = cast("Any", sender._pipeline.transport)._store
        put, store.put = store.put, put_and_lose
        with pytest.raises(SendError, match=r"could not read the object store: .*broken"):
            sender.send()
        store.put = put
        assert sender.send().updated == (0, 1, 2)


def test_actors_come_and_go_while_versions_are_sent(actors: list[Any]) -> None:
    ended = threading.Event()
    with Sender("ray", linear(1.0), workers=actors[:1]) as sender:
        transport = cast("Any", sender._pipeline.transport)

        def come_and_go() -> None:
            while not ended.is_set():
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


def test_a_late_actor_that_is_dead_is_known_to_be_lost(actors: list[Any]) -> None:
    (dead,) = start(1)
    ray.get(dead.pid.remote())
    ray.kill(dead)
    with Sender("ray", linear(5.0), workers=actors[:1]) as sender:
        sender.send()
        sender.add_worker(worker=dead)
        assert eventually(lambda: sender.workers[1].state is WorkerState.LOST)
        assert "the actor is gone" in str(sender.workers[1].error)


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


def test_what_are_no_actors() -> None:
    with pytest.raises(OptionError, match="is not a Ray actor"):
        Sender("ray", linear(), workers=[Agent()])
    with pytest.raises(OptionError, match=r"the path 'env', and there is no context .* context="):
        Sender("ray", linear(), workers=["env"])
    with pytest.raises(OptionError, match="is not a Ray actor"):
        Sender("ray", linear(), workers=["env"], context=Agent())
    with pytest.raises(OptionError, match="model_getter"):
        Sender("ray", linear(), num_workers=1, model_getter="the_model")


def test_a_sender_stays_in_its_process(actors: list[Any]) -> None:
    with (
        Sender("ray", linear(), workers=actors) as sender,
        pytest.raises(TypeError, match=r"sender\.address\(worker_id\)"),
    ):
        pickle.dumps(sender)


def test_a_model_larger_than_the_store(actors: list[Any]) -> None:
    with pytest.raises(CapacityError, match=r"needs 8\d+ bytes .* has \d+ on this node"):
        Sender("ray", {"weight": torch.empty(200_000_000)}, workers=actors)


@pytest.mark.parametrize("name", ["carrier-pigeon", "gloo", "nccl"])
def test_a_tensor_transport_that_cannot_be_used(actors: list[Any], name: str) -> None:
    with pytest.raises(OptionError, match=r"This Ray has: .*gloo.*nixl"):
        Sender("ray", linear(), workers=actors, tensor_transport=name)


def test_closing_fails_what_is_pending(actors: list[Any]) -> None:
    sender = Sender("ray", linear(), workers=actors)
    busy = [actor.sleep.remote(1) for actor in actors]
    pending = sender.send_async()
    sender.close()
    with pytest.raises(SendError) as caught:
        pending.wait()
    assert isinstance(caught.value.report.failed[0].error, WorkerError)
    ray.get(busy)
    assert "sync-calls" not in {thread.name for thread in threading.enumerate()}


def test_an_actor_that_takes_no_more_calls(actors: list[Any]) -> None:
    (full,) = start(1, max_pending_calls=1)
    with Sender("ray", linear(1.0), workers=[full, actors[1]]) as sender:
        sender.send()
        busy = full.sleep.remote(1)
        with pytest.raises(SendError, match="worker 0: could not run the delivery") as caught:
            sender.send(linear(2.0))
        assert caught.value.report.updated == (1,)
        ray.get(busy)
        # Ray counts the call as pending for a moment after its result is there.
        assert eventually(lambda: reached(sender, linear(3.0)) == (0, 1))
    ray.kill(full)


@pytest.mark.parametrize("called", [True, False])
def test_a_closed_sender_keeps_nothing_in_the_store(
    large: list[Any], kept: Callable[[], int], called: bool
) -> None:
    model = linear(width=300)
    where: dict[str, Any] = {"workers": large} if called else {"num_workers": 1}
    sender = Sender("ray", model, timeout=5.0, **where)
    for _ in range(3):
        sender.send_async().abandon()
    assert kept() > 0
    sender.close()
    # What actors were being given when it was closed is released when they have it.
    assert eventually(lambda: kept() == 0, 10.0)


def test_closing_in_the_first_call_leaves_no_view_of_the_store(large: list[Any]) -> None:
    sender = Sender("ray", linear(1.0, width=300), workers=large[:1], zero_copy=True)
    busy = large[0].sleep.remote(0.5)
    sender.send_async()
    sender.close()
    ray.get(busy)
    assert policy_of(large[0]) == {1.0}
    assert not ray.get(large[0].shares_memory.remote())


def test_a_forgotten_sender_ends(large: list[Any]) -> None:
    sender = Sender("ray", linear(1.0, width=300), workers=large[:1], zero_copy=True)
    sender.send()
    del sender
    gc.collect()
    assert policy_of(large[0]) == {1.0}
    assert not ray.get(large[0].shares_memory.remote())
    assert eventually(lambda: "sync-calls" not in {t.name for t in threading.enumerate()})


def reached(sender: Sender, weights: nn.Module) -> tuple[int, ...]:
    try:
        return sender.send(weights).updated
    except SendError as error:
        return error.report.updated


def eventually(condition: Any, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_several_models_are_committed_all_or_none(pool: list[Any], actors: list[Any]) -> None:
    odd = pool[2]
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


def test_five_thousand_tensors(pool: list[Any]) -> None:
    names = [f"layer{i}" for i in range(5000)]
    actor = pool[0]
    ray.get(actor.host.remote({name: torch.zeros(10) for name in names}))
    with Sender("ray", {n: torch.ones(10) for n in names}, workers=[actor]) as sender:
        sender.send()
        assert sender.send({n: torch.full((10,), 2.0) for n in names}).updated == (0,)
    assert ray.get(actor.hosted.remote()) == {2.0}
