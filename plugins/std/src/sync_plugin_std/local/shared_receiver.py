"""The receiver's side for workers of the sender's machine; see `SharedMemorySender`."""

from __future__ import annotations

import os
import select
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from sync_core import Answer, Payload, ReceiverTransport
from sync_core.errors import CapacityError, PayloadError, SenderLostError
from sync_core.transports import uninterrupted
from sync_plugin_std.local.channel import Channel, Message, closed_with
from sync_plugin_std.local.control_page import ControlPage, Offer, ProcessEvent
from sync_plugin_std.local.handshake import shake_hands
from sync_plugin_std.local.serving import farewell
from sync_plugin_std.local.shared_memory import MappedSlots

if TYPE_CHECKING:
    from sync_core import TransportContext

_BROKEN = "the sender does not keep to the protocol: {}"


class SharedMemoryReceiver(ReceiverTransport):
    """Reads versions from the slots of a `SharedMemorySender`.

    Args:
        context: what the receiver gave to `create_transport`.
        channel: the connection to the sender; owned from now on.

    Raises:
        SenderLostError: the sender is gone, or refuses this worker.
    """

    def __init__(self, context: TransportContext, channel: Channel) -> None:
        self._timeout = context.timeout
        self._channel = channel
        self._layout = context.layout
        self._slots = MappedSlots(None if self._layout is None else self._layout.most_nbytes)
        # Accepted, and not answered about: until that is known, the sender offers nothing more.
        self._unanswered = 0
        # Why slots that were announced could not be opened, by index.
        self._unopened: dict[int, CapacityError] = {}
        self._closed = False
        try:
            shake_hands(channel, context.worker_token(), context.worker_id, context.timeout)
            self._handle_next(context.timeout)
            self._take_control()
        except BaseException:
            channel.close()
            raise
        self._poll = select.poll()
        self._poll.register(self._offers.reader, select.POLLIN)
        channel.register(self._poll)

    def receive(self, timeout: float) -> Payload | None:
        """The newest version, once there is one that was not seen."""
        deadline = time.monotonic() + timeout
        if self._unanswered:
            self._send({"type": "on", "version": self._unanswered, "held": self._slots.held})
            self._unanswered = 0
        while ready := self._poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            # Interrupted with the event taken, no version would be offered any more.
            with uninterrupted():
                offer = self._accept()
            if offer is not None:
                return self._read(offer)
            if any(descriptor != self._offers.reader for descriptor, _ in ready):
                self._handle_next(0)
        return None

    def acknowledge(self, answer: Answer) -> None:
        """Answer, and say which slots are still read."""
        # Interrupted in between, the sender would wait for the answer before it offers more.
        with uninterrupted():
            if self._unanswered == answer.version:
                self._unanswered = 0
            held = self._slots.held
            if self._page.write_answer(answer, held):
                self._answers.set()
                if not self._page.waiting:
                    self._send({"type": "look"})
            else:
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
            self._page.close()
            self._offers.close()
            self._answers.close()
            self._slots.clear()

    def _accept(self) -> Offer | None:
        """Return what is offered, which is accepted by that; None where nothing is."""
        if not self._offers.take():
            return None
        try:
            offer = self._page.read_offer()
        except ValueError as error:
            raise SenderLostError(_BROKEN.format(error)) from error
        self._unanswered = offer.version
        return offer

    def _read(self, offer: Offer) -> Payload:
        since = time.perf_counter()
        try:
            while (found := self._slots.hold(offer.slot)) is None:
                if (lacking := self._unopened.pop(offer.slot, None)) is not None:
                    self._send({"type": "lacks", "index": offer.slot})
                    raise lacking
                self._handle_next(self._timeout)
            block, release = found
            payload = Payload.unpack(
                block,
                offer.version,
                digest=offer.layout,
                known=self._layout,
                release=release,
                since=since,
            )
        except BaseException as error:
            self._slots.release(offer.slot)
            if isinstance(error, (CapacityError, PayloadError)):
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
            if message["type"] == "slot":
                self._unopened.pop(message["index"], None)
            self._slots.hear(message, self._channel)
        except CapacityError as error:
            # The announcement may be read before the offer, which is what can be refused.
            self._unopened[message["index"]] = error
        except (LookupError, TypeError, ValueError, OSError) as error:
            if isinstance(error, SenderLostError):
                raise
            raise SenderLostError(_BROKEN.format(repr(error))) from error

    def _take_control(self) -> None:
        """Take what came with the welcome: the page, and the two events."""
        # All three or none: the first may have come, and the last be one too many for this process.
        with ExitStack() as opened:
            try:
                page, offers, answers = (
                    closed_with(opened, self._channel.pop_descriptor()) for _ in range(3)
                )
                self._page = ControlPage(page)
            except (OSError, ValueError) as error:
                raise SenderLostError(_BROKEN.format(error)) from error
            opened.pop_all()
        os.close(page)
        self._offers = ProcessEvent(offers, offers)
        self._answers = ProcessEvent(answers, answers)

    def _send(self, message: Message) -> None:
        try:
            self._channel.send(message)
        except ConnectionError as error:
            raise SenderLostError(f"the sender is gone: {error}") from error
