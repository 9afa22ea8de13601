"""Updates by the collector itself that nothing waits for."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from sync_collector import Collector
from sync_collector.envs import CountingEnv
from sync_collector.testing import Scale
from sync_core import ApplyContext, SendError, hookimpl
from sync_testing.interrupts import interrupted

pytestmark = pytest.mark.timeout(60)


def collector(policy: Any = None, **options: Any) -> Collector:
    options = {
        "scheme": "thread",
        "workers": "thread",
        "num_workers": 2,
        "frames_per_batch": 4,
        "timeout": 20.0,
        "update_after_each_batch": True,
        **options,
    }
    return Collector(lambda: CountingEnv(100_000), policy, **options)


def acted(batch: Any) -> list[float]:
    return sorted(batch["action"].unique().tolist())


def owner(batch: Any) -> int:
    return int(batch["collector", "traj_ids"][0]) >> 32


class Gate:
    """Lets the first commit of a refresh wait."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    @hookimpl(wrapper=True)
    def apply_weights(self) -> Any:
        self.reached.set()
        assert self.open.wait(30)
        return (yield)


def test_nobody_waits_for_a_worker_that_is_refreshed() -> None:
    policy, gate = Scale(), Gate()
    with collector(policy, layers=[gate]) as made:
        first = owner(next(made))
        policy.set(1.0)
        assert owner(next(made)) != first
        assert gate.reached.wait(30)
        policy.set(2.0)
        gate.open.set()
        while owner(batch := next(made)) != first:
            continue
        assert (acted(batch), batch["policy_version"].unique().tolist()) == ([1.0], [1])


class Refuses:
    """Lets worker 0 refuse the policy's weights, once."""

    def __init__(self, commits: int) -> None:
        self.left = commits

    @hookimpl(wrapper=True)
    def apply_weights(self, context: ApplyContext) -> Any:
        if (context.worker_id, context.model_id) == (0, "policy"):
            self.left -= 1
            if self.left == 0:
                raise ValueError("not these")
        return (yield)


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
    with collector(policy, **options) as made:
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
    with collector(policy, **options) as made:
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
    with collector(policy, **options) as made:
        for step in range(1, 9):
            batch = next(made)
            assert acted(batch)[0] >= least[owner(batch)]
            least[owner(batch)] = step
            policy.set(float(step))
    assert (tmp_path / "died").exists()


def test_who_takes_a_place_has_the_newest_weights_and_is_not_refreshed() -> None:
    sent: list[tuple[int, ...]] = []
    with collector(Scale()) as made:
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
        with collector(Scale(), **options) as made:
            for _ in range(3):
                next(made)
    assert [record.getMessage() for record in caplog.records] == []


def test_who_is_due_goes_on_with_no_old_weights_after_an_error() -> None:
    policy, refuses, acts = Scale(), Refuses(2), dict[int, list[float]]()
    with collector(policy, layers=[refuses]) as made:
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
    with collector(policy, workers="inline") as made:
        go_on(made, policy, 0)
        state, weight = made.state_dict(), policy.weight.item()
        expected = go_on(made, policy, 4)
    other = Scale(weight)
    with collector(other, workers="inline") as made:
        made.load_state_dict(state)
        assert go_on(made, other, 4) == expected


def test_weights_that_were_on_their_way_do_not_overwrite_a_state() -> None:
    policy = Scale(1.0)
    with collector(policy, workers="inline") as made:
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
    with collector(Scale(), num_workers=3, scheme=None, **options) as made:
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
    with collector(policy, workers=workers, num_workers=1, timeout=8.0) as made:
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
    with collector(None, scheme=None, **options) as made:
        made._requests.on_stale.append(calls.append)
        for _ in range(6):
            next(made)
    assert calls == []


def test_a_state_is_saved_while_another_thread_iterates() -> None:
    ended = threading.Event()
    with collector(Scale(), sync=True) as made:
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
