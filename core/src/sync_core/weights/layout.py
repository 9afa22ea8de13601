"""The layout of a payload: its tensors, their offsets, and the safetensors header."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from sync_core.errors import ModelError, PayloadError


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a layout.

    Args:
        name: dotted name, as in a state_dict.
        dtype: its dtype.
        shape: its shape.
        offset: its first byte, counted from the start of the body.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name}: {str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


#: A box of a tensor: for each of its dimensions, the first index and the one after the last.
Region: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class RegionSource:
    """A region of a trainer's tensor that is a region of a tensor under another name.

    Args:
        name: the trainer's tensor.
        region: the region of that.
        start: where it begins in the other tensor: an index for each dimension.
    """

    name: str
    region: Region
    start: tuple[int, ...]


#: Every tensor starts at a multiple of this: a cache line, and any vector register.
ALIGNMENT = 64

#: A header longer than this is refused before it is read.
MAX_HEADER_BYTES = 100_000_000

_SAFETENSORS_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float64: "F64",
    torch.complex64: "C64",
}
_DTYPES = {name: dtype for dtype, name in _SAFETENSORS_NAMES.items()}
# Dtypes that the format has no name for travel as bytes; the metadata keeps dtype and shape.
_RAW_DTYPES = {
    str(dtype): dtype
    for dtype in (
        torch.complex32,
        torch.complex128,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
    )
}
# The format allows no holes, so the bytes between aligned tensors belong to filler tensors.
_FILLER = "__filler__."
# What layers may add to the size of a version: wider dtypes, and tensors of their own.
_TIMES, _MORE = 16, 1 << 26
# Of what a tensor of torch can have: sizes in 64 bits, also without the dimensions that are 0.
_TOO_LARGE = 1 << 63
_MAX_RANK = 64
_METADATA = "__metadata__"
#: What to do about a quantized model.
QUANTIZED = "send the module as it was before it was quantized, and let each worker quantize a copy"
#: The prefix of the names of tensors that a transport adds to those of the weights.
RESERVED_PREFIX = "__sync__."
#: The prefix of the names of extras in a layout; see `sync_core.weights.extras`.
EXTRA_PREFIX = f"{RESERVED_PREFIX}extra."


def is_reserved(name: str) -> bool:
    """Return whether the format has its own use for a tensor's name."""
    return name == _METADATA or name.startswith((RESERVED_PREFIX, _FILLER))


def has_place(dtype: torch.dtype) -> bool:
    """Return whether tensors of a dtype can be written."""
    return dtype in _SAFETENSORS_NAMES or str(dtype) in _RAW_DTYPES


def write_header(specs: Sequence[TensorSpec], aliases: Sequence[tuple[str, str]]) -> bytes:
    """The header, its length first; padded so that the body is aligned.

    Args:
        specs: the tensors, in the order of their offsets.
        aliases: pairs of the name of a tied tensor and the name under which it travels.
    """
    metadata = {"format": "pt"}
    if aliases:
        metadata["sync.aliases"] = json.dumps(dict(aliases))
    raw = {
        spec.name: [str(spec.dtype), spec.shape]
        for spec in specs
        if spec.dtype not in _SAFETENSORS_NAMES
    }
    if raw:
        metadata["sync.raw"] = json.dumps(raw)
    content: dict[str, object] = {_METADATA: metadata}
    end = 0
    for spec in specs:
        if spec.offset > end:
            content[f"{_FILLER}{end}"] = _entry("U8", (spec.offset - end,), end, spec.offset)
        end = spec.offset + spec.nbytes
        if spec.name in raw:
            content[spec.name] = _entry("U8", (spec.nbytes,), spec.offset, end)
        else:
            name = _SAFETENSORS_NAMES[spec.dtype]
            content[spec.name] = _entry(name, spec.shape, spec.offset, end)
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def read_header(header: bytes) -> tuple[tuple[TensorSpec, ...], tuple[tuple[str, str], ...]]:
    """The tensors that a header describes, and the aliases of tied ones.

    Args:
        header: the length (8 bytes) and the JSON text.

    Raises:
        PayloadError: not a safetensors header, or one that contradicts itself.
    """
    if len(header) < 8 or int.from_bytes(header[:8], "little") != len(header) - 8:
        raise PayloadError("the header is not as long as it says")
    if len(header) > MAX_HEADER_BYTES:
        raise PayloadError(f"the header has {len(header)} bytes, more than any may have")
    try:
        content = _parse(header[8:])
        metadata = content.pop(_METADATA, {})
        raw = _parse(metadata.get("sync.raw", "{}"))
        aliases = tuple(_parse(metadata.get("sync.aliases", "{}")).items())
        entries = [_read_entry(name, e, raw.get(name)) for name, e in content.items()]
        entries.sort(key=lambda spec: (spec.offset, spec.nbytes))
        _check_apart(entries)
        specs = tuple(spec for spec in entries if not spec.name.startswith(_FILLER))
        names = {spec.name for spec in specs}
        if any(owner not in names or name in names for name, owner in aliases):
            raise ValueError("its tied tensors name tensors that are not there")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise PayloadError(f"not a safetensors header: {error!r:.300}") from error
    return specs, aliases


