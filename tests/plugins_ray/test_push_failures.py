"""Scheme `ray` with `workers=actors`: actors that die, are late or refuse, and senders that end."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import ray
import torch
from ray import cloudpickle
from ray.util.client.common import ClientActorHandle
from tests.plugins_ray.agents import Agent, linear, pair, policy_of, start
from torch import nn

from sync_core import (
    ApplyError,
    CapacityError,
    OptionError,
    Payload,
    Sender,
    SendError,
    WorkerError,
    WorkerLostError,
    WorkerState,
    WorkerTimeoutError,
)
from sync_testing import eventually
from sync_testing.schemes import Workers

pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]


# Actors cannot import this file by name.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_a_killed_actor_fails_at_once_and_the_others_are_updated(actors: list[Any]) -> None:
    (doomed,) = start(1)
    with Sender("ray", linear(1.0), workers=[doomed, actors[1]]) as sender:
        sender.send()
        os.kill(ray.get(doomed.pid.remote()), signal.SIGKILL)
        with pytest.raises(SendError) as caught:
            sender.send(linear(2.0), timeout=60.0)
        assert caught.value.report.seconds < 50
        assert isinstance(caught.value.report.failed[0].error, WorkerLostError)
        assert caught.value.report.updated == (1,)
        assert policy_of(actors[1]) == {2.0}
        # One that is added is known to be lost before the next send.
        added = sender.add_worker(worker=doomed)
        assert eventually(lambda: sender.workers[added].state is WorkerState.LOST, 30)
        assert "the actor is gone" in str(sender.workers[added].error)


def test_an_actor_that_has_not_started() -> None:
    (waiting,) = start(1, resources={"absent": 1})
    with (
        Sender("ray", linear(1.0), workers=[waiting]) as sender,
        pytest.raises(SendError, match="no call of this sender yet: Ray has no place for it"),
    ):
        sender.send(timeout=0.5)


def test_one_model_of_another_shape(agents: list[Any], actors: list[Any]) -> None:
    odd = agents[2]
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


def test_an_actor_in_a_long_call_is_late_and_catches_up(actors: list[Any], tmp_path: Path) -> None:
    with Sender("ray", linear(1.0), workers=actors) as sender:
        sender.send()
        busy = actors[0].wait_for.remote(tmp_path / "release")
        for value in (2.0, 3.0):
            report = Workers.give_up(sender.send_async(linear(value)), 0)
            late = report.failed[0].error
            assert isinstance(late, WorkerTimeoutError)
            assert "if the sender calls it, take calls in time?" in str(late)
            assert report.updated == (1,)
        (tmp_path / "release").touch()
        ray.get(busy)
        assert eventually(lambda: policy_of(actors[0]) == {3.0}, 30)
        assert sender.send(linear(4.0)).updated == (0, 1)


@pytest.mark.parametrize("silent", [0, 1])
def test_an_answer_counts_while_an_actor_is_silent(
    actors: list[Any], silent: int, tmp_path: Path
) -> None:
    with (
        Sender("ray", linear(1.0), workers=actors, timeout=60.0) as sender,
        ThreadPoolExecutor(1) as threads,
    ):
        sender.send()
        busy = actors[silent].wait_for.remote(tmp_path / "release")
        pending = sender.send_async(linear(2.0))
        waiting = threads.submit(pending.wait)
        assert pending.deliveries[1 - silent].wait(30.0)
        assert not waiting.done()
        (tmp_path / "release").touch()
        ray.get(busy)
        assert waiting.result(60).updated == (0, 1)


def test_a_restarted_actor_gets_the_version_before_it_counts(
    actors: list[Any], tmp_path: Path
) -> None:
    (frail,) = start(1, max_restarts=1)
    with Sender("ray", linear(1.0), workers=[frail, actors[1]]) as sender:
        sender.send()
        os.kill(ray.get(frail.pid.remote()), signal.SIGKILL)
        assert sender.send(linear(2.0)).updated == (0, 1)
        assert policy_of(frail) == {2.0}
        frail.wait_for.remote(tmp_path / "never")
        pending = sender.send_async(linear(3.0))
        ray.kill(frail)
        with pytest.raises(SendError, match="the actor is gone"):
            pending.wait()


def test_a_restarted_actor_gets_the_newest_version_without_another_send() -> None:
    (frail,) = start(1, max_restarts=1)
    with Sender("ray", linear(1.0), workers=[frail]) as sender:
        states: list[WorkerState | None] = []
        sender.subscribe(lambda event: states.append(event.after))
        sender.send()
        os.kill(ray.get(frail.pid.remote()), signal.SIGKILL)
        restarted = [WorkerState.LOST, WorkerState.BEHIND, WorkerState.CURRENT]
        assert eventually(lambda: states[-3:] == restarted, 60)
        assert policy_of(frail) == {1.0}
        os.kill(ray.get(frail.pid.remote()), signal.SIGKILL)
        assert eventually(lambda: sender.workers[0].state is WorkerState.LOST, 30)
        assert "process of its actor has ended" in str(sender.workers[0].error)


@pytest.mark.parametrize("size", [20_000, 2_200_000], ids=["its only one", "one of its two"])
def test_a_lost_object_is_put_again(agents: list[Any], lost: Any, size: int) -> None:
    ray.get([actor.host.remote(pair(0.0, size)) for actor in agents])

    def put_and_lose(payload: Payload) -> Any:
        publication = put(payload)
        publication.data = [*publication.data[:-1], lost]
        return publication

    with Sender("ray", pair(2.0, size), workers=agents) as sender:
        store = cast("Any", sender._pipeline.transport)._store
        put, store.put = store.put, put_and_lose
        assert sender.send(timeout=30).updated == (0, 1, 2)
    assert ray.get([actor.hosted.remote() for actor in agents]) == [{2.0}] * 3


def test_an_object_that_cannot_be_put_again_fails_one_send(agents: list[Any], lost: Any) -> None:
    ray.get([actor.host.remote(pair(0.0, 20_000)) for actor in agents])

    def refuse(given: list[Any]) -> bool:
        raise ray.exceptions.RaySystemError("the store is broken")

    def put_and_lose(payload: Payload) -> Any:
        publication = put(payload)
        publication.data = [lost]
        publication.put_again = refuse
        return publication

    with Sender("ray", pair(2.0, 20_000), workers=agents, timeout=30) as sender:
        store = cast("Any", sender._pipeline.transport)._store
        put, store.put = store.put, put_and_lose
        with pytest.raises(SendError, match=r"could not read the object store: .*broken"):
            sender.send()
        store.put = put
        assert sender.send().updated == (0, 1, 2)


def test_what_are_no_actors() -> None:
    by_client = ClientActorHandle.__new__(ClientActorHandle)
    with pytest.raises(OptionError, match=r"handle of Ray Client .*sender\.address\(i\)"):
        Sender("ray", linear(), workers=[by_client])
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


def test_closing_fails_what_is_pending(actors: list[Any], tmp_path: Path) -> None:
    sender = Sender("ray", linear(), workers=actors)
    busy = [actor.wait_for.remote(tmp_path / "release") for actor in actors]
    pending = sender.send_async()
    sender.close()
    (tmp_path / "release").touch()
    with pytest.raises(SendError) as caught:
        pending.wait()
    assert isinstance(caught.value.report.failed[0].error, WorkerError)
    ray.get(busy)
    assert "sync-calls" not in {thread.name for thread in threading.enumerate()}


def test_an_actor_that_takes_no_more_calls(actors: list[Any], tmp_path: Path) -> None:
    (full,) = start(1, max_pending_calls=1)
    with Sender("ray", linear(1.0), workers=[full, actors[1]]) as sender:
        sender.send()
        busy = full.wait_for.remote(tmp_path / "release")
        with pytest.raises(SendError, match="worker 0: could not run the delivery") as caught:
            sender.send(linear(2.0))
        assert caught.value.report.updated == (1,)
        (tmp_path / "release").touch()
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


def test_closing_in_the_first_call_leaves_no_view_of_the_store(
    large: list[Any], tmp_path: Path
) -> None:
    sender = Sender("ray", linear(1.0, width=300), workers=large[:1], zero_copy=True)
    busy = large[0].wait_for.remote(tmp_path / "release")
    sender.send_async()
    sender.close()
    (tmp_path / "release").touch()
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
