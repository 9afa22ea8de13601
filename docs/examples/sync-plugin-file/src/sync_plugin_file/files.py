"""Files that appear whole, and signs of life in them."""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

#: Seconds between two looks into the directory.
PAUSE = 0.005


def write(path: Path, data: bytes) -> None:
    """Put a file in its place by a rename, so that nobody reads half of it."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".")
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    Path(name).replace(path)


def write_json(path: Path, message: dict[str, Any]) -> None:
    """Put a message in its place."""
    write(path, json.dumps(message).encode())


def read_json(path: Path) -> dict[str, Any]:
    """The message that stands there; nothing where there is none."""
    try:
        message: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    return message


class Pulse:
    """Rewrites a file again and again, until `end` or the end of its process.

    Args:
        path: the file.
        message: what else stands in it.
        seconds: between two beats.
    """

    def __init__(self, path: Path, message: dict[str, Any], seconds: float) -> None:
        self._path = path
        self._message = message
        self._seconds = seconds
        self._ended = threading.Event()
        self._beat(0)
        self._thread = threading.Thread(target=self._run, name="sync-file-pulse", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop, and say so. Ending again is allowed."""
        if not self._ended.is_set():
            self._ended.set()
            self._thread.join()

    def _run(self) -> None:
        beats = 0
        while not self._ended.wait(self._seconds):
            beats += 1
            if not self._beat(beats):
                return
        self._beat(-1)

    def _beat(self, beats: int) -> bool:
        current = read_json(self._path)
        if beats and current.get("owner") != self._message["owner"]:
            return False  # another has taken this place, or the directory is gone
        try:
            write_json(self._path, self._message | {"beats": beats})
        except FileNotFoundError:
            return False
        return True


class Watch:
    """Tells by a file whether the one who writes it lives.

    Args:
        path: the file.
        lost_after: seconds without a beat after which it does not.
    """

    def __init__(self, path: Path, lost_after: float) -> None:
        self._path = path
        self._lost_after = lost_after
        self._last: tuple[Any, Any] = (None, None)
        self._since = time.monotonic()
        self._looked = 0.0

    def lives(self) -> bool | None:
        """Whether it lives; None where it was never there."""
        message = read_json(self._path)
        if not message:
            return None if self._last[0] is None else False
        beat = (message["owner"], message["beats"])
        now = time.monotonic()
        # Whoever has not looked for a while cannot know how long nothing came.
        if beat != self._last or now - self._looked > self._lost_after / 2:
            self._last, self._since = beat, now
        self._looked = now
        return message["beats"] >= 0 and now - self._since <= self._lost_after

    def message(self) -> dict[str, Any]:
        """What the other one wrote last."""
        return read_json(self._path)
