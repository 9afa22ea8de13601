"""Copies tensors: small ones fused, large ones by two threads, and to a GPU in few transfers."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

# torch divides the copy of a tensor of this many elements among its threads beforehand
# (GRAIN_SIZE in ATen/TensorIterator.h), and waits for all of them. Where other processes have the
# cores that is a slice of their time, hundreds of times as long as a small copy takes.
_DIVIDED = 32_768
# The size of a piece, and the size from which a second thread is worth its start, in bytes.
_PIECE = 4 << 20
_WORTHWHILE = 16 << 20
# Tensors of at most this many bytes are copied side by side, so many bytes at a time; fewer than
# some are not worth the two copies more.
_SMALL = 1 << 20
_TRANSFER = 32 << 20
_SOME = 4
# `torch.cat` knows them on every device.
_DTYPES = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64}
)

Result = TypeVar("Result")
Item = TypeVar("Item")

_Piece: TypeAlias = (
    "tuple[np.ndarray[Any, np.dtype[np.uint8]], np.ndarray[Any, np.dtype[np.uint8]]]"
)


def copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy every source into its target: the small ones in one fused copy."""
    if max(map(Tensor.numel, targets), default=0) < _DIVIDED:
        _copy_fused(targets, sources)
        return
    apart: list[tuple[Tensor, Tensor]] = []
    others: list[tuple[Tensor, Tensor]] = []
    for target, source in zip(targets, sources, strict=True):
        alone = target.numel() >= _DIVIDED and _same_bytes(target, source)
        (apart if alone else others).append((target, source))
    _copy_fused([target for target, _ in others], [source for _, source in others])
    _copy_pieces(deque(piece for pair in apart for piece in _pieces(*pair)))
    # What autograd has saved for a backward pass has changed, as with any in-place copy.
    increment_version([target for target, _ in apart])


def outside_inference_mode(function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Call a function in a mode in which tensors are made that can be trained."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(mode=False):
            return function(*args, **kwargs)
    return function(*args, **kwargs)


def writing_to(targets: Iterable[Tensor]) -> AbstractContextManager[object]:
    """The mode in which tensors can be written to, and nothing is recorded for a backward pass."""
    # Tensors made in inference mode can be written to in that mode only.
    inference = any(map(Tensor.is_inference, targets))
    return torch.inference_mode() if inference else torch.no_grad()


def _copy_fused(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    if not targets:
        return
    if any(map(Tensor.is_inference, targets)) and not torch.is_inference_mode_enabled():
        with torch.inference_mode():
            _copy_fused(targets, sources)
        return
    # What `torch.no_grad` does, in a third of its time, which is most of that of a small copy.
    records = torch.is_grad_enabled()
    try:
        torch.set_grad_enabled(False)
        # A process that has not begun to use a GPU has no tensors there.
        if torch.cuda.is_initialized():
            pairs = copy_to_gpu(targets, sources)
            targets, sources = [one for one, _ in pairs], [one for _, one in pairs]
        if targets:
            torch._foreach_copy_(list(targets), list(sources))
    except RuntimeError:
        # It takes no views that negate for targets, and says so before it writes to any; to
        # look for them in every copy would cost more.
        if not any(target.is_conj() or target.is_neg() for target in targets):
            raise
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
    finally:
        torch.set_grad_enabled(records)


def _copy_pieces(pieces: deque[_Piece]) -> None:
    nbytes = sum(len(target) for target, _ in pieces)
    in_two_threads(_copy_piece, pieces, nbytes)


def _copy_piece(piece: _Piece) -> None:
    np.copyto(*piece)


def in_two_threads(work: Callable[[Item], object], items: deque[Item], nbytes: int) -> None:
    """Call a function with every item: by this thread and, where that pays, by one more.

    Each takes the next item when it is done with one. Large NumPy operations run at the same time.

    Args:
        work: the function.
        items: taken from the left; none is left when this returns or raises.
        nbytes: the bytes that all items stand for.
    """
    if nbytes < _WORTHWHILE or torch.get_num_threads() == 1:
        _work_off(work, items)
        return
    errors: list[BaseException] = []
    # Memory is hardly faster for three.
    helper = threading.Thread(
        target=_work_off_or_note, args=(work, items, errors), name="sync-copy"
    )
    try:
        # Since Python 3.12, no thread begins while the process ends.
        with suppress(RuntimeError):
            helper.start()
        _work_off(work, items)
    finally:
        # After Ctrl-C, the memory is another version's, so the helper takes no other item.
        items.clear()
        if helper.ident is not None:
            helper.join()
    if errors:
        raise errors[0]


def _work_off(work: Callable[[Item], object], items: deque[Item]) -> None:
    while True:
        try:
            item = items.popleft()
        except IndexError:
            return
        work(item)


def _work_off_or_note(
    work: Callable[[Item], object], items: deque[Item], errors: list[BaseException]
) -> None:
    try:
        _work_off(work, items)
    except BaseException as error:
        errors.append(error)


def _same_bytes(target: Tensor, source: Tensor) -> bool:
    """Return whether a copy of the bytes in memory is a copy of the values."""
    return (
        target.dtype == source.dtype
        and target.shape == source.shape
        and _is_plain(target)
        and _is_plain(source)
    )


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_inference()
    )


def _pieces(target: Tensor, source: Tensor) -> Iterator[_Piece]:
    to, of = _bytes(target), _bytes(source)
    for begin in range(0, len(to), _PIECE):
        yield to[begin : begin + _PIECE], of[begin : begin + _PIECE]


def _bytes(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return tensor.detach().view(-1).view(torch.uint8).numpy()


def copy_to_gpu(
    targets: Sequence[Tensor], sources: Sequence[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Copy the small tensors that go from host memory to a GPU, in one transfer.

    A transfer for each takes 15 µs, or 280 µs where several processes use the GPU. When this
    returns, they have arrived for every stream. At most 32 MB of pinned memory and of the GPU's
    are in use meanwhile.

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
