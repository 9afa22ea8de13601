"""Measures one scheme with one model: rounds of real sends to real workers, checked."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from sync_core.bench.limit import CopyLimit
from sync_core.bench.models import make_model, mark
from sync_core.bench.worker import BenchWorker
from sync_core.errors import OptionError, SyncError
from sync_core.models.binding import Binding
from sync_core.models.consolidate import consolidate
from sync_core.plugins import registry
from sync_core.plugins.groups import choose_group, shares_policy
from sync_core.sending.sender import Sender

_WARM_UP = 3
#: How long the workers are given to be waiting before a round begins.
SETTLE_SECONDS = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What one run of a benchmark measured.

    Args:
        plugin: the scheme, its distribution and version.
        model: the model's name.
        tensors: how many tensors it has.
        nbytes: the size of a payload, in bytes.
        workers: how many workers there were.
        zero_copy: whether they kept views.
        consolidated: whether the trainer's model was consolidated.
        options: the options of the scheme.
        seconds: of each round, from the call of `send` to its return.
        limit: seconds of each round of plain copies, done in turn with those; empty where the
            workers share the trainer's process, or the system cannot measure it.
        cores: how many cores this process may use.
        torch: the version of torch.
    """

    plugin: str
    model: str
    tensors: int
    nbytes: int
    workers: int
    zero_copy: bool
    consolidated: bool
    options: dict[str, Any]
    seconds: list[float]
    limit: list[float]
    cores: int
    torch: str

    @property
    def median(self) -> float:
        """Seconds of the median round."""
        return median(self.seconds)

    @property
    def gigabytes_per_second(self) -> float:
        """What the workers received together in the median round."""
        return self.nbytes * self.workers / self.median / 1e9

    @property
    def share_of_limit(self) -> float | None:
        """The limit's median seconds over ours; above 1 for a scheme that copies less."""
        return median(self.limit) / self.median if self.limit else None


def check_measurable(scheme: str) -> None:
    """Raise `OptionError` for a scheme that has nothing to measure."""
    if shares_policy(scheme):
        raise OptionError(f"scheme {scheme!r} moves no weights, so there is nothing to measure")


def measure(
    scheme: str,
    model: str,
    *,
    workers: int,
    zero_copy: bool = False,
    consolidated: bool = False,
    rounds: int = 9,
    options: dict[str, Any] | None = None,
) -> Measurement:
    """Send a model to workers, round after round, and check on them what arrived.

    Args:
        scheme: the scheme's name.
        model: a name in `sync_core.bench.MODELS`.
        workers: how many.
        zero_copy: let the workers keep views.
        consolidated: consolidate the trainer's model.
        rounds: how many rounds count, after three that do not.
        options: options of the scheme.

    Raises:
        SyncError: the scheme does not work here, or something else arrived than was sent.
    """
    options = options or {}
    check_measurable(scheme)
    source = make_model(model)
    if consolidated:
        consolidate(source)
    update = Binding(source).read()
    group_type = choose_group([scheme], None)
    with ExitStack() as stack:
        group = stack.enter_context(group_type(partial(_host, model), workers))
        sender = stack.enter_context(
            Sender(scheme, source, num_workers=workers, zero_copy=zero_copy, **options)
        )
        for worker_id in group.worker_ids:
            group.call(worker_id, BenchWorker.connect, sender.address(worker_id)).result()
            group.call(worker_id, BenchWorker.keep_receiving).result()
        limit: CopyLimit | None = None
        if "cross_process" in group_type.capabilities and CopyLimit.is_available():
            limit = stack.enter_context(CopyLimit(group, update))
        seconds: list[float] = []
        limits: list[float] = []
        for version in range(1, _WARM_UP + rounds + 1):
            mark(source, version)
            seconds.append(_round(sender, group, version))
            if limit is not None:
                limits.append(limit.measure())
    return Measurement(
        plugin=registry.find(registry.SCHEMES, scheme).describe(),
        model=model,
        tensors=len(update.layout.specs),
        nbytes=update.layout.nbytes,
        workers=workers,
        zero_copy=zero_copy,
        consolidated=consolidated,
        options=options,
        seconds=seconds[_WARM_UP:],
        limit=limits[_WARM_UP:],
        cores=len(os.sched_getaffinity(0)) if CopyLimit.is_available() else os.cpu_count() or 1,
        torch=torch.__version__,
    )


def _host(model: str, worker_id: int) -> BenchWorker:
    del worker_id
    return BenchWorker(model)


def _round(sender: Sender, group: Any, version: int) -> float:
    time.sleep(SETTLE_SECONDS)
    begin = time.perf_counter()
    sender.send()
    seconds = time.perf_counter() - begin
    for worker_id in group.worker_ids:
        if not group.call(worker_id, BenchWorker.has_arrived, version).result():
            raise SyncError(f"worker {worker_id} has other weights than those of round {version}")
    return seconds
