"""Workers that die, raise or hang, and what ``on_worker_failure`` does about them."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import pytest
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from sync_collector import Collector
from sync_collector.envs import CountingEnv
from sync_collector.policies import PolicyError
from sync_collector.testing import Scale
from sync_core import RemoteCallError, WorkerLostError
from sync_plugin_std.workers import ProcessGroup
from sync_testing import descendants

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(110),
    pytest.mark.filterwarnings("ignore:the policy has"),
]
cloudpickle.register_pickle_by_value(sys.modules[__name__])

TIMEOUT = 4.0


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """Load torch in the process that forks workers, which may take longer than a timeout."""
    ProcessGroup(lambda worker_id: worker_id, 1).stop()


class Flaky(CountingEnv):
    """Fails in step 13, where no other one has before."""

    def __init__(self, flag: Path, how: str) -> None:
        super().__init__(100_000)
        self._flag, self._how, self._made = flag, how, 0

    def step(self, tensordict: TensorDictBase, /) -> TensorDictBase:
        self._made += 1
        if self._made == 13:
            try:
                self._flag.touch(exist_ok=False)
            except FileExistsError:
                return super().step(tensordict)
            if self._how == "raise":
                raise RuntimeError("the simulator is not reachable")
            if self._how == "hang":
                time.sleep(1e4)
            os._exit(3)
        return super().step(tensordict)


class Broken(nn.Module):
    def forward(self, observation: Tensor) -> Tensor:
        return self.act(observation)

    def act(self, observation: Tensor) -> Tensor:
        raise KeyError("hidden") from ZeroDivisionError("before")


class Unplugged(CountingEnv):
    def step(self, tensordict: TensorDictBase, /) -> TensorDictBase:
        del tensordict
        raise OSError("the cable is out")


@pytest.mark.parametrize(
    ("make", "policy", "shown", "last"),
    [
        (CountingEnv, Broken(), ["forward", "act"], "KeyError: 'hidden'"),
        (Unplugged, Scale(), ["step"], "OSError: the cable is out"),
    ],
    ids=["policy", "environment"],
)
def test_a_traceback_shows_the_users_code_and_folds_what_calls_it(
    make: Any, policy: Any, shown: list[str], last: str
) -> None:
    with (
        Collector(make, policy, scheme="shm", frames_per_batch=4) as failing,
        pytest.raises(RemoteCallError) as caught,
    ):
        next(failing)
    lines = [line.removeprefix("  ") for line in str(caught.value).splitlines()]
    assert lines[0].startswith("worker 0: ")
    assert lines[0].endswith(last)
    frames = [line for line in lines if line.startswith("  File ")]
    assert [line.partition(" in ")[2] for line in frames] == shown
    assert any("frames of sync_collector" in line for line in lines)
    assert ("ZeroDivisionError: before" in lines) == (make is CountingEnv)
    assert lines[-1] == last


def collector(make: Any, policy: Any, remedy: Any, **options: Any) -> Collector:
    options = {"num_workers": 2, "frames_per_batch": 20, "timeout": TIMEOUT, **options}
    return Collector(make, policy, scheme="shm", on_worker_failure=remedy, **options)


@pytest.mark.parametrize("remedy", ["restart", "drop", "quarantine"])
@pytest.mark.parametrize("how", ["exit", "raise", "hang"])
@pytest.mark.parametrize("sync", [False, True])
def test_collection_continues(how: str, remedy: str, sync: bool, tmp_path: Path) -> None:
    policy, flag, slow = Scale(), tmp_path / "flag", 0
    with collector(lambda: Flaky(flag, how), policy, remedy, total_frames=600, sync=sync) as made:
        frames = 0
        for batch in made:
            frames += batch.numel()
            nn.init.constant_(policy.weight, frames)
            began = time.monotonic()
            made.update_policy_weights_()
            slow += time.monotonic() - began > TIMEOUT / 2
            if frames < 600:
                workers = len(made.worker_ids)
        assert 600 <= frames < 620
        assert flag.exists()
        left = remedy == "restart" or (remedy == "quarantine" and how != "exit")
        assert workers == (2 if left else 1)
        # A worker that hangs costs one deadline, or in quarantine one after longer and longer ones.
        assert slow <= 2
    assert not descendants()


def test_a_hung_worker_is_replaced_without_an_update(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = Scale()
    make = [lambda: CountingEnv(100_000), lambda: Flaky(tmp_path / "flag", "hang")]
    with collector(make, policy, "restart") as made:
        end, seen = time.monotonic() + 60, set()
        # Seats 0 and 1 are the first workers', and 2 that of the one which replaces the second.
        while 2 not in seen and time.monotonic() < end:
            seen |= {int(i) >> 32 for i in next(made)["collector", "traj_ids"].unique()}
        assert 2 in seen
    late = "worker replaced: worker 1: gave no batch within 4 s; give it a longer timeout"
    assert any(message.startswith(late) for message in caplog.messages)


def fails() -> CountingEnv:
    class Fails(CountingEnv):
        def step(self, tensordict: TensorDictBase, /) -> TensorDictBase:
            raise RuntimeError("the simulator is not reachable")

    return Fails()


def test_an_environment_that_always_raises_ends_the_collector() -> None:
    with (
        collector(fails, Scale(), "restart", num_workers=1) as made,
        pytest.raises(WorkerLostError, match=r"(?s)failed, and so did the 3 .* not reachable"),
    ):
        next(made)


@pytest.mark.parametrize("remedy", ["drop", "quarantine"])
def test_the_last_worker_is_not_removed(remedy: str) -> None:
    with (
        collector(fails, Scale(), remedy) as made,
        pytest.raises(RemoteCallError, match="the simulator is not reachable"),
    ):
        next(made)


def test_a_policy_that_does_not_fit_is_not_replaced() -> None:
    class Silent(Scale):
        def forward(self, observation: Any) -> Any:
            return None

    with (
        collector(CountingEnv, Silent(), "restart", timeout=60.0) as made,
        pytest.raises(PolicyError, match="the policy returned a NoneType"),
    ):
        next(made)


@pytest.mark.parametrize("sync", [True, False])
def test_a_worker_in_quarantine_is_waited_for_where_the_others_were_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, sync: bool
) -> None:
    make = [lambda: Flaky(tmp_path / "flag", "raise"), lambda: CountingEnv(100_000)]
    options: dict[str, Any] = {"scheme": "thread", "frames_per_batch": 2, "timeout": 60.0}
    with Collector(make, on_worker_failure="quarantine", sync=sync, **options) as made:
        while "worker in quarantine" not in caplog.text:
            next(made)
        # Of the worker that is left, alone.
        assert int(next(made)["collector", "traj_ids"].min()) >> 32 == 1
        made.remove_workers(1)
        begin = time.monotonic()
        assert int(next(made)["collector", "traj_ids"].max()) == 0
        assert time.monotonic() - begin < 30


def test_all_that_were_asked_fail_as_the_quarantine_of_another_ends(tmp_path: Path) -> None:
    class FailsLate(Flaky):
        def step(self, tensordict: TensorDictBase, /) -> TensorDictBase:
            if self._made == 12:
                pool.workers[1].retry_at = 0.0
            return super().step(tensordict)

    make = [lambda: FailsLate(tmp_path / "flag", "raise"), lambda: CountingEnv(100_000)]
    options: dict[str, Any] = {"scheme": "thread", "frames_per_batch": 8, "timeout": 60.0}
    with Collector(make, on_worker_failure="quarantine", sync=True, **options) as made:
        pool = made._pool
        for _ in range(3):
            assert next(made).batch_size == (2, 4)
        pool.workers[1].retry_at = time.monotonic() + 60
        # The first worker alone is asked, and fails in its thirteenth step.
        batch = next(made)
    assert batch.batch_size == (1, 4)
    assert int(batch["collector", "traj_ids"].min()) >> 32 == 1


class Parametrized(nn.Module):
    """torch does not pickle it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = parametrizations.weight_norm(nn.Linear(1, 1))

    def forward(self, observation: Tensor) -> Tensor:
        acted: Tensor = self.layer(observation)
        return acted


def test_the_advice_about_a_policy_that_cannot_be_pickled() -> None:
    policy = Parametrized()
    options: dict[str, Any] = {"frames_per_batch": 2, "scheme": "shm"}
    with pytest.raises(RemoteCallError, match=r"policy_factory=make_policy\), then update_policy"):
        Collector(CountingEnv, policy, **options)
    with Collector(CountingEnv, policy_factory=Parametrized, **options) as made:
        assert made.update_policy_weights_(policy).updated == (0,)
        assert made.cascade_execute("policy.layer.weight.item") == [policy.layer.weight.item()]
