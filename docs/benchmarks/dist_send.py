"""Compares the schemes `dist` and `rpc` with plain gloo, and with TorchRL's two schemes over it.

    python docs/benchmarks/dist_send.py

All ways update the same worker processes, alternately round by round in one run. Only the ways over
RPC have their own processes, since members of an RPC world poll without pause and would take the
cores from the others. The limit, measured with both kinds of processes, is the faster of two ways
over the default gloo group: ``gloo tensors`` sends every tensor separately, all at once, into the
model; ``gloo flat`` sends as many bytes in one buffer, without packing. In both, the workers wait
in their receives when the clock starts; it stops when all workers have reported over a pipe. ``gloo
staged`` is ``gloo flat`` with two additions: trainer and workers check that no tensor object has
changed since the last round, and workers copy the bytes to their place after all have arrived.
Without these, a worker could be left with half a version when the trainer dies, or with tensors
that nothing reads. ``over gloo`` are our schemes without shared memory, as between machines. Prints
medians in milliseconds for each kind of processes.

All ways of ``large`` together take 21 GB with four workers; ``--only`` selects some. Torch's
messages about RPC at the end go to stderr.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from statistics import median
from typing import Any

import _tensors
import _torchrl_dist as torchrl
import numpy as np
import torch
from torch import distributed, multiprocessing, nn
from torch.distributed import rpc

import sync_core
import sync_tools.bench as ours
from sync_core.models import consolidate
from sync_tools.bench import SETTLE_SECONDS, is_marked, make_model, mark

_WARM_UP = 3
_TIMEOUT = 120.0

_DIST, _ZERO_COPY, _RPC = "dist, copy", "dist, zero-copy", "rpc, copy"
_DIST_OPTIONS: dict[str, dict[str, Any]] = {
    _DIST: {},
    _ZERO_COPY: {"zero_copy": True},
    "dist, consolidated": {},
    "dist over gloo": {"shared_memory": False},
    "dist over gloo, zero-copy": {"shared_memory": False, "zero_copy": True},
    "dist, broadcast": {"topology": "broadcast"},
}
_RPC_OPTIONS: dict[str, dict[str, Any]] = {
    _RPC: {},
    "rpc, consolidated": {},
    "rpc over gloo": {"shared_memory": False},
}
_GLOO = ["gloo tensors", "gloo flat"]
_STAGED = "gloo staged"
_BY_GLOO = [*_GLOO, _STAGED]
_TORCHRL_DIST, _TORCHRL_RPC = ["torchrl dist", "torchrl dist, sync=False"], "torchrl rpc"
_TORCHRL = [*_TORCHRL_DIST, _TORCHRL_RPC]
_OVER_RPC = [*_RPC_OPTIONS, _TORCHRL_RPC]
_WAYS = [*_DIST_OPTIONS, *_RPC_OPTIONS, *_BY_GLOO, *_TORCHRL]
# A ratio: the median of the fastest of some ways, divided by another's.
_RATIOS = {
    "torchrl dist / dist": (_TORCHRL_DIST, _DIST),
    "torchrl rpc / rpc": ([_TORCHRL_RPC], _RPC),
    "limit / dist": (_GLOO, _DIST),
    "limit / dist, zero-copy": (_GLOO, _ZERO_COPY),
    "limit / dist over gloo": (_GLOO, "dist over gloo"),
    "limit / rpc": (_GLOO, _RPC),
    "limit / staged": (_GLOO, _STAGED),
}


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Way:
    """A way to update the workers; only `send` is timed.

    Args:
        send: returns when every worker has the weights.
        before: lets the workers wait for a version.
        after: called when the workers no longer wait.
    """

    send: Callable[[], object]
    before: Callable[[], object] = _nothing
    after: Callable[[], object] = _nothing


class Worker:
    """The worker's side of every way; each worker process has one.

    Each of our ways has its own model, as in real programs: a receiver packs its parameters into
    memory of its own only if nothing else uses them. The other ways share one model.

    Args:
        rank: the worker's rank in the default process group; the trainer has 0.
    """

    here: Worker

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.nets: dict[str, nn.Module] = {}
        self.collectors: dict[str, torchrl.Collector] = {}
        self._targets: dict[str, list[torch.Tensor]] = {}
        self._receivers: dict[str, sync_core.Receiver] = {}
        self._posted: list[Any] = []

    def open(self, model: str) -> None:
        """Make the model with a name."""
        self.net = make_model(model)
        self._targets["gloo tensors"] = [p.data for p in self.net.parameters()]
        self._tensors = _tensors.Tensors(self.net)

    def connect(self, way: str, model: str, addresses: list[sync_core.Address]) -> None:
        """Make a receiver of sync-core."""
        self.make_net(way, model)
        self._receivers[way] = sync_core.Receiver(addresses[self.rank - 1], self.nets[way])

    def make_net(self, way: str, model: str) -> None:
        """Make a model for one of our ways."""
        self.nets[way] = make_model(model)

    def receive(self, way: str) -> None:
        """Receive and commit a version of sync-core."""
        if self._receivers[way].receive() is None:
            raise TimeoutError(f"nothing came by {way}")

    def join(self, way: str, scheme: Any) -> None:
        """Make a receiver of TorchRL's."""
        self.collectors[way] = torchrl.Collector(self.net, self.rank, scheme)

    def make_flat(self, nbytes: int) -> None:
        """Allocate this many bytes."""
        for way in ("gloo flat", _STAGED):
            self._targets[way] = [torch.zeros(nbytes, dtype=torch.uint8)]
        self._flat = torch.zeros(nbytes, dtype=torch.uint8).numpy()

    def post(self, way: str) -> None:
        """Start every receive of a way over gloo."""
        targets = self._targets[way]
        self._posted = [distributed.irecv(t, 0, tag=tag) for tag, t in enumerate(targets)]

    def wait(self, way: str) -> None:
        """Wait for the started receives."""
        for work in self._posted:
            work.wait()
        if way == _STAGED:
            self._tensors.check()
            np.copyto(self._flat, self._targets[way][0].numpy())
            self._tensors.count_write()

    def has_arrived(self, way: str, version: int) -> bool:
        """Return whether every element has the value for this version."""
        if way == "gloo flat":
            return bool((self._targets[way][0] == version % 256).all())
        if way == _STAGED:
            return bool((self._flat == version % 256).all())
        return is_marked(self.nets.get(way, self.net), version)

    def close(self) -> None:
        """Close everything that `open` and later calls have made."""
        for each in (*self._receivers.values(), *self.collectors.values()):
            each.close()
        for kept in (self._receivers, self.collectors, self._targets, self._posted, self.nets):
            kept.clear()


