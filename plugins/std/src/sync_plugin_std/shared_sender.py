"""The sender's side of ``shm`` and ``mp``: slots in shared memory, offered by tokens."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

from sync_core import Answer, Delivery, Payload, TransportContext
from sync_core.transports import Message, Peer, Publisher, ServingTransport, SharedSlots, Slot
from sync_plugin_std.protocol import Board, Offer, TokenPipe


@dataclass(eq=False)
class SharedPeer(Peer):
    """A worker on the same host.

    Args:
        tokens: where its offers are accepted or revoked.
        offered: the slot that it was offered, and has not answered about.
        knows: the slots that were announced to it.
    """

    tokens: TokenPipe = field(default_factory=TokenPipe)
    offered: Slot | None = None
    knows: set[int] = field(default_factory=set)


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
            self._board.close()
            raise

    def send(self, payload: Payload, worker_ids: Sequence[int]) -> dict[int, Delivery]:
        """Pack once for all, and offer the slot to the workers that wait for it."""
        deliveries = self._publisher.publish(payload, worker_ids)
        self.offer_to(worker_ids)
        return deliveries

    def joined(self, peer: SharedPeer) -> None:
        """Called when a worker has said hello."""

    def welcome(self, peer: SharedPeer) -> None:
        """Give the worker what offers are read from."""
        descriptors = [self._board.descriptor, peer.tokens.reader]
        if self.tell(peer, {"type": "welcome"}, descriptors):
            self.joined(peer)

    def handle(self, peer: SharedPeer, message: Message) -> None:
        """Take an answer."""
        assert peer.worker_id is not None
        kind, answer = message["type"], None
        if kind == "answer":
            answer = Answer.from_message(message["answer"])
            version = answer.version
        elif kind == "on":
            version = int(message["version"])
        elif kind == "lacks":
            peer.knows.discard(int(message["index"]))
            self.offer(peer)
            return
        else:
            raise ValueError(f"{kind!r} is not a message")
        peer.offered, peer.seen = None, version
        self._publisher.give_back(peer, message["held"])
        if answer is not None:
            self._publisher.answer(peer.worker_id, answer, peer)
        # Not to this peer, whose place another may have taken.
        self.offer_to([peer.worker_id])

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
        """Close its pipe."""
        peer.tokens.close()

    def torn_down(self) -> None:
        """Release the board."""
        self._board.close()

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
