"""A model of every kind of tensor, and workers that hold it on a device."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

from sync_core import Address, Receiver
from sync_testing.schemes.models import fingerprints


class Model(nn.Module):
    """Tied weights, buffers, several dtypes and orders of memory.

    Args:
        value: what every tensor holds.
        device: where the tensors are.
    """

    def __init__(self, value: int, device: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16, dtype=torch.bfloat16)
        self.head = nn.Linear(16, 50, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embedding.weight
        self.convolution = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm1d(8)
        self.wide = nn.Linear(300, 1000)
        self.register_buffer("scale", torch.zeros(6).to(torch.float8_e4m3fn))
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        self.register_buffer("empty", torch.zeros(0))
        self.to(device)
        weight = self.convolution.weight
        weight.data = weight.data.contiguous(memory_format=torch.channels_last)
        self.fill(value)

    def fill(self, value: int) -> None:
        """Let every tensor hold the value."""
        with torch.no_grad():
            for tensor in self.state_dict().values():
                tensor.copy_(torch.full(tensor.shape, float(value)))

    def forward(self, ids: Tensor) -> Tensor:
        """Return the scores of each entry."""
        scores: Tensor = self.head(self.embedding(ids))
        return scores


def bits(model: nn.Module) -> dict[str, str]:
    """Return the fingerprints of all tensors."""
    return fingerprints({name: t.cpu() for name, t in model.state_dict().items()})


class Worker:
    """A worker with a model on a device.

    Args:
        worker_id: its number.
    """

    def __init__(self, worker_id: int) -> None:
        # NCCL takes ranks with other names for ranks of other hosts, which may use one GPU.
        os.environ["NCCL_HOSTID"] = f"worker-{worker_id}"

    def connect(self, address: Address, device: str, options: dict[str, Any]) -> None:
        """Make a model and its receiver."""
        self.model = Model(0, device)
        self.receiver = Receiver(address, self.model, **options)

    def receive(self) -> tuple[dict[str, str], set[str], bool, bool]:
        """Return what arrived: bits, devices, whether weights are tied and lie where they did."""
        before = self.places()
        assert self.receiver.receive(30.0)
        devices = {tensor.device.type for tensor in self.model.state_dict().values()}
        tied = self.model.head.weight is self.model.embedding.weight
        return bits(self.model), devices, tied, self.places() == before

    def places(self) -> list[int]:
        """Return where the tensors lie."""
        return [tensor.data_ptr() for tensor in self.model.state_dict().values()]

    def on_a_side_stream(self) -> float:
        """Receive, and use the weights at once on another stream; the largest score."""
        ids = torch.arange(50, device="cuda")
        side = torch.cuda.Stream()
        assert self.receiver.receive(30.0)
        with torch.cuda.stream(side), torch.no_grad():
            return float(self.model(ids).max())

    def capture(self) -> None:
        """Record the model's use as a CUDA graph."""
        self.ids = torch.arange(50, device="cuda")
        side = torch.cuda.Stream()
        with torch.cuda.stream(side), torch.no_grad():
            self.model(self.ids)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph), torch.no_grad():
            self.scores = self.model(self.ids)

    def replay(self) -> float:
        """Receive, and replay the graph; the largest score."""
        assert self.receiver.receive(30.0)
        self.graph.replay()
        torch.cuda.synchronize()
        return float(self.scores.max())

    def close(self) -> None:
        """Leave the sender."""
        self.receiver.close()
