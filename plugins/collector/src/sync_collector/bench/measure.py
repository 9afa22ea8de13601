"""Measures the speed of a collector and of its weight updates on this machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sync_collector import Collector
from sync_collector.bench.training import BenchPolicy, change, torch_threads, train
from sync_collector.envs import GymEnv
from sync_core import Address, Receiver, Sender, WorkerGroup
from sync_plugin_std.workers import choose_group
from sync_tools.bench import check_measurable, measure

_WARM_UP = 2

# Yields each batch, and the function that updates all workers and waits until they commit.
_Updates = Generator[tuple[Tensor, Callable[[], object]], None, None]


class HandWorker:
    """Steps one environment with a policy that a `Receiver` keeps up to date.

    Args:
        env: the environment's id.
        worker_id: its seed.
    """

    def __init__(self, env: str, worker_id: int) -> None:
        # Imported here, since gymnasium may not be installed.
        import gymnasium

        self._env = gymnasium.make(env)
        self._discrete = isinstance(self._env.action_space, gymnasium.spaces.Discrete)
        self._policy = BenchPolicy(env)
        self._observation, _ = self._env.reset(seed=worker_id)
        self._receiver: Receiver | None = None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._batch: Tensor | None = None
        self._made = threading.Condition()

    def connect(self, address: Address) -> None:
        """Connect to the sender."""
        # As in a collector's workers: one step is too little work for several threads.
        torch.set_num_threads(1)
        self._receiver = Receiver(address, self._policy)

    def collect(self, frames: int, *, looking: bool = False) -> Tensor:
        """Collect observations; look for new weights before each step, or never."""
        observations = np.empty((frames, *self._observation.shape), np.float32)
        for frame in observations:
            if looking:
                self.receive(0.0)
            frame[:] = self._observation
            self._step(frame)
        return torch.from_numpy(observations)

    def receive(self, timeout: float | None = None) -> int | None:
        """Commit the newest weights, if newer ones arrive in time."""
        assert self._receiver is not None
        return self._receiver.receive(timeout)

    def begin(self, frames: int) -> None:
        """Make batches on a thread until `end`, looking for weights before each step."""
        self._thread = threading.Thread(target=self._collect_all, args=(frames,), daemon=True)
        self._thread.start()

    def take(self) -> Tensor:
        """Wait for the newest batch that was not taken yet, and return it."""
        with self._made:
            self._made.wait_for(lambda: self._batch is not None)
            batch, self._batch = self._batch, None
        assert batch is not None
        return batch

    def end(self) -> None:
        """Stop after the batch in progress."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _collect_all(self, frames: int) -> None:
        while not self._stopped.is_set():
            batch = self.collect(frames, looking=True)
            with self._made:
                self._batch = batch
                self._made.notify()

    @torch.no_grad()
    def _step(self, observation: Any) -> None:
        action = self._policy(torch.from_numpy(observation))
        chosen = action.argmax().item() if self._discrete else action.numpy()
        self._observation, _, terminated, truncated, _ = self._env.step(chosen)
        if terminated or truncated:
            self._observation, _ = self._env.reset()


def measure_by_hand(
    env: str,
    mode: str,
    *,
    scheme: str,
    workers: int,
    frames_per_batch: int,
    rounds: int,
    threads: int,
) -> list[float]:
    """Measure updates without a collector: the seconds until all workers have committed.

    The loop has the environments, frames, policy and training of `measure_collector`, but only a
    `Sender` and `Receiver`. Workers that make batches together wait for weights after each batch;
    the others look for weights at each step.

    Args:
        env: one of `sync_collector.bench.training.ENVS`.
        mode: one of `sync_collector.bench.measure.MODES`.
        scheme: the scheme's name.
        workers: the number of workers.
        frames_per_batch: the frames of a batch.
        rounds: the number of updates measured, after two for warm-up.
        threads: torch's number of threads in the trainer.
    """
    policy = BenchPolicy(env)
    optimizer = torch.optim.Adam(policy.parameters())
    seconds = []
    with ExitStack() as stack:
        sender = stack.enter_context(Sender(scheme, policy, num_workers=workers))
        if mode == "single":
            updates = _alone(HandWorker(env, 0), sender, frames_per_batch)
        else:
            group_type = choose_group([scheme], None)
            group = stack.enter_context(group_type(partial(HandWorker, env), workers))
            for i in group.worker_ids:
                group.call(i, HandWorker.connect, sender.address(i)).result()
            loop = _together if mode == "sync" else _each_its_own
            updates = loop(group, sender, frames_per_batch)
        stack.enter_context(closing(updates))
        stack.enter_context(torch_threads(threads))
        for _, (batch, update) in zip(range(_WARM_UP + rounds), updates, strict=False):
            train(policy, optimizer, batch)
            begin = time.perf_counter()
            update()
            seconds.append(time.perf_counter() - begin)
    return seconds[_WARM_UP:]


