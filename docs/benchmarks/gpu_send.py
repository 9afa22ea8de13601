"""Measures sends of a model on a GPU to two workers on the same GPU, over shared memory.

Needs a GPU: ``python docs/benchmarks/gpu_send.py``. The trainer's and the workers' models are on
the CPU or the GPU. Prints milliseconds.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn

from sync_core import Address, Receiver, Sender
from sync_plugin_std.workers import choose_group

# Numbers of tensors, and the elements of each tensor.
SIZES = {
    "10 tensors, 40 KB": (10, 1000),
    "2,000 tensors, 10 MB": (2000, 1250),
    "5,000 tensors, 50 MB": (5000, 2500),
    "100 tensors, 419 MB": (100, 1 << 20),
}
PLACES = [("cpu", "cpu"), ("cuda", "cpu"), ("cuda", "cuda")]
SENDS = 9


def make(size: str, device: str) -> nn.Module:
    """Return a model of a size on a device."""
    count, elements = SIZES[size]
    return nn.ParameterList(torch.zeros(elements, device=device) for _ in range(count))


class Worker:
    """A worker that receives.

    Args:
        worker_id: its number.
    """

    def __init__(self, worker_id: int) -> None:
        self.worker_id = worker_id

    def connect(self, address: Address, size: str, device: str) -> None:
        """Make a model and its receiver."""
        self.receiver = Receiver(address, make(size, device))

    def receive(self, count: int) -> None:
        """Receive a number of versions."""
        for _ in range(count):
            self.receiver.receive(60)

    def close(self) -> None:
        """Close the receiver."""
        self.receiver.close()


def measure(size: str, trainer: str, worker: str) -> tuple[float, float]:
    """Return the median milliseconds of a send, and of its part until the trainer may continue."""
    group = choose_group(["shm"], None)(Worker, 2, timeout=120.0)
    try:
        model = make(size, trainer)
        with Sender("shm", model, num_workers=2) as sender:
            for i in group.worker_ids:
                group.call(i, Worker.connect, sender.address(i), size, worker).result(120)
            calls = [group.call(i, Worker.receive, SENDS) for i in group.worker_ids]
            took = []
            for step in range(SENDS):
                for parameter in model.parameters():
                    nn.init.constant_(parameter, step)
                began = time.perf_counter()
                pending = sender.send_async()
                packed = time.perf_counter()
                pending.wait(60)
                took.append((time.perf_counter() - began, packed - began))
            for call in calls:
                call.result(60)
            for i in group.worker_ids:
                group.call(i, Worker.close).result(60)
    finally:
        group.stop()
    # The first sends allocate the memory.
    whole, packed = (statistics.median(column) * 1e3 for column in zip(*took[2:], strict=True))
    return whole, packed


if __name__ == "__main__":
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    for size in SIZES:
        for trainer, worker in PLACES:
            whole, packed = measure(size, trainer, worker)
            print(f"{size:>22} {trainer:>5} to {worker:<5} {whole:8.1f} ms, packed {packed:7.1f}")
