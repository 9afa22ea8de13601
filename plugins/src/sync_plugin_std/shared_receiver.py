"""The receiver's side of ``shm`` and ``mp``: asks for a version and reads it in its slot."""

from __future__ import annotations

import os
import time
from functools import partial

from sync_core import Block, Payload, ReceiverTransport, SenderLostError, TransportContext
from sync_plugin_std import memory
from sync_plugin_std.channel import Channel, Message
from sync_plugin_std.protocol import Board, hello

# A sender that has something answers at once, unless its process is stopped or swapped out.
_ANSWER_SECONDS = 1.0


class SharedReceiver(ReceiverTransport):
    """Reads versions from the slots of a sender on the same host.

    Args:
        context: what the receiver gave to `create_transport`.
        channel: the connection to the sender; owned from now on.

    Raises:
        SenderLostError: the sender is gone, or refuses this worker.
    """

    def __init__(self, context: TransportContext, channel: Channel) -> None:
        self._worker_id = context.worker_id
        self._channel = channel
        self._blocks: dict[int, Block] = {}
        self._held: set[int] = set()
        self._seen = 0
        self._asked = False
        self._closed = False
        try:
            self._send(hello(context.token, context.worker_id))
            answer = self._next_message(context.timeout)
            if answer is None:
                raise SenderLostError(f"the sender did not answer within {context.timeout:g} s")
            self._board = Board(channel.pop_descriptor(), writable=False)
        except BaseException:
            channel.close()
            raise

    def receive(self, timeout: float) -> Payload | None:
        """The newest version, once there is one that was not seen."""
        deadline = time.monotonic() + timeout
        while True:
            if not self._asked:
                if timeout <= 0 and self._board[self._worker_id] <= self._seen:
                    self._look_for_news()
                    return None
                self._ask()
            message = self._wait(deadline)
            if message is None or message["type"] == "nothing":
                return None
            payload = self._read(message)
            if payload.version >= self._board[self._worker_id]:
                return payload
            # The sender was held up, and has published a newer one since it offered this.
            payload.release()

    def acknowledge(self, version: int, error: str | None) -> None:
        """Answer, and say which slots are still read."""
        if error is not None:
            error = error[-60_000:]
        held = list(self._held)
        self._send({"type": "answer", "version": version, "error": error, "held": held})

    def close(self) -> None:
        """Hang up; the sender takes back every slot."""
        if not self._closed:
            self._closed = True
            self._channel.close()
            self._board.close()
            self._blocks.clear()

    def _ask(self) -> None:
        self._send({"type": "want", "seen": self._seen, "held": list(self._held)})
        self._asked = True

    def _wait(self, deadline: float) -> Message | None:
        """The sender's answer; None when it has none in time."""
        there_is_one = self._board[self._worker_id] > self._seen
        patience = _ANSWER_SECONDS if there_is_one else 0.0
        message = self._next_message(max(patience, deadline - time.monotonic()))
        if message is None and not there_is_one:
            self._send({"type": "never mind"})
            message = self._next_message(_ANSWER_SECONDS)
        if message is not None:
            self._asked = False
        return message

    def _look_for_news(self) -> None:
        if self._next_message(0) is not None:
            raise SenderLostError("the sender sent an answer to no question")

    def _read(self, message: Message) -> Payload:
        index = message["slot"]
        if message["new"]:
            descriptor = self._channel.pop_descriptor()
            try:
                self._blocks[index] = memory.map_block(descriptor, writable=False)
            finally:
                os.close(descriptor)
        self._seen = message["version"]
        self._held.add(index)
        release = partial(self._held.discard, index)
        return Payload.unpack(
            self._blocks[index], self._seen, digest=message["digest"], release=release
        )

    def _send(self, message: Message) -> None:
        try:
            self._channel.send(message)
        except ConnectionError as error:
            raise SenderLostError(f"the sender is gone: {error}") from error

    def _next_message(self, timeout: float) -> Message | None:
        try:
            message = self._channel.receive(timeout)
        except ConnectionError as error:
            raise SenderLostError(f"the sender is gone: {error}") from error
        if message is not None and message.get("type") == "gone":
            raise SenderLostError(str(message["reason"]))
        return message
