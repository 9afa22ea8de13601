"""Measures how fast a scheme moves weights on this machine, beside the machine's copy limit."""

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
    """Measures the copies that no scheme between processes can do without.

    The trainer's tensors are packed into one mapping, all of whose pages are there; then every
    worker copies the mapping, at once with the others, into its own block.

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
        """Return whether this system has what it takes."""
        return sys.platform == "linux"

    def measure(self) -> float:
        """Seconds for one pack and for the workers' copies, the calls to them left out."""
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
        tensors: how many.
        nbytes: the bytes of each.
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
    """The model of one of the names in `MODELS`."""
    size = MODELS[name]
    if size is None:
        return nn.Sequential(
            nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)
        )
    return nn.ParameterList(
        torch.zeros(size.nbytes // 4, device="cpu") for _ in range(size.tensors)
    )


def mark(model: nn.Module, version: int) -> None:
    """Fill every tensor with its own value, of this version."""
    with torch.no_grad():
        for position, parameter in enumerate(model.parameters()):
            parameter.fill_(_value(version, position))


def is_marked(model: nn.Module, version: int) -> bool:
    """Return whether every element of every tensor is of this version."""
    return all(
        bool((parameter == _value(version, position)).all())
        for position, parameter in enumerate(model.parameters())
    )


def mark_share(model: nn.Module, version: int, share: float) -> None:
    """Give a share of the elements of every tensor a value of this version: all in the first."""
    step = 1 if version == 1 else max(1, round(1 / share))
    with torch.no_grad():
        for position, parameter in enumerate(model.parameters()):
            parameter.view(-1)[version % step :: step] = _value(version, position)


def _value(version: int, position: int) -> float:
    return float(version * 4096 + position)  # exact in float32 for the first 4,096 versions


_LONG = 3600.0


class BenchWorker:
    """Hosted by each worker of a benchmark.

    Args:
        model: the name of the model.
    """

    def __init__(self, model: str) -> None:
        self.model = make_model(model)
        self._name = model
        # What versions of which only a share was marked add up to, and the last of them.
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
        """Commit every version that comes from now on, in a thread that ends with the sender."""
        receiver = self._connected()
        threading.Thread(
            target=_receive_all, args=(receiver,), name="sync-bench", daemon=True
        ).start()

    def has_arrived(self, version: int, share: float | None = None) -> bool:
        """Return whether every element of the model is as `mark` or `mark_share` left it."""
        if share is None:
            return is_marked(self.model, version)
        expected, last = self._expected or (make_model(self._name), 0)
        for number in range(last + 1, version + 1):
            mark_share(expected, number, share)
        self._expected = expected, version
        pairs = zip(self.model.parameters(), expected.parameters(), strict=True)
        return all(torch.equal(mine, theirs) for mine, theirs in pairs)

    def map_source(self, path: str, nbytes: int) -> None:
        """Map the memory that `copy_source` reads, and touch what it writes to."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            mapping = mmap.mmap(descriptor, nbytes, flags=flags, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        self._source = np.frombuffer(mapping, dtype=np.uint8)
        # On its own page like the source: elsewhere in the page it may take several times
        # as long, and this measures the limit.
        self._target = Block.allocate(max(nbytes, 2 * MIB)).memory[:nbytes].numpy()
        self._target[:] = 0

    def copy_source(self) -> tuple[float, float]:
        """Copy the whole source once; when that began and ended."""
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
#: How long the workers are given to be waiting before a round begins.
SETTLE_SECONDS = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The figures of one run of a benchmark.

    Args:
        plugin: the scheme, its distribution and version.
        model: the model's name.
        tensors: how many tensors it has.
        nbytes: the size of a payload, in bytes.
        workers: how many workers there were.
        zero_copy: whether they kept views.
        consolidated: whether the models of the trainer and of the workers were consolidated.
        options: the options of the scheme.
        seconds: of each round, from the call of `send` to its return.
        limit: seconds of each round of plain copies, done in turn with those; empty where the
            workers share the trainer's process, or the system cannot measure it.
        cores: how many cores this process may use.
        torch: the version of torch.
        changed: the share of the elements that changed from round to round, where versions
            travelled as increments; None where all did, and versions travelled whole.
        travelled: the bytes that travelled to a worker in the median round.
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
        """Seconds of the median round."""
        return median(self.seconds)

    @property
    def gigabytes_per_second(self) -> float:
        """Return the GB/s that all workers received together in the median round."""
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
    changed: float | None = None,
    options: dict[str, Any] | None = None,
) -> Measurement:
    """Send a model to workers, round after round, and check on them what arrived.

    Args:
        scheme: the scheme's name.
        model: a name in `sync_tools.bench.MODELS`.
        workers: how many.
        zero_copy: let the workers keep views.
        consolidated: consolidate the models of the trainer and of the workers.
        rounds: how many rounds count, after three that do not.
        changed: send increments (``"increments::"`` and the scheme), and change this share of the
            elements before each round.
        options: options of the scheme.

    Raises:
        SyncError: the scheme does not work here, or something else arrived than was sent.
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