class World:
    """The worker processes, which share a gloo group with this process.

    Args:
        pipes: the pipes to the workers.
        over_rpc: whether they are also in an RPC world.
    """

    def __init__(self, pipes: list[Any], over_rpc: bool) -> None:
        self._pipes = pipes
        self.ranks = range(1, len(pipes) + 1)
        self.infos = [rpc.get_worker_info(_name(rank)) for rank in self.ranks if over_rpc]

    def tell(self, method: Callable[..., Any], *arguments: Any) -> None:
        """Start a method of `Worker` in every worker."""
        for pipe in self._pipes:
            pipe.send((method.__name__, arguments))

    def hear(self) -> list[Any]:
        """Return the result of every worker."""
        return [_answer(pipe) for pipe in self._pipes]

    def ask(self, method: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call a method in every worker, and return the results."""
        self.tell(method, *arguments)
        return self.hear()

    def rrefs(self, function: Callable[[], Any]) -> list[Any]:
        """Return references to a function's result in each worker."""
        return [rpc.remote(info, function) for info in self.infos]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    models = ["small", "many", "large"]
    parser.add_argument("--models", nargs="+", choices=ours.MODELS, default=models)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="+", choices=_WAYS, default=_WAYS, metavar="NAME")
    arguments = parser.parse_args()
    kinds = {way in _OVER_RPC for way in arguments.only if way not in _BY_GLOO} or {False}
    for over_rpc in sorted(kinds):
        ways = [w for w in arguments.only if w in _BY_GLOO or (w in _OVER_RPC) == over_rpc]
        with _start(arguments.workers, over_rpc) as world:
            columns = [_measure(world, model, ways, arguments.rounds) for model in arguments.models]
        _print(arguments.models, columns)


def _print(models: list[str], columns: list[dict[str, float]]) -> None:
    print("\n| ms | " + " | ".join(models) + " |")
    print("|---|" + "--:|" * len(models))
    for way in columns[0]:
        print(f"| {way} | " + " | ".join(f"{1e3 * column[way]:.2f}" for column in columns) + " |")
    for name, (others, own) in _RATIOS.items():
        compared = [way for way in others if way in columns[0]]
        if compared and own in columns[0]:
            ratios = [min(column[way] for way in compared) / column[own] for column in columns]
            print(f"| {name} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")


def _measure(world: World, model: str, names: list[str], rounds: int) -> dict[str, float]:
    source, consolidated = make_model(model), consolidate(make_model(model))
    flat = torch.zeros(sum(p.nbytes for p in source.parameters()), dtype=torch.uint8)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    version = 0
    world.ask(Worker.open, model)
    with ExitStack() as stack:
        ways = {name: _torchrl(stack, world, name, source) for name in names if name in _TORCHRL}
        for name in names:
            if name in _BY_GLOO:
                ways[name] = _gloo(world, name, source, flat)
            elif name not in _TORCHRL:
                sent = consolidated if name.endswith("consolidated") else source
                ways[name] = _ours(stack, world, name, model, sent)
        for _ in range(_WARM_UP + rounds):
            for name in names:
                version += 1
                mark(source, version)
                mark(consolidated, version)
                flat.fill_(version % 256)
                seconds[name].append(_round(ways[name]))
                if not all(world.ask(Worker.has_arrived, name, version)):
                    raise RuntimeError(f"a worker has not what was sent by {name}")
    world.ask(Worker.close)
    return {name: median(each[_WARM_UP:]) for name, each in seconds.items()}


