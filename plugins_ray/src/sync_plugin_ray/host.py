"""What runs in the actor of a worker: it makes one object and runs calls on it, in order."""

from __future__ import annotations

import threading
from typing import Any

from sync_core import CallOutcome

#: Concurrency group of the methods that run beside a call: the one that `waits`, and `end`.
BESIDE = "beside"

#: A call, or an outcome, as it travels: what arrives can be written to.
Message = list[bytearray]


class Host:
    """One worker's actor. Ray runs its calls one at a time, and those `BESIDE` at any time."""

    def __init__(self) -> None:
        self._hosted: Any = None
        self._ending = threading.Event()

    def begin(self) -> None:
        """Return, by which the caller knows that all calls before have ended."""

    def make(self, call: Message, worker_id: int) -> Message:
        """Make the hosted object by a call on the id; its outcome, without a value."""
        made = CallOutcome.of_pickled(call, worker_id)
        self._hosted = made.value
        return _pickle(made.without_value())

    def run(self, call: Message) -> Message | None:
        """Run a call; its outcome, or None if the end came before its turn."""
        if self._ending.is_set():
            return None
        return _pickle(CallOutcome.of_pickled(call, self._hosted))

    def waits(self) -> None:
        """Never return: that Ray tells the caller of this call's failure is how it learns all."""
        threading.Event().wait()

    def end(self) -> None:
        """Let the call in progress finish, and no other begin."""
        self._ending.set()


def _pickle(outcome: CallOutcome) -> Message:
    return [bytearray(part) for part in outcome.pickle()]