def _entry(dtype: str, shape: tuple[int, ...], start: int, stop: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def _read_entry(
    name: str, entry: Mapping[str, Any], raw: tuple[str, list[int]] | None
) -> TensorSpec:
    start, stop = entry["data_offsets"]
    dtype_name, shape = raw if raw is not None else (entry["dtype"], entry["shape"])
    dtype = _RAW_DTYPES[dtype_name] if raw is not None else _DTYPES[dtype_name]
    spec = TensorSpec(name, dtype, tuple(shape), start)
    if not all(type(n) is int and 0 <= n < _TOO_LARGE for n in (start, stop, *spec.shape)):
        raise ValueError(f"{name!r} has a size or an offset that is not a natural number")
    if len(spec.shape) > _MAX_RANK:
        raise ValueError(f"{name!r} has {len(spec.shape)} dimensions")
    if prod(filter(None, spec.shape)) * dtype.itemsize >= _TOO_LARGE:
        raise ValueError(f"{name!r} has dimensions that no tensor can have")
    if spec.nbytes != stop - start:
        raise ValueError(f"{name!r} needs {spec.nbytes} bytes, the header gives {stop - start}")
    return spec


def _parse(text: bytes | str) -> dict[str, Any]:
    """A JSON object whose keys are there once, and are text."""
    parsed: dict[str, Any] = json.loads(text, object_pairs_hook=_unique)
    return parsed


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("a name is there twice")
    for name in content:
        name.encode()  # half of a surrogate pair is not a text
    return content


def _check_apart(entries: Sequence[TensorSpec]) -> None:
    """Raise `ValueError` where two tensors, in the order of their offsets, overlap."""
    for before, after in pairwise(entries):
        if before.offset + before.nbytes > after.offset:
            raise ValueError(f"{before.name!r} and {after.name!r} overlap")


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

    @classmethod
    def of_kinds(
        cls,
        kinds: Iterable[tuple[str, torch.dtype, tuple[int, ...]]],
        aliases: Iterable[tuple[str, str]] = (),
    ) -> Layout:
        """The layout of tensors of which name, dtype and shape are known.

        Args:
            kinds: name, dtype and shape of each tensor that travels.
            aliases: pairs of the name of a tied tensor and the name under which it travels.

        Example:
            >>> Layout.of_kinds([("weight", torch.float32, (2, 3))]).body_nbytes
            24
        """
        return cls(_place(kinds), tuple(aliases))

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
    def plain(self) -> Layout:
        """The layout without extras; itself where there are none."""
        count = len(self.specs)
        while count and self.specs[count - 1].name.startswith(EXTRA_PREFIX):
            count -= 1
        return self if count == len(self.specs) else Layout(self.specs[:count], self.aliases)

    @cached_property
    def body_nbytes(self) -> int:
        """Size of the body, in bytes."""
        return max((spec.offset + spec.nbytes for spec in self.specs), default=0)

    @cached_property
    def nbytes(self) -> int:
        """Size of a payload, header and body, in bytes."""
        return len(self.header) + self.body_nbytes

    @property
    def most_nbytes(self) -> int:
        """The size of the largest version that layers may make of one of this layout, in bytes.

        Memory for more is never taken, whatever a sender announces.
        """
        return self.nbytes * _TIMES + _MORE

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
    """Return the place of a tensor, equal for tied ones: the same elements in the same view.

    Example:
        >>> weight = torch.ones(2, 2)
        >>> place_of(weight) == place_of(weight.detach()), place_of(weight) == place_of(weight.t())
        (True, False)
    """
    stride = tensor.stride()
    # Rows of an expanded tensor, such as a stand-in for weights to come, begin at one address.
    if tensor.numel() == 0 or (0 in stride and _is_expanded(tensor)):
        return id(tensor)
    signs = tensor.is_conj(), tensor.is_neg()
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, stride, signs


def _is_expanded(tensor: Tensor) -> bool:
    return any(n > 1 and not step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def check_tensor(name: object, tensor: object) -> None:
    """Raise `ModelError`, naming the tensor, unless it can travel."""
    if not isinstance(name, str):
        raise ModelError(f"weights need names that are strings, not {name!r}")
    if is_reserved(name):
        raise ModelError(f"the name {name!r} is reserved by the payload's format")
    if not isinstance(tensor, Tensor):
        raise ModelError(f"{name!r} is of the type {type(tensor).__name__}; only tensors travel")
    if torch.nn.parameter.is_lazy(tensor):
        raise ModelError(
            f"{name!r} has no shape yet (a lazy parameter); run the model once before this"
        )
    if is_traceable_wrapper_subclass(tensor):
        raise ModelError(f"{name!r} is of the type {type(tensor).__name__}; {_remedy(tensor)}")
    _check_values(name, tensor)
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        raise ModelError(f"{name!r} is sparse, quantized or nested; it cannot travel")
    if not has_place(tensor.dtype):
        raise ModelError(f"{name!r} has dtype {tensor.dtype}, which has no place in a payload")


def _check_values(name: str, tensor: Tensor) -> None:
    """Raise `ModelError`, naming the tensor, unless its elements are its values."""
    packed = type(tensor).__module__.startswith("bitsandbytes.") and not tensor.is_floating_point()
    if packed or getattr(tensor, "quant_state", None) is not None:
        raise ModelError(
            f"{name!r} is quantized by bitsandbytes, which keeps its scales elsewhere; {QUANTIZED}"
        )
    if hasattr(tensor, "ds_id") and not tensor.numel():
        raise ModelError(
            f"{name!r} is partitioned by DeepSpeed ZeRO-3, and this process has no elements of "
            "it; gather the model, on every rank: "
            "with deepspeed.zero.GatheredParameters(list(model.parameters())): sender.send()"
        )
    if tensor.is_meta:
        raise ModelError(
            f"{name!r} is on the meta device and has no values here; where accelerate offloads "
            "them (device_map, cpu_offload), send what accelerate.utils.modeling."
            "get_state_dict_offloaded_model(model) returns, or take its hooks off: "
            "accelerate.hooks.remove_hook_from_submodules(model); a model that was never loaded, "
            "load: model.load_state_dict(…, assign=True)"
        )


def _remedy(tensor: Tensor) -> str:
    """Return what to type instead of sending a tensor that spans several."""
    if hasattr(tensor, "full_tensor"):
        return (
            "to send it, type Sender(scheme, gathered(model)) on every rank, or send "
            "tensor.full_tensor(); "
            "for a worker with such a model, type Sender(Sharded(scheme, rank, size), …)"
        )
    if type(tensor).__module__.partition(".")[0] == "torchao":
        return (
            "send the model as it was before torchao's quantize_(), and let each worker quantize "
            "a copy of what it receives: Receiver(…, on_commit=…)"
        )
    return "it spans several tensors; send a plain one"


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
