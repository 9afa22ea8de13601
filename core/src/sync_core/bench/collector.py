"""Measures how fast a collector is here, and its weight updates beside those of a bare sender."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from sync_core.bench.measure import check_measurable, measure
from sync_core.collector import Collector
from sync_core.envs import GymEnv

#: What workers do: one in the trainer's process, or several that make each batch together, or
#: several that each make their own.
MODES = ("single", "sync", "first-ready")

_ENVS = {"CartPole-v1": (4, 2), "Pendulum-v1": (3, 1)}
#: The environments that there is a policy for.
ENVS = tuple(_ENVS)

_WARM_UP = 2
_BATCHES = 3
_EPOCHS = 4
_MINIBATCHES = 4


class BenchPolicy(nn.Module):
    """Two layers, 64 wide: samples one of CartPole's actions, or gives Pendulum's.

    Args:
        env: the environment's id.

    Example:
        >>> BenchPolicy("CartPole-v1")(torch.zeros(4)).sum()
        tensor(1)
    """

    def __init__(self, env: str) -> None:
        super().__init__()
        seen, acts = _ENVS[env]
        self.layers = nn.Sequential(
            nn.Linear(seen, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, acts)
        )
        self.discrete = acts > 1

    def forward(self, observation: Tensor) -> Tensor:
        """The action."""
        out: Tensor = self.layers(observation)
        if not self.discrete:
            return 2 * out.tanh()
        noise = torch.empty_like(out).exponential_().log()
        return nn.functional.one_hot((out - noise).argmax(-1), out.shape[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectorMeasurement:
    """What one run measured.

    Args:
        env: the environment's id.
        mode: one of `MODES`.
        scheme: the scheme's name.
        workers: how many there were.
        frames_per_second: of each round: frames over seconds, the round's update included.
        sync_seconds: of each `update_policy_weights_` after training on a batch, which waits until
            all workers have committed the weights.
        refresh_seconds: what each refresh that a collector does by itself, with
            ``update_after_each_batch``, kept the training loop from going on.
        bare_seconds: rounds of a bare sender with a model of that size, and as many workers.
    """

    env: str
    mode: str
    scheme: str
    workers: int
    frames_per_second: list[float]
    sync_seconds: list[float]
    refresh_seconds: list[float]
    bare_seconds: list[float]

    @property
    def sync_over_bare(self) -> float:
        """The median update in the loop over that of the bare sender."""
        return median(self.sync_seconds) / median(self.bare_seconds)

    @property
    def refresh_over_bare(self) -> float:
        """The median refresh in the loop over an update of the bare sender.

        The loop does not wait until workers have committed the weights, and the bare sender does.
        """
        return median(self.refresh_seconds) / median(self.bare_seconds)


def measure_collector(
    env: str,
    mode: str,
    *,
    scheme: str = "shm",
    workers: int = 2,
    frames_per_batch: int = 1000,
    rounds: int = 7,
    threads: int = 1,
) -> CollectorMeasurement:
    """Collect batch after batch, with an update after every third of them; then train as well.

    Trains with updates that are waited for, and once more with a collector that refreshes its
    workers by itself.

    Args:
        env: one of `ENVS`.
        mode: one of `MODES`.
        scheme: the scheme's name.
        workers: how many; a single one is alone.
        frames_per_batch: the frames of a batch.
        rounds: how many rounds of three batches count, and of training, after two that do not.
        threads: of torch's in the trainer that trains. For so small a policy a second one has
            nothing to do, and spins for milliseconds on a core that a worker needs.

    Raises:
        SyncError: the scheme does not work here.
    """
    check_measurable(scheme)
    single = mode == "single"
    workers = 1 if single else workers
    options: dict[str, Any] = {
        "scheme": scheme,
        "workers": "inline" if single else None,
        "num_workers": workers,
        "frames_per_batch": frames_per_batch,
        "sync": mode == "sync",
    }
    speeds: list[float] = []
    updates: list[float] = []
    refreshes: list[float] = []
    policy = BenchPolicy(env)
    optimizer = torch.optim.Adam(policy.parameters())
    with Collector(partial(GymEnv, env), policy, **options) as collector:
        for _ in range(_WARM_UP + rounds):
            begin = time.perf_counter()
            frames = sum(next(collector).numel() for _ in range(_BATCHES))
            collector.update_policy_weights_()
            speeds.append(frames / (time.perf_counter() - begin))
        with _torch_threads(threads):
            for _ in range(_WARM_UP + rounds):
                _train(policy, optimizer, next(collector)["observation"].flatten(0, -2))
                begin = time.perf_counter()
                collector.update_policy_weights_()
                updates.append(time.perf_counter() - begin)
    options["update_after_each_batch"] = True
    with Collector(partial(GymEnv, env), policy, **options) as collector, _torch_threads(threads):
        for _ in range(_WARM_UP + rounds):
            _train(policy, optimizer, next(collector)["observation"].flatten(0, -2))
            refreshes.append(collector.stats().sync_seconds)
    bare = measure(scheme, "small", workers=workers, rounds=rounds)
    return CollectorMeasurement(
        env=env,
        mode=mode,
        scheme=scheme,
        workers=workers,
        frames_per_second=speeds[_WARM_UP:],
        sync_seconds=updates[_WARM_UP:],
        refresh_seconds=refreshes[_WARM_UP:],
        bare_seconds=bare.seconds,
    )


@contextmanager
def _torch_threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _train(policy: BenchPolicy, optimizer: torch.optim.Optimizer, observations: Tensor) -> None:
    """As many steps as a small PPO takes with a batch; what they minimise does not matter."""
    for _ in range(_EPOCHS):
        for minibatch in observations.chunk(_MINIBATCHES):
            optimizer.zero_grad()
            policy.layers(minibatch).square().mean().backward()
            optimizer.step()
