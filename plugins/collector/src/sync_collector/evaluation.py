"""Evaluates the trainer's policy in an environment that is not used for collection."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from tensordict.nn import InteractionType
from torch import Tensor

from sync_collector.collector_worker import CollectorWorker, WorkerSpecs
from sync_collector.episodes import totals_of
from sync_collector.model_weights import ModelWeights
from sync_collector.policies import called_module
from sync_collector.rollout import BatchRequest, random_state, seed_process, set_random_state
from sync_collector.schemes import POLICY
from sync_core.checks import check_count, check_integer, check_seconds
from sync_core.models import named_tensors

# The number of frames between two checks of the deadline.
_FRAMES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The result of `Collector.evaluate`.

    Args:
        rewards: the total reward of each episode.
        lengths: the number of steps of each episode.
        version: the newest version that had been sent to the collector's workers.

    Example:
        >>> Evaluation(rewards=(1.0, 2.0), lengths=(4, 6), version=1).mean_reward
        1.5
    """

    rewards: tuple[float, ...]
    lengths: tuple[int, ...]
    version: int

    @property
    def mean_reward(self) -> float:
        """The mean total reward."""
        return statistics.fmean(self.rewards)

    @property
    def std_reward(self) -> float:
        """The standard deviation of the total rewards."""
        return statistics.pstdev(self.rewards)

    @property
    def mean_length(self) -> float:
        """The mean number of steps."""
        return statistics.fmean(self.lengths)


class Evaluator:
    """Runs a copy of the policy in another environment, in the calling thread.

    The first evaluation makes the copy and the environment as in a worker; `close` releases them.

    Args:
        specs: the specifications of the workers.
        weights: the trainer's models.
        read_model: returns the workers' weights of a model that the trainer does not have.
    """

    def __init__(
        self,
        specs: WorkerSpecs,
        weights: ModelWeights,
        read_model: Callable[[str], Mapping[str, Tensor]],
    ) -> None:
        self._specs = specs
        self._weights = weights
        self._read_model = read_model
        self._worker: CollectorWorker | None = None
        self._deterministic = True
        # The random state from which the next evaluation continues, so that it draws new numbers.
        self._random: dict[str, Any] | None = None

    @property
    def needs_rest(self) -> bool:
        """Return whether workers must pause during an evaluation, since they are threads here.

        Worker threads share the random state, and in some versions of tensordict the exploration
        type.
        """
        options = self._specs.options[0]
        return options.parallel and not options.owns_process

    def evaluate(
        self, episodes: int, given: Any, *, deterministic: bool, seed: int | None, timeout: float
    ) -> Evaluation:
        """Run some episodes; see `Collector.evaluate`."""
        episodes, timeout = check_count(episodes, "episodes"), check_seconds(timeout)
        if seed is not None:
            seed = check_integer(seed, "seed", "give one such as 0")
        with self._own_random_state(seed):
            worker = self._made(deterministic)
            version = self._weights.version
            worker.begin_with(self._current(given), version)
            worker.resemble(self._specs.policy)
            worker.start_over(0, version, version)
            if seed is not None:
                worker.set_seed(seed, False)
            rewards, lengths = _run(worker, episodes, timeout)
        return Evaluation(rewards=rewards, lengths=lengths, version=version)

    def close(self) -> None:
        """Close the environment."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    @contextmanager
    def _own_random_state(self, seed: int | None) -> Iterator[None]:
        """For ``with``: use a separate random state; restore the process's own afterwards.

        Args:
            seed: the seed; None to continue from the last evaluation.
        """
        state = random_state()
        try:
            if seed is not None:
                seed_process(seed)
            elif self._random is not None:
                set_random_state(self._random)
            yield
        finally:
            if seed is None:
                self._random = random_state()
            set_random_state(state)

    def _made(self, deterministic: bool) -> CollectorWorker:
        if self._worker is not None and self._deterministic == deterministic:
            return self._worker
        self.close()
        spec = self._specs(0, 0)
        kind = {"exploration_type": InteractionType.DETERMINISTIC} if deterministic else {}
        options = replace(
            spec.options,
            frames_per_batch=_FRAMES,
            episode_stats=True,
            owns_process=False,
            parallel=False,
            deliver=None,
            reset_at_each_iter=False,
            **kind,
        )
        worker = CollectorWorker()
        worker.build(replace(spec, options=options, share_policy=False))
        self._worker, self._deterministic = worker, deterministic
        return worker

    def _current(self, given: Any) -> dict[str, Mapping[str, Tensor]]:
        """Return the weights of each model; for the policy, the weights given."""
        own = self._weights.models
        current = {
            name: sender.snapshot()
            for name, sender in self._weights.senders.items()
            if name in own and (name != POLICY or given is None)
        }
        module = called_module(self._specs.policy)
        if given is not None:
            current[POLICY] = named_tensors(given)
        elif POLICY not in current and module is not None and (tensors := named_tensors(module)):
            # The policy has no sender if only its parts are sent, or if workers call a method of
            # the trainer's own module.
            current = {POLICY: tensors, **current}
        elif POLICY not in own and self._specs.policy is None and self._specs.policy_fns[0]:
            current[POLICY] = self._read_model(POLICY)
        return current


def _run(
    worker: CollectorWorker, episodes: int, timeout: float
) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Return the rewards and the lengths of the episodes.

    Environments that are stepped together make equally many episodes, or one more: otherwise short
    episodes, which end first, would be over-represented.
    """
    deadline = time.monotonic() + timeout
    quotas: list[int] = []
    rewards: list[float] = []
    lengths: list[int] = []
    while not quotas or any(quotas):
        batch = worker.collect(BatchRequest())
        assert batch is not None
        totals = totals_of(batch)
        assert totals is not None
        time_steps = batch.shape[-1]
        ended, reward, length = (
            values.reshape(-1, time_steps)
            for values in (totals.ended, totals.reward, totals.length)
        )
        number = len(ended)
        quotas = quotas or [(episodes + number - 1 - row) // number for row in range(number)]
        for row, steps in enumerate(ended):
            ends = steps.nonzero().flatten()[: quotas[row]]
            rewards += reward[row, ends].tolist()
            lengths += length[row, ends].tolist()
            quotas[row] -= len(ends)
        if any(quotas) and time.monotonic() > deadline:
            raise TimeoutError(
                f"{len(rewards)} of {episodes} episodes ended within {timeout:g} s; type "
                "evaluate(timeout=…) to wait for longer, or give the collector "
                "max_frames_per_traj=… to end long ones"
            )
    return tuple(rewards), tuple(lengths)
