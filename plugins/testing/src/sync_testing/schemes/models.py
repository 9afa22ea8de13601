"""The models to send, the same in the trainer and in its workers."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "Tied",
    "annotated",
    "convolutional",
    "frozen",
    "growing",
    "huge",
    "large",
    "many_small",
    "nested",
    "not_contiguous",
    "not_numbers",
    "of_every_dtype",
    "of_odd_shapes",
    "parametrised",
    "recurrent",
    "specimens",
    "stateful",
]

DTYPES = (
    torch.bool,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)
# NaNs: quiet, with a payload, negative and signalling; also infinity and minus zero.
_NAN_BITS = (0x7FC00000, 0x7FC12345, -0x400000, -0x3EDCBB, 0x7F800001, 0x7F800000, -0x80000000)


def make_policy(value: float = 0.0) -> nn.Sequential:
    """Return a small policy with buffers, filled with one value."""
    policy = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    with torch.no_grad():
        for tensor in (*policy.parameters(), *policy.buffers()):
            tensor.fill_(value)
    return policy


def fill(model: nn.Module, value: float) -> None:
    """Set every parameter to one value, in place."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def of_every_dtype(seed: int) -> dict[str, Tensor]:
    """Return one tensor of each dtype."""
    return {
        str(dtype).removeprefix("torch."): _random_bits(seed + i, (5, 3), dtype)
        for i, dtype in enumerate(DTYPES)
    }


def of_odd_shapes(seed: int) -> dict[str, Tensor]:
    """Return tensors without dimensions, without elements, and of unaligned sizes."""
    shapes = {
        "scalar": (),
        "empty": (0,),
        "empty in the middle": (3, 0, 2),
        "one": (1,),
        "prime": (7,),
        "ones": (1, 1, 1, 1),
        "matrix": (13, 17),
        "one more than a page": (4097,),
    }
    return {name: _random_bits(seed, shape) for name, shape in shapes.items()}


def not_contiguous(seed: int) -> dict[str, Tensor]:
    """Return tensors whose elements are not contiguous in memory."""
    shape = (8, 6, 4)
    return {
        "transposed": _random_bits(seed, shape)[0].t(),
        "sliced": _random_bits(seed, shape)[1:, ::2, 1:3],
        "permuted": _random_bits(seed, shape).permute(2, 0, 1),
        "with an offset": _random_bits(seed, shape).flatten()[5:],
        "every third": _random_bits(seed, shape).flatten()[1::3],
        "channels_last": _random_bits(seed, (2, 3, 4, 5)).to(memory_format=torch.channels_last),
    }


def not_numbers(seed: int) -> dict[str, Tensor]:
    """Return values that are unequal to everything, and differ only in their bits."""
    bits = torch.tensor(_NAN_BITS, dtype=torch.int32) if seed else torch.zeros(7).int()
    nan = bits.roll(seed).view(torch.float32)
    tiny = torch.tensor([seed], dtype=torch.int32).view(torch.float32)
    return {
        "nan": nan,
        "subnormal": tiny,
        "double": nan.double(),
        "complex": torch.complex(nan, -nan),
    }


def specimens(seed: int) -> dict[str, Tensor]:
    """Return small tensors of every kind, each with a descriptive name."""
    kinds = (of_every_dtype, of_odd_shapes, not_contiguous, not_numbers)
    found = {f"{kind.__name__}.{name}": t for kind in kinds for name, t in kind(seed).items()}
    named = _random_bits(seed, (3,))
    for name in ("a name of spaces", "Gewichtsmaß.重み", "n" * 300, "UPPER.lower.0"):
        found[f"names.{name}"] = named.clone()
    return found


def many_small(seed: int) -> dict[str, Tensor]:
    """Return 5,000 tensors of up to 36 bytes."""
    sizes = [i % 10 for i in range(5_000)]
    pieces = _random_bits(seed, (sum(sizes),)).split(sizes)
    return {f"blocks.{i}.weight": piece for i, piece in enumerate(pieces)}


def large(seed: int) -> dict[str, Tensor]:
    """Return 100 MB in tensors from 60 MB to 100 kB."""
    sizes = (15_000_000, 25_000, 7_500_000, *(250_000,) * 9)
    # Random values would take a second.
    pieces = torch.arange(sum(sizes), dtype=torch.int32).mul_(seed).split(sizes)
    return {f"tensor{i}": piece for i, piece in enumerate(pieces)}


