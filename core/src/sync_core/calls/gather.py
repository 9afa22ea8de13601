"""Waits for calls to several workers."""

from __future__ import annotations

import time
from concurrent.futures import Future, wait
from typing import Any

from sync_core.errors import WorkerTimeoutError


def gather(futures: dict[int, Future[Any]], timeout: float, what: str) -> list[Any]:
    """The results of calls to workers, in the order given.

    Args:
        futures: the calls, by worker.
        timeout: seconds for all of them together.
        what: what the workers were to do, for the message.

    Raises:
        WorkerTimeoutError: a call did not end in time.
        WorkerError: a call failed.
    """
    deadline = time.monotonic() + timeout
    results = []
    for worker_id, future in futures.items():
        if not wait([future], max(0.0, deadline - time.monotonic())).done:
            raise WorkerTimeoutError(worker_id, f"did not {what} within {timeout:g} s")
        results.append(future.result())
    return results
