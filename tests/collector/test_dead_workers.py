"""Workers of a collector that die or hang, and those that take their places."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import Future
from pathlib import Path
from threading import Timer
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from tests.collector.processes import MODELS, Pid, collector, kill, versions

from sync_collector import Collector
from sync_collector.envs import CountingEnv
from sync_collector.episodes import PER_WORKER
from sync_collector.testing import Scale
from sync_core import (
    SendReport,
    SkipContext,
    WorkerLostError,
    hookimpl,
)
from sync_plugin_std.workers import ProcessGroup
from sync_testing import descendants, eventually

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(60),
    pytest.mark.usefixtures("leaves_no_process"),
]


class SlowToMake(Pid):
    """Is made in half a second."""

    def __init__(self) -> None:
        super().__init__()
        time.sleep(0.5)


class Fatal(CountingEnv):
    """Kills its process in its fourth step."""

    def __init__(self) -> None:
        super().__init__(100)

    def step(self, tensordict: TensorDictBase, /) -> TensorDictBase:
        if self._steps.item() == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(tensordict)


def test_a_dead_worker_is_an_error() -> None:
    options: dict[str, Any] = {"scheme": "shm", "workers": "process"}
    with collector(Pid, Scale(), num_workers=2, **options) as made:
        next(made)
        kill(made, 1)
        with pytest.raises(WorkerLostError, match="worker 1"):
            list(made)
        assert not descendants()
        assert list(made) == []


@pytest.mark.parametrize("sync", [True, False])
def test_a_dead_worker_is_replaced(sync: bool) -> None:
    policy = Scale()
    options: dict[str, Any] = {"scheme": "shm", "workers": "process", "sync": sync}
    options |= {"on_worker_failure": "restart", "total_frames": 40, "num_workers": 2}
    with collector(Pid, policy, **options) as made:
        frames = 0
        made.update_policy_weights_(Scale(1.0))
        seats = set()
        for count, batch in enumerate(made):
            frames += batch.numel()
            ids = batch["collector", "traj_ids"] // PER_WORKER
            seats.update(ids.flatten().tolist())
            # A later worker has never acted with less than this.
            assert (batch["policy_version"][ids > 1] >= 1).all()
            assert torch.equal(batch["action"].squeeze(-1).long(), batch["policy_version"])
            if count == 1:
                kill(made, 1)
                if sync:
                    assert made.state_dict()["frames_per_worker"] == [2, 2]
                    kill(made, 1)
                    report = made.update_policy_weights_(Scale(2.0))
                    assert isinstance(report, SendReport)
                    assert report.updated == (0, 1)
        assert frames == made.stats().frames == 40
        assert seats == ({0, 1, 3} if sync else {0, 1, 2})


def test_a_worker_that_dies_after_its_random_frames_were_delivered() -> None:
    options: dict[str, Any] = {"scheme": "shm", "workers": "process", "num_workers": 2}
    options |= {"sync": True, "init_random_frames": 4, "on_worker_failure": "restart"}
    with collector(Pid, Scale(5.0), **options) as made:
        assert (next(made)["action"] != 5.0).all()
        kill(made, 0)
        made.update_policy_weights_()
        # Those frames are not made again, least of all beside the policy's own.
        assert next(made)["action"].unique().tolist() == [5.0]


def goes_on(made: Collector, batches: list[TensorDictBase]) -> bool:
    """Return whether batches come in the background, and updates reach all workers."""
    before = len(batches)
    assert eventually(lambda: len(batches) > before + 5)
    return made.update_policy_weights_().updated == made.worker_ids


def test_an_update_while_the_place_of_a_worker_is_taken() -> None:
    batches: list[TensorDictBase] = []
    options: dict[str, Any] = {"workers": "process", "on_worker_failure": "restart", **MODELS[1]}
    options |= {"num_workers": 2, "replay_buffer": SimpleNamespace(extend=batches.append)}
    with collector(SlowToMake, Scale(), **options) as made:
        made.start()
        made.update_policy_weights_()
        kill(made, 1)
        assert eventually(lambda: made._pool.workers[1].is_restarting and made._pool.alive(1))
        assert made.update_policy_weights_(Scale(2.0)).updated == (0, 1)
        assert made.cascade_execute("policy.weight.item") == [2.0, 2.0]
        assert goes_on(made, batches)


def test_an_update_of_one_worker_that_has_died() -> None:
    options: dict[str, Any] = {"workers": "process", "num_workers": 2, "sync": True, **MODELS[1]}
    with collector(Pid, Scale(), on_worker_failure="restart", **options) as made:
        made.update_policy_weights_(Scale(1.0))
        kill(made, 1)
        assert made.update_policy_weights_(Scale(2.0), worker_ids=1).updated == (1,)
        assert made.cascade_execute("policy.weight.item") == [1.0, 2.0]
        kill(made, 0)
        assert made.update_policy_weights_(Scale(3.0)).updated == (0, 1)
        assert made.cascade_execute("policy.weight.item") == [3.0, 3.0]


class LateNews(ProcessGroup):
    """Learns of a death seconds after it, as Ray's may on a busy machine."""

    SECONDS = 2.5

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._died: dict[int, float] = {}
        super().__init__(*args, **kwargs)

    def alive(self, worker_id: int) -> bool:
        if super().alive(worker_id):
            return True
        return time.monotonic() < self._died.setdefault(worker_id, time.monotonic()) + self.SECONDS

    def call(self, *args: Any, **kwargs: Any) -> Future[Any]:
        late: Future[Any] = Future()

        def pass_on(call: Future[Any]) -> None:
            error = call.exception()
            if isinstance(error, WorkerLostError):
                Timer(self.SECONDS, late.set_exception, [error]).start()
            elif error is not None:
                late.set_exception(error)
            else:
                late.set_result(call.result())

        super().call(*args, **kwargs).add_done_callback(pass_on)
        return late

    def restart(self, worker_id: int) -> None:
        super().restart(worker_id)
        self._died.pop(worker_id, None)


