"""The rendezvous of a process group: keys exchanged over the control connections.

torch's own store accepts keys from any peer, and shows them to all. A control
connection has begun with the token.
"""

from __future__ import annotations

import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from sync_plugin_std.local import Message

# The keys of an end take some hundred bytes, and 8 more for each other end.
_MAX_VALUE = 1 << 16


def read_key(message: Message) -> tuple[str, bytes]:
    """Return the key that a message tells, and its value.

    Raises:
        ValueError, LookupError, TypeError: no end tells such a thing.
    """
    key, value = message["key"], b64decode(message["value"], validate=True)
    if type(key) is not str or len(key) > _MAX_VALUE or len(value) > _MAX_VALUE:
        raise ValueError(f"{message!r:.200} is not a key")
    return key, value


class BrokenGroupError(Exception):
    """A transfer did not begin, or did not come to its end; the wire is of no use any more."""


class Rendezvous(Store):
    """A store, to torch: the keys of one wire, as one of its ends knows them.

    Args:
        number: of the wire.
        tell: sends a message to the other ends.
        hear: waits at most that many seconds for what they tell, and hands it to `put`. It raises
            `BrokenGroupError` when the wire is given up.
        timeout: how long to wait, in seconds; what torch says is for one attempt to connect.
        lock: held while this waits, and during `put`.
    """

    def __init__(
        self,
        number: int,
        tell: Callable[[Message], None],
        hear: Callable[[float], None],
        *,
        timeout: float,
        lock: AbstractContextManager[Any] | None = None,
    ) -> None:
        super().__init__()
        self.number = number
        self._tell = tell
        self._hear = hear
        self._timeout = timeout
        self._lock = lock or nullcontext()
        self._values: dict[str, bytes] = {}

    def put(self, message: Message) -> None:
        """Store a key that another end has sent.

        Raises:
            ValueError, LookupError, TypeError: no end tells such a thing.
        """
        key, value = read_key(message)
        if key in self._values:
            raise ValueError(f"the key {key!r:.80} has a value already")
        self._values[key] = value

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        """Tell a key, which torch gives as bytes."""
        self._values[key] = value
        text = b64encode(value).decode()
        self._tell({"type": "key", "number": self.number, "key": key, "value": text})

    def get(self, key: str) -> bytes:
        """Return the value of a key, once it has arrived."""
        self.wait([key])
        return self._values[key]

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all of these have arrived."""
        return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when all of these have arrived.

        Raises:
            BrokenGroupError: they were not in time, or the wire is given up.
        """
        del timeout
        deadline = time.monotonic() + self._timeout
        with self._lock:
            while not self.check(keys):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise BrokenGroupError(f"not all have come together within {self._timeout:g} s")
                self._hear(left)
