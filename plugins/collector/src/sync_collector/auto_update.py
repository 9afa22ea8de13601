"""Updates workers automatically, and warns about stale workers."""

from __future__ import annotations

import gc
import itertools
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sync_collector.batch_requests import BatchRequests
from sync_collector.model_weights import ModelWeights
from sync_collector.worker_pool import PoolWorker, WorkerPool
from sync_core import PendingSend, SendError, WorkerLostError
from sync_core.models import UnsentAttributes

# The most values of a tensor that are compared. A training step changes nearly all of them.
_VALUES = 256
# After this number of batches without an update, search for an optimizer of the policy. The search
# takes tens of milliseconds.
_BATCHES = 5


class StaleWatch:
    """Warns when the trainer's models change but no update is ever sent to the workers.

    Up to 256 values of each tensor are compared, evenly spread, before every batch until the first
    update. So a training step is noticed, but a change of a few values in a large tensor may be
    missed. A model without changes counts as trained if an optimizer has its parameters.

    Args:
        weights: reports updates.
        models: the trainer's models that workers have copies of.
    """

    def __init__(self, weights: ModelWeights, models: Mapping[str, Any]) -> None:
        self._models = models
        self._ended = not models
        self._known = None if self._ended else _samples(models)
        self._batches, self._has_warned = 0, False
        #: The number of batches that began with changed models that were never sent.
        self.changes = 0
        weights.on_update.append(self._updated)

    def look(self, *, random: bool = False) -> None:
        """Count a change of the models if no weights were ever sent, and warn once.

        Args:
            random: whether the next batch has random actions.
        """
        if self._ended:
            return
        samples = _samples(self._models)
        if self._known is None:
            self._known = samples
        elif self._known != samples:
            self._known = samples
            self.changes += 1
            self._warn("the policy has changed and")
        elif self._batches == _BATCHES and not self._has_warned and has_optimizer(self._models):
            self._warn(f"an optimizer has the policy's parameters, and after {_BATCHES} batches")
        self._batches += not random

    def restart(self) -> None:
        """After a state was loaded, compare later models with those at the next `look`."""
        self._ended, self._known = not self._models, None
        self._batches = self.changes = 0

    def _warn(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{reason} the workers still act with the copies that they began with; type "
                "collector.update_policy_weights_() after every training step, or "
                "Collector(…, update_after_each_batch=True)",
                stacklevel=6,
            )

    def _updated(self, worker_ids: Sequence[int]) -> None:
        if worker_ids:
            self._ended, self._known = True, None
            self.changes = 0


class AttributeWatch:
    """Warns once if the trainer changes an attribute of a model that updates do not send.

    Args:
        weights: reports updates.
        models: the trainer's models that workers have copies of.
    """

    def __init__(self, weights: ModelWeights, models: Mapping[str, Any]) -> None:
        self._attributes: UnsentAttributes | None = UnsentAttributes(models)
        weights.on_update.append(self._updated)

    def _updated(self, worker_ids: Sequence[int]) -> None:
        if self._attributes is not None and worker_ids:
            changes = self._attributes.changes()
            if changes:
                self._attributes = None
                warnings.warn(changes[0].advice, stacklevel=8)


def has_optimizer(models: Mapping[str, Any]) -> bool:
    """Return whether an optimizer has a parameter of a model; visits all live objects.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> has_optimizer({"policy": model})
        False
        >>> optimizer = torch.optim.SGD(model.parameters())
        >>> has_optimizer({"policy": model})
        True
    """
    modules = [model for model in models.values() if isinstance(model, nn.Module)]
    own = {id(parameter) for module in modules for parameter in module.parameters()}
    # Not isinstance(): it asks an object for its class, and proxies would react to that.
    optimizers = [one for one in gc.get_objects() if issubclass(type(one), torch.optim.Optimizer)]
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return any(id(parameter) in own for group in groups for parameter in group["params"])


def _samples(models: Mapping[str, Any]) -> list[bytes]:
    """Return some values of every tensor, with one copy per device."""
    pieces: dict[torch.device, list[Tensor]] = {}
    with torch.no_grad():
        for model in models.values():
            if isinstance(model, nn.Module):
                for tensor in itertools.chain(model.parameters(), model.buffers()):
                    if (piece := _sample(tensor)) is not None:
                        pieces.setdefault(piece.device, []).append(piece)
        return [torch.cat(some).cpu().numpy().tobytes() for some in pieces.values()]


