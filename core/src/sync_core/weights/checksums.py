"""Checksums of an update's tensors, in buckets, and the tensor in which they travel.

The hash is XXH3 with 64 bits (https://xxhash.com), over the bytes of the tensors of a bucket, one
after the other as if contiguous. It finds accidents, not somebody who changes weights on purpose.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sync_core.errors import OptionError
from sync_core.weights.header import ALIGNMENT, CHECKSUMS
from sync_core.weights.layout import Layout
from sync_core.weights.tensor_spec import TensorSpec

_BUCKET_NBYTES = 4 << 20
# So many that the digest of a model, 16 digits for each bucket, fits into a message.
_MOST_BUCKETS = 1024
_NAMES_SHOWN = 8


def check_installed() -> None:
    """Raise `OptionError` where the hash library is missing."""
    try:
        import xxhash  # noqa: F401
    except ImportError as error:
        raise OptionError(
            "verify= needs the hash library xxhash, here and in the workers: "
            'pip install "sync-core[verify]"'
        ) from error


@lru_cache(maxsize=64)
def buckets(layout: Layout) -> tuple[range, ...]:
    """The tensors of each bucket, by position: neighbours of about 4 MB together.

    A larger tensor is a bucket of its own, and buckets are larger where there would be too many.

    Example:
        >>> named = {"a": torch.zeros(10), "b": torch.zeros(1 << 21), "c": torch.zeros(10)}
        >>> buckets(Layout.of(named))
        (range(0, 1), range(1, 2), range(2, 3))
    """
    limit = max(_BUCKET_NBYTES, layout.body_nbytes // _MOST_BUCKETS)
    found: list[range] = []
    start = size = 0
    for position, spec in enumerate(layout.specs):
        if position > start and size + spec.nbytes > limit:
            found.append(range(start, position))
            start, size = position, 0
        size += spec.nbytes
    found.append(range(start, len(layout.specs)))
    return tuple(found)


def checksums(layout: Layout, tensors: Sequence[Tensor]) -> list[int]:
    """The checksum of every bucket."""
    return [checksum([tensors[i] for i in bucket]) for bucket in buckets(layout)]


def checksum(tensors: Sequence[Tensor]) -> int:
    """The checksum of the bytes of some tensors."""
    import xxhash

    state = xxhash.xxh3_64()
    for tensor in tensors:
        state.update(_bytes(tensor))
    return state.intdigest()


def to_tensor(sums: Sequence[int]) -> Tensor:
    """Checksums as the tensor in which they travel."""
    return torch.from_numpy(np.array(sums, dtype=np.uint64).view(np.int64))


def from_tensor(tensor: Tensor) -> list[int]:
    """The checksums that travelled."""
    sums: list[int] = tensor.cpu().numpy().view(np.uint64).tolist()
    return sums


@lru_cache(maxsize=64)
def sealed(layout: Layout) -> Layout:
    """The layout with the checksums of its buckets after it."""
    end = layout.body_nbytes
    shape = (len(buckets(layout)),)
    spec = TensorSpec(CHECKSUMS, torch.int64, shape, end + -end % ALIGNMENT)
    return Layout((*layout.specs, spec), layout.aliases)


@lru_cache(maxsize=64)
def unsealed(layout: Layout) -> Layout | None:
    """The layout that was sealed; None when this is none that was."""
    if not layout.specs or layout.specs[-1].name != CHECKSUMS:
        return None
    plain = Layout(layout.specs[:-1], layout.aliases)
    return plain if sealed(plain) == layout else None


def describe_bucket(layout: Layout, number: int) -> str:
    """A bucket by its number and its tensors, for messages."""
    every = buckets(layout)
    names = [repr(layout.specs[i].name) for i in every[number]]
    more = [f"… {len(names) - _NAMES_SHOWN} more"] if len(names) > _NAMES_SHOWN else []
    listed = ", ".join(names[:_NAMES_SHOWN] + more)
    return f"bucket {number + 1} of {len(every)} ({listed})"


def _bytes(tensor: Tensor) -> Any:
    if tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        # The same as below, several times faster: a model may have thousands of small tensors.
        return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy()
