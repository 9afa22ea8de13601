"""Where every tensor of a model lies in a payload."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from sync_core.errors import ModelError
from sync_core.weights.header import ALIGNMENT, has_place, is_reserved, read_header, write_header
from sync_core.weights.tensor_spec import TensorSpec


@dataclass(frozen=True, eq=False)
class Layout:
    """The tensors of a model in the order in which they travel.

    Two layouts are equal when their headers are, byte for byte.

    Args:
        specs: one for each tensor that travels; tied tensors travel once.
        aliases: pairs of the name of a tied tensor and the name under which it travels.

    Example:
        >>> layout = Layout.of({"weight": torch.zeros(2, 3), "bias": torch.zeros(2)})
        >>> [str(spec) for spec in layout.specs]
        ['weight: float32[2, 3]', 'bias: float32[2]']
        >>> layout.body_nbytes
        72
    """

    specs: tuple[TensorSpec, ...]
    aliases: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, named: Mapping[str, Tensor]) -> Layout:
        """The layout of named tensors, tied ones found by the memory that they share.

        Raises:
            ModelError: a tensor that cannot travel; the message names it.
        """
        entries: list[tuple[str, torch.dtype, tuple[int, ...]]] = []
        aliases: list[tuple[str, str]] = []
        owners: dict[object, str] = {}
        for name, tensor in named.items():
            check_tensor(name, tensor)
            owner = owners.setdefault(place_of(tensor), name)
            if owner != name:
                aliases.append((name, owner))
                continue
            entries.append((name, tensor.dtype, tuple(tensor.shape)))
        return cls(_place(entries), tuple(aliases))

    def with_tensors(self, tensors: Sequence[Tensor]) -> Layout:
        """The layout of other tensors under the same names: a cast, a slice, a delta."""
        if len(tensors) != len(self.specs):
            raise ValueError(f"{len(self.specs)} tensors are named, {len(tensors)} were given")
        kinds = tuple((tensor.dtype, tensor.shape) for tensor in tensors)
        if all(
            spec.dtype == dtype and spec.shape == shape
            for spec, (dtype, shape) in zip(self.specs, kinds, strict=True)
        ):
            return self
        return _retyped(self, kinds)

    def subset(self, positions: tuple[int, ...]) -> Layout:
        """The layout of some of the tensors, given by their positions in ``specs``."""
        return self if len(positions) == len(self.specs) else _subset(self, positions)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Every name, those of tied tensors after the others."""
        return (*(spec.name for spec in self.specs), *(name for name, _ in self.aliases))

    @cached_property
    def index(self) -> Mapping[str, int]:
        """The position in ``specs`` of every name, those of tied tensors included."""
        index = {spec.name: i for i, spec in enumerate(self.specs)}
        return index | {name: index[owner] for name, owner in self.aliases}

    @cached_property
    def body_nbytes(self) -> int:
        """Size of the body, in bytes."""
        return max((spec.offset + spec.nbytes for spec in self.specs), default=0)

    @property
    def nbytes(self) -> int:
        """Size of a payload, header and body, in bytes."""
        return len(self.header) + self.body_nbytes

    @cached_property
    def header(self) -> bytes:
        """The safetensors header, its length first; padded so that the body is aligned."""
        return write_header(self.specs, self.aliases)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the header, in hexadecimal."""
        return hashlib.sha256(self.header).hexdigest()

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Layout) and self.digest == other.digest)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __reduce__(self) -> tuple[object, tuple[bytes]]:
        return Layout.from_header, (self.header,)

    @classmethod
    def from_header(cls, header: bytes) -> Layout:
        """The layout that a safetensors header describes, ours or another writer's.

        Args:
            header: the length (8 bytes) and the JSON text.

        Raises:
            PayloadError: not a safetensors header, or one that contradicts itself.
        """
        layout = cls(*read_header(header))
        # Another writer's header may be longer or shorter than ours, and the body starts after it.
        layout.__dict__["header"] = header
        return layout


def place_of(tensor: Tensor) -> object:
    """What two names have in common that are tied: the same elements, seen in the same way.

    Example:
        >>> weight = torch.ones(2, 2)
        >>> place_of(weight) == place_of(weight.detach()), place_of(weight) == place_of(weight.t())
        (True, False)
    """
    if tensor.numel() == 0:
        return id(tensor)
    signs = tensor.is_conj(), tensor.is_neg()
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), signs


def check_tensor(name: object, tensor: object) -> None:
    """Raise `ModelError`, naming the tensor, unless it can travel."""
    if not isinstance(name, str):
        raise ModelError(f"weights need names that are strings, not {name!r}")
    if is_reserved(name):
        raise ModelError(f"the name {name!r} is reserved by the payload's format")
    if not isinstance(tensor, Tensor):
        raise ModelError(f"{name!r} is a {type(tensor).__name__}; only tensors travel")
    if torch.nn.parameter.is_lazy(tensor):
        raise ModelError(
            f"{name!r} has no shape yet (a lazy parameter); run the model once before this"
        )
    if is_traceable_wrapper_subclass(tensor):
        raise ModelError(
            f"{name!r} is a {type(tensor).__name__}, which spans several tensors; "
            "send a plain one, such as tensor.full_tensor() of a DTensor"
        )
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
        raise ModelError(
            f"{name!r} is sparse, quantized, nested or on the meta device; it cannot travel"
        )
    if not has_place(tensor.dtype):
        raise ModelError(f"{name!r} has dtype {tensor.dtype}, which has no place in a payload")


def _place(entries: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> tuple[TensorSpec, ...]:
    specs: list[TensorSpec] = []
    end = 0
    for name, dtype, shape in entries:
        spec = TensorSpec(name, dtype, shape, end + -end % ALIGNMENT)
        end = spec.offset + spec.nbytes
        specs.append(spec)
    return tuple(specs)


@lru_cache(maxsize=64)
def _subset(layout: Layout, positions: tuple[int, ...]) -> Layout:
    specs = [layout.specs[position] for position in positions]
    names = {spec.name for spec in specs}
    return Layout(
        _place((spec.name, spec.dtype, spec.shape) for spec in specs),
        tuple((name, owner) for name, owner in layout.aliases if owner in names),
    )


@lru_cache(maxsize=64)
def _retyped(layout: Layout, kinds: tuple[tuple[torch.dtype, torch.Size], ...]) -> Layout:
    entries = (
        (spec.name, dtype, tuple(shape))
        for spec, (dtype, shape) in zip(layout.specs, kinds, strict=True)
    )
    return Layout(_place(entries), layout.aliases)
