"""What runs in the actor of a worker: it makes one object and runs calls on it, in order."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sync_core import CallOutcome

#: Concurrency group of the methods that run beside a call: the one that `waits`, and `end`.
BESIDE = "beside"


@dataclass(frozen=True, slots=True)
class Message:
    """A call, or an outcome, as it travels.

    What arrives can be written to: of a bare list, Ray would turn each part into bytes.

    Args:
        parts: as `RemoteCall.pickle` gives them.
    """

    parts: list[bytearray]


class Host:
    """One worker's actor. Ray runs its calls one at a time, and those `BESIDE` at any time."""

    def __init__(self) -> None:
        self._hosted: Any = None
        self._ending = threading.Event()

    def begin(self) -> None:
        """Return, by which the caller knows that all calls before have ended."""

    def make(self, call: Message, worker_id: int) -> Message:
        """Make the hosted object by a call on the id; its outcome, without a value."""
        made = _run(call, worker_id)
        self._hosted = made.value
        return _pickle(made.without_value())

    def run(self, call: Message) -> Message | None:
        """Run a call; its outcome, or None if the end came before its turn."""
        if self._ending.is_set():
            return None
        return _pickle(_run(call, self._hosted))

    def waits(self) -> None:
        """Never return: that Ray tells the caller of this call's failure is how it learns all."""
        threading.Event().wait()

    def end(self) -> None:
        """Let the call in progress finish, and no other begin."""
        self._ending.set()


def _run(call: Message, hosted: object) -> CallOutcome:
    # Not with this module, as it loads torch: before that, the caller learns that the actor begins.
    from sync_core import CallOutcome

    return CallOutcome.of_pickled(call.parts, hosted)


def _pickle(outcome: CallOutcome) -> Message:
    return Message([bytearray(part) for part in outcome.pickle()])
