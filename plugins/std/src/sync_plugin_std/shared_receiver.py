"""The receiver's side of ``shm`` and ``mp``: accepts an offer, and reads it in its slot."""

from __future__ import annotations

import os
import select
import time
from contextlib import suppress

from sync_core import (
    Answer,
    CapacityError,
    Payload,
    ReceiverTransport,
    SenderLostError,
    TransportContext,
)
from sync_core.errors import PayloadError
from sync_core.transports import Channel, MappedSlots, Message, farewell, hello
from sync_plugin_std.answers import write_answer
from sync_plugin_std.protocol import Board, Offer, take_token


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
        self._timeout = context.timeout
        self._channel = channel
        self._layout = context.layout
        self._slots = MappedSlots()
        # Accepted, and not answered about: until that is known, the sender offers nothing more.
        self._unanswered = 0
        self._closed = False
        try:
            self._send(hello(context.token, context.worker_id))
            self._handle_next(context.timeout)
            self._board, self._tokens, self._answers = self._take_board(channel)
        except BaseException:
            channel.close()
            raise
        self._poll = select.poll()
        self._poll.register(self._tokens, select.POLLIN)
        self._poll.register(channel, select.POLLIN)

    def receive(self, timeout: float) -> Payload | None:
        """The newest version, once there is one that was not seen."""
        deadline = time.monotonic() + timeout
        if self._unanswered:
            self._send({"type": "on", "version": self._unanswered, "held": self._slots.held})
            self._unanswered = 0
        while not take_token(self._tokens):
            left = max(0.0, deadline - time.monotonic())
            ready = self._poll.poll(left * 1000)
            if not ready:
                return None
            if any(descriptor != self._tokens for descriptor, _ in ready):
                self._handle_next(0)
        return self._read(self._board[self._worker_id])

    def acknowledge(self, answer: Answer) -> None:
        """Answer, and say which slots are still read."""
        self._unanswered = 0
        held = self._slots.held
        if self._board.waiting and write_answer(self._answers, answer, held):
            if not self._board.waiting:
                self._send({"type": "look"})
            return
        self._send({"type": "answer", "answer": answer.to_message(), "held": held})

    def leave(self, reason: str) -> None:
        """Notify the sender, unless that has gone."""
        with suppress(SenderLostError):
            self._send(farewell(reason))

    def wake(self) -> None:
        """Take the sender for gone."""
        self._channel.wake()

    def close(self) -> None:
        """Hang up; the sender takes back every slot."""
        if not self._closed:
            self._closed = True
            self._channel.close()
            self._board.close()
            os.close(self._tokens)
            os.close(self._answers)
            self._slots.clear()

    def _read(self, offer: Offer) -> Payload:
        since = time.perf_counter()
        try:
            while offer.slot not in self._slots:
                self._handle_next(self._timeout)
        except CapacityError as error:
            self.acknowledge(Answer.refusal(offer.version, error))
            raise
        block, release = self._slots.hold(offer.slot)
        self._unanswered = offer.version
        try:
            payload = Payload.unpack(
                block,
                offer.version,
                digest=offer.layout,
                known=self._layout,
                release=release,
                since=since,
            )
        except PayloadError as error:
            release()
            self.acknowledge(Answer.refusal(offer.version, error))
            raise
        self._layout = payload.layout
        return payload

    def _handle_next(self, timeout: float) -> None:
        """Act on the next message, if one comes in time."""
        try:
            message = self._channel.receive(timeout)
        except ConnectionError as error:
            raise SenderLostError(f"the sender is gone: {error}") from error
        if message is None:
            if timeout > 0:
                raise SenderLostError(f"the sender did not answer within {timeout:g} s")
            return
        try:
            if message["type"] == "gone":
                raise SenderLostError(str(message["reason"]))
            self._slots.hear(message, self._channel)
        except CapacityError:
            self._send({"type": "lacks", "index": message["index"]})
            raise
        except (LookupError, TypeError, ValueError, OSError) as error:
            if isinstance(error, SenderLostError):
                raise
            raise SenderLostError(f"the sender does not keep to the protocol: {error!r}") from error

    def _take_board(self, channel: Channel) -> tuple[Board, int, int]:
        """Return what came with the welcome: the board, and the ends of two pipes."""
        try:
            descriptor, tokens, answers = (channel.pop_descriptor() for _ in range(3))
            try:
                return Board.of(descriptor), tokens, answers
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:
            raise SenderLostError(f"the sender does not keep to the protocol: {error}") from error

    def _send(self, message: Message) -> None:
        try:
            self._channel.send(message)
        except ConnectionError as error:
            raise SenderLostError(f"the sender is gone: {error}") from error
