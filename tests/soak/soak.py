"""Collects for minutes while workers are killed, and looks for what is lost, repeated or left over.

    make soak                      # 10 minutes, 200,000 frames
    make soak ARGS='--seconds 60 --frames 10000'

Every 10 seconds a random worker is killed; the weights are updated after every batch. Each frame
says which worker process made it and how many it had made before, so that a frame that is lost or
comes twice is seen; and the weights that it was made with, so that half an update is. Memory,
threads, file descriptors and ``/dev/shm`` at the end are compared with those of the first minute.
Ends with code 1, and says why, if anything is not as it should be.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
from tensordict import TensorDictBase

from sync_collector import Collector
from sync_collector.envs import CountingEnv
from sync_collector.testing import Scale
from sync_plugin_std import History
from sync_plugin_std.history import check_history, read_history
from sync_testing import descendants

_WORKERS = 3
_FRAMES_PER_BATCH = 200
_SHM = "/dev/shm"
#: How much more there may be at the end than at first.
_TOLERANCE = {"megabytes": 40.0, "threads": 1, "descriptors": 3, "shm_megabytes": 16.0}


class NumberedEnv(CountingEnv):
    """Observes how many frames it has made, and which process it is in."""

    def __init__(self) -> None:
        super().__init__(2**24)
        self._pid = torch.tensor([os.getpid()])

    def reset(self, tensordict: TensorDictBase | None = None, /) -> TensorDictBase:
        return super().reset(tensordict).set("pid", self._pid)

    def step(self, tensordict: TensorDictBase, /) -> TensorDictBase:
        stepped = super().step(tensordict)
        stepped["next", "pid"] = self._pid
        return stepped


@dataclass(frozen=True, slots=True)
class Sample:
    """The resources that the trainer and its workers hold at one time."""

    megabytes: float
    threads: int
    descriptors: int
    shm_megabytes: float

    @classmethod
    def take(cls) -> Sample:
        """Look now."""
        me = psutil.Process()
        resident = me.memory_info().rss
        for child in me.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                resident += child.memory_info().rss
        return cls(
            megabytes=resident / 1e6,
            threads=me.num_threads(),
            descriptors=me.num_fds(),
            shm_megabytes=psutil.disk_usage(_SHM).used / 1e6,
        )


@dataclass
class Ledger:
    """Accounts for every frame."""

    frames: int = 0
    complaints: list[str] = field(default_factory=list)
    _next: dict[int, int] = field(default_factory=dict)

    def enter(self, batch: TensorDictBase) -> None:
        """Check a batch, which is one worker's."""
        pid = int(batch["pid"][-1])
        first = self._next.get(pid, 0)
        expected = torch.arange(first, first + batch.numel())
        if not torch.equal(batch["observation"].squeeze(-1).long(), expected):
            self.complaints.append(f"process {pid}: frames lost or repeated at {first}")
        if not torch.equal(batch["action"].squeeze(-1).long(), batch["policy_version"]):
            self.complaints.append(f"process {pid}: acted with other weights than its version's")
        self._next[pid] = first + batch.numel()
        self.frames += batch.numel()

    def alive(self) -> list[int]:
        """The processes that have delivered frames and still live."""
        return [pid for pid in self._next if psutil.pid_exists(pid)]

    @property
    def processes(self) -> int:
        """Return how many worker processes have delivered frames."""
        return len(self._next)


def main() -> None:
    """Soak, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--frames", type=int, default=200_000)
    parser.add_argument("--kill-every", type=float, default=10.0)
    parser.add_argument("--scheme", default="shm")
    parser.add_argument("--history", type=Path, help="a file that keeps the history of the run")
    arguments = parser.parse_args()
    ledger = Ledger()
    with TemporaryDirectory() as folder:
        history = History(arguments.history or Path(folder, "soak.jsonl"))
        samples = list(_soak(arguments, ledger, history))
        ledger.complaints += map(str, check_history(read_history([history.path])))
    if descendants():
        ledger.complaints.append("processes are left over")
    ledger.complaints += _grown(samples)
    if ledger.processes <= _WORKERS:
        ledger.complaints.append("no worker was replaced")
    _say(f"{ledger.frames} frames by {ledger.processes} processes; first and last sample:")
    _say(f"{samples[0]}\n{samples[-1]}")
    _say("\n".join(ledger.complaints) or "nothing lost, repeated or left over")
    sys.exit(bool(ledger.complaints))


def _soak(arguments: argparse.Namespace, ledger: Ledger, history: History) -> Iterator[Sample]:
    policy = Scale()
    options: dict[str, Any] = {"num_workers": _WORKERS, "frames_per_batch": _FRAMES_PER_BATCH}
    begin = time.monotonic()
    next_kill = begin + arguments.kill_every
    with Collector(
        NumberedEnv,
        policy,
        scheme=arguments.scheme,
        on_worker_failure="restart",
        layers=[history],
        **options,
    ) as collector:
        while time.monotonic() < begin + arguments.seconds or ledger.frames < arguments.frames:
            ledger.enter(next(collector))
            policy.set(collector.stats().version + 1)
            collector.update_policy_weights_()
            if time.monotonic() >= next_kill:
                next_kill = time.monotonic() + arguments.kill_every
                yield Sample.take()
                # None, if every one that lives is new and has delivered nothing yet.
                if alive := ledger.alive():
                    os.kill(random.choice(alive), signal.SIGKILL)
        if collector.stats().frames != ledger.frames:
            ledger.complaints.append(f"{collector.stats().frames} frames counted by the collector")
        yield Sample.take()


def _grown(samples: list[Sample]) -> Iterator[str]:
    """Return what there is more of in the last tenth than in the first."""
    few = max(1, len(samples) // 10)
    for name in (each.name for each in fields(Sample)):
        first, last = (
            median(getattr(sample, name) for sample in part)
            for part in (samples[:few], samples[-few:])
        )
        if last > first + _TOLERANCE[name]:
            yield f"{name} grew from {first:.0f} to {last:.0f}"


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    main()
