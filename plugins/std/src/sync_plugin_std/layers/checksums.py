"""The layers `Checksum` and `Readback`: proofs of what has arrived, and of what was written."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from sync_core import (
    ApplyContext,
    BindContext,
    CorruptionError,
    Layout,
    ReadbackError,
    SendContext,
    Update,
    hookimpl,
)
from sync_core.errors import RequirementError
from sync_core.models import is_extra_state, named_tensors, place_of
from sync_core.transports import checksum, sums_from_tensor, sums_to_tensor

_BUCKET_NBYTES = 4 << 20
# So that the checksums of a large model take 8 KB at most.
_MOST_BUCKETS = 1024
_NAMES_SHOWN = 8
_SUMS = "checksum.sums"


class Checksum:
    """Sends checksums with each version; workers apply none that differs. Named ``checksum``.

    Give it last: then a version is checked before other layers restore it. A version that was
    changed on its way is a `CorruptionError`, which names the tensors; the worker keeps the version
    that it had. Checksums cover packing, memory, network and stores; they find accidents, and no
    forgery.

    Raises:
        RequirementError: the hash library xxhash is not installed.

    Example:
        >>> from sync_core import Receiver, Sender
        >>> model, copy = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
        >>> with Sender("thread", model, num_workers=1, layers=["checksum"]) as sender:
        ...     receiver = Receiver(sender.address(0), copy)
        ...     pending = sender.send_async()
        ...     receiver.receive()
        1
    """

    #: A scheme that sends versions in parts proves each part instead.
    capabilities = frozenset({"checks", "checksums"})

    def __init__(self) -> None:
        check_installed("checksum")
        self._travels = True

    def bind(self, context: BindContext) -> Checksum:
        """Return a layer for one end of one worker; an idle one where nothing travels."""
        bound = Checksum()
        bound._travels = "same_object" not in context.capabilities
        return bound

    @hookimpl(wrapper=True)
    def prepare_weights(self, context: SendContext) -> Generator[None, Update, Update]:
        """Add the checksums."""
        update = yield
        if self._travels:
            # Version 0 is prepared for its layout alone.
            count = len(buckets(update.layout)) + 1
            sums = _sums(update) if context.version else [0] * count
            update.extras[_SUMS] = sums_to_tensor(sums)
        return update

    @hookimpl(wrapper=True)
    def apply_weights(self, update: Update, context: ApplyContext) -> Generator[None, bool, bool]:
        """Compare them.

        Raises:
            CorruptionError: they differ, or are missing.
        """
        if self._travels and context.version:
            self._check(update, context)
        return (yield)

    def _check(self, update: Update, context: ApplyContext) -> None:
        layout, sums = update.layout, update.extras.pop(_SUMS, None)
        if sums is None or sums.shape != (len(buckets(layout)) + 1,):
            raise CorruptionError(
                context.worker_id, f"version {context.version} came without its checksums"
            )
        expected, found = sums_from_tensor(sums), _sums(update)
        if expected != found:
            raise CorruptionError(
                context.worker_id,
                f"version {context.version} was changed on its way, and nothing of it was "
                f"applied: {_differences(layout, expected, found)}",
            )


class Readback:
    """Compares a worker's model with what was written, after each commit. Named ``readback``.

    A model that holds other bits is a `ReadbackError`: the worker is known bad, and the next send
    is whole for it. Extra state of modules is not compared. To prove the whole way, type
    ``layers=["readback", "checksum"]``.

    Raises:
        RequirementError: the hash library xxhash is not installed.

    Example:
        >>> from sync_core import Receiver, Sender
        >>> model, copy = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
        >>> with Sender("thread", model, num_workers=1, layers=["readback"]) as sender:
        ...     receiver = Receiver(sender.address(0), copy)
        ...     pending = sender.send_async()
        ...     receiver.receive()
        1
    """

    capabilities = frozenset({"checks"})

    def __init__(self) -> None:
        check_installed("readback")
        self._travels = True

    def bind(self, context: BindContext) -> Readback:
        """Return a layer for one end of one worker; an idle one where nothing travels."""
        bound = Readback()
        bound._travels = "same_object" not in context.capabilities
        return bound

    @hookimpl(wrapper=True)
    def apply_weights(
        self, update: Update, model: object, context: ApplyContext
    ) -> Generator[None, bool, bool]:
        """Compare what the model holds with the update, as the other layers have restored it.

        Raises:
            ReadbackError: they differ.
        """
        result = yield
        # A worker that loads by its own function has no model that can be read.
        if self._travels and context.version and model is not None:
            _compare(update, named_tensors(model, context.strategy), context)
        return result


def check_installed(name: str) -> None:
    """Raise where the hash library that a layer needs is not installed."""
    try:
        import xxhash  # noqa: F401
    except ImportError as error:
        raise RequirementError(
            f"the layer {name!r} needs the hash library xxhash, here and in the workers: "
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


def _sums(update: Update) -> list[int]:
    """The checksums of the buckets, and one of the base and the other extras."""
    tensors = update.tensors
    sums = [checksum([tensors[i] for i in bucket]) for bucket in buckets(update.layout)]
    return [*sums, checksum([torch.tensor([update.base], device="cpu"), *update.extras.values()])]


def _differences(layout: Layout, expected: Sequence[int], found: Sequence[int]) -> str:
    return "; ".join(
        f"{_describe_bucket(layout, number)}: expected {wanted:016x}, found {got:016x}"
        for number, (wanted, got) in enumerate(zip(expected, found, strict=True))
        if wanted != got
    )


def _describe_bucket(layout: Layout, number: int) -> str:
    """A bucket by its number and its tensors, for messages."""
    every = buckets(layout)
    if number == len(every):
        return "the extras"
    names = [repr(layout.specs[i].name) for i in every[number]]
    more = [f"… {len(names) - _NAMES_SHOWN} more"] if len(names) > _NAMES_SHOWN else []
    listed = ", ".join(names[:_NAMES_SHOWN] + more)
    return f"bucket {number + 1} of {len(every)} ({listed})"


def _compare(update: Update, held: Mapping[str, Tensor], context: ApplyContext) -> None:
    wrong = []
    for spec, tensor in zip(update.layout.specs, update.tensors, strict=True):
        # A module may change its extra state as it likes.
        if is_extra_state(spec.name):
            continue
        mine = held[spec.name]
        given = tensor.to(mine.dtype) if context.cast else tensor
        if given.dtype != mine.dtype or checksum([given]) != checksum([mine]):
            wrong.append(spec.name)
    # Tied tensors that the model holds twice, with different bits.
    wrong += [
        name
        for name, owner in update.layout.aliases
        if not is_extra_state(name)
        and place_of(held[name]) != place_of(held[owner])
        and checksum([held[name]]) != checksum([held[owner]])
    ]
    if wrong:
        raise ReadbackError(
            context.worker_id,
            f"version {context.version} was written, but the model holds other bits than "
            f"those written in {', '.join(map(repr, wrong))}; it is known bad until a newer "
            "version is committed, which the next send brings",
        )
