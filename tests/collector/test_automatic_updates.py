"""Updates of workers that the collector makes itself, and that nothing waits for."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.collector.updates import Refuses, acted, collector, owner

from sync_collector import Collector
from sync_collector.auto_update import AutoUpdate
from sync_collector.testing import Scale
from sync_collector.worker_pool import PoolWorker
from sync_core import (
    SendError,
    SendReport,
    WorkerError,
    WorkerLostError,
    WorkerResult,
    hookimpl,
)
from sync_testing import interrupted

pytestmark = pytest.mark.timeout(60)


class Gate:
    """Lets the first commit of a refresh wait."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    @hookimpl(wrapper=True)
    def apply_weights(self) -> Any:
        self.reached.set()
        assert self.open.wait(30)
        return (yield)


class Dies:
    """Ends the process in its second commit, unless another one did."""

    def __init__(self, path: Path) -> None:
        self.path, self.commits = path / "died", 0

    @hookimpl(wrapper=True)
    def apply_weights(self) -> Any:
        self.commits += 1
        if self.commits == 2 and not self.path.exists():
            self.path.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return (yield)


EACH: dict[str, Any] = {"update_after_each_batch": True}
TWO_MODELS: dict[str, Any] = {
    "scheme": None,
    "weight_sync_schemes": {"policy": "thread", "critic": "thread"},
    "models": {"critic": Scale()},
}


def automatic(policy: Any, **options: Any) -> Collector:
    return collector(policy, **EACH, **options)


@pytest.mark.parametrize("workers", ["inline", "thread"])
@pytest.mark.parametrize(
    ("options", "by_hand", "expected"),
    [
        (EACH, 0, [0, 1, 2, 3, 4, 5, 6]),
        ({"max_weight_update_interval": 0}, 0, [0, 1, 2, 3, 4, 5, 6]),
        ({"max_weight_update_interval": 1}, 0, [0, 1, 2, 3, 4, 5, 6]),
        ({"max_weight_update_interval": 3}, 0, [0, 0, 0, 3, 3, 3, 6]),
        # An update by hand begins the count again.
        ({"max_weight_update_interval": 2}, 2, [0, 1, 1, 3, 3, 5]),
        (EACH | TWO_MODELS, 0, [0, 1, 2]),
    ],
)
def test_all_workers_are_updated_after_some_batches(
    workers: str, options: Any, by_hand: int, expected: list[int]
) -> None:
    policy, models = Scale(), options.get("models", {})
    with collector(policy, workers=workers, sync=True, **options) as made:
        for step, weight in enumerate(expected, 1):
            if step == by_hand:
                made.update_policy_weights_()
            assert acted(next(made)) == [weight]
            for model in (policy, *models.values()):
                model.set(float(step))
        for name in models:
            found = made.cascade_execute(f"{name}.weight")
            assert [weight.item() for weight in found] == [expected[-1]] * 2


@pytest.mark.parametrize("interval", [1, 3])
def test_only_the_worker_that_delivered_is_refreshed(interval: int) -> None:
    policy = Scale()
    made_by: dict[int, list[float]] = {0: [], 1: []}
    sent: list[tuple[int, ...]] = []
    with collector(policy, max_weight_update_interval=interval) as made:
        made._weights.on_update.append(lambda ids: sent.append(tuple(ids)))
        for step in itertools.count(1):
            batch = next(made)
            worker_id = owner(batch)
            assert len(acted(batch)) == 1
            made_by[worker_id] += acted(batch)
            policy.set(float(step))
            if min(map(len, made_by.values())) > 2 * interval:
                break
    assert set(sent) == {(0,), (1,)}
    for weights in made_by.values():
        # Never more batches with the same weights than were allowed.
        assert all(len(list(same)) <= interval for _, same in itertools.groupby(weights))
        assert weights == sorted(weights)


def test_a_policy_without_weights_needs_no_refreshing() -> None:
    with collector(None, update_after_each_batch=True) as made:
        for _ in range(5):
            next(made)
        assert made.stats().version == 0


class Refused:
    """Weights that reach no worker."""

    def __init__(self, error: WorkerError) -> None:
        self.on_update: list[Any] = []
        self.required = {0: {"policy": 1}}
        self._workers = {0: WorkerResult(version=None, seconds=0.0, nbytes=0, error=error)}

    def refresh(self, worker_ids: Any) -> Any:
        return SimpleNamespace(worker_ids=worker_ids, version=1)

    def settle(self, _: Any) -> None:
        raise SendError(SendReport(version=1, seconds=0.0, workers=self._workers))


