"""``sync-core plan``: which scheme for a model and a cluster, with its memory and its seconds.

The cost model is `estimates`. A way of sending is a function of a `Job` in `WAYS`; another one is
another function there. The pages "Choose a scheme" and "How the cost of a send grows" have tables
of it, which a test compares.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from sync_core.cli.listing import make_console

#: Bytes of one parameter.
DTYPES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Measured costs in seconds, from docs/benchmarks.md and docs/explanation/scaling.md.

    Args:
        start: of a send.
        worker: of each worker, in a send.
        ray_start: of a send over Ray.
        ray_worker: of each worker, over Ray.
        copy: of a GB that one core copies.
        put: of a GB that is put into Ray's store.
        gloo: of a GB from one sender to one worker, over loopback.
        copying: how many threads make a large copy.
    """

    start: float
    worker: float
    ray_start: float
    ray_worker: float
    copy: float
    put: float
    gloo: float
    copying: int


#: On two cores of an AMD EPYC.
MEASURED = Costs(
    start=0.0004,
    worker=0.0001,
    ray_start=0.008,
    ray_worker=0.002,
    copy=0.13,
    put=0.17,
    gloo=0.36,
    copying=2,
)
# While one version is read, the next is written.
_VERSIONS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A model, and the workers that it is sent to.

    Args:
        nbytes: bytes of the model as it travels.
        workers: how many workers, spread evenly over the nodes.
        nodes: how many machines; the trainer is on the first of them.
        gbit: what each machine's network carries, in Gbit/s.
        cores: cores of each machine; 0 for as many as it has workers.
        gpu: whether trainer and workers have their model on GPUs, each process on another.
    """

    nbytes: float
    workers: int
    nodes: int = 1
    gbit: float = 100.0
    cores: int = 0
    gpu: bool = False

    @property
    def gigabytes(self) -> float:
        """The bytes in GB."""
        return self.nbytes / 1e9

    @property
    def on_a_node(self) -> int:
        """The workers of each machine."""
        return math.ceil(self.workers / self.nodes)

    @property
    def elsewhere(self) -> int:
        """The workers that are not on the trainer's machine."""
        return self.workers - self.on_a_node

    @property
    def transfer(self) -> float:
        """The seconds of one transfer of the model over a link."""
        return self.gigabytes * 8 / self.gbit

    @property
    def copies(self) -> float:
        """The seconds of a copy in each worker of a machine, as many at once as it has cores."""
        cores = self.cores or self.on_a_node
        return self.gigabytes * MEASURED.copy * max(1.0, self.on_a_node / cores)

    @property
    def packing(self) -> float:
        """The seconds of packing the model into memory that others read."""
        return (
            self.gigabytes * MEASURED.copy / min(MEASURED.copying, self.cores or MEASURED.copying)
        )


@dataclass(frozen=True, slots=True)
class Estimate:
    """The cost of one way of sending.

    Args:
        way: what to type.
        seconds: from the call of `send` to the last worker's commit, at least.
        most_seconds: the same, at most.
        trainer_gb: memory on the trainer's machine, besides the models.
        node_gb: memory on each other machine, besides the models.
        worker_gb: memory in each worker, besides its model; below 0 where it needs no model of
            its own, as its parameters are views.
        remark: what the figures do not say.
    """

    way: str
    seconds: float
    most_seconds: float
    trainer_gb: float
    node_gb: float
    worker_gb: float
    remark: str = ""


def shm(job: Job) -> Iterator[Estimate]:
    """Shared memory: packed once, read by all workers."""
    if job.nodes > 1:
        return
    start = MEASURED.start + MEASURED.worker * job.workers + job.packing
    memory = _VERSIONS * job.gigabytes
    seconds = start + job.copies
    yield Estimate('Sender("shm", …)', seconds, seconds, memory, 0.0, 0.0)
    yield Estimate(
        'Sender("shm", …, zero_copy=True)',
        start,
        start,
        memory,
        0.0,
        -job.gigabytes,
        "workers only read their model",
    )


def ray(job: Job) -> Iterator[Estimate]:
    """Ray: one put, one transfer to each other machine, from any that has it, and the copies."""
    start = MEASURED.ray_start + MEASURED.ray_worker * job.workers + job.gigabytes * MEASURED.put
    least = start + (job.transfer if job.nodes > 1 else 0.0)
    most = start + job.transfer * (job.nodes - 1)
    memory = _VERSIONS * job.gigabytes
    node = memory if job.nodes > 1 else 0.0
    copies = job.copies
    yield Estimate('Sender("ray", …)', least + copies, most + copies, memory, node, 0.0)
    yield Estimate(
        'Sender("ray", …, zero_copy=True)',
        least,
        most,
        memory,
        node,
        -job.gigabytes,
        "workers only read their model",
    )


