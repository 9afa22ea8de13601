"""Measures the time between the commits of two workers, with ``two_phase::`` and without.

    python docs/benchmarks/two_phase.py | python docs/benchmarks/page.py --record two_phase

Takes about five minutes. Workers are processes on this machine that only receive. In rows with a
late worker, the last worker is busy for this time after each version, as with a longer step. The
spread is the time from the first worker's commit to the last one's, by a shared clock. The two ways
alternate, with five sends at a time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import pickle
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import ray
import torch

from sync_core import Address, Receiver, Sender, SenderLostError

_TIMEOUT = 120.0
WAYS = ("", "two_phase::")
# The number of sends that are not counted, and of sends in one turn.
WARM_UP, _TURN = 5, 5


def weights(mb: float) -> dict[str, torch.Tensor]:
    """Return a model of some MB."""
    return {"w": torch.zeros(int(mb * 1e6) // 4)}


def work(pickled: bytes, cluster: str, mb: float, late: float, pipe: Connection) -> None:
    """Receive until the sender is gone; return the time of each commit by version."""
    torch.set_num_threads(1)
    if cluster:
        ray.init(cluster, log_to_driver=False)
    address: Address = pickle.loads(pickled)
    moments: dict[int, float] = {}

    def note(version: int) -> None:
        moments[version] = time.perf_counter()

    with Receiver(address, weights(mb), on_commit=note) as receiver:
        pipe.send(None)
        with suppress(SenderLostError):
            while receiver.receive():
                # Stands for any work, such as a longer step.
                time.sleep(late)
    pipe.send(moments)


class Fleet:
    """A sender, and workers in processes.

    Args:
        scheme: of the sender.
        workers: the number of workers.
        mb: the size of the model, in MB.
        late: how long the last worker is busy between versions, in seconds.
    """

    def __init__(self, scheme: str, workers: int, mb: float, late: float) -> None:
        context = multiprocessing.get_context("forkserver")
        self.model = weights(mb)
        self.sender = Sender(scheme, self.model, num_workers=workers, timeout=_TIMEOUT)
        self.seconds: list[float] = []
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        for worker_id in range(workers):
            here, there = context.Pipe()
            process = context.Process(
                target=work,
                args=(
                    pickle.dumps(self.sender.address(worker_id)),
                    ray.get_runtime_context().gcs_address if ray.is_initialized() else "",
                    mb,
                    late if worker_id == workers - 1 else 0.0,
                    there,
                ),
                daemon=True,
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        for pipe in self._pipes:
            pipe.recv()

    def send(self) -> None:
        """Send a version."""
        self.model["w"].add_(1)
        self.seconds.append(self.sender.send().seconds)

    def spreads(self) -> list[float]:
        """Stop the workers, and return the spread of each version in seconds."""
        self.sender.close()
        moments = defaultdict(list)
        for pipe in self._pipes:
            for version, moment in pipe.recv().items():
                moments[version].append(moment)
        return [max(found) - min(found) for _, found in sorted(moments.items())]

    def close(self) -> None:
        """Close the sender, and stop the workers."""
        self.sender.close()
        for process in self._processes:
            process.join(10)
            process.kill()
            process.join()


def measure(inner: str, workers: int, mb: float, late: float, sends: int) -> None:
    """Print the rows of both ways."""
    with ExitStack() as ends:
        fleets = []
        for way in WAYS:
            fleets.append(Fleet(f"{way}{inner}", workers, mb, late))
            ends.callback(fleets[-1].close)
        for _ in range(0, sends + WARM_UP, _TURN):
            for fleet in fleets:
                for _ in range(_TURN):
                    fleet.send()
        for way, fleet in zip(WAYS, fleets, strict=True):
            spreads = fleet.spreads()[WARM_UP:]
            figures = (statistics.median(spreads), statistics.median(fleet.seconds[WARM_UP:]))
            cells = [f"{way}{inner}", f"{mb:g}", str(workers), f"{late * 1e3:g}"]
            cells += [f"{seconds * 1e3:.2f}" for seconds in figures]
            print("|", " | ".join(cells), "|", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="*", default=[2, 4, 8, 16])
    parser.add_argument("--schemes", nargs="*", default=["shm", "dist", "ray"])
    parser.add_argument("--mb", type=float, nargs="*", default=[0.004, 40.0])
    parser.add_argument("--sends", type=int, default=20)
    given = parser.parse_args(arguments)
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        ["torch", "sync_core", "sync_plugin_std", "sync_plugin_dist", "sync_plugin_scale"]
    )
    if "ray" in given.schemes:
        ray.init(include_dashboard=False, log_to_driver=False)
    print("| scheme | MB | workers | one is late, ms | spread of commits, ms | send, ms |")
    print("|---|---|---|---|---|---|")
    for mb in given.mb:
        for late in (0.0, 0.02) if mb == given.mb[0] else (0.0,):
            for inner in given.schemes:
                for workers in given.workers:
                    measure(inner, workers, mb, late, given.sends)


if __name__ == "__main__":
    main()
