"""Compares updates of RLlib's env runners by RLlib and by schemes, alternately in one run.

    python docs/benchmarks/rllib_sync.py | python docs/benchmarks/page.py --record rllib

PPO with two remote env runners and the learner in the driver, on CartPole. An update begins with
`EnvRunnerGroup.sync_weights` and ends when both runners have confirmed the weights. The
confirmation is one call per runner in every way; ``calls`` is the time of these calls alone. Frames
per second are those of `Algorithm.train`, which samples, learns and syncs.
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import ray
import torch
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

from sync_plugin_ray.rllib import sync_env_runners

# The width of two layers, by the megabytes of their weights.
_WIDTHS = {"1 MB": 500, "50 MB": 3530}
_THEIRS = "RLlib"
_WAYS = (_THEIRS, "shm", "dist", "ray")
_BATCH = 1000


@dataclass
class Way:
    """One algorithm and its measurements."""

    algorithm: Any
    seconds: list[float] = field(default_factory=list)
    frames: list[float] = field(default_factory=list)

    def sync(self, value: float) -> float:
        """Change and sync the weights; return the seconds until both runners hold them."""
        learners, runners = self.algorithm.learner_group, self.algorithm.env_runner_group
        learners.foreach_learner(lambda learner: _fill(learner, value))
        began = time.perf_counter()
        runners.sync_weights(from_worker_or_learner_group=learners, inference_only=True)
        held = runners.foreach_env_runner(_held, local_env_runner=False)
        ended = time.perf_counter()
        assert held == [value] * 2, f"the runners hold {held}, not {value}"
        return ended - began

    def call(self) -> float:
        """Return the seconds of a call of both runners that only looks."""
        began = time.perf_counter()
        self.algorithm.env_runner_group.foreach_env_runner(_held, local_env_runner=False)
        return time.perf_counter() - began

    def train(self) -> float:
        """Return the frames per second of an iteration."""
        began = time.perf_counter()
        found = self.algorithm.train()
        frames: float = found["env_runners"]["num_env_steps_sampled"]
        return frames / (time.perf_counter() - began)


def _fill(learner: Any, value: float) -> None:
    with torch.no_grad():
        for parameter in learner.module["default_policy"].unwrapped().parameters():
            parameter.fill_(value)


def _held(runner: Any) -> float:
    """Return the only value in a runner's weights, after it has received a scheme's weights."""
    if hasattr(runner, "receive_weights"):
        runner.receive_weights()
    values = torch.cat([p.detach().aminmax()[0][None] for p in runner.module.parameters()])
    return float(values.unique())


def _nbytes(algorithm: Any) -> int:
    (sizes,) = (each.get() for each in algorithm.learner_group.foreach_learner(_nbytes_of_learner))
    return int(sizes)


def _nbytes_of_learner(learner: Any) -> int:
    state = learner.module["default_policy"].unwrapped().get_state(inference_only=True)
    return sum(array.nbytes for array in state.values())


def _make(way: str, width: int) -> Way:
    config: Any = PPOConfig().environment("CartPole-v1").env_runners(num_env_runners=2)
    config.training(train_batch_size_per_learner=_BATCH, minibatch_size=_BATCH, num_epochs=1)
    config.rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[width, width]))
    config.debugging(log_level="ERROR")
    if way != _THEIRS:
        config = sync_env_runners(config, way)
    return Way(config.build_algo())


def measure(size: str, rounds: int, iterations: int) -> list[list[str]]:
    """Return the rows of a model size."""
    ways = {name: _make(name, _WIDTHS[size]) for name in _WAYS}
    try:
        calls = []
        for number in range(-3, rounds):
            for way in ways.values():
                seconds = way.sync(float(number))
                if number >= 0:
                    way.seconds.append(seconds)
            calls.append(ways[_THEIRS].call())
        for number in range(-1, iterations):
            for way in ways.values():
                frames = way.train()
                if number >= 0:
                    way.frames.append(frames)
        theirs = median(ways[_THEIRS].seconds)
        nbytes = _nbytes(ways[_THEIRS].algorithm)
        rows = [("calls", median(calls[3:]), "")]
        rows += [(n, median(w.seconds), f"{median(w.frames):,.0f}") for n, w in ways.items()]
        return [
            [
                f"{nbytes / 1e6:.0f} MB",
                name,
                f"{1e3 * seconds:.1f}",
                f"{theirs / seconds:.2f}",
                frames,
            ]
            for name, seconds, frames in rows
        ]
    finally:
        for way in ways.values():
            way.algorithm.stop()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="updates of each way (30)")
    parser.add_argument("--iterations", type=int, default=5, help="of training (5)")
    parser.add_argument("--sizes", nargs="+", default=list(_WIDTHS), choices=_WIDTHS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    ray.init(num_cpus=16, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    print("| weights | way | update (ms) | RLlib's time / its time | frames/s |")
    print("|---|---|---|---|---|")
    for size in options.sizes:
        for row in measure(size, options.rounds, options.iterations):
            print("| " + " | ".join(row) + " |", flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
