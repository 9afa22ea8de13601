"""Checksums and readback of updates: `Sender(verify=…)`."""

from __future__ import annotations

import ctypes
from collections.abc import Generator, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from sync_core.errors import CorruptionError, OptionError, ReadbackError, WorkerError
from sync_core.hooks import ApplyContext, SendContext, hookimpl, implemented
from sync_core.models.extra_state import is_extra_state
from sync_core.models.extract import Strategy, named_tensors
from sync_core.registry import LAYERS, Plugin
from sync_core.transports.transport import Answer, Delivery
from sync_core.weights.layout import ALIGNMENT, CHECKSUMS, Layout, TensorSpec, place_of
from sync_core.weights.payload import Update

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


@lru_cache(maxsize=64)
def sealed(layout: Layout) -> Layout:
    """The layout with the checksums of its buckets after it."""
    end = layout.body_nbytes
    shape = (len(buckets(layout)),)
    spec = TensorSpec(CHECKSUMS, torch.int64, shape, end + -end % ALIGNMENT)
    return Layout((*layout.specs, spec), layout.aliases)


@lru_cache(maxsize=64)
def unsealed(layout: Layout) -> Layout | None:
    """Return the layout that was sealed; None for one that was not."""
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


def bytes_of(tensor: Tensor) -> Any:
    """Return the bytes of a tensor, as something that hash functions take."""
    if tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        # The same as below, several times faster: a model may have thousands of small tensors.
        return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy()


#: The kinds of verification: see `Sender`, and docs/decisions/0011-verify.md.
Verify = Literal["checksum", "readback"]


class Verification:
    """The verification of one sender or receiver.

    Nothing where nothing travels: with a scheme whose workers have the sender's own model.

    Args:
        mode: see `Sender`.
        backend: the scheme.
        layers: the user's.
        strategy: how the model is read back.
        by_parts: whether the transport adds and compares checksums itself: those of the parts that
            each rank of a sharded trainer sends.

    Raises:
        OptionError: there is no such mode, the hash library is missing, or the scheme loads
            weights itself, so that they cannot be read back.
    """

    def __init__(
        self,
        mode: Verify | None,
        backend: Plugin,
        layers: Sequence[Plugin],
        strategy: Strategy,
        *,
        by_parts: bool = False,
    ) -> None:
        if mode not in (None, "checksum", "readback"):
            raise OptionError(f"verify must be 'checksum', 'readback' or None, not {mode!r}")
        self.layers = tuple(layers)
        self._seal: _Seal | None = None
        self._readback: _Readback | None = None
        #: Whether workers read their models back.
        self.reads_back = mode == "readback" and "same_object" not in backend.capabilities
        if mode is None or "same_object" in backend.capabilities:
            return
        check_installed()
        if not by_parts:
            self._seal = _Seal()
            self.layers = (*self.layers, Plugin(LAYERS, "checksum", self._seal))
        if mode == "readback":
            if "apply_weights" in implemented(backend.object):
                raise OptionError(
                    f"{backend.describe()} loads weights itself, so that they cannot be read "
                    "back; use verify='checksum'"
                )
            self._readback = _Readback(strategy)
            self.layers = (Plugin(LAYERS, "readback", self._readback), *self.layers)
        self._unchanged = not any(
            hook in implemented(layer.object)
            for layer in layers
            for hook in ("prepare_weights", "apply_weights")
        )

    @property
    def digest(self) -> str | None:
        """The digest of what was last committed here; None where it is not read back."""
        return None if self._readback is None else self._readback.digest

    def guard(self, deliveries: Iterable[Delivery]) -> None:
        """Let no worker count as updated whose model does not hold what was just prepared."""
        if self._readback is None:
            return
        # A rank knows its parts only; the worker has compared all of them.
        layout, sums = (Layout(()), ()) if self._seal is None else self._seal.sent
        known = self._unchanged and self._seal is not None
        check = partial(_compare, layout, _digest(sums) if known else None)
        for delivery in deliveries:
            delivery.require(check)


class _Seal:
    """The layer next to the wire: adds checksums to what travels, and takes them out again."""

    sent: tuple[Layout, Sequence[int]] = (Layout(()), ())

    @hookimpl(wrapper=True)
    def prepare_weights(self, context: SendContext) -> Generator[None, Update, Update]:
        update = yield
        layout, tensors = update.layout, update.tensors
        travels = sealed(layout)
        # Version 0 is prepared for its layout alone.
        sums = checksums(layout, tensors) if context.version else [0] * travels.specs[-1].shape[0]
        self.sent = layout, sums
        update.become(travels, (*tensors, to_tensor(sums)))
        return update

    @hookimpl(wrapper=True)
    def apply_weights(self, update: Update, context: ApplyContext) -> Generator[None, bool, bool]:
        layout = unsealed(update.layout)
        if layout is None:
            raise CorruptionError(
                context.worker_id, f"version {context.version} came without its checksums"
            )
        *tensors, sums = update.tensors
        expected, found = from_tensor(sums), checksums(layout, tensors)
        if expected != found:
            raise CorruptionError(
                context.worker_id,
                f"version {context.version} was changed on its way, and nothing of it was "
                f"applied: {_differences(layout, expected, found)}",
            )
        update.become(layout, tensors)
        return (yield)


class _Readback:
    """The layer next to the model: reads what was written, and compares."""

    def __init__(self, strategy: Strategy) -> None:
        self.digest: str | None = None
        self._strategy = strategy

    @hookimpl(wrapper=True)
    def apply_weights(
        self, update: Update, model: Any, context: ApplyContext
    ) -> Generator[None, bool, bool]:
        self.digest = None
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
        self.digest = _digest(found)
        return result


def _compare(
    layout: Layout, expected: str | None, delivery: Delivery, answer: Answer | None
) -> WorkerError | None:
    worker_id = delivery.worker_id
    digest = None if answer is None else answer.digest
    if digest is None:
        return WorkerError(
            worker_id,
            f"committed version {delivery.version}, and did not say what its model holds; the "
            "scheme brings no answers back, as verify='readback' needs",
        )
    if expected in (None, digest):
        return None
    return ReadbackError(
        worker_id,
        f"committed version {delivery.version}, but its model does not hold what was sent, and is "
        "known bad until the next send: "
        + _differences(layout, _sums(expected or ""), _sums(digest)),
    )


def _digest(sums: Sequence[int]) -> str:
    return "".join(f"{number:016x}" for number in sums)


def _sums(digest: str) -> list[str]:
    return [digest[start : start + 16] for start in range(0, len(digest), 16)]


def _differences(layout: Layout, expected: Sequence[object], found: Sequence[object]) -> str:
    if len(expected) != len(found):
        return f"{len(expected)} checksums were expected, and {len(found)} found"
    return "; ".join(
        f"{describe_bucket(layout, number)}: expected {_hex(wanted)}, found {_hex(got)}"
        for number, (wanted, got) in enumerate(zip(expected, found, strict=True))
        if wanted != got
    )


def _hex(value: object) -> str:
    return f"{value:016x}" if isinstance(value, int) else str(value)


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
