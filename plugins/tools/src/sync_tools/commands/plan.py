"""``sync-core plan``: compares schemes for a model and a cluster by memory and seconds.

The cost model is `estimates`. Each way of sending is a function of a `Job` in `WAYS`. The pages
"Choose a scheme" and "How the cost of a send grows" have tables of the results, which a test
compares.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

from sync_tools.tables import print_table

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
        compare: of a GB that is compared with the version before it, and applied as an increment.
        copying: how many threads make a large copy.
    """

    start: float
    worker: float
    ray_start: float
    ray_worker: float
    copy: float
    put: float
    gloo: float
    compare: float
    copying: int


#: Measured on two cores of an AMD EPYC.
MEASURED = Costs(
    start=0.0004,
    worker=0.0001,
    ray_start=0.008,
    ray_worker=0.002,
    copy=0.13,
    put=0.17,
    gloo=0.36,
    compare=0.38,
    copying=2,
)
# While workers read one version, the sender writes the next.
_VERSIONS = 2
# A rank of a sharded trainer copies its part twice: to send it, and to keep it for late workers.
_SHARD_COPIES = 2
# The number of chunks in which a relay passes a version on, as in docs/benchmarks/relays.py.
_CHUNKS = 64
# The ranks of the sharded trainer that `plan` compares with a single process.
_NOTED_RANKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A model, and the workers that it is sent to.

    Args:
        nbytes: bytes of the model as it is sent.
        workers: the number of workers, spread evenly over the nodes.
        nodes: the number of machines; the trainer is on the first.
        gbit: the bandwidth of each machine's network, in Gbit/s.
        cores: cores of each machine; 0 for one per worker.
        gpu: whether the models are on GPUs, one GPU per process.
        ranks: the number of ranks that share the trainer's model. If this or ``worker_ranks`` is
            more than 1, each rank and each worker has its own link of ``gbit`` and a core.
        worker_ranks: the number of workers that share each copy of the model.
        relays: the number of machines to which each relay forwards: 1 for a chain; 0 for no relays.
        changed: the share of the bytes that ``"increments::dist"`` sends.
    """

    nbytes: float
    workers: int
    nodes: int = 1
    gbit: float = 100.0
    cores: int = 0
    gpu: bool = False
    ranks: int = 1
    worker_ranks: int = 1
    relays: int = 0
    changed: float = 1.0

    @property
    def sharded(self) -> bool:
        """Return whether the model is sharded, in the trainer or in the workers."""
        return self.ranks > 1 or self.worker_ranks > 1

    @property
    def start(self) -> float:
        """The fixed seconds of a send, without the bytes."""
        return MEASURED.start + MEASURED.worker * self.workers

    @property
    def stream(self) -> float:
        """The seconds to send the model by gloo: limited by the link, or by this machine."""
        return max(self.transfer, self.gigabytes * MEASURED.gloo)

    @property
    def gigabytes(self) -> float:
        """The size of the model in GB."""
        return self.nbytes / 1e9

    @property
    def on_a_node(self) -> int:
        """The number of workers on each machine."""
        return math.ceil(self.workers / self.nodes)

    @property
    def elsewhere(self) -> int:
        """The number of workers on other machines than the trainer's."""
        return self.workers - self.on_a_node

    @property
    def transfer(self) -> float:
        """The seconds to send the model over a link once."""
        return self.gigabytes * 8 / self.gbit

    @property
    def copies(self) -> float:
        """The seconds of a copy in each worker of a machine; each core makes one copy at a time."""
        cores = self.cores or self.on_a_node
        return self.gigabytes * MEASURED.copy * max(1.0, self.on_a_node / cores)

    @property
    def packing(self) -> float:
        """The seconds to pack the model into shared memory."""
        return (
            self.gigabytes * MEASURED.copy / min(MEASURED.copying, self.cores or MEASURED.copying)
        )


@dataclass(frozen=True, slots=True)
class Estimate:
    """The cost of one way to send.

    Args:
        way: the scheme to type.
        seconds: the least seconds from the call of `send` to the last worker's commit.
        most_seconds: the most seconds.
        trainer_gb: memory on the trainer's machine, besides the models.
        node_gb: memory on each other machine, besides the models.
        worker_gb: memory in each worker, besides its model; below 0 if the worker needs no model of
            its own, because its parameters are views.
        remark: a note about the figures.
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
    if job.nodes > 1 or job.sharded:
        return
    start = job.start + job.packing
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
    """Ray: one put, a transfer to each other machine from any with the object, and copies."""
    if job.sharded:
        return
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
    """``dist``: shared memory on the trainer's machine, gloo or NCCL to the others."""
    if job.sharded:
        return
    here = job.start + job.packing + job.copies
    memory = _VERSIONS * job.gigabytes
    if not job.elsewhere:
        yield Estimate('Sender("dist", …)', here, here, memory, 0.0, 0.0)
        return
    there = job.elsewhere * job.stream
    yield Estimate(
        'Sender("dist", …)',
        here + there,
        here + there,
        memory,
        0.0,
        job.gigabytes,
        "each worker elsewhere gets its own transfer",
    )
    if job.changed < 1:
        seconds = job.start + MEASURED.compare * job.gigabytes + job.changed * there
        yield Estimate(
            'Sender("increments::dist", …)',
            seconds,
            seconds,
            memory + job.gigabytes / 16,
            0.0,
            2 * job.gigabytes,
            f"{job.changed:g} of the bytes travel",
        )
    if job.gpu:
        seconds = job.start + job.transfer
        yield Estimate(
            'Sender("dist", …, backend="nccl", topology="broadcast")',
            seconds,
            seconds,
            memory,
            0.0,
            job.gigabytes,
            "what the link allows; not measured here",
        )


