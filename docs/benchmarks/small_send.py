"""Measures updates of a small model, compared to TorchRL's and to a pipe for each worker.

    python docs/benchmarks/small_send.py | python docs/benchmarks/page.py --record small

In every way the same number of workers only wait. ``pipes`` writes a byte to each worker and reads
one back, the least that waking and answering takes. Rounds follow each other directly, or after a
pause in which other programs replace the contents of the processor's caches. Prints medians in
milliseconds, and the trainer's processor time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from statistics import median
from threading import Thread
from typing import Any

import torch
import torchrl_send

from sync_core import Receiver, Sender, SenderLostError
from sync_tools.bench import make_model, mark

_MODEL = "small"
_WARM_UP = 20
_TURNS = 4
_THEIRS = "TorchRL (shared)"
_SCHEMES = ("thread", "shm", "mp")

Round = Callable[[], object]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--pauses", nargs="+", type=float, default=[0.0, 0.005], metavar="SECONDS")
    arguments = parser.parse_args()
    print("| workers | pause | way | ms | processor time | of TorchRL |")
    print("|--:|--:|---|--:|--:|--:|")
    for workers in arguments.workers:
        for pause in arguments.pauses:
            _compare(workers, pause, arguments.rounds)


def _compare(workers: int, pause: float, rounds: int) -> None:
    seconds: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    with ExitStack() as stack:
        ways = {"pipes": stack.enter_context(_pipes(workers))}
        ways |= {name: stack.enter_context(_sender(name, workers)) for name in _SCHEMES}
        # Alternately, since the processor's speed changes during a run.
        for _ in range(_TURNS):
            for name, way in ways.items():
                _measure(way, pause, rounds, seconds.setdefault(name, []), cpu.setdefault(name, []))
            seconds.setdefault(_THEIRS, []).extend(
                torchrl_send.measure("shared", _MODEL, workers=workers, rounds=rounds, pause=pause)
            )
    theirs = median(seconds[_THEIRS])
    for name, taken in seconds.items():
        used = f"{1e3 * median(cpu[name]):.2f}" if name in cpu else ""
        print(
            f"| {workers} | {1e3 * pause:g} ms | {name} | {1e3 * median(taken):.2f} | {used} "
            f"| {median(taken) / theirs:.2f} |",
            flush=True,
        )


def _measure(
    way: Round, pause: float, rounds: int, seconds: list[float], used: list[float]
) -> None:
    """Append the seconds of each round, and this process's processor time."""
    for number in range(_WARM_UP + rounds):
        time.sleep(pause)
        cpu, begin = time.process_time(), time.perf_counter()
        way()
        end = time.perf_counter()
        if number >= _WARM_UP:
            seconds.append(end - begin)
            used.append(time.process_time() - cpu)


@contextmanager
def _sender(scheme: str, workers: int) -> Iterator[Round]:
    # With threads, the workers' time counts as the trainer's.
    context: Any = multiprocessing.get_context("spawn")
    start = Thread if scheme == "thread" else context.Process
    model = make_model(_MODEL)
    mark(model, 1)
    started = []
    try:
        with Sender(scheme, model, num_workers=workers) as sender:
            for worker_id in range(workers):
                started.append(
                    start(target=_receive, args=(sender.address(worker_id),), daemon=True)
                )
                started[-1].start()
            # Workers that load torch would disturb the ways measured before.
            sender.send()
            yield sender.send
    finally:
        for worker in started:
            worker.join(10)


def _receive(address: Any) -> None:
    torch.set_num_threads(1)
    with Receiver(address, make_model(_MODEL)) as receiver, suppress(SenderLostError):
        while True:
            receiver.receive(60.0)


@contextmanager
def _pipes(workers: int) -> Iterator[Round]:
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for _ in range(workers):
        mine, theirs = context.Pipe()
        processes.append(context.Process(target=_echo, args=(theirs,), daemon=True))
        processes[-1].start()
        theirs.close()
        mine.recv_bytes()
        pipes.append(mine)

    def wake_all() -> None:
        for pipe in pipes:
            os.write(pipe.fileno(), b"x")
        for pipe in pipes:
            os.read(pipe.fileno(), 1)

    try:
        yield wake_all
    finally:
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.close()
            process.join(10)


def _echo(pipe: Any) -> None:
    pipe.send_bytes(b"ready")
    while os.read(pipe.fileno(), 1):
        os.write(pipe.fileno(), b"x")


if __name__ == "__main__":
    main()
