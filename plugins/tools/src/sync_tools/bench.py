"""Measures how fast a scheme delivers weights, compared to the machine's copy speed."""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from statistics import median
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from sync_core import (
    Address,
    OptionError,
    Payload,
    Receiver,
    Sender,
    SenderLostError,
    SyncError,
    Update,
    WorkerGroup,
    registry,
)
from sync_core.models import Binding, consolidate
from sync_core.transports import Block
from sync_plugin_std.workers import choose_group, shares_policy

__all__ = [
    "MODELS",
    "SETTLE_SECONDS",
    "CopyLimit",
    "Measurement",
    "check_measurable",
    "is_marked",
    "make_model",
    "mark",
    "measure",
]


class CopyLimit:
    """Measures the copies that every scheme between processes needs.

    The trainer's tensors are packed into one mapping, whose pages are already allocated. Then all
    workers copy the mapping into their own blocks at the same time.

    Args:
        group: the workers, which host a `BenchWorker`.
        update: the weights.
    """

    def __init__(self, group: WorkerGroup, update: Update) -> None:
        self._group = group
        self._payload = Payload(0, update.layout, update.source)
        nbytes = self._payload.nbytes
        self._descriptor = os.memfd_create("sync-core-bench")
        os.ftruncate(self._descriptor, nbytes)
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        mapping = mmap.mmap(self._descriptor, nbytes, flags=flags)
        self._block = Block(torch.frombuffer(mapping, dtype=torch.uint8))
        path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        for call in [group.call(i, BenchWorker.map_source, path, nbytes) for i in group.worker_ids]:
            call.result()

    @staticmethod
    def is_available() -> bool:
        """Return whether this system supports the measurement."""
        return sys.platform == "linux"

    def measure(self) -> float:
        """Return the seconds of one pack and the workers' copies, without the calls themselves."""
        begin = time.perf_counter()
        self._payload.pack(self._block)
        pack = time.perf_counter() - begin
        calls = [self._group.call(i, BenchWorker.copy_source) for i in self._group.worker_ids]
        spans = [call.result() for call in calls]
        return pack + max(end for _, end in spans) - min(begin for begin, _ in spans)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._descriptor)


MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A model of equal float32 tensors.

    Args:
        tensors: the number of tensors.
        nbytes: the bytes of each tensor.
    """

    tensors: int
    nbytes: int


#: ``small`` is a two-layer, 64-wide MLP.
MODELS: dict[str, ModelSize | None] = {
    "small": None,
    "medium": ModelSize(10, MIB),
    "large": ModelSize(200, 2 * MIB),
    "huge": ModelSize(150, 1024 * MIB // 150 // 4 * 4),
    "many": ModelSize(2000, 4096),
}


def make_model(name: str) -> nn.Module:
    """Make the model with a name in `MODELS`."""
    size = MODELS[name]
    if size is None:
        return nn.Sequential(
            nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)
        )
    return nn.ParameterList(
        torch.zeros(size.nbytes // 4, device="cpu") for _ in range(size.tensors)
    )


def mark(model: nn.Module, version: int) -> None:
    """Fill every tensor with its own value for a version."""
    with torch.no_grad():
        for position, parameter in enumerate(model.parameters()):
            parameter.fill_(_value(version, position))


def is_marked(model: nn.Module, version: int) -> bool:
    """Return whether every element of every tensor has the value for a version."""
    return all(
        bool((parameter == _value(version, position)).all())
        for position, parameter in enumerate(model.parameters())
    )


def mark_share(model: nn.Module, version: int, share: float) -> None:
    """Give a share of every tensor's elements the value for a version; in the first, all."""
    step = 1 if version == 1 else max(1, round(1 / share))
    with torch.no_grad():
        for position, parameter in enumerate(model.parameters()):
            parameter.view(-1)[version % step :: step] = _value(version, position)


def _value(version: int, position: int) -> float:
    return float(version * 4096 + position)  # exact in float32 for the first 4,096 versions


_LONG = 3600.0


