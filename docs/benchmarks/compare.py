"""Compares ways to update two workers: this project's schemes, and common scripts.

    python docs/benchmarks/compare.py | python docs/benchmarks/page.py --record compare
    python docs/benchmarks/compare.py --death | python docs/benchmarks/page.py --record death

A trainer changes every element of a model, and two processes on the same machine load it. ``gloo``:
one broadcast per tensor, into the workers' models. ``torch.save``, ``safetensors``, ``DCP``
(torch.distributed.checkpoint): the trainer writes files and notifies the workers over a pipe, and
they load the files into their models. ``ray.put``: a state_dict in Ray's object store, which two
actors load. The others are schemes: ``ray`` calls such actors, and ``store`` and ``file`` write to
the same disk. Each worker compares every element after the clock has stopped.

The ways alternate; each turn begins with new processes, whose first update is not counted. Prints
medians of the seconds from the start of the transfer until both workers have the weights in their
models, the megabytes that each worker read, and the peaks of memory beyond the model, in megabytes.
Memory includes the code that a way loads, and shared memory in each process that maps it.

With ``--death``, a worker is killed by SIGKILL in the middle of a transfer of 270 MB, after half of
the time that the transfer before took. The table shows what the trainer's call did within 30 s,
whether the other worker had the new weights by then, and whether another update reached it
afterwards.

vLLM's own engines for weight transfer are not measured, since the versions tried need CUDA.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import distributed, nn
from torch.distributed import checkpoint

from sync_core import Receiver, Sender

_SECONDS = 30.0
_SIZES = {"10 MB": 8, "270 MB": 4, "1 GB": 3}
_FORK = multiprocessing.get_context("fork")


class Model(nn.Module):
    """A model of one of the sizes; the tensors of 270 MB are those of SmolLM2-135M, in bfloat16.

    Args:
        size: the name of the size.
    """

    def __init__(self, size: str) -> None:
        super().__init__()
        dtype, shapes = torch.float32, [(512, 512)] * 10
        if size == "1 GB":
            shapes = [(1024, 1024)] * 238
        if size == "270 MB":
            dtype, layer = torch.bfloat16, [(576, 576)] * 2 + [(192, 576)] * 2
            shapes = [(49152, 576), *([*layer, *[(1536, 576)] * 3, (1, 576), (1, 576)] * 30)]
        self.tensors = nn.ParameterList(torch.zeros(shape, dtype=dtype) for shape in shapes)

    def mark(self, version: int) -> None:
        """Set every element to a value for this version."""
        with torch.no_grad():
            for tensor in self.tensors:
                tensor.fill_(version)

    def has(self, version: int) -> float:
        """Return the share of the tensors whose elements all have the value for this version."""
        whole = [bool((tensor == version).all()) for tensor in self.tensors]
        return sum(whole) / len(whole)


class Way:
    """One way to update workers; the trainer and each worker have an object of it.

    Args:
        name: the name of the way.
        folder: an empty directory on a disk.
    """

    #: Whether workers load after a signal.
    told = True
    #: The deadline of a send, for ways that have one.
    seconds = 120.0
    #: The result of a call of `send`.
    did = "returns"

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder

    def start(self, model: Model) -> list[Any]:
        """Start in the trainer, and return a picklable argument for each worker."""
        del model
        return [1, 2]

    def join(self, model: Model, given: Any) -> None:
        """Start in a worker."""

    def send(self, model: Model) -> int:
        """Send the model; return the bytes that each worker reads."""
        raise NotImplementedError

    def load(self, model: Model) -> None:
        """Load the sent weights into a worker's model."""
        raise NotImplementedError

    def _send_by(self, sender: Sender) -> int:
        report = sender.send()
        self.did = "returns; the report names the worker" if report.dropped else "returns"
        return max((result.nbytes for result in report.workers.values()), default=0)


