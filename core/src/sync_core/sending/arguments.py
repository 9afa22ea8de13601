"""Checks of a sender's arguments, and near misses of those that it does not have."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from difflib import SequenceMatcher
from typing import Any

from sync_core import registry
from sync_core.checks import check_count, check_function
from sync_core.errors import OptionError, PluginError
from sync_core.wrapping import SEPARATOR

# The similarity, from 0 to 1, from which a name is taken for another: that of `difflib`.
_ALIKE = 0.6


def as_id(worker_id: int) -> int:
    """The id of a worker to be added.

    Raises:
        ValueError: that is not an id.
    """
    try:
        index = operator.index(worker_id)
    except TypeError as error:
        raise ValueError(_no_id(worker_id)) from error
    if isinstance(worker_id, bool) or index < 0:
        raise ValueError(_no_id(worker_id))
    return index


def as_barrier(before_read: Any) -> Callable[[], AbstractContextManager[object]]:
    """Return a function that makes what encloses each reading of a model.

    Args:
        before_read: see `Sender`.
    """
    if before_read is None:
        return nullcontext
    if isinstance(before_read, AbstractContextManager):
        return lambda: before_read
    check_function(before_read, "before_read")

    def call() -> AbstractContextManager[object]:
        made = before_read()
        return made if isinstance(made, AbstractContextManager) else nullcontext()

    return call


def count_workers(
    num_workers: int | None, workers: Sequence[Any] | None, *, publishes: bool = False
) -> int:
    """The number of workers that a sender starts with.

    Args:
        num_workers: as the user gave it.
        workers: as the user gave it.
        publishes: whether the scheme needs to know of none.

    Raises:
        OptionError: the workers are not a list.
        TypeError: the number is not an integer.
        ValueError: none is given, or two that differ, or less than no workers.
    """
    if workers is not None and (isinstance(workers, str) or not isinstance(workers, Sequence)):
        raise OptionError(f"workers is a list: workers=[{workers!r}]")
    if num_workers is not None:
        num_workers = check_count(num_workers, "num_workers", least=0)
    if workers is not None:
        if num_workers not in (None, len(workers)):
            raise ValueError(f"num_workers={num_workers}, but {len(workers)} workers were given")
        return len(workers)
    if num_workers is None and publishes:
        return 0
    if num_workers is None:
        raise ValueError(
            "no workers were given; give num_workers=…, or workers=[…] if the scheme calls them"
        )
    return num_workers


def check_handle(worker: Any, *, needed: bool) -> None:
    """Raise `OptionError` for a worker without a handle, or with one, unlike the others."""
    if needed and worker is None:
        raise OptionError("the sender calls its workers by their handles: add_worker(worker=…)")
    if worker is not None and not needed:
        raise OptionError("the workers connect by their addresses; leave worker= out")


def _no_id(worker_id: object) -> str:
    return f"the id of a worker is a number from 0 on, not {worker_id!r}"


def with_near_miss(error: OptionError, arguments: Iterable[str], scheme: str) -> OptionError:
    """Return the error for an unknown option, with what the user may have meant.

    Args:
        error: the scheme's.
        arguments: those of the sender.
        scheme: its name.
    """
    name = error.unknown or ""
    kinds = (
        (arguments, "{}=…"),
        (error.known, "{}=…"),
        (_installed(registry.LAYERS), "layers=[{!r}]"),
        (_installed(registry.SCHEMES), f'scheme="{{}}{SEPARATOR}{scheme}"'),
    )
    alike = [
        (SequenceMatcher(None, name.lower(), each).ratio(), -rank, each)
        for rank, (names, _) in enumerate(kinds)
        for each in names
    ]
    for ratio, rank, each in sorted(alike, reverse=True):
        if ratio < _ALIKE:
            break
        meant = kinds[-rank][1].format(each)
        if rank == -1:
            return OptionError(f"{error}; did you mean {meant}?")
        if rank > -3 or _wraps(each):
            return OptionError(f"Sender has no argument {name!r}; did you mean {meant}? ({error})")
    return error


def _installed(group: str) -> set[str]:
    return {entry.name for entry in registry.installed(group)}


def _wraps(scheme: str) -> bool:
    """Return whether a scheme wraps others, and so can be put in front of a chain."""
    try:
        registry.wrapper(scheme)
    except PluginError:
        return False
    return True