def relays(job: Job) -> Iterator[Estimate]:
    """``dist`` with a relay on each other machine, which forwards chunks while it receives."""
    if not job.relays or job.nodes < 2 or job.sharded:
        return
    hosts = job.nodes - 1
    branches = min(job.relays, hosts)
    depth = hosts if branches == 1 else math.ceil(math.log(hosts * (branches - 1) + 1, branches))
    wire = job.stream * branches * (1 + (depth - 1) / _CHUNKS)
    seconds = job.start + job.packing + wire + job.copies
    memory = _VERSIONS * job.gigabytes
    yield Estimate(
        'Sender("chunked::dist", …), Relay(…)',
        seconds,
        seconds,
        memory,
        memory,
        0.0,
        f"a relay on each other machine passes {_CHUNKS} chunks on to {branches}",
    )


def shards(job: Job) -> Iterator[Estimate]:
    """A sharded model over ``dist``: each rank sends its part, or gathers the whole model first."""
    if not job.sharded:
        return
    share, part = job.gigabytes / job.ranks, job.gigabytes / job.worker_ranks
    replicas = math.ceil(job.workers / job.worker_ranks)
    busiest = max(share * replicas, part)
    pack, copy = _SHARD_COPIES * share * MEASURED.copy, part * MEASURED.copy
    wire = busiest * 8 / job.gbit
    others = job.start + pack + copy
    yield Estimate(
        'Sender(Sharded("dist", …), …)',
        others + wire,
        others + max(wire, busiest * MEASURED.gloo),
        share * (1 + _VERSIONS),
        0.0,
        part,
        f"{_rounded(pack)} s to pack, {_rounded(wire)} s on a link, {_rounded(copy)} s to copy "
        "into the model; at most where gloo is as slow as here; memory here is of each rank",
    )
    if job.ranks == 1:
        return
    gathered = (job.ranks - 1) * share * 8 / job.gbit
    others = job.start + gathered + job.gigabytes * MEASURED.copy + job.gigabytes * MEASURED.copy
    yield Estimate(
        'Sender("dist", gathered(model), …)',
        others + job.workers * job.transfer,
        others + job.workers * job.stream,
        job.gigabytes * (1 + _VERSIONS),
        0.0,
        2 * job.gigabytes - part,
        f"{_rounded(gathered)} s to gather; every rank and every worker holds the whole model",
    )


#: The ways to compare.
WAYS: tuple[Callable[[Job], Iterator[Estimate]], ...] = (shm, ray, dist, relays, shards)


def estimates(job: Job) -> list[Estimate]:
    """Return the estimate of each way, the fastest first."""
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
    size.add_argument("--params", type=_parameters, help="parameters of the model, such as 7e9")
    size.add_argument("--mb", type=float, help="instead, megabytes of the model")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of parameters (fp32)")
    parser.add_argument(
        "--workers", type=int, help="how many workers (4, or as many as --worker-ranks)"
    )
    parser.add_argument("--nodes", type=int, default=1, help="how many machines (1)")
    parser.add_argument("--gbit", type=float, default=100.0, help="Gbit/s of the network (100)")
    parser.add_argument(
        "--cores", type=int, default=0, help="cores of each machine (as many as workers)"
    )
    parser.add_argument("--gpu", action="store_true", help="models are on GPUs, one per process")
    parser.add_argument(
        "--ranks",
        type=int,
        default=1,
        help="of a sharded trainer (1); each then has a link of --gbit, as each worker has",
    )
    parser.add_argument(
        "--worker-ranks", type=int, default=1, help="workers that share a copy of the model (1)"
    )
    parser.add_argument(
        "--relays", type=int, default=0, help="relays pass a version on to so many machines each"
    )
    parser.add_argument(
        "--changed", type=float, default=1.0, help="part of the bytes that increments bring, to 1"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace, rest: list[str], parser: argparse.ArgumentParser) -> int:
    if rest:
        parser.error(f"plan has no {' '.join(rest)!r}")
    if arguments.workers is None:
        arguments.workers = arguments.worker_ranks if arguments.worker_ranks > 1 else 4
    _check(arguments, parser)
    by_params = arguments.params is not None
    job = Job(
        nbytes=arguments.params * DTYPES[arguments.dtype] if by_params else arguments.mb * 1e6,
        workers=arguments.workers,
        nodes=arguments.nodes,
        gbit=arguments.gbit,
        cores=arguments.cores,
        gpu=arguments.gpu,
        ranks=arguments.ranks,
        worker_ranks=arguments.worker_ranks,
        relays=arguments.relays,
        changed=arguments.changed,
    )
    found = estimates(job)
    if arguments.json:
        sys.stdout.write(json.dumps([asdict(estimate) for estimate in found], indent=2) + "\n")
        return 0
    _print(job, found)
    if by_params and arguments.dtype == "fp32":
        sys.stdout.write('layers=["bf16"] halves the bytes; add --dtype bf16 to see it.\n')
    return 0


