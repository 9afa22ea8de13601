"""Measures updates of a collector's workers with copies, with views and by TorchRL, and memory.

    python docs/benchmarks/collector_updates.py | python docs/benchmarks/page.py --record updates

Workers make a small batch with their policy, then the trainer changes every weight and calls
`update_policy_weights_()`. Prints medians in milliseconds, and megabytes of one worker: its private
memory, and with its share of shared memory.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import gymnasium
import torch
import torchrl_send
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.collectors import MultiSyncCollector
from torchrl.envs import GymWrapper

from sync_collector import Collector
from sync_tools.bench import MODELS, SETTLE_SECONDS, make_model, mark

_ENV = "Pendulum-v1"
_FRAMES = 4
_WARM_UP = 3
_THEIRS = "TorchRL (shared)"


class Policy(nn.Module):
    """A policy with the weights of a benchmark's model.

    Args:
        model: the model's name.
    """

    def __init__(self, model: str) -> None:
        super().__init__()
        self.weights = make_model(model)

    def forward(self, observation: Tensor) -> Tensor:
        """Return an action that shows the newest version, from all elements of all tensors."""
        values = [parameter.sum(dtype=torch.float64) for parameter in self.weights.parameters()]
        return observation[..., :1] * 0 + (sum(values) / 1e12).to(torch.float32).remainder(1.0)


def make_env(folder: str) -> Any:
    """Make an environment, and write the worker's process id to a folder."""
    Path(folder, str(os.getpid())).touch()
    return gymnasium.make(_ENV)


def make_their_env(folder: str) -> Any:
    """Make the same for TorchRL."""
    return GymWrapper(make_env(folder))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["medium"])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=10, help="of each turn")
    parser.add_argument("--turns", type=int, default=4)
    arguments = parser.parse_args()
    torchrl_send._prepare_process()
    print("| model | way | ms | of TorchRL | own MB | with its part of what is shared |")
    print("|---|---|--:|--:|--:|--:|")
    for model in arguments.models:
        _compare(model, arguments.workers, arguments.rounds, arguments.turns)


def _compare(model: str, workers: int, rounds: int, turns: int) -> None:
    seconds: dict[str, list[float]] = {name: [] for name in _WAYS}
    memory = {}
    with ExitStack() as stack:
        ways = {name: stack.enter_context(way(model, workers)) for name, way in _WAYS.items()}
        version = 0
        for turn in range(turns):
            for name, (policy, collector, batches, _) in ways.items():
                for number in range(_WARM_UP + rounds if turn == 0 else 1 + rounds):
                    next(batches)
                    version += 1
                    mark(policy, version)
                    time.sleep(SETTLE_SECONDS)
                    began = time.perf_counter()
                    collector.update_policy_weights_()
                    if number >= (_WARM_UP if turn == 0 else 1):
                        seconds[name].append(time.perf_counter() - began)
        for name, (_, _, batches, folder) in ways.items():
            next(batches)  # a worker has touched all of its pages once it has acted
            memory[name] = [_memory(int(each.name)) for each in Path(folder).iterdir()]
    for name in _WAYS:
        own, shared = (mean(column) for column in zip(*memory[name], strict=True))
        share = median(seconds[name]) / median(seconds[_THEIRS])
        print(
            f"| {model} | {name} | {1e3 * median(seconds[name]):.2f} | {share:.2f} "
            f"| {own:.0f} | {shared:.0f} |",
            flush=True,
        )


Made = tuple[nn.Module, Any, Iterator[Any], str]


@contextmanager
def _ours(model: str, workers: int, *, zero_copy: bool) -> Iterator[Made]:
    policy = Policy(model)
    mark(policy, 0)
    with (
        tempfile.TemporaryDirectory() as folder,
        Collector(
            partial(make_env, folder),
            policy,
            scheme="shm",
            zero_copy=zero_copy,
            num_workers=workers,
            frames_per_batch=_FRAMES * workers,
            sync=True,
        ) as collector,
    ):
        yield policy, collector, iter(collector), folder


@contextmanager
def _torchrl(model: str, workers: int) -> Iterator[Made]:
    policy = Policy(model)
    mark(policy, 0)
    with tempfile.TemporaryDirectory() as folder:
        collector = MultiSyncCollector(
            [partial(make_their_env, folder)] * workers,
            TensorDictModule(policy, in_keys=["observation"], out_keys=["action"]),
            frames_per_batch=_FRAMES * workers,
            total_frames=-1,
            num_threads=1,
            num_sub_threads=1,
            cat_results=0,
        )
        try:
            yield policy, collector, iter(collector), folder
        finally:
            collector.shutdown()


_WAYS: dict[str, Callable[..., Any]] = {
    "copies": partial(_ours, zero_copy=False),
    "views, zero_copy=True": partial(_ours, zero_copy=True),
    _THEIRS: _torchrl,
}


def _memory(process: int) -> tuple[float, float]:
    """Return a process's private megabytes, and those with its share of shared memory."""
    found = {}
    for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:]:
        name, size, *_ = line.split()
        found[name] = int(size) / 1024
    return found["Private_Clean:"] + found["Private_Dirty:"], found["Pss:"]


if __name__ == "__main__":
    main()
