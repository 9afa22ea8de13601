"""The engine in Ray actors, called in the order in which verl's manager calls it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import ray
from tests.verl.group import PATIENCE, Cluster, begin, check, states, update

from sync_core import ModelError, OptionError, SendError
from sync_plugin_verl import StepError, SyncCoreEngine, register

pytestmark = pytest.mark.timeout(300)
OPTIONS = {"scheme": "shm", "timeout": 30}


@pytest.fixture
def actors(cluster: Cluster) -> list[Any]:
    """The rank that sends, and two rollouts."""
    return [*cluster.make(1, OPTIONS, is_master=True), *cluster.make(2, OPTIONS)]


@pytest.mark.parametrize(
    "scheme", ["dist", pytest.param("ray", marks=pytest.mark.long), "increments::shm"]
)
def test_weights_arrive_bit_by_bit(cluster: Cluster, scheme: str) -> None:
    options = {"scheme": scheme, "timeout": 30}
    trainers = cluster.make(1, options, is_master=True)
    rollouts = cluster.make(2, options)
    for step in range(3):
        figures = update(trainers, rollouts, step, source=step)
        check(rollouts, source=step)
        assert figures["sync_core/version"] == step + 1
        assert figures["sync_core/workers"] == 2
    # The workers are the same ones all along.
    assert states(trainers)[0]["workers"] == (0, 1)


def test_every_rank_of_the_trainer_makes_every_tensor(cluster: Cluster) -> None:
    trainers = [*cluster.make(1, OPTIONS, is_master=True), *cluster.make(1, OPTIONS)]
    rollouts = cluster.make(1, OPTIONS)
    update(trainers, rollouts, 0, source=0)
    update(trainers, rollouts, 1, source=1)
    check(rollouts, source=1)
    assert [state["drawn"] for state in states(trainers)] == [12, 12]


def test_one_dies_during_a_step_and_one_is_added(cluster: Cluster, actors: list[Any]) -> None:
    trainer, first, second = actors
    update([trainer], [first, second], 0, source=0)
    begin([trainer], [first, second])
    cluster.kill(second)
    received = first.receive.remote(1)
    with pytest.raises(SendError, match="worker 1"):
        ray.get(trainer.send.remote(1, 1), timeout=PATIENCE)
    ray.get(received, timeout=PATIENCE)
    check([first], source=1)
    [third] = cluster.make(1, OPTIONS)
    update([trainer], [first, third], 2, source=2)
    check([first, third], source=2)
    update([trainer], [third], 3, source=3)
    check([third], source=3)
    check([first], source=2)
    assert states([trainer])[0]["workers"] == (2,)


@pytest.mark.long
def test_one_dies_before_it_has_an_address(cluster: Cluster, actors: list[Any]) -> None:
    trainer, first, second = actors
    begin([trainer], [first, second])
    cluster.kill(second)
    received = first.receive.remote(0)
    with pytest.raises(SendError, match="worker 1"):
        ray.get(trainer.send.remote(0, 0), timeout=PATIENCE)
    ray.get(received, timeout=PATIENCE)
    check([first], source=0)


def test_a_step_is_not_taken_for_another(actors: list[Any]) -> None:
    trainer, first, second = actors
    begin([trainer], [first, second])
    received = [first.receive.remote(4), second.receive.remote(3)]
    with pytest.raises(SendError, match="in place of version 4, that of step 3"):
        ray.get(trainer.send.remote(4, 4), timeout=PATIENCE)
    ray.get(received[0], timeout=PATIENCE)
    with pytest.raises(StepError, match="in place of version 4, that of step 3"):
        ray.get(received[1], timeout=PATIENCE)
    check([first], source=4)
    assert not states([second])[0]["held"]
    # The same step again, and one of a trainer that does not count.
    update([trainer], [first, second], 4, source=5)
    check([first, second], source=5)
    assert update([trainer], [first, second], None, source=6)["sync_core/version"] == 7
    check([first, second], source=6)


def test_an_engine_that_cannot_load_fails_alone(actors: list[Any]) -> None:
    trainer, first, second = actors
    ray.get(second.fail.remote(fails=True))
    begin([trainer], [first, second])
    received = [first.receive.remote(0), second.receive.remote(0)]
    with pytest.raises(SendError, match="worker 1: could not apply version 1"):
        ray.get(trainer.send.remote(0, 0), timeout=PATIENCE)
    ray.get(received[0], timeout=PATIENCE)
    with pytest.raises(ValueError, match="out of memory"):
        ray.get(received[1], timeout=PATIENCE)
    ray.get(second.fail.remote(fails=False))
    update([trainer], [first, second], 1, source=1)
    check([first, second], source=1)


def test_a_step_that_the_trainer_cannot_send(actors: list[Any]) -> None:
    trainer, first, second = actors
    update([trainer], [first, second], 0, source=0)
    begin([trainer], [first, second])
    received = [first.receive.remote(1), second.receive.remote(1)]
    with pytest.raises(ModelError, match=r"other\.layer\.weight"):
        ray.get(trainer.send.remote(1, 1, ["embed"]), timeout=PATIENCE)
    # The next step ends what still waits.
    update([trainer], [first, second], 2, source=2)
    check([first, second], source=2)
    for each in received:
        with pytest.raises(Exception, match=r"given up|closed"):
            ray.get(each, timeout=PATIENCE)


def test_a_scheme_whose_addresses_cannot_be_sent(cluster: Cluster) -> None:
    options = {"scheme": "mp", "timeout": 30}
    [trainer], [rollout] = cluster.make(1, options, is_master=True), cluster.make(1, options)
    begin([trainer], [rollout])
    rollout.receive.remote(0)
    with pytest.raises(SendError, match="worker 0 could not be sent its address"):
        ray.get(trainer.send.remote(0, 0), timeout=PATIENCE)


def test_another_trainer_takes_over(actors: list[Any]) -> None:
    trainer, first, second = actors
    update([trainer], [first, second], 7, source=7)
    ray.get(trainer.make.remote(OPTIONS, is_master=True), timeout=PATIENCE)
    update([trainer], [first, second], 5, source=5)
    check([first, second], source=5)


def test_one_that_the_sender_has_dropped_joins_again(cluster: Cluster) -> None:
    options = OPTIONS | {"on_failure": "drop", "timeout": 2}
    [trainer], [first, second] = cluster.make(1, options, is_master=True), cluster.make(2, OPTIONS)
    update([trainer], [first, second], 0, source=0)
    begin([trainer], [first, second])
    received = first.receive.remote(1)
    figures = ray.get(trainer.send.remote(1, 1), timeout=PATIENCE)
    ray.get(received, timeout=PATIENCE)
    assert figures["sync_core/workers"] == 1
    update([trainer], [first, second], 2, source=2)
    check([first, second], source=2)


def test_one_rank_must_send() -> None:
    with pytest.raises(OptionError, match="is_master=True, got 0 of 1"):
        SyncCoreEngine.build_topology(1, 1, [{"worker": "a"}, {"worker": "b"}])


def test_a_scheme_is_needed() -> None:
    with pytest.raises(OptionError, match=r"engine_kwargs\.sync_core\.scheme=dist"):
        SyncCoreEngine(bucket_size=1, is_master=True)


def test_rollouts_are_actors() -> None:
    with pytest.raises(OptionError, match="must be Ray actors"):
        SyncCoreEngine(bucket_size=1, **OPTIONS).prepare()  # type: ignore[arg-type]


@pytest.mark.skipif(find_spec("verl") is not None, reason="verl is installed")
def test_without_verl_the_error_says_what_to_type() -> None:
    with pytest.raises(ImportError, match=r'pip install "sync-plugin-verl\[verl\]"'):
        register()
