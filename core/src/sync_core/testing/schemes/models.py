"""The models that are sent, the same in the trainer and in its workers."""

from __future__ import annotations

import zlib
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

DTYPES = (
    torch.bool,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
# A quiet NaN, others with a payload, negative ones, a signalling one, infinity, minus zero.
_NAN_BITS = (0x7FC00000, 0x7FC12345, -0x400000, -0x3EDCBB, 0x7F800001, 0x7F800000, -0x80000000)


def make_policy(value: float = 0.0) -> nn.Sequential:
    """A small policy with buffers, all of one value."""
    policy = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    with torch.no_grad():
        for tensor in (*policy.parameters(), *policy.buffers()):
            tensor.fill_(value)
    return policy


def fill(model: nn.Module, value: float) -> None:
    """Give every parameter one value, in place."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def of_every_dtype(seed: int) -> dict[str, Tensor]:
    """One tensor of each dtype."""
    return {str(dtype): _random_bits(seed + i, (5, 3), dtype) for i, dtype in enumerate(DTYPES)}


def of_odd_shapes(seed: int) -> dict[str, Tensor]:
    """Tensors without dimensions, without elements, and of sizes that align with nothing."""
    shapes = ((), (0,), (3, 0, 2), (1,), (7,), (1, 1, 1, 1), (13, 17), (4097,))
    return {f"tensor{i}": _random_bits(seed, shape) for i, shape in enumerate(shapes)}


def not_contiguous(seed: int) -> dict[str, Tensor]:
    """Tensors whose elements lie in memory in another order, or with gaps."""
    base = _random_bits(seed, (8, 6, 4))
    return {
        "transposed": base[0].t(),
        "sliced": base[1:, ::2, 1:3],
        "permuted": base.permute(2, 0, 1),
        "channels_last": _random_bits(seed, (2, 3, 4, 5)).to(memory_format=torch.channels_last),
    }


def not_numbers(seed: int) -> dict[str, Tensor]:
    """Values that are equal to nothing, and differ only in their bits."""
    bits = torch.tensor(_NAN_BITS, dtype=torch.int32) if seed else torch.zeros(7).int()
    return {"nan": bits.roll(seed).view(torch.float32)}


def many_small(seed: int) -> dict[str, Tensor]:
    """5,000 tensors of up to 36 bytes."""
    sizes = [i % 10 for i in range(5_000)]
    pieces = _random_bits(seed, (sum(sizes),)).split(sizes)
    return {f"blocks.{i}.weight": piece for i, piece in enumerate(pieces)}


def large(seed: int) -> dict[str, Tensor]:
    """100 MB in tensors from 60 MB to 100 kB."""
    sizes = (15_000_000, 25_000, 7_500_000, *(250_000,) * 9)
    # Random ones would take a second.
    pieces = torch.arange(sum(sizes), dtype=torch.int32).mul_(seed).split(sizes)
    return {f"tensor{i}": piece for i, piece in enumerate(pieces)}


class Tied(nn.Module):
    """An output layer that has the weight of the embedding."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.output = nn.Linear(4, 6)
        self.output.weight = self.embedding.weight
        with torch.no_grad():
            self.output.weight.fill_(seed)
            self.output.bias.fill_(-seed)

    def is_tied(self) -> bool:
        """Whether the weights still are one."""
        return self.output.weight.data_ptr() == self.embedding.weight.data_ptr()


def fingerprints(model: Any) -> dict[str, str]:
    """What tells one tensor from another: dtype, shape and every bit."""
    named = model.state_dict() if isinstance(model, nn.Module) else model
    return {name: _fingerprint(tensor.detach()) for name, tensor in named.items()}


def _fingerprint(tensor: Tensor) -> str:
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return f"{tensor.dtype} {list(tensor.shape)} {zlib.crc32(data.data)}"


def _random_bits(seed: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = (prod(shape) * dtype.itemsize,)
    data = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    if dtype is torch.bool:
        data &= 1
    return data.view(dtype).view(shape)
