"""The safetensors header of a payload: what is written for a layout, and what is read from one.

Source of the format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import torch

from sync_core.errors import PayloadError
from sync_core.weights.tensor_spec import TensorSpec

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
# Of what a tensor of torch can have: sizes in 64 bits, also without the dimensions that are 0.
_TOO_LARGE = 1 << 63
_MAX_RANK = 64
#: The name of the tensor in which checksums travel; see `sync_core.weights.checksums`.
CHECKSUMS = "__checksums__"
#: The name of the tensor that holds the base of an update; see `sync_core.plugins.increments`.
BASE = "__base__"
_METADATA = "__metadata__"


def is_reserved(name: str) -> bool:
    """Whether the format has a use of its own for a tensor's name."""
    return name in (_METADATA, CHECKSUMS, BASE) or name.startswith(_FILLER)


def has_place(dtype: torch.dtype) -> bool:
    """Whether tensors of a dtype can be written."""
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
        raise ValueError(f"{name!r} has a size or an offset that is no natural number")
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
        name.encode()  # half of a surrogate pair is no text
    return content


def _check_apart(entries: Sequence[TensorSpec]) -> None:
    """Raise `ValueError` where two tensors, in the order of their offsets, overlap."""
    for before, after in pairwise(entries):
        if before.offset + before.nbytes > after.offset:
            raise ValueError(f"{before.name!r} and {after.name!r} overlap")