def _round(way: Way) -> float:
    way.before()
    time.sleep(SETTLE_SECONDS)
    begin = time.perf_counter()
    way.send()
    seconds = time.perf_counter() - begin
    way.after()
    return seconds


def _ours(stack: ExitStack, world: World, name: str, model: str, source: nn.Module) -> Way:
    if name in _OVER_RPC:
        world.ask(Worker.make_net, name, model)
        workers = list(zip(world.infos, world.rrefs(_here), strict=True))
        options = _RPC_OPTIONS[name]
        sender = sync_core.Sender(
            "rpc", source, workers=workers, model_id=f"nets[{name!r}]", **options
        )
        return Way(stack.enter_context(sender).send)
    sender = sync_core.Sender("dist", source, num_workers=len(world.ranks), **_DIST_OPTIONS[name])
    stack.enter_context(sender)
    addresses = [sender.address(worker_id) for worker_id in sender.all_worker_ids()]
    world.ask(Worker.connect, name, model, addresses)
    return Way(sender.send, partial(world.tell, Worker.receive, name), world.hear)


def _torchrl(stack: ExitStack, world: World, name: str, source: nn.Module) -> Way:
    if name == _TORCHRL_RPC:
        world.ask(Worker.join, name, torchrl.RPCWeightSyncScheme())
        return Way(torchrl.rpc_sending(source, world.infos, world.rrefs(_torchrl_rpc_here)))
    sending = torchrl.DistSending(
        source, len(world.ranks), sync=name == "torchrl dist", timeout=_TIMEOUT
    )
    world.tell(Worker.join, name, sending.scheme)
    sending.connect()
    world.hear()
    stack.callback(sending.close)
    return Way(sending.send)


def _gloo(world: World, name: str, source: nn.Module, flat: torch.Tensor) -> Way:
    tensors = [p.data for p in source.parameters()] if name == "gloo tensors" else [flat]
    world.ask(Worker.make_flat, flat.nbytes)
    known = _tensors.Tensors(source)
    sent: list[Any] = []

    def before() -> None:
        world.ask(Worker.post, name)
        world.tell(Worker.wait, name)

    def send() -> None:
        if name == _STAGED:
            known.check()
        for tag, tensor in enumerate(tensors):
            sent.extend(distributed.isend(tensor, rank, tag=tag) for rank in world.ranks)
        world.hear()

    def after() -> None:
        for work in sent:
            work.wait()
        sent.clear()

    return Way(send, before, after)


def _here() -> Worker:
    return Worker.here


def _torchrl_rpc_here() -> torchrl.Collector:
    return Worker.here.collectors[_TORCHRL_RPC]


@contextmanager
def _start(workers: int, over_rpc: bool) -> Iterator[World]:
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(1, workers + 1):
                mine, theirs = context.Pipe()
                arguments = (rank, workers + 1, folder, over_rpc, theirs)
                processes.append(context.Process(target=_work, args=arguments, daemon=True))
                processes[-1].start()
                theirs.close()
                pipes.append(mine)
            _join_world(0, workers + 1, folder, over_rpc)
            yield World(pipes, over_rpc)
        finally:
            if distributed.is_initialized():
                if over_rpc:
                    rpc.shutdown(graceful=False)
                distributed.destroy_process_group()
            for process in processes:
                process.kill()
                process.join()


def _work(rank: int, world_size: int, folder: str, over_rpc: bool, pipe: Any) -> None:
    threading.Thread(target=_die_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    Worker.here = worker = Worker(rank)
    _join_world(rank, world_size, folder, over_rpc)
    while True:
        method, arguments = pipe.recv()
        try:
            pipe.send((getattr(worker, method)(*arguments), None))
        except Exception:
            pipe.send((None, traceback.format_exc()))


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _answer(pipe: Any) -> Any:
    if not pipe.poll(_TIMEOUT):
        raise TimeoutError("a worker does not answer")
    value, error = pipe.recv()
    if error is not None:
        raise RuntimeError(f"in a worker:\n{error}")
    return value


def _join_world(rank: int, world_size: int, folder: str, over_rpc: bool) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/gloo",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=_TIMEOUT),
    )
    if not over_rpc:
        return
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{folder}/rpc", rpc_timeout=_TIMEOUT
    )
    rpc.init_rpc(_name(rank), rank=rank, world_size=world_size, rpc_backend_options=options)


def _name(rank: int) -> str:
    return f"worker{rank}" if rank else "trainer"


if __name__ == "__main__":
    main()
