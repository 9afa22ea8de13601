"""Workers of a collector come, die, are replaced and go; and it ends itself, from any state."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import psutil  # type: ignore[import-untyped]
import pytest
from tensordict import TensorDictBase
from tests.collector.processes import MODELS, Pid, collector
from tests.std.test_calling import Agent, CallsScheme, linear

from sync_collector import Collector
from sync_collector.envs import CountingEnv
from sync_collector.testing import Scale, long_episodes, values
from sync_core import (
    ClosedError,
    ReceiverTransport,
    RemoteCallError,
    SenderTransport,
    SendReport,
    TransportContext,
    hookimpl,
)
from sync_plugin_std.schemes.thread import ThreadScheme, ThreadSender
from sync_testing import descendants, eventually, interrupted

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(60),
    pytest.mark.usefixtures("leaves_no_process"),
]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_process_ends_no_workers() -> None:
    with Collector(Pid, num_workers=1, frames_per_batch=2, scheme="shm") as collector:
        if not (child := os.fork()):
            # As when it is forgotten, or the process ends.
            collector._close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert next(collector).numel() == 2


@pytest.mark.parametrize("sync", [True, False])
def test_the_number_of_batches(sync: bool) -> None:
    with collector(num_workers=2, sync=sync, total_frames=10) as made:
        assert len(made) == 3
        next(made)
        assert len(made) == len(list(made)) + 1 == 3
    with collector() as made:
        assert made
        with pytest.raises(TypeError, match="give it total_frames"):
            len(made)
    envs = [long_episodes, lambda: CountingEnv(9, num_envs=5)]
    with pytest.warns(UserWarning, match="5 frames"):
        made = collector(envs, total_frames=9)
    with made, pytest.raises(TypeError, match="different sizes"):
        len(made)


def test_workers_end_with_the_last_batch() -> None:
    policy = Scale()
    with collector(policy=policy, workers="process", scheme="shm", total_frames=8) as made:
        seen = []
        for batch in made:
            seen.append(len(descendants()))
            policy.set(1.0)
            # The last round of a training loop is like the others.
            report = made.update_policy_weights_(worker_ids=0)
            assert isinstance(report, SendReport)
            assert report.updated == ((0,) if batch["observation"][0] == 0 else ())
        assert seen[0] > 0
        assert seen[1] == 0
        with pytest.raises(ClosedError):
            made.add_workers()
    assert made.stats().frames == 8


@pytest.mark.parametrize("models", MODELS)
def test_ctrl_c_at_any_moment_of_an_update(models: dict[str, Any]) -> None:
    options: dict[str, Any] = {"workers": "thread", "num_workers": 2, "sync": True, **models}
    with collector(policy=Scale(), timeout=30.0, **options) as made:
        for moment in itertools.count(step=2):
            with interrupted(moment) as moments:
                made.update_policy_weights_()
            begin = time.monotonic()
            assert made.update_policy_weights_(Scale(float(moment))).updated == (0, 1)
            assert time.monotonic() - begin < 25
            if not moments.came:
                break
        assert next(made)["action"].unique().tolist() == [moment]


@pytest.mark.parametrize("sync", [False, True])
def test_ctrl_c_at_any_moment_of_next_loses_no_batch(sync: bool) -> None:
    options: dict[str, Any] = {"workers": "thread", "num_workers": 2, "sync": sync}
    with collector(policy=Scale(), timeout=5.0, **options) as made:
        frames = 0
        for moment in itertools.count(step=3):
            with interrupted(moment) as moments:
                frames += next(made).numel()
            assert made.stats().frames == frames
            if not moments.came:
                break


class InterruptsWhenClosed(CountingEnv):
    """Sends Ctrl-C to the driver, which waits for the worker to end."""

    def close(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        super().close()


def test_ctrl_c_while_workers_end_loses_no_batch() -> None:
    options: dict[str, Any] = {"workers": "thread", "frames_per_batch": 4, "total_frames": 4}
    with collector(InterruptsWhenClosed, Scale(), timeout=5.0, **options) as made:
        with pytest.raises(KeyboardInterrupt):
            next(made)
        assert made.stats().frames == 0
        assert next(made).numel() == made.stats().frames == 4
        assert made.next() is None


@pytest.mark.parametrize("workers", ["inline", "thread"])
def test_seeds(workers: str) -> None:
    options: dict[str, Any] = {"workers": workers, "num_workers": 2, "frames_per_batch": 2}
    with collector(**options) as made:
        next(made)
        assert made.set_seed(100) == 102
        # Nothing that was made before is delivered.
        firsts = {values(next(made), "observation")[0] for _ in range(2)}
        assert firsts <= {100, 101, 102, 103}
        assert made.set_seed(7, static_seed=True) == 7
        assert values(next(made), "observation") == [7, 8]


def test_the_same_seed_gives_the_same_batches_and_workers_differ() -> None:
    options: dict[str, Any] = {"scheme": "shm", "workers": "process", "num_workers": 2}
    with collector(sync=True, **options) as made:
        runs = []
        for _ in range(2):
            made.set_seed(3)
            runs.append(next(made).exclude("collector"))
        assert (runs[0] == runs[1]).all()
        assert values(runs[0], "action")[0] != values(runs[0], "action")[1]
        made.set_seed(4)
        assert values(next(made), "action") != values(runs[0], "action")


def test_shutdown_in_an_event_loop_and_again() -> None:
    made = collector(workers="thread", num_workers=2)
    next(made)
    asyncio.run(made.async_shutdown())
    made.shutdown()
    assert list(made) == []


def test_a_shutdown_of_workers_that_hang_is_bounded() -> None:
    class Hanging(CountingEnv):
        def step(self, tensordict: TensorDictBase, /) -> TensorDictBase:
            time.sleep(30)
            return super().step(tensordict)

    options: dict[str, Any] = {"scheme": "shm", "workers": "process", "timeout": 20.0}
    made = collector(Hanging, Scale(), **options)
    made._requests.ask(0)
    made.update_policy_weights_(blocking=False)
    began = time.monotonic()
    made.shutdown(timeout=1.0)
    assert time.monotonic() - began < 20
    assert not descendants()


class Noted(CountingEnv):
    """Appends a line to a file when it is closed; what made it stays, and so it is not collected.

    Args:
        path: the file.
    """

    kept: ClassVar[list[Noted]] = []

    def __init__(self, path: Path) -> None:
        super().__init__(100)
        self._path = path
        self.kept.append(self)

    def close(self) -> None:
        with self._path.open("a") as file:
            file.write("closed\n")


def closed(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("workers", ["inline", "thread", "process"])
def test_environments_are_closed_once_with_their_workers(
    workers: str, sync: bool, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    options: dict[str, Any] = {"workers": workers, "scheme": "shm", "num_workers": 2, "sync": sync}
    options |= {"num_workers_per_collector": 2, "max_frames_per_traj": 3}
    with collector(lambda: Noted(notes), Scale(), **options) as made:
        next(made)
        made.remove_workers(1)
        assert closed(notes) == 2
    assert closed(notes) == 4
    made.shutdown()
    with collector(lambda: Noted(notes), Scale(), total_frames=8, **options) as made:
        assert sum(batch.numel() for batch in made) >= 8
        assert closed(notes) == 8
    assert closed(notes) == 8


@pytest.mark.parametrize("workers", ["inline", "thread", "process"])
def test_workers_that_end_close_their_receivers(workers: str) -> None:
    options: dict[str, Any] = {"workers": workers, "scheme": "shm", "num_workers": 2}
    with collector(long_episodes, Scale(), total_frames=8, **options) as made:
        for _ in made:
            made.update_policy_weights_()
        assert made.sender is not None
        sender = made.sender
        assert eventually(
            lambda: all("closed its receiver" in str(w.error) for w in sender.workers.values())
        ), sender.workers


@pytest.mark.parametrize("workers", ["inline", "thread"])
def test_environments_are_closed_where_a_policy_cannot_be_made(
    workers: str, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    functions: list[Any] = [Scale, lambda: 1 / 0]
    options: dict[str, Any] = {"policy_factory": functions, "workers": workers, "num_workers": 2}
    with pytest.raises(RemoteCallError, match="division by zero"):
        collector(lambda: Noted(notes), **options)
    assert closed(notes) == 2


def test_an_environment_is_closed_when_its_stuck_step_has_ended(tmp_path: Path) -> None:
    notes, started, release = tmp_path / "notes", threading.Event(), threading.Event()

    class Stuck(Noted):
        def step(self, tensordict: TensorDictBase, /) -> TensorDictBase:
            started.set()
            release.wait()
            return super().step(tensordict)

    made = collector(lambda: Stuck(notes), Scale(), workers="thread", sync=False)
    made._requests.ask(0)
    started.wait()
    began = time.monotonic()
    made.shutdown(timeout=0.3)
    assert time.monotonic() - began < 20
    assert not closed(notes)
    release.set()
    assert eventually(lambda: closed(notes) == 1)


def test_an_environment_that_cannot_be_closed_is_told(tmp_path: Path) -> None:
    notes = tmp_path / "notes"

    class Fails(Noted):
        def close(self) -> None:
            super().close()
            raise OSError("no more")

    raised = r"worker [01]: CollectorWorker\.close raised OSError: no more\n"
    with (
        pytest.warns(UserWarning, match=raised) as warned,
        pytest.raises(ZeroDivisionError),
        collector(lambda: Fails(notes), Scale(), num_workers=2),
    ):
        1 / 0  # noqa: B018
    assert "ZeroDivisionError" not in str(warned[0].message)
    assert closed(notes) == 2


SCRIPT = """
    import os, sys, time
    from sync_collector import Collector
    from sync_collector.envs import CountingEnv

    class Slow(CountingEnv):
        def step(self, tensordict):
            time.sleep(0.2)
            return super().step(tensordict)

    def slow():
        return Slow(100)

    with Collector(slow, scheme="shm", workers="process", num_workers=2, frames_per_batch=50) as c:
        print("ready", flush=True)
        list(c)