def test_an_update_of_a_worker_whose_death_is_noticed_late() -> None:
    options: dict[str, Any] = {"scheme": "shm", "workers": LateNews, "num_workers": 2}
    with collector(Pid, Scale(), on_worker_failure="restart", sync=True, **options) as made:
        kill(made, 1)
        assert made.update_policy_weights_(Scale(2.0)).updated == (0, 1)
        assert made.cascade_execute("policy.weight.item") == [2.0, 2.0]


class Skipping:
    """Holds back what is not the first push to a worker, or all."""

    def __init__(self, *, first: bool) -> None:
        self.first = first

    @hookimpl
    def skip_update(self, context: SkipContext) -> bool:
        return context.updated or (self.first and context.version > 0)


@pytest.mark.parametrize("first", [False, True])
def test_a_place_is_taken_where_a_layer_holds_pushes_back(first: bool) -> None:
    policy, layer = Scale(), Skipping(first=first)
    options: dict[str, Any] = {"workers": "process", "num_workers": 2, "sync": True, "timeout": 20}
    options |= {"scheme": "shm", "layers": [layer], "on_worker_failure": "restart"}
    with collector(Pid, policy, **options) as made:
        next(made)
        assert made.update_policy_weights_(worker_ids=1).updated == (1,)
        with torch.no_grad():
            policy.weight.fill_(2.0)
        kill(made, 1)
        begin = time.monotonic()
        batch = next(made)
        assert time.monotonic() - begin < 10
        assert batch["policy_version"][1].unique().tolist() == [0 if first else 2]


LATE: list[dict[str, Any]] = [
    {"policy_factory": Scale, "scheme": "shm"},
    {
        "policy": torch.nn.Sequential(Scale()),
        "scheme": None,
        "weight_sync_schemes": {"policy": "shm", "policy[0]": "shm"},
    },
]


@pytest.mark.parametrize("late", LATE)
def test_the_first_weights_of_a_model_when_a_worker_has_died(late: dict[str, Any]) -> None:
    name = "policy" if "policy_factory" in late else "policy[0]"
    options: dict[str, Any] = {"workers": "process", "num_workers": 2, **late}
    with collector(Pid, on_worker_failure="restart", **options) as made:
        next(made)
        kill(made, 0)
        assert made.update_policy_weights_(weights_dict={name: Scale(2.0)}).updated == (0, 1)
        assert made.cascade_execute(f"{name}.weight.item") == [2.0, 2.0]
    with collector(Pid, **options) as made:
        kill(made, 0)
        with pytest.raises(WorkerLostError, match="worker 0"):
            made.update_policy_weights_(weights_dict={name: Scale(2.0)})


