"""`log_to=` and `progress=`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from sync_collector import Collector
from sync_collector.envs import CountingEnv

pytestmark = pytest.mark.timeout(60)


class Writer:
    """Has the method of TensorBoard's SummaryWriter that is needed."""

    def __init__(self) -> None:
        self.logged: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, value: float, global_step: int) -> None:
        self.logged.append((tag, value, global_step))


class Run:
    """Has the method of a run of W&B that is needed."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, float], int]] = []

    def log(self, data: dict[str, float], step: int) -> None:
        self.logged.append((data, step))


def collect(log_to: Any, **options: Any) -> Collector:
    return Collector(
        lambda: CountingEnv(3),
        scheme="none",
        frames_per_batch=2,
        total_frames=6,
        log_to=log_to,
        **options,
    )


def test_a_function() -> None:
    logged: list[tuple[int, dict[str, float]]] = []
    with collect(lambda values, step: logged.append((step, dict(values)))) as collector:
        for _ in collector:
            pass
    assert [step for step, _ in logged] == [2, 4, 6]
    # Nothing is logged of episodes before one has ended.
    assert ["episode/length" in values for _, values in logged] == [False, True, True]
    assert [values["episode/count"] for _, values in logged] == [0, 1, 2]
    assert logged[-1][1]["episode/length"] == 3.0
    assert logged[-1][1]["collect/frames_per_second"] > 0


def test_tensorboard_and_wandb() -> None:
    writer, run = Writer(), Run()
    for log_to in (writer, run):
        with collect(log_to) as collector:
            next(collector)
            collector.evaluate(1)
    tags = {tag for tag, _, step in writer.logged if step == 2}
    assert tags == {name for values, step in run.logged if step == 2 for name in values}
    assert {"collect/lag", "policy/version", "evaluation/reward"} <= tags


def test_a_real_tensorboard_writer(tmp_path: Any) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    with tensorboard.SummaryWriter(str(tmp_path)) as writer, collect(writer) as collector:
        for _ in collector:
            pass
    assert list(tmp_path.iterdir())


def test_a_log_that_fails_loses_no_batch() -> None:
    failures = [ValueError("the disk is full")]

    def log(values: Mapping[str, float], step: int) -> None:
        if failures:
            raise failures.pop()

    with collect(log) as collector:
        with pytest.raises(ValueError, match="disk"):
            next(collector)
        assert collector.stats().frames == 0
        assert [len(batch) for batch in collector] == [2, 2, 2]


@pytest.mark.parametrize("log_to", ["runs", Writer])
def test_what_cannot_log(log_to: Any) -> None:
    with pytest.raises(TypeError, match="SummaryWriter"):
        collect(log_to)


@pytest.mark.long
def test_a_progress_bar() -> None:
    script = (
        "from sync_collector import Collector\n"
        "from sync_collector.envs import CountingEnv\n"
        "def main():\n"
        "    with Collector(CountingEnv, scheme='none', frames_per_batch=10, total_frames=40,\n"
        "                   progress=True) as c:\n"
        "        for batch in c: print('a line')\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=50
    )
    assert done.stdout.count("a line") == 4
    assert "40 frames" in done.stdout
    assert "length 5.0" in done.stdout