@pytest.mark.parametrize(
    ("error", "raises"), [(WorkerLostError(0, "died"), False), (WorkerError(0, "refused"), True)]
)
def test_who_died_and_was_replaced_since_is_no_failure(error: WorkerError, raises: bool) -> None:
    alive: Any = lambda worker_id: True  # noqa: E731
    worker = PoolWorker(0)
    pool: Any = SimpleNamespace(
        workers={0: worker}, joined=[worker], alive=alive, on_join=[], lock=threading.RLock()
    )
    released: list[int] = []
    requests: Any = SimpleNamespace(
        hold=lambda _: None, require=lambda *_: None, release=released.append, on_stale=[]
    )
    weights: Any = Refused(error)
    auto_update = AutoUpdate(1, pool, requests, weights)
    auto_update.delivered(0)
    auto_update.refresh()
    assert released == [0]
    with pytest.raises(SendError) if raises else nullcontext():
        auto_update.settle()


def test_nobody_waits_for_a_worker_that_is_refreshed() -> None:
    policy, gate = Scale(), Gate()
    with automatic(policy, layers=[gate]) as made:
        first = owner(next(made))
        policy.set(1.0)
        assert owner(next(made)) != first
        assert gate.reached.wait(30)
        policy.set(2.0)
        gate.open.set()
        while owner(batch := next(made)) != first:
            continue
        assert (acted(batch), batch["policy_version"].unique().tolist()) == ([1.0], [1])


def one_model(scheme: str, layer: Any) -> dict[str, Any]:
    return {"scheme": scheme, "layers": [layer]}


def two_models(scheme: str, layer: Any) -> dict[str, Any]:
    schemes = {"policy": {"scheme": scheme, "layers": [layer]}, "critic": scheme}
    return {"scheme": None, "weight_sync_schemes": schemes, "models": {"critic": Scale()}}


@pytest.mark.parametrize(
    ("workers", "scheme"), [("inline", "thread"), ("thread", "thread"), ("process", "shm")]
)
@pytest.mark.parametrize("kind", [{"sync": True}, {"num_workers": 1}, {}])
@pytest.mark.parametrize("models", [one_model, two_models])
def test_weights_that_a_worker_refuses(workers: str, scheme: str, kind: Any, models: Any) -> None:
    policy, refusals = Scale(), list[SendError]()
    options = {"workers": workers, **kind, **models(scheme, Refuses(3))}
    seen: dict[int, list[float]] = {}
    with automatic(policy, **options) as made:
        while len(seen.get(0, ())) < 24:
            try:
                batch = next(made)
                for part in batch.unbind(0) if batch.ndim == 2 else [batch]:
                    seen.setdefault(owner(part), []).extend(part["observation"].flatten().tolist())
                    assert acted(part) == part["policy_version"].unique().tolist()
            except SendError as error:
                refusals.append(error)
            policy.set(made.stats().version + 1.0)
    (refusal,) = refusals
    assert "not these" in str(refusal)
    assert [*refusal.report.failed] == [0]
    for observations in seen.values():
        assert observations == list(range(len(observations)))


def test_random_frames_that_were_not_made_do_not_count() -> None:
    policy = Scale()
    options: dict[str, Any] = {"init_random_frames": 8, "num_workers": 1, "layers": [Refuses(1)]}
    with automatic(policy, **options) as made:
        assert acted(next(made)) != [0.0]
        with pytest.raises(SendError, match="not these"):
            next(made)
        assert acted(next(made)) != [0.0]
        assert acted(next(made)) == [0.0]


def test_who_dies_while_it_is_refreshed_is_replaced(tmp_path: Path) -> None:
    policy = Scale()
    # By seat: no worker acts with older weights, and a replacement not with the first.
    least = {0: 0, 1: 0, 2: 1}
    options: dict[str, Any] = {"workers": "process", "scheme": "shm", "layers": [Dies(tmp_path)]}
    options["on_worker_failure"] = "restart"
    with automatic(policy, **options) as made:
        for step in range(1, 9):
            batch = next(made)
            assert acted(batch)[0] >= least[owner(batch)]
            least[owner(batch)] = step
            policy.set(float(step))
    assert (tmp_path / "died").exists()


def test_who_takes_a_place_has_the_newest_weights_and_is_not_refreshed() -> None:
    sent: list[tuple[int, ...]] = []
    with automatic(Scale()) as made:
        made._weights.on_update.append(lambda ids: sent.append(tuple(ids)))
        made._pool.restart(owner(next(made)))
        next(made)
        assert sent == []


@pytest.mark.parametrize("total_frames", [-1, 12])
def test_a_refresh_on_its_way_is_no_failure_at_the_end(
    total_frames: int, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"workers": "process", "scheme": "shm", "total_frames": total_frames}
    for _ in range(2):
        with automatic(Scale(), **options) as made:
            for _ in range(3):
                next(made)
    assert [record.getMessage() for record in caplog.records] == []


