"""The actor of a worker: it makes one object, and runs calls on it in order."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

# Makes processes that the worker's object forks close their connection to the raylet.
import sync_plugin_ray.liveness  # noqa: F401
from sync_plugin_ray.inbox import take_calls
from sync_plugin_std.workers import describe_failure

#: Concurrency group of the methods that run during a call: `waits` and `end`.
BESIDE = "beside"
#: Concurrency group of the calls that bring versions to receivers in the actor.
WEIGHTS = "weights"


@dataclass(frozen=True, slots=True)
class Returned:
    """The function returned."""

    value: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """The function failed.

    Args:
        verdict: a phrase for messages, such as ``raised KeyError: 'a'``.
        traceback: the traceback as text.
        cause: the exception; in transit, its pickle or None.
    """

    verdict: str
    traceback: str
    cause: BaseException | bytes | None

    @classmethod
    def because(cls, verdict: str, error: BaseException) -> Failed:
        """Return a failure for a caught exception."""
        summary, frames = describe_failure(error)
        return cls(f"{verdict} {summary}", frames, error)


Outcome = Returned | Failed


class Host:
    """The actor of one worker. Ray runs its calls one by one, except those `BESIDE` others."""

    def __init__(self) -> None:
        take_calls(WEIGHTS)
        self._worker_id = -1
        self._hosted: Any = None
        self._close: Callable[[int, object], None] | None = None
        self._ending = threading.Event()

    def begin(self) -> None:
        """Do nothing; when this returns, all earlier calls have ended."""

    def make(self, call: bytes, worker_id: int) -> bytes:
        """Make the hosted object by calling the factory; return the outcome as bytes."""
        made = _run(call, worker_id)
        if isinstance(made, Failed):
            return _encode(made)
        self._worker_id, self._hosted = worker_id, made.value
        if hasattr(type(made.value), "close"):
            # Imported here, since it imports torch, which takes seconds that not all objects need.
            self._close = import_module("sync_plugin_std.workers").close_hosted
        return _encode(Returned(None))

    def run(self, call: bytes) -> bytes | None:
        """Run a call; return the outcome as bytes, or None if `end` was called first."""
        return None if self._ending.is_set() else _encode(_run(call, self._hosted))

    def waits(self) -> None:
        """Never return: the caller notices the actor's death when this call fails."""
        threading.Event().wait()

    def end(self) -> None:
        """Let the call in progress finish, and start no other."""
        self._ending.set()

    def close(self) -> None:
        """Close the hosted object after all earlier calls."""
        hosted, self._hosted = self._hosted, None
        if self._close is not None:
            self._close(self._worker_id, hosted)


def encode(value: object) -> bytes:
    """Pickle any value; functions and classes of ``__main__`` are pickled by value."""
    pickled: bytes = cloudpickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return pickled


def decode(reply: bytes) -> Outcome:
    """Unpickle the outcome from an actor."""
    try:
        outcome: Outcome = pickle.loads(reply)
    except Exception as error:
        return Failed.because("returned a value that cannot be unpickled here:", error)
    if not isinstance(outcome, Failed) or not isinstance(outcome.cause, bytes):
        return outcome
    try:
        return replace(outcome, cause=pickle.loads(outcome.cause))
    except Exception:
        # The exception's class may not be picklable or importable; the text is enough.
        return replace(outcome, cause=None)


def _run(call: bytes, hosted: Any) -> Outcome:
    try:
        function, args, kwargs = pickle.loads(call)
    except Exception as error:
        return Failed.because("or its arguments cannot be unpickled in the worker:", error)
    try:
        return Returned(function(hosted, *args, **kwargs))
    except BaseException as error:
        # Includes SystemExit, which must end the call but not the actor.
        return Failed.because("raised", error)


def _encode(outcome: Outcome) -> bytes:
    if isinstance(outcome, Failed):
        outcome = replace(outcome, cause=_encode_cause(outcome.cause))
    try:
        return encode(outcome)
    except Exception as error:
        return _encode(Failed.because("returned a value that cannot be pickled:", error))


def _encode_cause(cause: object) -> bytes | None:
    try:
        return encode(cause)
    except Exception:
        # Few exceptions cannot be pickled; the traceback is sent in any case.
        return None
