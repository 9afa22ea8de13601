"""The workers of the runner, and the model that they hold."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path

import torch
from torch import Tensor, nn

from sync_core import Address, Receiver
from sync_testing import count_threads
from sync_testing.faults import few_descriptors
from sync_testing.recording import Recorder, WorkerRecorder
from sync_testing.schemes import Worker


def make_model(value: float = 0.0) -> nn.ParameterDict:
    """1.2 MB in tensors small and large, all of one value; commits gather its memory."""
    sizes = (1, 50_000, 7, 100_000, 33, 100_000, 50_000, 2)
    return as_module(torch.full((size,), value) for size in sizes)


def as_module(tensors: Iterable[Tensor]) -> nn.ParameterDict:
    """A module that holds these tensors."""
    named = {f"tensor{i}": tensor for i, tensor in enumerate(tensors)}
    return nn.ParameterDict({k: nn.Parameter(v, requires_grad=False) for k, v in named.items()})


def fill(model: nn.ParameterDict, value: float) -> None:
    """Give all of it one value, in place."""
    for tensor in model.values():
        tensor.fill_(value)


# What records the receiver of each worker of this process.
_recorders: dict[int, WorkerRecorder] = {}


def connect(worker: Worker, address: Address, background: bool, history: Path) -> None:
    """Make a model and its receiver, whose events are appended to a file."""
    leave(worker)
    worker.model = make_model()
    recorder = _recorders[worker.worker_id] = WorkerRecorder(
        Recorder(history), address.worker_id, look=lambda: digest(worker.model)
    )
    worker.receiver = Receiver(
        address, worker.model, background=background, on_commit=recorder.committed
    )


def digest(model: nn.ParameterDict) -> str:
    """Return the values that a model holds: one, unless it is torn."""
    return " ".join(map(str, _values_of(model)))


def receive_until(worker: Worker, version: int, seconds: float, descriptors: int | None) -> int:
    """Receive until the version is there, or the time is over; the version at the end.

    Args:
        worker: the worker.
        version: the version.
        seconds: the time.
        descriptors: how many can be opened meanwhile; None for as many as there are.
    """
    assert worker.receiver is not None
    deadline = time.monotonic() + seconds
    with ExitStack() as stack:
        if descriptors is not None:
            stack.enter_context(few_descriptors(descriptors))
        try:
            while worker.receiver.version < version and time.monotonic() < deadline:
                worker.receiver.receive(max(0.0, deadline - time.monotonic()))
        except BaseException:
            _recorders[worker.worker_id].refused(version, worker.receiver.version)
            raise
    return worker.receiver.version


def values(worker: Worker) -> list[float]:
    """Every value in the model: one, unless it is torn."""
    _recorders[worker.worker_id].looked()
    return _values_of(worker.model)


def _values_of(model: nn.ParameterDict) -> list[float]:
    return sorted({value for tensor in model.values() for value in tensor.unique().tolist()})


def leave(worker: Worker) -> None:
    """Close the receiver, which gives the memory of a zero-copy model back."""
    if worker.receiver is not None:
        worker.receiver.close()
        worker.receiver = None
    if worker.worker_id in _recorders:
        _recorders.pop(worker.worker_id).close()
    worker.model = {}


def resources(worker: Worker | None = None, *, collect: bool = True) -> dict[str, int]:
    """Return what this process has open.

    Args:
        worker: not looked at.
        collect: whether to let go first of what an exception has kept, until its traceback is
            collected.
    """
    del worker
    if collect:
        gc.collect()
    return {"descriptors": len(descriptors()), "threads": count_threads()}


def descriptors(worker: Worker | None = None) -> list[str]:
    """Return the target of each open descriptor of this process."""
    del worker
    found = []
    for path in Path("/proc/self/fd").iterdir():
        # That of the listing itself is closed when it ends.
        with suppress(FileNotFoundError):
            found.append(str(path.readlink()))
    return sorted(found)
