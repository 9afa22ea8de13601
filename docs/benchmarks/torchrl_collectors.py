"""Compares updates of a TorchRL collector by its own schemes and by ours, alternately in one run.

    python docs/benchmarks/torchrl_collectors.py

Prints a Markdown table of medians in milliseconds of `update_policy_weights_()` between two
batches, which returns when every worker has the weights. A ratio is TorchRL's median divided by
ours.
"""

from __future__ import annotations

import argparse
import resource
import time
import warnings
from functools import partial
from statistics import median
from typing import Any

import torch
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.collectors import MultiSyncCollector
from torchrl.testing.mocking_classes import ContinuousActionVecMockEnv
from torchrl.weight_update import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme

from sync_plugin_torchrl import Scheme
from sync_tools.bench import MODELS, SETTLE_SECONDS, make_model, mark

_WARM_UP = 3
_FIRST_WEIGHTS_SECONDS = 300.0


class PatientScheme(MultiProcessWeightSyncScheme):  # type: ignore[misc]  # torchrl has no types
    """TorchRL's scheme, but its workers also wait for the first weights of large models."""

    def connect(self, **kwargs: Any) -> None:
        """Connect without the limit of 10 seconds."""
        for transport in (self.receiver_transport, *(self.sender_transports or {}).values()):
            if transport is not None:
                transport.timeout = _FIRST_WEIGHTS_SECONDS
        super().connect(**kwargs)


_WAYS = {
    "shm": partial(Scheme, "shm"),
    "mp": partial(Scheme, "mp"),
    "SharedMem": SharedMemWeightSyncScheme,
    "MultiProcess": PatientScheme,
}
_THEIRS = {"shm": "SharedMem", "mp": "MultiProcess"}


class Policy(nn.Module):
    """A policy with the weights of a benchmark's model."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self.weights = make_model(model)

    def forward(self, observation: Tensor) -> Tensor:
        """Return an action that depends on the weights."""
        value = next(self.weights.parameters()).flatten()[0]
        return observation * 0 + value.remainder(1.0)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["small", "medium", "many"])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--turns", type=int, default=2)
    arguments = parser.parse_args()
    # A tensor in shared memory may need an open file.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    print("| model | scheme | ours | TorchRL | TorchRL / ours |")
    print("|---|---|--:|--:|--:|")
    for model in arguments.models:
        seconds: dict[str, list[float]] = {way: [] for way in _WAYS}
        for _ in range(arguments.turns):
            for way in _WAYS:
                seconds[way] += measure(
                    way, model, workers=arguments.workers, rounds=arguments.rounds
                )
        for ours, theirs in _THEIRS.items():
            own, other = median(seconds[ours]), median(seconds[theirs])
            print(
                f"| {model} | {ours} | {1e3 * own:.2f} | {1e3 * other:.2f} ({theirs}) "
                f"| {other / own:.1f} |",
                flush=True,
            )


def measure(way: str, model: str, *, workers: int, rounds: int) -> list[float]:
    """Return the seconds of each round."""
    policy = TensorDictModule(Policy(model), ["observation"], ["action"])
    mark(policy, 0)
    collector = MultiSyncCollector(
        [ContinuousActionVecMockEnv] * workers,
        policy,
        frames_per_batch=2 * workers,
        total_frames=-1,
        cat_results="stack",
        num_threads=1,
        num_sub_threads=1,
        weight_sync_schemes={"policy": _WAYS[way]()},
    )
    try:
        batches = iter(collector)
        seconds = []
        for version in range(1, _WARM_UP + rounds + 1):
            next(batches)
            mark(policy, version)
            time.sleep(SETTLE_SECONDS)
            begin = time.perf_counter()
            collector.update_policy_weights_()
            seconds.append(time.perf_counter() - begin)
        _check(collector, policy, workers)
        return seconds[_WARM_UP:]
    finally:
        collector.shutdown()


def _check(collector: Any, policy: nn.Module, workers: int) -> None:
    sent, states = policy.state_dict(), collector.state_dict()
    for index in range(workers):
        held = states[f"worker{index}"]["policy_state_dict"]
        if not all(torch.equal(held[name], tensor) for name, tensor in sent.items()):
            raise RuntimeError(f"worker {index} has other weights than those of the last round")


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main()