def test_who_is_due_goes_on_with_no_old_weights_after_an_error() -> None:
    policy, refuses, acts = Scale(), Refuses(2), dict[int, list[float]]()
    with automatic(policy, layers=[refuses]) as made:
        step, told = 0.0, False
        while not told or len(acts.get(1, ())) < 5:
            try:
                batch = next(made)
                acts.setdefault(owner(batch), []).extend(acted(batch))
            except SendError:
                told = True
            step += 1
            policy.set(step)
    # Worker 0 keeps what it had, once; no other acts twice with the same weights.
    assert len(set(acts[1])) == len(acts[1])


def test_a_state_has_the_weights_that_are_on_their_way() -> None:
    def go_on(made: Collector, policy: Scale, step: int) -> list[tuple[int, list[float]]]:
        seen = []
        for following in range(step + 1, step + 5):
            batch = next(made)
            seen.append((owner(batch), acted(batch)))
            policy.set(float(following))
        return seen

    policy = Scale()
    with automatic(policy, workers="inline") as made:
        go_on(made, policy, 0)
        state, weight = made.state_dict(), policy.weight.item()
        expected = go_on(made, policy, 4)
    other = Scale(weight)
    with automatic(other, workers="inline") as made:
        made.load_state_dict(state)
        assert go_on(made, other, 4) == expected


def test_weights_that_were_on_their_way_do_not_overwrite_a_state() -> None:
    policy = Scale(1.0)
    with automatic(policy, workers="inline") as made:
        next(made)
        next(made)
        state = made.state_dict()
        for weight in (100.0, 200.0):
            policy.set(weight)
            next(made)
        policy.set(300.0)
        made.load_state_dict(state)
        policy.set(5.0)
        batches = [next(made), next(made)]
    assert [acted(batch) for batch in batches] == [[1.0], [5.0]]


def test_who_is_removed_while_the_last_refresh_is_waited_for() -> None:
    gate = Gate()
    schemes = {"policy": {"scheme": "thread", "layers": [gate]}, "critic": "thread"}
    options: dict[str, Any] = {"weight_sync_schemes": schemes, "models": {"critic": Scale()}}
    with automatic(Scale(), num_workers=3, scheme=None, **options) as made:
        next(made)
        due = owner(next(made))
        assert gate.reached.wait(30)
        removing = threading.Thread(target=made.remove_workers, args=(due,))
        opening = threading.Timer(0.5, gate.open.set)
        removing.start()
        opening.start()
        assert due not in {owner(next(made)) for _ in range(4)}
        removing.join()
        opening.join()


@pytest.mark.parametrize("workers", ["inline", "thread"])
def test_ctrl_c_at_any_moment(workers: str) -> None:
    policy = Scale()
    with automatic(policy, workers=workers, num_workers=1, timeout=8.0) as made:
        for moment in itertools.count(step=5):
            with interrupted(moment) as moments:
                next(made)
            policy.set(float(moment))
            began = time.monotonic()
            # A worker may have begun the first of them before.
            batches = [next(made), next(made), next(made)]
            assert acted(batches[-1]) == [float(moment)]
            assert time.monotonic() - began < 25
            if not moments.came:
                break


def test_no_batch_is_asked_for_twice_where_workers_make_their_policies() -> None:
    calls: list[int] = []
    options: dict[str, Any] = {"policy_factory": Scale, "models": {"critic": Scale()}}
    options["weight_sync_schemes"] = {"policy": "thread", "critic": "thread"}
    with automatic(None, scheme=None, **options) as made:
        made._requests.on_stale.append(calls.append)
        for _ in range(6):
            next(made)
    assert calls == []


def test_a_state_is_saved_while_another_thread_iterates() -> None:
    ended = threading.Event()
    with automatic(Scale(), sync=True) as made:
        next(made)

        def save() -> None:
            while not ended.is_set():
                made.state_dict()

        saving = threading.Thread(target=save)
        saving.start()
        deadline, frames = time.monotonic() + 1.0, 2
        while time.monotonic() < deadline:
            batch = next(made)
            assert batch["observation"].flatten(1).tolist() == [[frames, frames + 1.0]] * 2
            frames += 2
        ended.set()
        saving.join()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_weight_update_interval": -2}, "give 0 or more, or -1 for never"),
        ({"max_weight_update_interval": 5, "update_after_each_batch": True}, "leave one of them"),
        ({"policy_factory": Scale, "update_after_each_batch": True}, "come from policy_factory"),
    ],
)
def test_bad_arguments(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        collector(**options)