"""


def test_ctrl_c_and_another_leave_nothing_behind() -> None:
    script = [sys.executable, "-c", textwrap.dedent(SCRIPT)]
    with subprocess.Popen(
        script, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        workers = psutil.Process(process.pid).children(recursive=True)
        assert len(workers) >= 2
        for _ in range(2):
            time.sleep(0.2)
            os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert "KeyboardInterrupt" in errors
    assert not psutil.wait_procs(workers, 5)[1]


@pytest.mark.parametrize(
    ("scheme", "message"),
    [("shm", r"exist\. create_env_fn runs .*register\(…\) inside"), ("thread", "NameNotFound")],
)
def test_an_id_that_only_the_trainer_has_registered(scheme: str, message: str) -> None:
    name = "OnlyHere-v0"
    if scheme == "shm":
        gymnasium.register(name, entry_point="tests.collector.processes:Pid")
    try:
        with pytest.raises(RemoteCallError, match=message) as failure:
            Collector(
                lambda: gymnasium.make(name), num_workers=1, frames_per_batch=2, scheme=scheme
            )
    finally:
        gymnasium.registry.pop(name, None)
    assert ("create_env_fn runs" in str(failure.value)) == (scheme == "shm")


class EndsBadly(ThreadScheme):
    """A transport that cannot be closed."""

    @hookimpl
    def create_transport(self, context: TransportContext) -> SenderTransport | ReceiverTransport:
        made = super().create_transport(context)
        if isinstance(made, ThreadSender):
            made.close = self._close  # type: ignore[method-assign]
        return made

    @staticmethod
    def _close() -> None:
        raise OSError("no more")


def test_a_transport_that_cannot_be_closed_leaves_no_sender_open() -> None:
    agents = [Agent()]
    schemes = {"policy": EndsBadly(), "critic": {"scheme": CallsScheme(), "workers": agents}}
    options: dict[str, Any] = {"scheme": None, "weight_sync_schemes": schemes}
    made = collector(policy=Scale(), models={"critic": linear(1.0)}, **options)
    critic = made.senders["critic"]
    try:
        with pytest.raises(OSError, match="no more"):
            made.shutdown()
        with pytest.raises(ClosedError):
            critic.send()
    finally:
        critic.close()
        agents[0].thread.shutdown()