def _parameters(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number; type 7e9 for 7B") from None


def _check(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    for name in ("params", "mb", "workers", "nodes", "gbit", "ranks", "worker_ranks", "changed"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < math.inf:
            parser.error(f"--{name.replace('_', '-')} must be more than 0, got {value}")
    for name in ("cores", "relays"):
        if getattr(arguments, name) < 0:
            parser.error(f"--{name} must be 1 or more, got {getattr(arguments, name)}")
    if arguments.changed > 1:
        parser.error(f"--changed must be at most 1, got {arguments.changed}")
    if arguments.nodes > arguments.workers:
        parser.error(f"{arguments.workers} workers cannot be on {arguments.nodes} machines")
    if arguments.ranks > 1 or arguments.worker_ranks > 1:
        _check_sharded(arguments, parser)


def _check_sharded(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if arguments.workers % arguments.worker_ranks:
        parser.error(
            f"{arguments.workers} workers do not make copies of {arguments.worker_ranks} each"
        )
    for name, usual in (("nodes", 1), ("relays", 0), ("changed", 1)):
        if getattr(arguments, name) != usual:
            parser.error(f"--{name} is for models that are not sharded; leave it out")


def _print(job: Job, found: list[Estimate]) -> None:
    network = f" on {job.nodes} machines, {job.gbit:g} Gbit/s" if job.nodes > 1 else ""
    if job.sharded:
        network = f", each copy on {job.worker_ranks}, {job.gbit:g} Gbit/s for each"
    ranks = f" from {job.ranks} ranks" if job.ranks > 1 else ""
    sys.stdout.write(f"{size_text(job.gigabytes)}{ranks} to {job.workers} workers{network}\n\n")
    figures = ("seconds", "memory: here", "elsewhere", "worker")
    print_table(
        ("way", *figures),
        [
            (
                each.way,
                seconds_text(each),
                *map(size_text, (each.trainer_gb, each.node_gb, each.worker_gb)),
            )
            for each in found
        ],
        right=figures,
        whole=figures,
    )
    remarks = [f"{estimate.way}: {estimate.remark}" for estimate in found if estimate.remark]
    if faster := _faster_by_shards(job, found):
        remarks.append(faster)
    remarks.append(
        "Memory besides models: on the trainer's machine, on each other one, and in each worker; "
        "below 0 where a worker needs no model."
    )
    sys.stdout.write("\n" + "\n".join(remarks) + "\n")


def _faster_by_shards(job: Job, found: list[Estimate]) -> str:
    """Return a note if sending by the ranks of a sharded trainer would be faster; or ''."""
    if job.sharded or job.nodes == 1:
        return ""
    plain = max(each.most_seconds for each in found if each.way == 'Sender("dist", …)')
    sharded = next(shards(replace(job, ranks=_NOTED_RANKS)))
    if sharded.most_seconds >= plain:
        return ""
    return (
        f"With a trainer that is sharded over {_NOTED_RANKS} ranks, such as by FSDP2, "
        f"{sharded.way} takes {seconds_text(sharded)} s: add --ranks {_NOTED_RANKS}; and "
        "--worker-ranks, where workers are tensor parallel."
    )


def seconds_text(estimate: Estimate) -> str:
    """Return the seconds with two digits, as a range if they differ."""
    least, most = (_rounded(s) for s in (estimate.seconds, estimate.most_seconds))
    return least if least == most else f"{least} to {most}"


def size_text(gigabytes: float) -> str:
    """Return a size with its unit."""
    if not gigabytes:
        return "0"
    return f"{_rounded(gigabytes * 1e3)} MB" if abs(gigabytes) < 1 else f"{_rounded(gigabytes)} GB"


def _rounded(value: float) -> str:
    """Return a number with two significant digits, without an exponent."""
    digits = 1 - math.floor(math.log10(abs(value))) if value else 0
    return f"{round(value, digits):,.{max(0, digits)}f}"