def huge(seed: int) -> dict[str, Tensor]:
    """Return more bytes than 31 bits can count; the last bytes depend on the seed."""
    data = torch.zeros(2**31 + 4097, dtype=torch.uint8)
    data[-4097:] = seed
    return {"huge": data}


class Tied(nn.Module):
    """A model whose output layer shares the weight of the embedding."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.output = nn.Linear(4, 6)
        self.output.weight = self.embedding.weight
        with torch.no_grad():
            self.output.weight.fill_(seed)
            self.output.bias.fill_(-seed)

    def is_tied(self) -> bool:
        """Return whether the weights are still shared."""
        return self.output.weight.data_ptr() == self.embedding.weight.data_ptr()


class Stateful(nn.Module):
    """A module with extra state, which is neither a parameter nor a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.scale = torch.tensor([float(seed)])

    def get_extra_state(self) -> Tensor:
        return self.scale

    def set_extra_state(self, state: Tensor) -> None:
        self.scale = state


def stateful(seed: int) -> nn.Module:
    """Return a module with extra state."""
    return _seeded(seed, lambda: Stateful(seed))


class Annotated(nn.Module):
    """A module whose extra state has other objects than tensors, and changes in size."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.state: Any = {
            "steps": seed,
            "names": [f"run {i}" for i in range(seed * 100)],
            "key": bytes(range(seed)),
            3: (None, True, -0.5, float("inf")),
            "mean": torch.full((2,), float(seed)),
        }

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def annotated(seed: int) -> nn.Module:
    """Return a module with extra state of many kinds."""
    return _seeded(seed, lambda: Annotated(seed))


class Growing(nn.Module):
    """A module whose extra state is empty at first and grows, as in FP8 modules."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.state = torch.full((seed * 5000,), seed, dtype=torch.uint8)

    def get_extra_state(self) -> Tensor:
        return self.state

    def set_extra_state(self, state: Tensor) -> None:
        self.state = state


def growing(seed: int) -> nn.Module:
    """Return a module whose extra state has another shape for each seed."""
    return _seeded(seed, lambda: Growing(seed))


def parametrised(seed: int) -> nn.Module:
    """Return a module whose weight is computed from two others."""
    return _seeded(seed, lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)))


def nested(seed: int) -> nn.Module:
    """Return nested containers, with one module in two places."""

    def make() -> nn.Module:
        shared = nn.Linear(2, 2)
        lists = nn.ParameterList([torch.rand(2), torch.rand(1)])
        dicts = nn.ParameterDict({"a": torch.rand(3)})
        return nn.ModuleDict({"x": nn.Sequential(shared, shared), "l": lists, "d": dicts})

    return _seeded(seed, make)


def recurrent(seed: int) -> nn.Module:
    """Return a recurrent module, whose weights torch wants in one block of memory."""
    return _seeded(seed, lambda: nn.GRU(3, 4, num_layers=2, bidirectional=True))


def convolutional(seed: int) -> nn.Module:
    """Return a module with another memory format, and integer buffers."""

    def make() -> nn.Module:
        convolution = nn.Conv2d(3, 8, 3)
        weight = convolution.weight
        model = nn.Sequential(convolution, nn.BatchNorm2d(8))
        model(torch.rand(2, 3, 5, 5))
        weight.data = weight.data.to(memory_format=torch.channels_last)
        return model

    return _seeded(seed, make)


def frozen(seed: int) -> nn.Module:
    """Return a module with some frozen parameters, in several precisions."""

    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 3).bfloat16(), nn.Linear(3, 2).double())
        model[0].requires_grad_(requires_grad=False)
        return model

    return _seeded(seed, make)


def _seeded(seed: int, make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def fingerprints(model: Any) -> dict[str, str]:
    """Return the dtype, shape and every bit of each tensor."""
    named = model.state_dict() if isinstance(model, nn.Module) else model
    return {
        name: _fingerprint(value.detach()) if isinstance(value, Tensor) else repr(value)
        for name, value in named.items()
    }


def _fingerprint(tensor: Tensor) -> str:
    data = tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return f"{tensor.dtype} {list(tensor.shape)} {zlib.crc32(data.data)}"


def _random_bits(seed: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = (prod(shape) * dtype.itemsize,)
    data = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    if dtype is torch.bool:
        data &= 1
    return data.view(dtype).view(shape)
