"""The rendezvous of a process group, which exchanges keys over the control connections.

torch's own store accepts keys from any peer and shows them to all. Control connections are
authenticated by the token.
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

# The longest value, in bytes: a member's takes some hundred, and 8 more per other member.
_MAX_VALUE = 1 << 16


def read_key(message: Message) -> tuple[str, bytes]:
    """Return the key and the value in a message.

    Raises:
        ValueError, LookupError, TypeError: the message is not valid.
    """
    key, value = message["key"], b64decode(message["value"], validate=True)
    if type(key) is not str or len(key) > _MAX_VALUE or len(value) > _MAX_VALUE:
        raise ValueError(f"{message!r:.200} is not a key")
    return key, value


class BrokenGroupError(Exception):
    """A transfer did not start or complete; its process group can no longer be used."""


class Rendezvous(Store):
    """A torch store with the keys of one process group, as known to one member.

    Args:
        number: the number of the process group.
        tell: sends a message to the other members.
        hear: waits up to a number of seconds for a message from them, and calls `put` with it. It
            raises `BrokenGroupError` if the process group is given up.
        timeout: how long to wait, in seconds, instead of torch's timeout for one attempt to
            connect.
        lock: held during waits and during `put`.
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
        """Store a key from another member.

        Raises:
            ValueError, LookupError, TypeError: the message is not valid.
        """
        key, value = read_key(message)
        if key in self._values:
            raise ValueError(f"the key {key!r:.80} has a value already")
        self._values[key] = value

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        """Send a key, given as bytes, to the other members."""
        self._values[key] = value
        text = b64encode(value).decode()
        self._tell({"type": "key", "number": self.number, "key": key, "value": text})

    def get(self, key: str) -> bytes:
        """Wait for a key, and return its value."""
        self.wait([key])
        return self._values[key]

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys have arrived."""
        return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have arrived.

        Raises:
            BrokenGroupError: keys did not arrive in time, or the process group was given up.
        """
        del timeout
        deadline = time.monotonic() + self._timeout
        with self._lock:
            while not self.check(keys):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise BrokenGroupError(f"not all have come together within {self._timeout:g} s")
                self._hear(left)