class Broadcast(Way):
    """Broadcasts each tensor by gloo."""

    told = False

    def start(self, model: Model) -> list[Any]:
        del model
        threading.Thread(target=self._join, args=(0,), daemon=True).start()
        return [1, 2]

    def join(self, model: Model, given: Any) -> None:
        del model
        self._join(given)

    def _join(self, rank: int) -> None:
        store = distributed.FileStore(str(self.folder / "store"), 3)
        wait = timedelta(seconds=self.seconds)
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=wait)

    def send(self, model: Model) -> int:
        while not distributed.is_initialized():
            time.sleep(0.01)
        self.load(model)
        return sum(tensor.nbytes for tensor in model.tensors)

    def load(self, model: Model) -> None:
        for tensor in model.tensors:
            distributed.broadcast(tensor.data, 0)


class Files(Way):
    """Files that a library writes and reads."""

    def send(self, model: Model) -> int:
        state = model.state_dict()
        if self.name == "torch.save":
            torch.save(state, self.folder / "weights")
        elif self.name == "safetensors":
            save_file(state, self.folder / "weights")
        else:
            checkpoint.save(state, checkpoint_id=self.folder, no_dist=True)
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())

    def load(self, model: Model) -> None:
        if self.name == "torch.save":
            model.load_state_dict(torch.load(self.folder / "weights"))
        elif self.name == "safetensors":
            model.load_state_dict(load_file(self.folder / "weights"))
        else:
            checkpoint.load(model.state_dict(), checkpoint_id=self.folder, no_dist=True)


class Scheme(Way):
    """A scheme whose receivers wait for versions."""

    told = False

    def start(self, model: Model) -> list[Any]:
        options: dict[str, Any] = {"timeout": self.seconds, "on_failure": "drop"}
        if self.name == "file":
            options["directory"] = str(self.folder)
        if self.name == "store":
            options["url"] = str(self.folder)
        self.sender = Sender(self.name, model, num_workers=2, **options)
        return [self.sender.address(0), self.sender.address(1)]

    def join(self, model: Model, given: Any) -> None:
        self.receiver = Receiver(given, model)

    def send(self, model: Model) -> int:
        del model
        return self._send_by(self.sender)

    def load(self, model: Model) -> None:
        del model
        while self.receiver.receive(self.seconds) is None:
            pass


class Actors(Way):
    """Two Ray actors instead of worker processes."""

    def start(self, model: Model) -> list[Any]:
        import ray

        # Ray's files are in another folder, since the path of a socket must be short.
        ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        self.actors = [ray.remote(Actor).remote(self.folder.name) for _ in range(2)]
        ray.get([actor.base.remote() for actor in self.actors])
        if self.name == "ray":
            terms: dict[str, Any] = {"timeout": self.seconds, "on_failure": "drop"}
            self.sender = Sender("ray", model, workers=self.actors, model_id="model", **terms)
        return []

    def send(self, model: Model) -> int:
        import ray

        if self.name == "ray":
            return self._send_by(self.sender)
        # The actors get the object itself, because the reference is a direct argument.
        put = ray.put(model.state_dict())
        ray.get([actor.load.remote(put) for actor in self.actors], timeout=self.seconds)
        return sum(tensor.nbytes for tensor in model.tensors)


class Actor:
    """Holds a model in a Ray actor.

    Args:
        size: the size of the model.
    """

    def __init__(self, size: str) -> None:
        self.model = Model(size.replace("_", " "))
        self._base = memory("VmRSS")
        reset_peak()

    def base(self) -> int:
        """Return the process id."""
        return os.getpid()

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Copy tensors into the model."""
        self.model.load_state_dict(state)

    def has(self, version: int) -> float:
        """Return the share of the tensors that have this version."""
        return self.model.has(version)

    def peak(self) -> int:
        """Return the peak of memory beyond the model."""
        return memory("VmHWM") - self._base


_WAYS: dict[str, type[Way]] = {
    "shm": Scheme,
    "dist": Scheme,
    "ray": Actors,
    "store": Scheme,
    "file": Scheme,
    "gloo": Broadcast,
    "torch.save": Files,
    "safetensors": Files,
    "DCP": Files,
    "ray.put": Actors,
}


def memory(field: str) -> int:
    """Return a memory figure of this process, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field):
            return 1024 * int(line.split()[1])
    raise LookupError(field)


