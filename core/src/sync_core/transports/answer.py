"""What a worker answers about a version: that it was committed or why not, and what it measured."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from sync_core.errors import ApplyError, CorruptionError, ReadbackError, WorkerError

# What went wrong, as it is called in a message, and what the sender raises for it.
_FAILURES: Mapping[str, type[WorkerError]] = {
    "corruption": CorruptionError,
    "readback": ReadbackError,
    "apply": ApplyError,
    "late": ApplyError,
}
_OUTCOMES = {
    "readback": "could not apply version {}; its model is known bad",
    "late": "has version {}, and something raised after that was loaded",
}
_USUAL_OUTCOME = "could not apply version {}; it keeps the one it had"
# A traceback says most at its end; the whole has to fit into the buffer of a socket.
_LONGEST_ERROR = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A worker's answer about one version.

    A transport that sends messages carries `to_message`, and need not know what is in it.

    Args:
        version: the version.
        error: why it was not committed; None when it was.
        failure: the kind of that error: ``"apply"``, ``"corruption"``, ``"readback"``, or
            ``"late"`` when the model has the version, and a layer or ``on_commit`` raised after
            it was loaded.
        stage_seconds: from the moment at which the worker's transport knew of the version to
            the one at which it had all of it; 0 where the transport does not measure that.
        commit_seconds: what loading it into the model took.
        pause_seconds: how long the thread that called `receive` was held after the version was
            there: loading, and what `Receiver` was given as ``on_commit``.
        known_at: when the worker's transport knew of the version, by the clock ``clock``.
        answered_at: when the worker answered, by the same clock.
        clock: which clock that is, as `sync_core.transports.clock.clock_id` says it; None for one
            that nobody else is known to have, and for a worker that does not tell when.
        digest: of the model after the commit, where the sender asks for it: ``verify="readback"``.

    Example:
        >>> answer = Answer(version=3, commit_seconds=0.25)
        >>> Answer.from_message(answer.to_message()) == answer
        True
    """

    version: int
    error: str | None = None
    failure: str = "apply"
    stage_seconds: float = 0.0
    commit_seconds: float = 0.0
    pause_seconds: float = 0.0
    known_at: float | None = None
    answered_at: float | None = None
    clock: str | None = None
    digest: str | None = None

    @classmethod
    def refusal(cls, version: int, error: BaseException, *, loaded: bool = False) -> Self:
        """The answer of a worker that could not commit a version because of ``error``.

        Args:
            version: the version.
            error: what was raised.
            loaded: whether the model has the version all the same.
        """
        kinds = [name for name, kind in _FAILURES.items() if isinstance(error, kind)]
        usual = "late" if loaded else "apply"
        text = "".join(traceback.format_exception(error)).rstrip()
        return cls(
            version=version, error=text[-_LONGEST_ERROR:], failure=kinds[0] if kinds else usual
        )

    def to_message(self) -> dict[str, Any]:
        """The answer as a mapping of numbers and strings, which JSON and pickle can hold."""
        message = {name: getattr(self, name) for name in _FITS}
        if self.error is not None:
            message["error"] = self.error[-_LONGEST_ERROR:]
        return message

    @classmethod
    def from_message(cls, message: object) -> Self:
        """The answer that `to_message` made; what else a newer worker tells is left out.

        Raises:
            ValueError: it is none; says which of its entries is wrong.
        """
        given = message if isinstance(message, Mapping) else {}
        values = {name: given[name] for name in _FITS if name in given}
        for name, value in {"version": None, **values}.items():
            if not _FITS[name](value):
                raise ValueError(f"an answer cannot have {name}={value!r:.80}")
        return cls(**values)

    def to_error(self, worker_id: int) -> WorkerError | None:
        """What the sender reports for the worker; None when the version was committed."""
        if self.error is None:
            return None
        outcome = _OUTCOMES.get(self.failure, _USUAL_OUTCOME).format(self.version)
        return _FAILURES[self.failure](worker_id, f"{outcome}\n{self.error}")


def _is_version(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_text(value: object) -> bool:
    return value is None or isinstance(value, str)


def _is_failure(value: object) -> bool:
    return isinstance(value, str) and value in _FAILURES


def _is_duration(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 0  # type: ignore[arg-type, operator]


def _is_moment(value: object) -> bool:
    return value is None or _is_duration(value)


# What each field of an answer may hold.
_FITS: Mapping[str, Callable[[object], bool]] = {
    "version": _is_version,
    "error": _is_text,
    "failure": _is_failure,
    "stage_seconds": _is_duration,
    "commit_seconds": _is_duration,
    "pause_seconds": _is_duration,
    "known_at": _is_moment,
    "answered_at": _is_moment,
    "clock": _is_text,
    "digest": _is_text,
}
