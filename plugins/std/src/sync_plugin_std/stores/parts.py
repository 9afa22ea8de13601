"""The bytes of a version, in parts that are written without being joined first."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sync_core import Payload

# Smaller versions are packed: a call for each tensor would take longer than a copy of all.
_LARGE = 4 << 20


def parts_of(payload: Payload) -> Iterator[memoryview]:
    """The payload as the bytes of a ``.safetensors`` file, in parts.

    Contiguous tensors in the host's memory are their own parts, good until the trainer changes
    them.

    Example:
        >>> from sync_core import Layout
        >>> layout = Layout.of({"bias": torch.ones(3)})
        >>> payload = Payload(1, layout, (torch.ones(3),))
        >>> b"".join(parts_of(payload)) == payload.to_bytes()
        True
    """
    if payload.nbytes < _LARGE:
        yield memoryview(payload.to_bytes())
        return
    layout = payload.layout
    yield memoryview(layout.header)
    written = 0
    for spec, tensor in zip(layout.specs, payload.tensors, strict=True):
        yield memoryview(bytes(spec.offset - written))
        yield _bytes_of(tensor)
        written = spec.offset + spec.nbytes
    yield memoryview(bytes(layout.body_nbytes - written))


def _bytes_of(tensor: Tensor) -> memoryview:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data