def reset_peak() -> None:
    """Reset the peak `VmHWM`."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def work(way: Way, size: str, pipe: Connection) -> None:
    """Load the model whenever the trainer requests it."""
    torch.set_num_threads(1)
    model = Model(size)
    model.mark(0)
    base = memory("VmRSS")
    reset_peak()
    way.join(model, pipe.recv())
    for word, version in iter(pipe.recv, None):
        if word == "load":
            try:
                way.load(model)
            except Exception as error:
                pipe.send(repr(error))
            else:
                pipe.send("loaded")
        elif word == "has":
            pipe.send(model.has(version))
        else:
            pipe.send(memory("VmHWM") - base)


class Trainer:
    """The trainer of one way, with its workers.

    Args:
        way: the way.
        size: the size of the model.
    """

    def __init__(self, way: Way, size: str) -> None:
        self.way, self.version = way, 0
        self.pipes: list[Connection] = []
        self.pids: list[int] = []
        if not isinstance(way, Actors):
            for _ in range(2):
                mine, theirs = _FORK.Pipe()
                process = _FORK.Process(target=work, args=(way, size, theirs), daemon=True)
                process.start()
                theirs.close()
                self.pipes.append(mine)
                self.pids.append(int(process.pid or 0))
        torch.set_num_threads(1)
        self.model = Model(size)
        self.model.mark(0)
        given = way.start(self.model)
        for pipe, each in zip(self.pipes, given, strict=False):
            pipe.send(each)
        if isinstance(way, Actors):
            import ray

            self.pids = ray.get([actor.base.remote() for actor in way.actors])
        self.base = memory("VmRSS")
        reset_peak()

    def update(self) -> tuple[float, int]:
        """Change and send the model; return the seconds until all workers have it, and bytes."""
        self.version += 1
        self.model.mark(self.version)
        begin = time.perf_counter()
        if not self.way.told:
            self._say("load")
        nbytes = self.way.send(self.model)
        if self.way.told:
            self._say("load")
        for pipe in self.pipes:
            if not pipe.poll(self.way.seconds):
                raise TimeoutError("a worker does not answer")
            if (answer := pipe.recv()) != "loaded":
                raise RuntimeError(answer)
        return time.perf_counter() - begin, nbytes

    def ask(self, word: str, workers: Sequence[int] = (0, 1)) -> list[Any]:
        """Return the answers of live workers."""
        if isinstance(self.way, Actors):
            import ray

            chosen = [self.way.actors[i] for i in workers]
            if word == "has":
                return list(
                    ray.get([actor.has.remote(self.version) for actor in chosen], timeout=5)
                )
            return list(ray.get([actor.peak.remote() for actor in chosen], timeout=5))
        self._say(word, workers)
        return [self.pipes[i].recv() if self.pipes[i].poll(_SECONDS + 5) else None for i in workers]

    def _say(self, word: str, workers: Sequence[int] = (0, 1)) -> None:
        for i in workers:
            if i < len(self.pipes):
                with suppress(OSError):
                    self.pipes[i].send((word, self.version))


def measure(way: Way, size: str, rounds: int, results: Connection) -> None:
    """Send the results of several updates."""
    os.setsid()
    trainer = Trainer(way, size)
    found = [trainer.update() for _ in range(rounds + 1)][1:]
    assert trainer.ask("has") == [1, 1], f"{way.name}: the workers have other weights"
    peak = memory("VmHWM") - trainer.base
    results.send(([s for s, _ in found], found[-1][1], peak, max(trainer.ask("peak"))))


def kill(way: Way, size: str, rounds: int, results: Connection) -> None:
    """Send the result of an update in which a worker is killed."""
    os.setsid()
    way.seconds = _SECONDS
    trainer = Trainer(way, size)
    seconds = [trainer.update()[0] for _ in range(rounds)][-1]
    threading.Timer(seconds / 2, os.kill, (trainer.pids[0], signal.SIGKILL)).start()
    results.send("hangs")
    begin = time.perf_counter()
    told = _outcome(trainer, begin)
    results.send(told)
    time.sleep(1)  # data on its way may still arrive
    results.send(_share(trainer))
    told = _outcome(trainer, time.perf_counter())
    share = _share(trainer)
    results.send(share if share == "yes" else f"{share}; {told}")


def _outcome(trainer: Trainer, begin: float) -> str:
    way, told = trainer.way, trainer.way.told
    trainer.version += 1
    trainer.model.mark(trainer.version)
    if not told:
        trainer._say("load")
    try:
        way.send(trainer.model)
        said = way.did
    except Exception as error:
        message = re.sub(r"^\[.*?\] ", "", str(error).splitlines()[0])
        said = f"raises {type(error).__name__}: {message:.40}"
    seconds = time.perf_counter() - begin
    if told:
        trainer._say("load")
    return f"{said} ({seconds:.1f} s)"


def _share(trainer: Trainer) -> str:
    with suppress(Exception):
        (share,) = trainer.ask("has", [1])
        # The answer to an update comes first.
        while isinstance(share, str):
            share = trainer.pipes[1].recv() if trainer.pipes[1].poll(10) else None
        if share is not None:
            return "yes" if share == 1 else "no" if not share else f"{share:.0%} of its tensors"
    return "no answer"


@contextmanager
def started(target: Any, name: str, size: str, rounds: int) -> Iterator[Connection]:
    """Run a trainer in a group of processes that ends with the block."""
    with ExitStack() as stack:
        # The actors read the size from the folder's name.
        parent = Path(
            stack.enter_context(tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")))
        )
        folder = parent / size.replace(" ", "_")
        folder.mkdir()
        mine, theirs = _FORK.Pipe(duplex=False)
        process = _FORK.Process(
            target=target, args=(_WAYS[name](name, folder), size, rounds, theirs)
        )
        process.start()
        theirs.close()
        try:
            yield mine
        finally:
            if name in ("ray", "ray.put"):
                process.join(5)  # it ends its cluster
            with suppress(ProcessLookupError):
                os.killpg(int(process.pid or 0), signal.SIGKILL)
            process.join()


def compare(ways: Sequence[str], sizes: Sequence[str], turns: int) -> None:
    """Print the table of seconds, bytes and memory."""
    print("| size | way | seconds | MB | trainer's memory | worker's memory |")
    print("|---|---|--:|--:|--:|--:|")
    for size in sizes:
        found: dict[str, list[Any]] = {name: [] for name in ways}
        for turn in range(turns):
            for name in ways if turn % 2 == 0 else reversed(ways):
                with started(measure, name, size, _SIZES[size]) as results:
                    if results.poll(10 * _SECONDS):
                        with suppress(EOFError):
                            found[name].append(results.recv())
        for name, runs in found.items():
            if not runs:
                print(f"{size}: no result of {name}", file=sys.stderr)
                continue
            seconds = median(s for run in runs for s in run[0])
            trainers, workers = (max(run[i] for run in runs) / 1e6 for i in (2, 3))
            print(
                f"| {size} | {name} | {seconds:.3f} | {runs[0][1] / 1e6:.1f} | {trainers:.0f} "
                f"| {workers:.0f} |",
                flush=True,
            )


def deaths(ways: Sequence[str]) -> None:
    """Print the results of transfers in which a worker is killed."""
    print("| way | the trainer's call | the other worker has the version | and the next one |")
    print("|---|---|---|---|")
    for name in ways:
        told = []
        with started(kill, name, "270 MB", 2) as results, suppress(EOFError):
            while len(told) < 4 and results.poll(60 if not told else _SECONDS + 12):
                told.append(str(results.recv()))
        outcome = told[1] if len(told) > 1 else "hangs" if told else "did not start"
        rest = [*told[2:], *["no: the call hangs"] * 2][:2] if told else ["", ""]
        print(f"| {name} | {outcome} | {rest[0]} | {rest[1]} |", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", nargs="+", choices=_WAYS, default=list(_WAYS))
    parser.add_argument("--sizes", nargs="+", choices=_SIZES, default=list(_SIZES))
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--death", action="store_true", help="kill a worker")
    arguments = parser.parse_args()
    # DCP warns about a single process, and about an existing checkpoint.
    warnings.filterwarnings("ignore", module="torch.distributed.checkpoint")
    if arguments.death:
        deaths(arguments.ways)
    else:
        compare(arguments.ways, arguments.sizes, arguments.turns)


if __name__ == "__main__":
    main()
