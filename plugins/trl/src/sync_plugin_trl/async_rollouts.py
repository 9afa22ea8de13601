"""A rollout worker for TRL's `AsyncGRPOTrainer` with completions from `Rollouts`."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from transformers import GenerationConfig
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from sync_core import SyncError, WorkerLostError
from sync_core.checks import check_count
from sync_plugin_trl.rollouts import Completion, Rollouts

#: A reward function of TRL: takes ``prompts``, ``completions``, ``completion_ids`` and the columns
#: of the dataset, each a list; returns the rewards, None for a completion without one.
Reward = Callable[..., Sequence[float | None]]

# How long `stop` waits for completions in progress, in seconds.
_PATIENCE = 60.0


class AsyncRollouts:
    """The ``rollout_worker`` of `trl.experimental.async_grpo.AsyncGRPOTrainer`.

    A thread cycles through the prompts of a dataset. For each prompt, the workers of ``rollouts``
    generate a group of completions, which the thread rewards and puts into ``rollout_buffer``.
    Advantages are those of GRPO (arXiv:2402.03300): rewards minus the mean of their group, divided
    by their standard deviation. The protocol is
    `trl.experimental.async_grpo.RolloutWorkerProtocol`.

    If a worker dies, the others generate its completions. If no worker is left, or another error
    occurs, the trainer raises it when it finds no sample (`check_health`).

    Args:
        rollouts: the workers; ``weight_transfer=SyncTransfer(rollouts)`` updates them.
        dataset: rows with a ``prompt``, text or chat messages; other columns are passed to the
            reward functions.
        reward_funcs: one reward function of TRL, or several whose rewards are added up.
        generation_config: as for ``model.generate``; it must sample.
        num_generations: the number of completions of each prompt.
        max_samples: the most samples that wait for the trainer.

    Attributes:
        rollout_buffer: the samples.
        metrics_queue: always empty; each sample has its metrics.

    Raises:
        ValueError: the dataset is empty, or a count is invalid.
    """

    def __init__(
        self,
        rollouts: Rollouts,
        dataset: Sequence[Mapping[str, Any]],
        reward_funcs: Reward | Sequence[Reward],
        generation_config: GenerationConfig,
        *,
        num_generations: int = 8,
        max_samples: int = 64,
    ) -> None:
        if not len(dataset):
            raise ValueError("the dataset has no rows; give one row with a prompt, or more")
        self._rollouts = rollouts
        self._dataset = dataset
        self._rewards = [reward_funcs] if callable(reward_funcs) else list(reward_funcs)
        self._config = generation_config
        self._count = check_count(num_generations, "num_generations")
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(check_count(max_samples, "max_samples"))
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        # The trainer's number of the newest version, minus the sender's.
        self._offset = 0
        self._error: BaseException | None = None
        self._stopped = threading.Event()
        self._beat = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="sync-rollouts", daemon=True)

    def start(self) -> None:
        """Start the thread; the trainer calls this after its first weights were sent."""
        self._beat = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the completions in progress."""
        self._stopped.set()
        with self.rollout_buffer.mutex:
            # The thread may be waiting for room in the buffer.
            self.rollout_buffer.queue.clear()
            self.rollout_buffer.not_full.notify_all()
        if self._thread.ident is not None:
            self._thread.join(_PATIENCE)

    def update_model_version(self, model_version: int) -> None:
        """Record the trainer's number of the last version sent."""
        self._offset = model_version - self._rollouts.version

    def check_health(self, stale_after_s: float) -> None:
        """Raise the error that ended the thread, or an error if no sample has come for a long time.

        Args:
            stale_after_s: the longest time in seconds without a sample.

        Raises:
            SyncError: see above.
        """
        if self._error is not None:
            raise SyncError(f"no more completions are generated: {self._error}") from self._error
        silent = time.monotonic() - self._beat
        if silent > stale_after_s:
            raise SyncError(
                f"no sample has come for {silent:.0f} s; shorten what is generated, or give "
                f"AsyncGRPOConfig(heartbeat_stale_after_s=…) more than {stale_after_s:g}"
            )

    def _run(self) -> None:
        try:
            for group, index in enumerate(itertools.cycle(range(len(self._dataset)))):
                for sample in self._samples(dict(self._dataset[index]), group):
                    if self._stopped.is_set():
                        return
                    self.rollout_buffer.put(sample)
                    self._beat = time.monotonic()
        except BaseException as error:
            self._error = error

    def _generate(self, prompt: list[int]) -> list[Completion]:
        prompts = [prompt] * self._count
        while True:
            try:
                return self._rollouts.sample(prompts, self._config)
            except WorkerLostError:
                # Other workers generate the completions; `sample` raises another error if none is
                # left.
                if self._stopped.is_set():
                    raise

    def _samples(self, row: dict[str, Any], group: int) -> list[Any]:
        """Generate and reward a group of completions of one prompt."""
        prompt = row.pop("prompt")
        ids = self._rollouts.encode(prompt)
        made = self._generate(ids)
        texts: list[Any] = [self._rollouts.decode(completion.tokens) for completion in made]
        if not isinstance(prompt, str):
            texts = [[{"role": "assistant", "content": text}] for text in texts]
        columns = {name: [value] * len(made) for name, value in row.items()}
        columns["prompts"] = [prompt] * len(made)
        columns["completion_ids"] = [completion.tokens for completion in made]
        rewards = _added(function(completions=texts, **columns) for function in self._rewards)
        advantages = _advantages(rewards)
        return [
            RolloutSample(
                prompt=prompt,
                completion=text,
                input_ids=np.array([*ids, *completion.tokens]),
                completion_mask=np.array([0] * len(ids) + [1] * len(completion.tokens)),
                old_log_probs=np.array([0.0] * len(ids) + completion.log_probs, dtype=np.float32),
                advantage=float(advantage),
                model_version=completion.version + self._offset,
                group_id=group,
                metrics={"reward": float(reward)},
            )
            for text, completion, reward, advantage in zip(
                texts, made, rewards, advantages, strict=True
            )
        ]


def _added(rewards: Iterable[Sequence[float | None]]) -> np.ndarray:
    """Return the sum of the functions' rewards; NaN if none of them gives a reward."""
    each = np.array([[np.nan if one is None else one for one in row] for row in rewards], float)
    total: np.ndarray = np.nansum(each, axis=0)
    total[np.isnan(each).all(axis=0)] = np.nan
    return total


def _advantages(rewards: np.ndarray) -> np.ndarray:
    """Return the advantages of a group; 0 for a completion without a reward."""
    judged = rewards[~np.isnan(rewards)]
    if not judged.size:
        return np.zeros_like(rewards)
    # If all rewards are the same, the advantages are 0.
    advantages: np.ndarray = (rewards - judged.mean()) / (judged.std() or 1.0)
    advantages[np.isnan(rewards)] = 0
    return advantages
