"""Copies many small tensors from host memory to a GPU in one transfer.

A transfer for each takes 15 µs, or 280 µs where several processes use the GPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# Tensors of at most this many bytes are copied side by side, so many bytes at a time; fewer than
# some are not worth the two copies more.
_SMALL = 1 << 20
_TRANSFER = 32 << 20
_SOME = 4
# `torch.cat` knows them on every device.
_DTYPES = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64}
)


def copy_to_gpu(
    targets: Sequence[Tensor], sources: Sequence[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Copy the small tensors that go from host memory to a GPU.

    When this returns, they have arrived for every stream. At most 32 MB of pinned memory and of
    the GPU's are in use meanwhile.

    Args:
        targets: tensors to be written to, of any devices.
        sources: what to write, of the same shapes.

    Returns:
        The pairs of a target and its source that are still to be copied.
    """
    alike: defaultdict[object, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    others: list[tuple[Tensor, Tensor]] = []
    for target, source in zip(targets, sources, strict=True):
        if _is_small(target, source):
            alike[target.device, target.dtype].append((target, source))
        else:
            others.append((target, source))
    for pairs in alike.values():
        if len(pairs) < _SOME:
            others += pairs
            continue
        for few in _transfers(pairs):
            _transfer(*zip(*few, strict=True))
    return others


def _is_small(target: Tensor, source: Tensor) -> bool:
    return (
        target.is_cuda
        and source.is_cpu
        and source.nbytes <= _SMALL
        and source.dtype in _DTYPES
        and target.dtype == source.dtype
        and target.shape == source.shape
        and target.layout is source.layout is torch.strided
    )


def _transfers(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    few: list[tuple[Tensor, Tensor]] = []
    nbytes = 0
    for pair in pairs:
        if nbytes + pair[1].nbytes > _TRANSFER:
            yield few
            few, nbytes = [], 0
        few.append(pair)
        nbytes += pair[1].nbytes
    yield few


def _transfer(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    parts = [source.reshape(-1) for source in sources]
    sizes = [len(part) for part in parts]
    pinned = torch.empty(sum(sizes), dtype=sources[0].dtype, device="cpu", pin_memory=True)
    torch.cat(parts, out=pinned)
    # Streams are those of the device at hand.
    with torch.cuda.device(targets[0].device):
        joined = pinned.to(targets[0].device).split(sizes)
        pairs = zip(joined, targets, strict=True)
        torch._foreach_copy_(list(targets), [part.view(target.shape) for part, target in pairs])
        torch.cuda.current_stream().synchronize()
