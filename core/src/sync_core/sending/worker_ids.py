"""Checks of the workers that a sender is given."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from sync_core.checks import check_count
from sync_core.errors import OptionError


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


def count_workers(num_workers: int | None, workers: Sequence[Any] | None) -> int:
    """The number of workers that a sender starts with.

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
