"""Messages on their way out: sent at once while the socket takes them, else by a thread."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from queue import SimpleQueue

from sync_plugin_std import _frames


class Outbox:
    """Sends messages in order and never blocks whoever puts them in.

    A short message goes out in the caller's thread when nothing is ahead of it, which saves a
    thread switch. Once the other end is gone, messages vanish: who reads from it is to notice.

    Args:
        sock: where to send; its owner closes it, after `join`.
        name: of the thread.
    """

    def __init__(self, sock: socket.socket, name: str) -> None:
        self._socket = sock
        self._lock = threading.Lock()
        self._behind = 0
        self._backlog: SimpleQueue[list[_frames.Part]] = SimpleQueue()
        self._thread = threading.Thread(target=self._write, name=name, daemon=True)
        self._thread.start()

    def put(self, number: int, parts: Sequence[_frames.Part]) -> None:
        """Send the message now, or as soon as those before it are sent."""
        pieces = _frames.encode(number, parts)
        with self._lock:
            if not self._behind and len(pieces) == 1:
                unsent = pieces[0][self._send_now(pieces[0]) :]
                if not unsent:
                    return
                pieces = [unsent]
            self._behind += 1
            self._backlog.put(pieces)

    def join(self) -> None:
        """Wait until all is sent, or the other end is gone; nothing is to be put in any more."""
        self._backlog.put([])
        self._thread.join()

    def _send_now(self, piece: _frames.Part) -> int:
        try:
            return self._socket.send(piece, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            return len(piece)

    def _write(self) -> None:
        with suppress(OSError):
            while self._write_next():
                pass

    def _write_next(self) -> bool:
        pieces = self._backlog.get()
        for piece in pieces:
            self._socket.sendall(piece)
        with self._lock:
            self._behind -= 1
        return bool(pieces)
