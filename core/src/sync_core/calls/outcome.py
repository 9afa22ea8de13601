"""What became of one call of a worker, in a form that can travel."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sync_core.calls.pickling import Buffer, dumps, dumps_copy, loads


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """What became of a call: a value, or how it failed.

    Args:
        value: what the function returned.
        verdict: what the function did instead; a sentence without its subject:
            ``raised KeyError: 'a'``.
        traceback: where, as text.
        cause: the exception, where there is one that could travel.

    Example:
        >>> from sync_core import RemoteCall
        >>> call = RemoteCall(0, divmod)
        >>> message = call.pickle((3,), {})
        >>> reply = CallOutcome.of_pickled(message, 7).pickle()  # in the worker, which hosts 7
        >>> call.finish(CallOutcome.unpickle(reply))
        >>> call.future.result()
        (2, 1)
    """

    value: Any = None
    verdict: str | None = None
    traceback: str = ""
    cause: BaseException | None = None

    @classmethod
    def of(cls, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> CallOutcome:
        """Call the function. Whatever it raises, SystemExit included, is an outcome too."""
        try:
            return cls(function(*args, **kwargs))
        except BaseException as error:
            return cls.failure("raised", error)

    @classmethod
    def of_pickled(cls, message: Sequence[Buffer], hosted: object) -> CallOutcome:
        """Make the call that `RemoteCall.pickle` or `pickle_factory` has pickled.

        Args:
            message: the parts; arrays among the arguments take them over as their memory.
            hosted: the first argument; the worker's id for a factory.
        """
        try:
            function, args, kwargs = loads(message)
        except Exception as error:
            return cls.failure("or its arguments cannot be unpickled in the worker:", error)
        return cls.of(function, hosted, *args, **kwargs)

    @classmethod
    def failure(cls, verdict: str, error: BaseException) -> CallOutcome:
        """A failure by an exception, told from the frame below the one that caught it."""
        below = error.__traceback__ and error.__traceback__.tb_next
        frames = traceback.format_exception(type(error), error, below)
        summary = traceback.format_exception_only(error)[0].strip()
        return cls(None, f"{verdict} {summary}", "".join(frames), error)

    @property
    def failed(self) -> bool:
        """Whether there is no value."""
        return self.verdict is not None

    def without_value(self) -> CallOutcome:
        """The same, with nothing of what was returned; for a factory, whose object stays."""
        return replace(self, value=None)

    def pickle(self) -> list[bytes | memoryview]:
        """The outcome as it is to travel, or as a failure that can; big arrays are not copied."""
        try:
            return dumps((self.value, self.verdict, self.traceback, _pickle_cause(self.cause)))
        except Exception as error:
            return self.failure("returned a value that cannot be pickled:", error).pickle()

    @classmethod
    def unpickle(cls, reply: Sequence[Buffer]) -> CallOutcome:
        """What was pickled. Arrays in it take the parts over as their memory."""
        try:
            value, verdict, where, cause = loads(reply)
        except Exception as error:
            return cls.failure("returned a value that cannot be unpickled here:", error)
        return cls(value, verdict, where, _unpickle_cause(cause))


def _pickle_cause(cause: BaseException | None) -> list[bytearray] | None:
    try:
        return None if cause is None else dumps_copy(cause)
    except Exception:
        # The traceback travels in any case; few exceptions hold what cannot.
        return None


def _unpickle_cause(pickled: list[bytearray] | None) -> BaseException | None:
    try:
        cause = None if pickled is None else loads(pickled)
    except Exception:
        # An exception class need not be able to travel; the text says it all.
        return None
    return cause if isinstance(cause, BaseException) else None
