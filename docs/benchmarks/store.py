r"""Compares a run in a store with a copied checkpoint, for several readers over one link.

    python docs/benchmarks/store.py | python docs/benchmarks/page.py --record store

The tensors are those of SmolLM2-135M in bfloat16 (269 MB). Between versions, 0.7 % of the elements
change. A trainer publishes to a directory, which a web server in its process serves; readers are
processes. ``whole``: the scheme `store`. ``increments``: the same with ``anchor_every=``, without
counting the anchor. ``copy``: the trainer writes one file by safetensors, and each reader downloads
it to a file, loads it, and copies it into its model without any check, as a script with ``aws s3
sync`` does. All processes are in a network namespace whose loopback has the rate of the link, which
all readers share. This needs root; without it, only the unlimited link is measured. Each reader
compares every element at the end.

Prints a table: medians of seconds from the call of `send` to the last reader's commit, the used
share of the link's rate, megabytes and requests of a reader per version, objects that the trainer
wrote, and the peaks of memory in copies of the model. The default takes about four minutes; 16
readers need 14 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from http.client import HTTPConnection
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sync_core import Receiver, Sender
from sync_plugin_store.web import RunServer

_GBITS = {"0.2 Gb/s": 0.2, "0.6 Gb/s": 0.6, "1 Gb/s": 1.0, "5 Gb/s": 5.0, "unlimited": 0.0}
_WAYS = ("copy", "whole", "increments")
_COLUMNS = (
    "link | readers | way | seconds | of the link | MB | requests | objects written "
    "| trainer's memory | reader's memory"
)
_CHANGED = 0.007


@dataclass(frozen=True)
class Figures:
    """The medians of one way.

    Args:
        seconds: from the call of `send` to the last commit.
        nbytes: bytes sent to a reader per version, without HTTP headers.
        requests: requests of a reader per version, without requests for an unchanged head.
        written: objects that the trainer wrote per version.
        trainer_memory: the trainer's peak beyond its memory before the first send, in copies of the
            model.
        reader_memory: the peak of a reader.
    """

    seconds: float
    nbytes: float
    requests: float
    written: float
    trainer_memory: float
    reader_memory: float


def main() -> None:
    """Measure each way over each link in its own process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--links", nargs="+", choices=_GBITS, default=["1 Gb/s", "unlimited"])
    parser.add_argument("--readers", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--versions", type=int, default=3, help="of each way, after the first (3)")
    parser.add_argument("--measure", choices=_WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure is not None:
        found = measure(arguments.measure, arguments.readers[0], arguments.versions)
        sys.stdout.write(json.dumps(asdict(found)))
        return
    print(f"| {_COLUMNS} |")
    print("|---" + "|--:" * _COLUMNS.count("|") + "|")
    for link in arguments.links:
        for readers in arguments.readers:
            for way in _WAYS:
                figures = measured_at(link, way, readers, arguments.versions)
                if figures is not None:
                    print(row(link, readers, way, figures), flush=True)


def row(link: str, readers: int, way: str, found: Figures) -> str:
    """Return a row of the table."""
    rate = _GBITS[link] * 1e9 / 8
    cells = (
        link,
        f"{readers}",
        way,
        f"{found.seconds:.2f}",
        f"{readers * found.nbytes / rate / found.seconds:.0%}" if rate else "",
        f"{found.nbytes / 1e6:.2f}",
        f"{found.requests:.0f}",
        f"{found.written:.0f}",
        f"{found.trainer_memory:.2f}",
        f"{found.reader_memory:.2f}",
    )
    return f"| {' | '.join(cells)} |"


def measured_at(link: str, way: str, readers: int, versions: int) -> Figures | None:
    """Return the figures at a rate of the loopback; None if it cannot be limited."""
    command = [sys.executable, __file__, "--measure", way]
    command += ["--readers", str(readers), "--versions", str(versions)]
    if rate := _GBITS[link]:
        limit = f"tc qdisc add dev lo root tbf rate {rate * 1000:g}mbit burst 1mb latency 400ms"
        script = f'ip link set lo up && {limit} && exec "$@"'
        command = ["unshare", "--net", "sh", "-c", script, "sh", *command]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if result.returncode:
        print(f"{link}, {way}: not measured; can this user limit a link?", file=sys.stderr)
        return None
    return Figures(**json.loads(result.stdout))


def weights() -> dict[str, Tensor]:
    """Return tensors with the shapes of SmolLM2-135M."""
    shapes: dict[str, tuple[int, ...]] = {"embed": (49152, 576), "norm": (576,)}
    for layer in range(30):
        for name, shape in {
            "q": (576, 576),
            "k": (192, 576),
            "v": (192, 576),
            "o": (576, 576),
            "gate": (1536, 576),
            "up": (1536, 576),
            "down": (576, 1536),
            "norm1": (576,),
            "norm2": (576,),
        }.items():
            shapes[f"layers.{layer}.{name}"] = shape
    torch.manual_seed(0)
    return {name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()}


def train(model: dict[str, Tensor]) -> None:
    """Change some elements of each tensor."""
    for tensor in model.values():
        positions = torch.randint(0, tensor.numel(), (max(1, round(_CHANGED * tensor.numel())),))
        tensor.view(-1)[positions] += 1


class Server(RunServer):
    """A web server that counts requests and bytes."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.sent = 0
        self.answers = 0
        self.counting = threading.Lock()
        handler: Any = self.RequestHandlerClass
        server = self

        class Counting(handler):  # type: ignore[misc]
            def _begin(self, status: int, nbytes: int, headers: Any = None) -> None:
                with server.counting:
                    server.sent += nbytes
                    server.answers += status != 304
                super()._begin(status, nbytes, headers)

        self.RequestHandlerClass = Counting

    @contextmanager
    def running(self) -> Iterator[None]:
        """For ``with``: serve on threads."""
        thread = threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.shutdown()
            thread.join()


class Memory:
    """Measures this process's peak of memory beyond its current memory; Linux only."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        self._before = self._peak()

    def peak(self) -> int:
        """Return the peak since then, in bytes."""
        return self._peak() - self._before

    @staticmethod
    def _peak() -> int:
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return int(status.partition("VmHWM:")[2].split()[0]) << 10


def measure(way: str, readers: int, versions: int) -> Figures:
    """Return the medians of one way, without the first version."""
    model = weights()
    nbytes = sum(tensor.nbytes for tensor in model.values())
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = {"anchor_every": 1000} if way == "increments" else {}
        with (
            Server(folder) as server,
            server.running(),
            Sender("store", model, url=name, poll=0.05, **options) as sender,
        ):
            address = sender.address()
            address = replace(address, endpoint=replace(address.endpoint, urls=[server.url]))
            # The web server of runs serves no files with other names.
            (folder / "objects").mkdir(exist_ok=True)
            url = f"{server.url}/objects/{'0' * 64}"
            pipes, processes = [], []
            for _ in range(readers):
                ours, theirs = context.Pipe()
                target = copy if way == "copy" else read
                process = context.Process(target=target, args=(theirs,), daemon=True)
                process.start()
                ours.send((url if way == "copy" else address, versions + 1))
                pipes.append(ours)
                processes.append(process)
            for pipe in pipes:
                assert pipe.recv() == "ready"
            memory, found = Memory(), []
            for _ in range(versions + 1):
                train(model)
                found.append(send(way, model, sender, server, pipes))
            peak = memory.peak()
            path = folder / "expected"
            save_file(model, path)
            reader_peaks = []
            for pipe in pipes:
                pipe.send(str(path))
                same, reader_peak = pipe.recv()
                assert same, "other bits have arrived"
                reader_peaks.append(reader_peak)
            for process in processes:
                process.join()
    # The first version is an anchor or opens connections, so it is not counted.
    medians = map(median, zip(*found[1:], strict=True))
    return Figures(*medians, peak / nbytes, max(reader_peaks) / nbytes)


def send(
    way: str,
    model: dict[str, Tensor],
    sender: Sender,
    server: Server,
    pipes: list[Connection],
) -> tuple[float, float, float, float]:
    """Publish a version; return seconds, bytes and requests of a reader, and objects written."""
    sent, answers, before = server.sent, server.answers, _files(server.directory)
    began = time.monotonic()
    if way == "copy":
        part = server.directory / "part"
        save_file(model, part)
        part.replace(server.directory / "objects" / ("0" * 64))
        for pipe in pipes:
            pipe.send("new")
        written = 1
    else:
        sender.send()
        # HEAD is replaced, not added.
        written = len(_files(server.directory) - before) + 1
    ended = max(pipe.recv() for pipe in pipes)
    readers = len(pipes)
    return (
        ended - began,
        (server.sent - sent) / readers,
        (server.answers - answers) / readers,
        written,
    )


def _files(directory: Path) -> set[Path]:
    return {path for path in directory.rglob("*") if path.is_file()}


def read(connection: Connection) -> None:
    """Receive versions, and report the time of each commit."""
    torch.set_num_threads(1)
    address, versions = connection.recv()
    model = {name: torch.zeros_like(tensor) for name, tensor in weights().items()}
    memory = Memory()
    with Receiver(address, model, timeout=600.0) as receiver:
        connection.send("ready")
        for version in range(1, versions + 1):
            assert receiver.receive() == version
            connection.send(time.monotonic())
        finish(connection, model, memory)


def copy(connection: Connection) -> None:
    """Download a file, load it and copy it into a model, and report the time of each."""
    torch.set_num_threads(1)
    url, versions = connection.recv()
    host, name = url.removeprefix("http://").split("/", 1)
    model = {key: torch.zeros_like(tensor) for key, tensor in weights().items()}
    memory = Memory()
    connection.send("ready")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        for _ in range(versions):
            connection.recv()
            link = HTTPConnection(host, timeout=600)
            link.request("GET", f"/{name}")
            with link.getresponse() as answer, path.open("wb") as file:
                shutil.copyfileobj(answer, file, 1 << 20)
            link.close()
            for key, tensor in load_file(path).items():
                model[key].copy_(tensor)
            connection.send(time.monotonic())
    finish(connection, model, memory)


def finish(connection: Connection, model: dict[str, Tensor], memory: Memory) -> None:
    """Report whether every element equals the trainer's, and the peak of memory."""
    peak = memory.peak()
    expected = load_file(connection.recv())
    same = all(torch.equal(model[name], tensor) for name, tensor in expected.items())
    connection.send((same, peak))


if __name__ == "__main__":
    main()
