"""The sender's side of ``shm`` and ``mp``: slots in shared memory, offered by tokens."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from sync_core import Answer, Delivery, Payload, TransportContext
from sync_core.transports import (
    Message,
    Peer,
    Publisher,
    ServingTransport,
    SharedSlots,
    Slot,
    uninterrupted,
)
from sync_plugin_std.answers import AnswerPipe
from sync_plugin_std.protocol import Board, Offer, TokenPipe


@dataclass(eq=False)
class SharedPeer(Peer):
    """A worker on the same host.

    Args:
        tokens: where its offers are accepted or revoked.
        answers: where its answers come while a thread waits for them.
        offered: the slot that it was offered, and has not answered about.
        knows: the slots that were announced to it.
    """

    tokens: TokenPipe = field(init=False)
    answers: AnswerPipe = field(init=False)
    offered: Slot | None = None
    knows: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.tokens = TokenPipe()
        try:
            self.answers = AnswerPipe()
        except OSError:
            self.tokens.close()
            raise


class SharedSender(ServingTransport[SharedPeer]):
    """Serves workers that connect over unix sockets; see `sync_plugin_std.protocol`.

    Args:
        context: what the sender gave to `create_transport`.
        slots: how many versions may lie in shared memory at a time; see `ShmOptions`.
        directory: see `sync_core.transports.SharedMemory.create`.
        listeners: listening unix sockets, where workers connect by themselves.
    """

    def __init__(
        self,
        context: TransportContext,
        *,
        slots: int | None,
        directory: str | None,
        listeners: Sequence[socket.socket] = (),
    ) -> None:
        assert context.layout is not None
        self._slots = SharedSlots(directory)
        self._board = Board.create()
        # The thread that reads answers; the bell is rung for it when a delivery ends otherwise.
        self._reader: int | None = None
        self._waiting = False
        self._bell, self._rung = socket.socketpair()
        self._bell.setblocking(False)
        try:
            publisher = Publisher(
                self._slots.allocate,
                context.layout.nbytes,
                slots,
                context.worker_ids,
                timeout=context.timeout,
                views=context.zero_copy,
                notify=context.notify,
                revoke=self._revoke_all,
            )
            super().__init__(context.token, publisher, SharedPeer, listeners)
        except BaseException:
            self._close_bell()
            self._board.close()
            raise

    def send(self, payload: Payload, worker_ids: Sequence[int]) -> dict[int, Delivery]:
        """Pack once for all, and offer the slot to the workers that wait for it."""
        # Ctrl-C may have ended a wait, and left answers where they are.
        self._wait_no_longer()
        deliveries = self._publisher.publish(payload, worker_ids)
        self.offer_to(worker_ids)
        return deliveries

    def wait(self, deliveries: Sequence[Delivery], timeout: float) -> None:
        """Read the workers' answers in this thread."""
        with self._publisher.lock:
            # Ctrl-C may have left this thread there.
            alone = self._reader in (None, threading.get_ident())
            if alone:
                self._reader = threading.get_ident()
        if not alone:
            super().wait(deliveries, timeout)
            return
        try:
            for delivery in deliveries:
                delivery.on_end(self._ring)
            self._set_waiting(True)
            self._read_answers(deliveries, time.monotonic() + timeout)
        finally:
            self._wait_no_longer()
            with self._publisher.lock:
                self._reader = None
                if self._publisher.closed:
                    self._close_bell()

    def close(self) -> None:
        """Let the workers know, and end the thread."""
        super().close()
        with self._publisher.lock:
            if self._reader in (None, threading.get_ident()):
                self._close_bell()

    def joined(self, peer: SharedPeer) -> None:
        """Called when a worker has said hello."""

    def welcome(self, peer: SharedPeer) -> None:
        """Give the worker what offers are read from, and what answers are written to."""
        descriptors = [self._board.descriptor, peer.tokens.reader, peer.answers.writer]
        if self.tell(peer, {"type": "welcome"}, descriptors):
            peer.answers.close_writer()
            self.joined(peer)
            self._ring()

    def handle(self, peer: SharedPeer, message: Message) -> None:
        """Take an answer."""
        kind = message["type"]
        if kind == "answer":
            answer = Answer.from_message(message["answer"])
            self._take_answer(peer, answer.version, message["held"], answer)
        elif kind == "on":
            self._take_answer(peer, int(message["version"]), message["held"], None)
        elif kind == "look":
            self._take_answers_of(peer)
        elif kind == "lacks":
            peer.knows.discard(int(message["index"]))
            self.offer(peer)
        else:
            raise ValueError(f"{kind!r} is not a message")

    def offer(self, peer: SharedPeer) -> None:
        """Offer the newest version meant for a worker, in place of what it has not accepted."""
        assert peer.worker_id is not None
        if not self._revoke(peer):
            return
        slot = self._publisher.lend(peer.worker_id, peer.seen, peer, peer.name)
        if slot is None:
            return
        self._board[peer.worker_id] = Offer(slot.version, slot.index, slot.digest[:16])
        peer.offered = slot
        if self._tell_of_slots(peer, slot):
            peer.tokens.put()

    def withdraw(self, peer: SharedPeer) -> None:
        """Take back what the worker has not accepted."""
        self._revoke(peer)

    def left(self, peer: SharedPeer) -> None:
        """Take its last answers, and close its pipes."""
        with suppress(ValueError):
            self._take_answers_of(peer)
        peer.tokens.close()
        peer.answers.close()

    def torn_down(self) -> None:
        """Release the board."""
        self._board.close()

    def _set_waiting(self, waits: bool) -> None:
        with self._publisher.lock:
            if not self._publisher.closed:
                self._board.waiting = self._waiting = waits

    def _read_answers(self, deliveries: Sequence[Delivery], deadline: float) -> None:
        while pending := [delivery for delivery in deliveries if not delivery.ended]:
            poll = select.poll()
            poll.register(self._rung, select.POLLIN)
            with self._publisher.lock:
                # That of the worker which was offered its version last is likely to come last.
                peer = self._peers.get(pending[-1].worker_id)
                if peer is not None:
                    poll.register(peer.answers.reader, select.POLLIN)
            left = deadline - time.monotonic()
            ready = poll.poll(left * 1000) if left > 0 else []
            if not ready:
                return
            if any(descriptor == self._rung.fileno() for descriptor, _ in ready):
                self._rung.recv(4096)
            # An answer that was read must be acted on.
            with self._publisher.lock, uninterrupted():
                self._take_answers()
                if all(delivery.ended for delivery in pending):
                    self._wait_no_longer()

    def _wait_no_longer(self) -> None:
        if self._waiting:
            with self._publisher.lock, uninterrupted():
                self._set_waiting(False)
                # Those that were written before the workers could know.
                self._take_answers()

    def _take_answers(self) -> None:
        if self._publisher.closed:
            return
        for peer in tuple(self._peers.values()):
            try:
                self._take_answers_of(peer)
            except ValueError as error:
                self._lose(peer, f"does not answer as agreed: {error}")

    def _take_answers_of(self, peer: SharedPeer) -> None:
        for answer, held in peer.answers.read():
            self._take_answer(peer, answer.version, held, answer)

    def _take_answer(
        self, peer: SharedPeer, version: int, held: Sequence[int], answer: Answer | None
    ) -> None:
        assert peer.worker_id is not None
        peer.offered, peer.seen = None, version
        self._publisher.give_back(peer, held)
        if answer is not None:
            self._publisher.answer(peer.worker_id, answer, peer)
        # Not to this peer, whose place another may have taken.
        self.offer_to([peer.worker_id])

    def _ring(self) -> None:
        """Wake the thread that reads answers, unless this is it."""
        if self._reader not in (None, threading.get_ident()):
            with suppress(OSError):
                self._bell.send(b"\0")

    def _close_bell(self) -> None:
        self._bell.close()
        self._rung.close()

    def _tell_of_slots(self, peer: SharedPeer, offered: Slot) -> bool:
        """Let the worker know which slots there are; False when it is gone."""
        news = self._slots.news(peer.knows, offered, self._publisher.slots)
        return news is None or self.tell(peer, *news)

    def _revoke(self, peer: SharedPeer) -> bool:
        """Take back what the worker has not accepted; False when it reads that already."""
        if peer.offered is None:
            return True
        if not peer.tokens.revoke():
            return False
        self._publisher.take_back(peer, peer.offered)
        peer.offered = None
        return True

    def _revoke_all(self) -> None:
        for peer in self._peers.values():
            self._revoke(peer)
