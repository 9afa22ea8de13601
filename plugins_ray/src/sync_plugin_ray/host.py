"""The actor of a worker: it makes one object and runs calls on it, in order."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

# What the worker's object forks closes its connection to the raylet.
import sync_plugin_ray.liveness  # noqa: F401
from sync_plugin_ray.inbox import take_calls
from sync_plugin_std.workers import describe_failure

#: Concurrency group of the methods that run beside a call: the one that `waits`, and `end`.
BESIDE = "beside"
#: Concurrency group in which receivers in the actor are handed versions.
WEIGHTS = "weights"


@dataclass(frozen=True, slots=True)
class Returned:
    """The function returned."""

    value: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """There is no value.

    Args:
        verdict: what the function did; a sentence without its subject: ``raised KeyError: 'a'``.
        traceback: where, as text.
        cause: the exception; its pickle, or None, while it travels.
    """

    verdict: str
    traceback: str
    cause: BaseException | bytes | None

    @classmethod
    def because(cls, verdict: str, error: BaseException) -> Failed:
        """A failure with an exception, where it was caught."""
        summary, frames = describe_failure(error)
        return cls(f"{verdict} {summary}", frames, error)


Outcome = Returned | Failed


class Host:
    """One worker's actor. Ray runs its calls one at a time, and those `BESIDE` at any time."""

    def __init__(self) -> None:
        take_calls(WEIGHTS)
        self._worker_id = -1
        self._hosted: Any = None
        self._close: Callable[[int, object], None] | None = None
        self._ending = threading.Event()

    def begin(self) -> None:
        """Return, by which the caller knows that all calls before have ended."""

    def make(self, call: bytes, worker_id: int) -> bytes:
        """Make the hosted object by a call on the id; its outcome, without a value, as bytes."""
        made = _run(call, worker_id)
        if isinstance(made, Failed):
            return _encode(made)
        self._worker_id, self._hosted = worker_id, made.value
        if hasattr(type(made.value), "close"):
            # Here, and not above: with it comes torch, seconds that other objects need not wait.
            self._close = import_module("sync_plugin_std.workers").close_hosted
        return _encode(Returned(None))

    def run(self, call: bytes) -> bytes | None:
        """Run a call; its outcome as bytes, or None if the end came before its turn."""
        return None if self._ending.is_set() else _encode(_run(call, self._hosted))

    def waits(self) -> None:
        """Never return: that Ray tells the caller of this call's failure is how it learns all."""
        threading.Event().wait()

    def end(self) -> None:
        """Let the call in progress finish, and no other begin."""
        self._ending.set()

    def close(self) -> None:
        """Close the hosted object, after all calls before."""
        hosted, self._hosted = self._hosted, None
        if self._close is not None:
            self._close(self._worker_id, hosted)


def encode(value: object) -> bytes:
    """Anything, as it is now; functions and classes of ``__main__`` by value."""
    pickled: bytes = cloudpickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return pickled


def decode(reply: bytes) -> Outcome:
    """The outcome that an actor has sent."""
    try:
        outcome: Outcome = pickle.loads(reply)
    except Exception as error:
        return Failed.because("returned a value that cannot be unpickled here:", error)
    if not isinstance(outcome, Failed) or not isinstance(outcome.cause, bytes):
        return outcome
    try:
        return replace(outcome, cause=pickle.loads(outcome.cause))
    except Exception:
        # An exception class need not be able to travel; the text says it all.
        return replace(outcome, cause=None)


def _run(call: bytes, hosted: Any) -> Outcome:
    try:
        function, args, kwargs = pickle.loads(call)
    except Exception as error:
        return Failed.because("or its arguments cannot be unpickled in the worker:", error)
    try:
        return Returned(function(hosted, *args, **kwargs))
    except BaseException as error:
        # SystemExit too: what a function raises ends its call, not the actor.
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
        # The traceback travels in any case; few exceptions hold what cannot.
        return None