def dist(job: Job) -> Iterator[Estimate]:
    """The scheme ``dist``: shared memory on the trainer's machine, gloo or NCCL to the others."""
    here = MEASURED.start + MEASURED.worker * job.workers + job.packing + job.copies
    memory = _VERSIONS * job.gigabytes
    if not job.elsewhere:
        yield Estimate('Sender("dist", …)', here, here, memory, 0.0, 0.0)
        return
    there = job.elsewhere * max(job.transfer, job.gigabytes * MEASURED.gloo)
    yield Estimate(
        'Sender("dist", …)',
        here + there,
        here + there,
        memory,
        0.0,
        job.gigabytes,
        "each worker elsewhere gets its own transfer",
    )
    if job.gpu:
        seconds = MEASURED.start + MEASURED.worker * job.workers + job.transfer
        yield Estimate(
            'Sender("dist", …, backend="nccl", topology="broadcast")',
            seconds,
            seconds,
            memory,
            0.0,
            job.gigabytes,
            "what the link allows; not measured here",
        )


#: The ways that are compared.
WAYS: tuple[Callable[[Job], Iterator[Estimate]], ...] = (shm, ray, dist)


def estimates(job: Job) -> list[Estimate]:
    """Return what each way costs, the fastest first."""
    found = [estimate for way in WAYS for estimate in way(job)]
    return sorted(found, key=lambda estimate: (estimate.most_seconds, estimate.way))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.description = (
        "Computes seconds and memory of an update by each scheme, from a cost model whose "
        "constants were measured on two slow cores: compare the rows with each other, and "
        "measure with sync-core bench."
    )
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--params", type=float, help="parameters of the model, such as 7e9")
    size.add_argument("--mb", type=float, help="instead, megabytes of the model")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of parameters (fp32)")
    parser.add_argument("--workers", type=int, default=4, help="how many workers (4)")
    parser.add_argument("--nodes", type=int, default=1, help="how many machines (1)")
    parser.add_argument("--gbit", type=float, default=100.0, help="Gbit/s of the network (100)")
    parser.add_argument(
        "--cores", type=int, default=0, help="cores of each machine (as many as workers)"
    )
    parser.add_argument("--gpu", action="store_true", help="models are on GPUs, one per process")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace, rest: list[str], parser: argparse.ArgumentParser) -> int:
    if rest:
        parser.error(f"plan has no {' '.join(rest)!r}")
    for name in ("params", "mb", "workers", "nodes", "gbit"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < math.inf:
            parser.error(f"--{name} must be more than 0, got {value}")
    if arguments.cores < 0:
        parser.error(f"--cores must be 1 or more, got {arguments.cores}")
    if arguments.nodes > arguments.workers:
        parser.error(f"{arguments.workers} workers cannot be on {arguments.nodes} machines")
    by_params = arguments.params is not None
    job = Job(
        nbytes=arguments.params * DTYPES[arguments.dtype] if by_params else arguments.mb * 1e6,
        workers=arguments.workers,
        nodes=arguments.nodes,
        gbit=arguments.gbit,
        cores=arguments.cores,
        gpu=arguments.gpu,
    )
    found = estimates(job)
    if arguments.json:
        sys.stdout.write(json.dumps([asdict(estimate) for estimate in found], indent=2) + "\n")
        return 0
    _print(job, found, make_console())
    if by_params and arguments.dtype == "fp32":
        sys.stdout.write('layers=["bf16"] halves the bytes; add --dtype bf16 to see it.\n')
    return 0


def _print(job: Job, found: list[Estimate], console: Console) -> None:
    network = f" on {job.nodes} machines, {job.gbit:g} Gbit/s" if job.nodes > 1 else ""
    console.print(f"{size_text(job.gigabytes)} to {job.workers} workers{network}")
    table = Table(box=SIMPLE, padding=0)
    table.add_column("way")
    for column in ("seconds", "memory: here", "elsewhere", "worker"):
        table.add_column(column, justify="right", no_wrap=True)
    for estimate in found:
        memory = estimate.trainer_gb, estimate.node_gb, estimate.worker_gb
        table.add_row(estimate.way, seconds_text(estimate), *map(size_text, memory))
    console.print(table)
    for estimate in found:
        if estimate.remark:
            console.print(f"{estimate.way}: {estimate.remark}", soft_wrap=True)
    console.print(
        "Memory besides models: on the trainer's machine, on each other one, and in each worker; "
        "below 0 where a worker needs no model.",
        soft_wrap=True,
    )


def seconds_text(estimate: Estimate) -> str:
    """Return the seconds with two digits, as a range where there is one."""
    least, most = (_rounded(s) for s in (estimate.seconds, estimate.most_seconds))
    return least if least == most else f"{least} to {most}"


def size_text(gigabytes: float) -> str:
    """Return a size with its unit."""
    if not gigabytes:
        return "0"
    return f"{_rounded(gigabytes * 1e3)} MB" if abs(gigabytes) < 1 else f"{_rounded(gigabytes)} GB"


def _rounded(value: float) -> str:
    """Two digits that count, without an exponent."""
    digits = 1 - math.floor(math.log10(abs(value))) if value else 0
    return f"{round(value, digits):,.{max(0, digits)}f}"