def _sample(tensor: Tensor) -> Tensor | None:
    """Return some values as bytes, of a distributed tensor's local part; None if it is empty."""
    if is_lazy(tensor):
        return None
    local = getattr(tensor, "to_local", None)
    values: Tensor = (tensor if local is None else local()).detach()
    if values.is_meta or values.is_quantized or values.layout is not torch.strided:
        return None
    step = max(1, -(-values.numel() // _VALUES))
    if values.is_contiguous():
        some = values.view(-1)[::step]
    else:
        # reshape() would copy the whole tensor.
        places = torch.arange(0, values.numel(), step, device=values.device)
        some = values[torch.unravel_index(places, values.shape)]
    return some.contiguous().view(torch.uint8)


class AutoUpdate:
    """Counts each worker's batches since its last update.

    When a worker has made ``interval`` batches, it starts no other batch before it has the newest
    weights. They are sent when the trainer asks for the next batch, after it has learned from this
    one.

    Args:
        interval: a worker is updated after this number of batches; 0 means 1, and -1 means never.
        pool: the workers.
        requests: the requests for batches.
        weights: sends the weights.
    """

    def __init__(
        self, interval: int, pool: WorkerPool, requests: BatchRequests, weights: ModelWeights
    ) -> None:
        self._enough = max(1, interval)
        self._pool = pool
        self._requests = requests
        self._weights = weights
        #: Whether automatic updates are enabled.
        self.enabled = interval >= 0
        self._under_way: PendingSend | None = None
        requests.on_stale.append(lambda _: self.settle())
        weights.on_update.append(self._sent)
        pool.on_join.append(self._joined)

    def delivered(self, worker_id: int | None) -> None:
        """Count a batch, and block a worker that has made ``interval`` of them.

        Args:
            worker_id: the worker that made it; None if all workers made it.
        """
        for worker in self._pool.joined:
            if worker_id in (None, worker.worker_id):
                worker.batches += 1
        self._hold_due()

    def refresh(self) -> None:
        """Send weights to the workers that have made ``interval`` batches, and unblock them.

        Does not wait for workers: each commits the weights before its next batch.

        Raises:
            SendError: the last update failed for some workers that are alive. No worker was
                unblocked. The failure of a dead worker is reported with its batch.
        """
        if self._due():
            began = time.perf_counter()
            self.settle()
            self._send()
            self._weights.seconds = time.perf_counter() - began
        for worker in self._pool.workers.values():
            if worker.is_due:
                self._requests.release(worker.worker_id)
                worker.is_due = False

    def settle(self) -> None:
        """Wait for the last refresh, and raise its failure once, as `refresh` does."""
        if self._under_way is None:
            return
        try:
            self._weights.settle(self._under_way)
        except SendError as error:
            self._under_way = None
            for worker_id in error.report.failed:
                # The worker continues with its old weights; the trainer was notified.
                self._requests.require(worker_id, {})
            # Another thread may have restarted a lost worker by now.
            if any(
                self._pool.alive(worker_id) and not isinstance(result.error, WorkerLostError)
                for worker_id, result in error.report.failed.items()
            ):
                raise
        self._under_way = None

    def forget(self) -> None:
        """Send the weights again next time, since Ctrl-C may have interrupted an inline worker."""
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return
        under_way.abandon("Ctrl-C")
        try:
            under_way.wait()
        except SendError as error:
            for worker_id in error.report.failed:
                self._requests.require(worker_id, {})
                worker = self._pool.workers[worker_id]
                worker.batches = max(worker.batches, self._enough)
            self._hold_due()

    def load_state_dict(self, batches: Sequence[int]) -> None:
        """Restore each worker's number of batches since its last update."""
        for worker in self._pool.workers.values():
            worker.batches = 0
        for worker, made in zip(self._pool.joined, batches, strict=False):
            worker.batches = made
        self._hold_due()

    def _send(self) -> None:
        # The lock prevents the removal of workers here.
        with self._pool.lock:
            due = self._due()
            if not due:
                return
            batches = [worker.batches for worker in due]
            try:
                self._under_way = self._weights.refresh([worker.worker_id for worker in due])
                if self._under_way is not None:
                    for worker_id, versions in self._weights.required.items():
                        self._requests.require(worker_id, versions)
            except BaseException:
                # For example Ctrl-C: the workers that were sent the weights may not need them.
                for worker, made in zip(due, batches, strict=True):
                    worker.batches = max(worker.batches, made)
                raise

    def _hold_due(self) -> None:
        for worker in self._due():
            if not worker.is_due:
                worker.is_due = True
                self._requests.hold(worker.worker_id)

    def _due(self) -> list[PoolWorker]:
        if not self.enabled:
            return []
        enough = [worker for worker in self._pool.joined if worker.batches >= self._enough]
        return [worker for worker in enough if self._pool.alive(worker.worker_id)]

    def _joined(self, worker_id: int) -> None:
        """Record that a new worker has the newest weights and has made no batch."""
        self._sent((worker_id,))
        self._requests.require(worker_id, {})

    def _sent(self, worker_ids: Sequence[int]) -> None:
        for worker_id in worker_ids:
            self._pool.workers[worker_id].batches = 0
