"""One call of a worker, on its caller's side: how it travels, and the future that ends with it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from sync_core.calls.outcome import CallOutcome
from sync_core.calls.pickling import dumps_copy
from sync_core.errors import RemoteCallError, WorkerLostError


@dataclass(frozen=True, slots=True, eq=False)
class RemoteCall:
    """A call that a worker is to run, on its caller's side.

    Args:
        worker_id: the worker, which errors name.
        function: what it is to run.

    Example:
        >>> call = RemoteCall(3, list.pop)
        >>> call.finish(CallOutcome.of(list.pop, []))
        >>> print(str(call.future.exception()).splitlines()[0])
        worker 3: list.pop raised IndexError: pop from empty list
    """

    worker_id: int
    function: Callable[..., Any]
    #: Ends with the call. It cannot be cancelled.
    future: Future[Any] = field(default_factory=Future, init=False)

    def __post_init__(self) -> None:
        # Once posted, a call cannot be taken back: cancel() is to answer False.
        self.future.set_running_or_notify_cancel()

    @property
    def name(self) -> str:
        """What to call the function in a message."""
        return _name_of(self.function)

    def pickle(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[bytearray] | None:
        """The call as it is now, for `CallOutcome.of_pickled`; the arguments are copied.

        Returns:
            Parts, of which the first is a pickle and each other the memory of a big array in it.
            None when it cannot be pickled; the future has ended by then, and says why.
        """
        try:
            return dumps_copy((self.function, args, kwargs))
        except Exception as error:
            self.finish(CallOutcome.failure("or its arguments cannot be pickled:", error))
            return None

    def finish(self, outcome: CallOutcome) -> None:
        """End the future: with the value, or with `RemoteCallError`."""
        if not outcome.failed:
            self.future.set_result(outcome.value)
            return
        message = f"{self.name} {outcome.verdict}\n{outcome.traceback}".rstrip()
        error = RemoteCallError(self.worker_id, message)
        error.__cause__ = outcome.cause
        self.future.set_exception(error)

    def lose(self, message: str, cause: BaseException | None = None) -> None:
        """End the future with `WorkerLostError`, which has that message."""
        error = WorkerLostError(self.worker_id, message)
        error.__cause__ = cause
        self.future.set_exception(error)


def pickle_factory(factory: Callable[[int], Any], worker_id: int) -> list[bytearray]:
    """A factory, for `CallOutcome.of_pickled` in each worker.

    Args:
        factory: makes what a worker hosts.
        worker_id: the first of the workers, which the error names.

    Raises:
        RemoteCallError: it cannot be pickled.
    """
    try:
        return dumps_copy((factory, (), {}))
    except Exception as error:
        message = f"was not started, its factory {_name_of(factory)} cannot be pickled: {error}"
        raise RemoteCallError(worker_id, message) from error


def _name_of(function: Callable[..., Any]) -> str:
    if isinstance(function, functools.partial):
        return _name_of(function.func)
    return getattr(function, "__qualname__", None) or repr(function)