class BenchWorker:
    """The object that each worker of a benchmark hosts.

    Args:
        model: the name of the model.
    """

    def __init__(self, model: str) -> None:
        self.model = make_model(model)
        self._name = model
        # The model as all `mark_share` calls so far leave it, and the version of the last call.
        self._expected: tuple[nn.Module, int] | None = None
        self._receiver: Receiver | None = None
        self._source: np.ndarray[Any, Any] | None = None
        self._target: np.ndarray[Any, Any] | None = None

    def connect(self, address: Address, consolidate: bool = False) -> None:
        """Connect to the sender."""
        self._receiver = Receiver(address, self.model, consolidate=consolidate)

    def receive(self) -> int | None:
        """Wait for a version and commit it."""
        return self._connected().receive()

    def keep_receiving(self) -> None:
        """Commit every new version on a thread, which ends with the sender."""
        receiver = self._connected()
        threading.Thread(
            target=_receive_all, args=(receiver,), name="sync-bench", daemon=True
        ).start()

    def has_arrived(self, version: int, share: float | None = None) -> bool:
        """Return whether every element of the model has the value of `mark` or `mark_share`."""
        if share is None:
            return is_marked(self.model, version)
        expected, last = self._expected or (make_model(self._name), 0)
        for number in range(last + 1, version + 1):
            mark_share(expected, number, share)
        self._expected = expected, version
        pairs = zip(self.model.parameters(), expected.parameters(), strict=True)
        return all(torch.equal(mine, theirs) for mine, theirs in pairs)

    def map_source(self, path: str, nbytes: int) -> None:
        """Map the memory that `copy_source` reads, and allocate the pages that it writes."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            mapping = mmap.mmap(descriptor, nbytes, flags=flags, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        self._source = np.frombuffer(mapping, dtype=np.uint8)
        # Page-aligned like the source: otherwise the copy may take several times as long, and this
        # would not be the limit.
        self._target = Block.allocate(max(nbytes, 2 * MIB)).memory[:nbytes].numpy()
        self._target[:] = 0

    def copy_source(self) -> tuple[float, float]:
        """Copy the whole source once; return the start and end time."""
        if self._source is None or self._target is None:
            raise RuntimeError("map_source comes before copy_source")
        begin = time.perf_counter()
        np.copyto(self._target, self._source)
        return begin, time.perf_counter()

    def _connected(self) -> Receiver:
        if self._receiver is None:
            raise RuntimeError("connect comes before receive")
        return self._receiver


def _receive_all(receiver: Receiver) -> None:
    with suppress(SenderLostError):
        while True:
            receiver.receive(timeout=_LONG)


_WARM_UP = 3
#: How long to wait at most until the workers wait, before a round begins.
SETTLE_SECONDS = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The results of one benchmark.

    Args:
        plugin: the scheme, its distribution and version.
        model: the model's name.
        tensors: the number of its tensors.
        nbytes: the size of a payload, in bytes.
        workers: the number of workers.
        zero_copy: whether workers used zero-copy views.
        consolidated: whether the models of the trainer and of the workers were consolidated.
        options: the options of the scheme.
        seconds: the seconds of each round, from the call of `send` to its return.
        limit: the seconds of each round of plain copies, alternating with the sends; empty if the
            workers share the trainer's process, or the system cannot measure it.
        cores: the number of cores that this process may use.
        torch: the version of torch.
        changed: with increments, the share of the elements that changed between rounds; None if
            whole versions were sent.
        travelled: the bytes sent to a worker in the median round.
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
    changed: float | None = None
    travelled: float = 0.0

    @property
    def median(self) -> float:
        """The seconds of the median round."""
        return median(self.seconds)

    @property
    def gigabytes_per_second(self) -> float:
        """The GB/s that all workers received together in the median round."""
        return self.nbytes * self.workers / self.median / 1e9

    @property
    def share_of_limit(self) -> float | None:
        """The median seconds of the copy limit, divided by the scheme's."""
        return median(self.limit) / self.median if self.limit else None


def check_measurable(scheme: str) -> None:
    """Raise `OptionError` for a scheme without anything to measure."""
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
    changed: float | None = None,
    options: dict[str, Any] | None = None,
) -> Measurement:
    """Send a model to workers several times, and check the weights that arrive.

    Args:
        scheme: the scheme's name.
        model: a name in `sync_tools.bench.MODELS`.
        workers: the number of workers.
        zero_copy: let the workers use zero-copy views.
        consolidated: consolidate the models of the trainer and of the workers.
        rounds: the number of rounds measured, after three for warm-up.
        changed: send increments (``"increments::"`` and the scheme), and change this share of the
            elements before each round.
        options: options of the scheme.

    Raises:
        SyncError: the scheme does not work here, or wrong weights arrived.
    """
    options = options or {}
    check_measurable(scheme)
    if changed is not None and not scheme.startswith("increments::"):
        scheme = f"increments::{scheme}"
    source = make_model(model)
    if consolidated:
        consolidate(source)
    update = Binding(source).read()
    group_type = choose_group([scheme], None)
    with ExitStack() as stack:
        group = stack.enter_context(group_type(partial(_host, model), workers))
        sender = stack.enter_context(
            Sender(
                scheme,
                source,
                num_workers=workers,
                zero_copy=zero_copy,
                **options,
            )
        )
        for worker_id in group.worker_ids:
            address = sender.address(worker_id)
            group.call(worker_id, BenchWorker.connect, address, consolidated).result()
            group.call(worker_id, BenchWorker.keep_receiving).result()
        limit: CopyLimit | None = None
        if "cross_process" in group_type.capabilities and CopyLimit.is_available():
            limit = stack.enter_context(CopyLimit(group, update))
        seconds: list[float] = []
        travelled: list[float] = []
        limits: list[float] = []
        for version in range(1, _WARM_UP + rounds + 1):
            if changed is None:
                mark(source, version)
            else:
                mark_share(source, version, changed)
            took, nbytes = _round(sender, group, version, changed)
            seconds.append(took)
            travelled.append(nbytes / workers)
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
        changed=changed,
        travelled=median(travelled[_WARM_UP:]),
    )


def _host(model: str, worker_id: int) -> BenchWorker:
    del worker_id
    return BenchWorker(model)


def _round(sender: Sender, group: Any, version: int, share: float | None) -> tuple[float, int]:
    time.sleep(SETTLE_SECONDS)
    begin = time.perf_counter()
    report = sender.send()
    seconds = time.perf_counter() - begin
    for worker_id in group.worker_ids:
        if not group.call(worker_id, BenchWorker.has_arrived, version, share).result():
            raise SyncError(f"worker {worker_id} has other weights than those of round {version}")
    return seconds, report.nbytes
