"""Which workers a call is for."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from sync_core.errors import UnknownWorkerError


def normalize(worker_ids: int | Iterable[int] | None, known: Iterable[int]) -> tuple[int, ...]:
    """The worker ids meant, each once, in the order given.

    Args:
        worker_ids: one id, several, or None for all. Anything with ``__index__`` is an id (numpy
            integers are), except True and False. No ids mean no workers.
        known: the ids there are.

    Raises:
        UnknownWorkerError: an id that is none of these; there are no negative ones.

    Example:
        >>> normalize([2, 0, 2], known=range(4))
        (2, 0)
    """
    everybody = tuple(known)
    if worker_ids is None:
        return everybody
    given = worker_ids if isinstance(worker_ids, Iterable) else (worker_ids,)
    return tuple(dict.fromkeys(_normalize_one(worker_id, everybody) for worker_id in given))


def _normalize_one(worker_id: Any, known: tuple[int, ...]) -> int:
    message = f"there is no worker {worker_id!r}; the workers are {list(known)}"
    if isinstance(worker_id, bool):
        raise UnknownWorkerError(message)
    try:
        index = operator.index(worker_id)
    except TypeError as error:
        raise UnknownWorkerError(message) from error
    if index not in known:
        raise UnknownWorkerError(message)
    return index
