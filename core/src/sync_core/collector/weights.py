"""Takes new weights from the trainer's policy to the copies that the workers act with."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from typing import Any

from torch import nn

from sync_core.collector.requests import gather
from sync_core.collector.rollout import Rollout
from sync_core.errors import ModelError
from sync_core.extract import named_tensors
from sync_core.pending import PendingSend
from sync_core.report import SendReport
from sync_core.sender import Sender
from sync_core.worker_ids import normalize
from sync_core.workers import WorkerGroup

# How long a worker waits for weights that had not arrived when it looked first.
_PATIENCE = 0.1


class PolicyWeights:
    """A sender, and the workers whose receivers it feeds.

    Args:
        group: the workers, which host rollouts.
        make_sender: makes the sender for a model.
        policy: the trainer's policy; None if there is none, or if workers make theirs.
        made_by_workers: whether workers have policies that the trainer has not seen.
        timeout: deadline of blocking calls, in seconds.
    """

    def __init__(
        self,
        group: WorkerGroup,
        make_sender: Callable[[Any], Sender],
        policy: Any,
        *,
        made_by_workers: bool,
        timeout: float,
    ) -> None:
        self._group = group
        self._make_sender = make_sender
        self._made_by_workers = made_by_workers
        self._timeout = timeout
        self.sender: Sender | None = None
        self.seconds = 0.0
        if isinstance(policy, nn.Module) and named_tensors(policy):
            self._connect(policy)

    @property
    def version(self) -> int:
        """The newest version sent."""
        return 0 if self.sender is None else self.sender.version

    def update(
        self, weights: Any, worker_ids: int | Iterable[int] | None, *, blocking: bool
    ) -> SendReport | PendingSend:
        """Send the weights given, or the policy's, and let the workers commit them."""
        started = time.perf_counter()
        if self.sender is None and weights is not None:
            self._check_wanted(weights)
            self._connect(weights)
        elif self._made_by_workers and weights is None:
            raise ModelError(
                "the workers' policies come from policy_factory, so the collector has no weights "
                "of its own; type update_policy_weights_(weights)"
            )
        if self.sender is None:
            # Random actions, or a policy without tensors: every worker has the newest weights.
            normalize(worker_ids, self._group.worker_ids)
            return SendReport(0, time.perf_counter() - started, {})
        addressed = normalize(worker_ids, self.sender.all_worker_ids())
        pending = self.sender.send_async(weights, addressed)
        calls = self._ask(addressed, timeout=0)
        if blocking:
            try:
                self._finish(pending, calls)
                return pending.wait()
            finally:
                pending.abandon()
                self.seconds = time.perf_counter() - started
        self.seconds = time.perf_counter() - started
        return pending

    def close(self) -> None:
        """Release what the sender holds."""
        if self.sender is not None:
            self.sender.close()

    def _check_wanted(self, weights: Any) -> None:
        if not self._made_by_workers:
            raise ModelError(
                f"there is nothing to load a {type(weights).__name__} into: the collector's "
                "policy is no module with tensors; give Collector the nn.Module that it acts with"
            )

    def _connect(self, model: Any) -> None:
        sender = self._make_sender(model)
        try:
            calls = {
                worker_id: self._group.call(worker_id, Rollout.connect, sender.address(worker_id))
                for worker_id in sender.all_worker_ids()
            }
            gather(calls, self._timeout, "connect to the sender")
        except BaseException:
            sender.close()
            raise
        self.sender = sender

    def _ask(self, worker_ids: Iterable[int], timeout: float) -> dict[int, Future[int | None]]:
        return {i: self._group.call(i, Rollout.receive, timeout) for i in worker_ids}

    def _finish(self, pending: PendingSend, calls: dict[int, Future[int | None]]) -> None:
        """Ask again where the weights came later than the call; give up on whoever failed."""
        deadline = time.monotonic() + self._timeout
        while calls:
            _, late = wait(calls.values(), max(0.0, deadline - time.monotonic()))
            if late or pending.done():
                return
            empty = [i for i, call in calls.items() if not call.exception() and not call.result()]
            calls = self._ask(empty, _PATIENCE)