def _alone(worker: HandWorker, sender: Sender, frames: int) -> _Updates:
    worker.connect(sender.address(0))

    def update() -> None:
        pending = sender.send_async()
        worker.receive()
        pending.wait()

    while True:
        yield worker.collect(frames), update


def _together(group: WorkerGroup, sender: Sender, frames: int) -> _Updates:
    ids = group.worker_ids
    while True:
        parts = [group.call(i, HandWorker.collect, frames // len(ids)) for i in ids]
        commits = [group.call(i, HandWorker.receive) for i in ids]
        yield torch.cat([part.result() for part in parts]), sender.send
        for commit in commits:
            commit.result()


def _each_its_own(group: WorkerGroup, sender: Sender, frames: int) -> _Updates:
    for i in group.worker_ids:
        group.call(i, HandWorker.begin, frames).result()
    try:
        for i in cycle(group.worker_ids):
            yield group.call(i, HandWorker.take).result(), sender.send
    finally:
        for i in group.worker_ids:
            group.call(i, HandWorker.end).result()


#: How workers run: one in the trainer's process, several that make each batch together, or several
#: that each make their own batches.
MODES = ("single", "sync", "first-ready")

_BATCHES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectorMeasurement:
    """The results of one measurement.

    Args:
        env: the environment's id.
        mode: one of `MODES`.
        scheme: the scheme's name.
        workers: the number of workers.
        frames_per_second: the frames per second of each round, including its update.
        sync_seconds: the seconds of each `update_policy_weights_` after training on a batch, until
            all workers have committed the weights.
        refresh_seconds: the seconds for which each automatic update, with
            ``update_after_each_batch``, blocked the training loop.
        by_hand_seconds: the seconds of each update in a loop without a collector; see
            `measure_by_hand`.
        bare_seconds: the seconds of each send without any environment: the same model size and
            number of workers, which only wait for weights.
    """

    env: str
    mode: str
    scheme: str
    workers: int
    frames_per_second: list[float]
    sync_seconds: list[float]
    refresh_seconds: list[float]
    by_hand_seconds: list[float]
    bare_seconds: list[float]


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
    """Measure a collector: frames per second, then updates while it trains.

    The first part has an update after every third batch. The second part trains twice: with
    blocking updates, and with automatic updates.

    Args:
        env: one of `ENVS`.
        mode: one of `MODES`.
        scheme: the scheme's name.
        workers: the number of workers, except in the mode with one worker.
        frames_per_batch: the frames of a batch.
        rounds: the number of rounds measured, of three batches or of training, after two for
            warm-up.
        threads: torch's number of threads in the trainer. The policy is so small that a second
            thread only spins for milliseconds on a core that a worker needs.

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
            change(policy)
        with torch_threads(threads):
            for _ in range(_WARM_UP + rounds):
                train(policy, optimizer, next(collector)["observation"].flatten(0, -2))
                begin = time.perf_counter()
                collector.update_policy_weights_()
                updates.append(time.perf_counter() - begin)
    options["update_after_each_batch"] = True
    with Collector(partial(GymEnv, env), policy, **options) as collector, torch_threads(threads):
        for _ in range(_WARM_UP + rounds):
            train(policy, optimizer, next(collector)["observation"].flatten(0, -2))
            refreshes.append(collector.stats().sync_seconds)
    by_hand = measure_by_hand(
        env,
        mode,
        scheme=scheme,
        workers=workers,
        frames_per_batch=frames_per_batch,
        rounds=rounds,
        threads=threads,
    )
    bare = measure(scheme, "small", workers=workers, rounds=rounds)
    return CollectorMeasurement(
        env=env,
        mode=mode,
        scheme=scheme,
        workers=workers,
        frames_per_second=speeds[_WARM_UP:],
        sync_seconds=updates[_WARM_UP:],
        refresh_seconds=refreshes[_WARM_UP:],
        by_hand_seconds=by_hand,
        bare_seconds=bare.seconds,
    )
