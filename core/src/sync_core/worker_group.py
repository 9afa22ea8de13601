"""The interface of worker groups: workers that each host one object and run calls on it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ClassVar, Self, TypeVar

Result = TypeVar("Result")


class WorkerGroup(ABC):
    """Workers that each host one object, made by ``factory(worker_id)`` in the worker itself.

    Calls to one worker run one after the other, in the order given; calls to different workers
    run at once where the group can. A group is found by name in the entry point group
    ``sync.workers``; the entry point is the class.

    A worker that ends, however its group ends it, closes what it hosts as the last thing: it calls
    ``close()`` of an object whose class has one (`sync_plugin_std.workers.close_hosted`), in the
    worker, after the call in progress and within the same time. One that dies, or is ended by
    force, does not.

    Args:
        factory: makes the object that worker ``worker_id`` hosts. It travels to the worker, and
            may be a lambda, a closure or a function of ``__main__``.
        num_workers: workers to start; their ids are ``0 … num_workers - 1``.
        timeout: deadline in seconds for a worker to start or to stop.

    Raises:
        RemoteCallError: the factory raised in a worker; every worker is stopped first.
        WorkerLostError: a worker died while it started; no worker is left.
        WorkerTimeoutError: a worker did not start in time; no worker is left.
    """

    #: The capabilities of the group; `sync_core.hooks` explains each.
    capabilities: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def __init__(
        self, factory: Callable[[int], Any], num_workers: int, *, timeout: float = 60.0
    ) -> None: ...

    @property
    @abstractmethod
    def worker_ids(self) -> tuple[int, ...]:
        """The ids of the workers that were started and not removed, dead ones included."""

    @abstractmethod
    def call(
        self,
        worker_id: int,
        function: Callable[..., Result],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Future[Result]:
        """Run ``function(hosted, *args, **kwargs)`` on a worker; never blocks for long.

        The future ends with the result; with `RemoteCallError` (chained from the exception
        itself where that can travel) when the function raised, or its arguments or result could
        not travel; with `WorkerLostError` when the worker is dead or dies first. It cannot be
        cancelled.

        Raises:
            UnknownWorkerError: no such worker.
            ClosedError: the group was stopped.
        """

    @abstractmethod
    def alive(self, worker_id: int) -> bool:
        """Return whether the worker can still run calls."""

    @abstractmethod
    def add(self) -> int:
        """Start one more worker with the group's factory and return its id, never used before.

        Raises as the constructor does; the group is then as before. A group that cannot raises
        `OptionError`.
        """

    @abstractmethod
    def restart(self, worker_id: int) -> None:
        """End the worker if it lives and start a new one in its place, under the same id.

        Raises as the constructor does; the worker is then dead. A group that cannot raises
        `OptionError`, and leaves the worker as it is.
        """

    @abstractmethod
    def remove(self, worker_id: int) -> None:
        """End one worker, within the group's timeout; its unfinished calls fail."""

    @abstractmethod
    def stop(self, timeout: float | None = None) -> None:
        """End every worker within ``timeout`` seconds, by force where asking is not enough.

        Unfinished calls fail. Stopping again does nothing. Leaving a ``with`` block stops too.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()
