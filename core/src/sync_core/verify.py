"""Checksums and readback of updates: `Sender(verify=…)`."""

from __future__ import annotations

import ctypes
from collections.abc import Generator, Mapping, Sequence
from functools import lru_cache
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from sync_core.address import Verify
from sync_core.errors import CorruptionError, OptionError, ReadbackError
from sync_core.hooks import ApplyContext, SendContext, hookimpl, implemented
from sync_core.models.extra_state import is_extra_state
from sync_core.models.extract import Strategy, named_tensors
from sync_core.registry import LAYERS, Plugin
from sync_core.weights.layout import Layout, place_of
from sync_core.weights.payload import Update

_BUCKET_NBYTES = 4 << 20
# So that the checksums of a large model take 8 KB at most.
_MOST_BUCKETS = 1024
_NAMES_SHOWN = 8
_SUMS = "checksum.sums"


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

    A larger tensor is its own bucket, and buckets are larger where there would be too many.

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
        state.update(bytes_of(tensor))
    return state.intdigest()


def to_tensor(sums: Sequence[int]) -> Tensor:
    """Checksums as the tensor in which they travel."""
    return torch.from_numpy(np.array(sums, dtype=np.uint64).view(np.int64))


def from_tensor(tensor: Tensor) -> list[int]:
    """The checksums that travelled."""
    sums: list[int] = tensor.cpu().numpy().view(np.uint64).tolist()
    return sums


def describe_bucket(layout: Layout, number: int) -> str:
    """A bucket by its number and its tensors, for messages."""
    every = buckets(layout)
    if number == len(every):
        return "the extras"
    names = [repr(layout.specs[i].name) for i in every[number]]
    more = [f"… {len(names) - _NAMES_SHOWN} more"] if len(names) > _NAMES_SHOWN else []
    listed = ", ".join(names[:_NAMES_SHOWN] + more)
    return f"bucket {number + 1} of {len(every)} ({listed})"


def bytes_of(tensor: Tensor) -> Any:
    """Return the bytes of a tensor, as something that hash functions take."""
    if tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        # The same as below, several times faster: a model may have thousands of small tensors.
        return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy()


def with_verification(
    mode: Verify, backend: Plugin, layers: Sequence[Plugin], strategy: Strategy
) -> tuple[Plugin, ...]:
    """Return the layers of one end, with those that verify: see docs/decisions/0011-verify.md.

    Where nothing travels, since the scheme's workers have the sender's own model, they are the
    layers given.

    Args:
        mode: the argument ``verify`` of `sync_core.Sender`.
        backend: the scheme.
        layers: the user's.
        strategy: how the model is read back.
        by_parts: whether the transport adds and compares checksums itself: those of the parts that
            each rank of a sharded trainer sends.

    Raises:
        OptionError: there is no such mode, the hash library is missing, or the scheme loads
            weights itself, so that they cannot be read back.
    """
    if mode not in get_args(Verify):
        raise OptionError(f"verify must be 'checksum', 'readback' or None, not {mode!r}")
    if "same_object" in backend.capabilities:
        return tuple(layers)
    check_installed()
    verified = tuple(layers)
    if not backend.by_parts:
        verified = (*verified, Plugin(LAYERS, "checksum", _Seal()))
    if mode == "checksum":
        return verified
    if "apply_weights" in implemented(backend.object):
        raise OptionError(
            f"{backend.describe()} loads weights itself, so that they cannot be read back; use "
            "verify='checksum'"
        )
    return (Plugin(LAYERS, "readback", _Readback(strategy)), *verified)


class _Seal:
    """The layer next to the wire: adds checksums to what travels, and takes them out again."""

    @hookimpl(wrapper=True)
    def prepare_weights(self, context: SendContext) -> Generator[None, Update, Update]:
        update = yield
        # Version 0 is prepared for its layout alone.
        layout = update.layout
        sums = _sums(update) if context.version else [0] * (len(buckets(layout)) + 1)
        update.extras[_SUMS] = to_tensor(sums)
        return update

    @hookimpl(wrapper=True)
    def apply_weights(self, update: Update, context: ApplyContext) -> Generator[None, bool, bool]:
        sums = update.extras.pop(_SUMS, None)
        if sums is None or sums.shape != (len(buckets(update.layout)) + 1,):
            raise CorruptionError(
                context.worker_id, f"version {context.version} came without its checksums"
            )
        expected, found = from_tensor(sums), _sums(update)
        if expected != found:
            raise CorruptionError(
                context.worker_id,
                f"version {context.version} was changed on its way, and nothing of it was "
                f"applied: {_differences(update.layout, expected, found)}",
            )
        return (yield)


def _sums(update: Update) -> list[int]:
    """The checksums of the buckets, and one of the base and the other extras."""
    beside = [torch.tensor([update.base]), *update.extras.values()]
    return [*checksums(update.layout, update.tensors), checksum(beside)]


class _Readback:
    """The layer next to the model: reads what was written, and compares."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    @hookimpl(wrapper=True)
    def apply_weights(
        self, update: Update, model: Any, context: ApplyContext
    ) -> Generator[None, bool, bool]:
        if context.cast:
            update.replace(_as_in(named_tensors(model, self._strategy), update))
        layout, given = update.layout, update.tensors
        expected = checksums(layout, given)
        result = yield
        named = named_tensors(model, self._strategy)
        # A module may change its extra state as it likes.
        held = [
            mine if is_extra_state(spec.name) else named[spec.name]
            for spec, mine in zip(layout.specs, given, strict=True)
        ]
        found = checksums(layout, held)
        untied = _untied(layout, named)
        if expected != found or untied:
            wrong = [*_unequal(layout, given, held), *untied]
            raise ReadbackError(
                context.worker_id,
                f"version {context.version} was written, but the model holds other bits than "
                f"those written in {', '.join(map(repr, wrong))}; it is known bad until a newer "
                "version is committed, which the next send brings",
            )
        return result


def _differences(layout: Layout, expected: Sequence[int], found: Sequence[int]) -> str:
    return "; ".join(
        f"{describe_bucket(layout, number)}: expected {wanted:016x}, found {got:016x}"
        for number, (wanted, got) in enumerate(zip(expected, found, strict=True))
        if wanted != got
    )


def _unequal(layout: Layout, given: Sequence[Tensor], held: Sequence[Tensor]) -> list[str]:
    return [
        spec.name
        for spec, ours, theirs in zip(layout.specs, given, held, strict=True)
        if checksum([ours]) != checksum([theirs])
    ]


def _as_in(named: Mapping[str, Tensor], update: Update) -> list[Tensor]:
    """The update's tensors in the dtypes of the model's."""
    return [
        tensor.to(named[spec.name].dtype) if spec.name in named else tensor
        for spec, tensor in zip(update.layout.specs, update.tensors, strict=True)
    ]


def _untied(layout: Layout, named: Mapping[str, Tensor]) -> list[str]:
    """Tied tensors that the model holds twice, with different bits."""
    return [
        name
        for name, owner in layout.aliases
        if not is_extra_state(name)
        and place_of(named[name]) != place_of(named[owner])
        and checksum([named[name]]) != checksum([named[owner]])
    ]