def test_a_worker_that_is_removed_while_its_place_is_taken() -> None:
    batches: list[TensorDictBase] = []
    options: dict[str, Any] = {"workers": "process", "on_worker_failure": "restart", **MODELS[0]}
    options |= {"num_workers": 3, "replay_buffer": SimpleNamespace(extend=batches.append)}
    with collector(SlowToMake, Scale(), **options) as made:
        made.start()
        made.update_policy_weights_()
        kill(made, 1)
        assert eventually(lambda: made._pool.workers[1].is_restarting and made._pool.alive(1))
        made.remove_workers(1)
        assert eventually(lambda: not made._pool.workers[1].is_restarting)
        assert made.worker_ids == (0, 2)
        assert goes_on(made, batches)
        made.add_workers()
        assert goes_on(made, batches)


@pytest.mark.parametrize("on_worker_failure", ["restart", "raise"])
def test_a_worker_that_hangs_is_removed(
    on_worker_failure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[TensorDictBase] = []
    options: dict[str, Any] = {"workers": "process", "scheme": "shm", "timeout": 4.0}
    options |= {"num_workers": 3, "replay_buffer": SimpleNamespace(extend=batches.append)}
    with collector(Pid, Scale(), on_worker_failure=on_worker_failure, **options) as made:
        made.start()
        made.update_policy_weights_()
        remove = made._pool.remove

        def remove_and_linger(worker_id: int) -> None:
            remove(worker_id)
            time.sleep(0.5)

        # The thread that collects learns at once that the worker has ended.
        monkeypatch.setattr(made._pool, "remove", remove_and_linger)
        os.kill(made.cascade_execute("env.pid")[1], signal.SIGSTOP)
        made_before = len(batches)
        assert eventually(lambda: len(batches) > made_before + 20)
        made.remove_workers(1)
        assert goes_on(made, batches)


def test_a_place_that_is_lost_again_and_again() -> None:
    options: dict[str, Any] = {"scheme": "shm", "workers": "process", "frames_per_batch": 8}
    with collector(Fatal, on_worker_failure="restart", **options) as made:
        with pytest.raises(WorkerLostError, match="worker 0: died, and so did the 3"):
            next(made)
        assert not descendants()


def test_a_worker_that_dies_before_it_has_taken_a_place(tmp_path: Path) -> None:
    made_so_far = tmp_path / "made"

    def make() -> Pid:
        with made_so_far.open("a") as file:
            file.write("x")
        if made_so_far.read_text() == "xx":
            os.kill(os.getpid(), signal.SIGKILL)
        return Pid()

    options: dict[str, Any] = {"scheme": "shm", "workers": "process", "sync": True}
    with collector(make, Scale(), on_worker_failure="restart", **options) as made:
        next(made)
        kill(made, 0)
        assert made.update_policy_weights_(Scale(2.0)).updated == (0,)
        assert next(made)["action"].unique().tolist() == [2.0]
        assert made_so_far.read_text() == "xxx"


@pytest.mark.parametrize("when", ["seeded", "saved", "loaded"])
def test_a_worker_that_dies_while_all_are_at_rest(when: str, tmp_path: Path) -> None:
    dead = tmp_path / "dead"

    def die(now: str) -> None:
        if now == when and not dead.exists():
            dead.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    class Mortal(CountingEnv):
        def set_seed(self, seed: int, static_seed: bool = False) -> int:
            die("seeded")
            return super().set_seed(seed, static_seed)

        def save_state(self) -> Any:
            die("saved")
            return super().save_state()

        def load_state(self, state: Any) -> None:
            die("loaded")
            super().load_state(state)

    options: dict[str, Any] = {"scheme": "shm", "workers": "process", "sync": True}
    options |= {"num_workers": 2, "on_worker_failure": "restart"}
    with collector(Mortal, Scale(), **options) as made:
        made.update_policy_weights_(Scale(1.0))
        next(made)
        assert made.set_seed(7) == 9
        state = made.state_dict()
        assert dead.exists() == (when != "loaded")
        made.load_state_dict(state)
        assert dead.exists()
        batch = next(made)
        assert set(versions(batch)) == {1}
        assert made.stats().frames == 8
        # A worker that was dead when it was saved has not been seeded since.
        assert batch["observation"][:, 0, 0].tolist() == [7.0, 8.0] or when == "saved"


def test_what_can_be_done_about_a_dead_worker() -> None:
    with pytest.raises(ValueError, match="give 'raise', 'restart', 'drop' or 'quarantine'"):
        collector(on_worker_failure="ignore")
