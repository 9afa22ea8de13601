"""The sender's side of ``shm`` and ``mp``: slots in shared memory, and a thread for the talk."""

from __future__ import annotations

import hmac
import os
import selectors
import socket
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sync_core import Block, Delivery, Payload, SenderTransport, TransportContext
from sync_plugin_std import memory
from sync_plugin_std.channel import Channel, Message
from sync_plugin_std.protocol import Board, Offer, TokenPipe
from sync_plugin_std.publisher import Publisher, Slot


@dataclass(eq=False)
class _Peer:
    """A connection: nobody's until its hello, a worker's after it.

    Args:
        channel: the connection.
        expected: the only worker that may say hello on it; None for any.
        worker_id: the worker that did.
        pid: the worker's process.
        tokens: where its offers are accepted or revoked.
        offered: the slot that it was offered, and has not answered about.
        seen: the newest version that it has answered about.
        knows: the slots that it was told of.
    """

    channel: Channel
    expected: int | None = None
    worker_id: int | None = None
    pid: int | None = None
    tokens: TokenPipe = field(default_factory=TokenPipe)
    offered: Slot | None = None
    seen: int = 0
    knows: set[int] = field(default_factory=set)

    def close(self) -> None:
        self.channel.close()
        self.tokens.close()


class SharedSender(SenderTransport):
    """Serves workers that connect over unix sockets.

    `send` packs and offers; a thread accepts connections and listens to answers. See
    `sync_plugin_std.protocol`.

    Args:
        context: what the sender gave to `create_transport`.
        slots: how many versions may lie in shared memory at a time.
        directory: see `sync_plugin_std.memory.create`.
        listener: a listening unix socket, when workers connect by themselves.
    """

    def __init__(
        self,
        context: TransportContext,
        *,
        slots: int,
        directory: str | None,
        listener: socket.socket | None = None,
    ) -> None:
        assert context.layout is not None
        self._token = context.token
        self._directory = directory
        self._descriptors: weakref.WeakKeyDictionary[Block, int] = weakref.WeakKeyDictionary()
        self._board = Board.create()
        self._peers: dict[int, _Peer] = {}
        self._connections: set[_Peer] = set()
        self._listener = listener
        try:
            self._publisher = Publisher(
                self._allocate,
                context.layout.nbytes,
                slots,
                context.worker_ids,
                timeout=context.timeout,
                revoke=self._revoke_all,
            )
        except BaseException:
            self._board.close()
            raise
        self._wake_up, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ)
        if listener is not None:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="sync-sender", daemon=True)
        self._thread.start()

    def connect(self, connection: socket.socket, worker_id: int | None = None) -> None:
        """Serve one more connection; only ``worker_id`` may say hello on it, if that is given."""
        with self._publisher.changed:
            peer = _Peer(Channel(connection), expected=worker_id)
            self._connections.add(peer)
            self._selector.register(peer.channel, selectors.EVENT_READ, peer)
            self._wake_up.send(b"\0")

    def joined(self, worker_id: int) -> None:
        """Called when a worker has said hello."""

    def send(self, payload: Payload, worker_ids: Sequence[int]) -> dict[int, Delivery]:
        """Pack once for all, and offer the slot to the workers that wait for it."""
        deliveries = self._publisher.publish(payload, worker_ids)
        with self._publisher.changed:
            for worker_id in worker_ids:
                self._offer(worker_id)
        return deliveries

    def add_worker(self, worker_id: int, worker: Any = None) -> None:
        """Serve one more worker."""
        del worker
        self._publisher.add_worker(worker_id)

    def remove_worker(self, worker_id: int) -> None:
        """Forget a worker, and let it know."""
        with self._publisher.changed:
            self._publisher.remove_worker(worker_id)
            peer = self._peers.pop(worker_id, None)
            if peer is not None:
                self._say_gone(peer, f"worker {worker_id} was removed from the sender")

    def close(self) -> None:
        """Let the workers know, end the thread and release the memory."""
        with self._publisher.changed:
            if self._publisher.closed:
                return
            self._publisher.close()
            self._wake_up.send(b"\0")
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _serve(self) -> None:
        while not self._publisher.closed:
            for key, _ in self._selector.select():
                with self._publisher.changed:
                    if key.fileobj is self._woken:
                        self._woken.recv(4096)
                    elif key.fileobj is self._listener:
                        self._accept(self._listener)
                    elif key.data in self._connections:
                        self._listen_to(key.data)
        self._tear_down()

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return  # the worker has given up already
        self.connect(connection)

    def _listen_to(self, peer: _Peer) -> None:
        try:
            peer.channel.read()
            while (message := peer.channel.pop_message()) is not None:
                self._handle(peer, message)
        except (ConnectionError, KeyError, TypeError, ValueError) as error:
            self._lose(peer, f"its process {peer.pid} is gone: {error}")

    def _handle(self, peer: _Peer, message: Message) -> None:
        kind = message["type"]
        if peer.worker_id is None:
            self._welcome(peer, message)
        elif kind == "answer":
            peer.offered = None
            peer.seen = int(message["version"])
            self._publisher.give_back(peer, message["held"])
            self._publisher.answer(peer.worker_id, peer.seen, message["error"])
            self._offer(peer.worker_id)
        else:
            raise ValueError(f"{kind!r} is no message")

    def _welcome(self, peer: _Peer, message: Message) -> None:
        if message["type"] != "hello" or not hmac.compare_digest(
            str(message["token"]).encode(), self._token.encode()
        ):
            raise ConnectionError("it does not know the token")
        worker_id = int(message["worker"])
        if peer.expected not in (None, worker_id) or not self._publisher.joined(worker_id, peer):
            self._say_gone(peer, f"the sender has no worker {worker_id} any more")
            return
        peer.worker_id = worker_id
        peer.pid = int(message["pid"])
        replaced = self._peers.get(worker_id)
        if replaced is not None:
            self._say_gone(replaced, "another receiver was given the same address")
        self._peers[worker_id] = peer
        peer.channel.send({"type": "welcome"}, [self._board.descriptor, peer.tokens.reader])
        self.joined(worker_id)
        self._offer(worker_id)

    def _offer(self, worker_id: int) -> None:
        """Offer the newest version meant for a worker, in place of what it has not accepted."""
        peer = self._peers.get(worker_id)
        if peer is None or not self._revoke(peer):
            return
        name = f"worker {worker_id} (process {peer.pid})"
        slot = self._publisher.lend(worker_id, peer.seen, peer, name)
        if slot is None:
            return
        self._board[worker_id] = Offer(slot.version, slot.index, slot.digest[:16])
        peer.offered = slot
        try:
            if slot.index not in peer.knows:
                peer.knows = {known.index for known in self._publisher.slots} & peer.knows
                peer.knows.add(slot.index)
                message = {"type": "slot", "index": slot.index, "live": list(peer.knows)}
                peer.channel.send(message, [self._descriptors[slot.block]])
            peer.tokens.put()
        except ConnectionError as error:
            self._lose(peer, f"its process {peer.pid} is gone: {error}")

    def _revoke(self, peer: _Peer) -> bool:
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

    def _say_gone(self, peer: _Peer, reason: str) -> None:
        # What it reads stays lent until it hangs up: it may still look at those weights.
        self._revoke(peer)
        try:
            peer.channel.send({"type": "gone", "reason": reason})
        except ConnectionError as error:
            self._lose(peer, f"its process {peer.pid} is gone: {error}")

    def _lose(self, peer: _Peer, reason: str) -> None:
        if peer not in self._connections:
            return
        self._connections.discard(peer)
        self._selector.unregister(peer.channel)
        peer.close()
        if peer.worker_id is not None:
            if self._peers.get(peer.worker_id) is peer:
                del self._peers[peer.worker_id]
            self._publisher.lost(peer.worker_id, peer, reason)

    def _allocate(self, nbytes: int) -> Block:
        descriptor = memory.create(nbytes, self._directory)
        block = memory.map_block(descriptor, writable=True)
        self._descriptors[block] = descriptor
        weakref.finalize(block, os.close, descriptor)
        return block

    def _tear_down(self) -> None:
        with self._publisher.changed:
            for peer in tuple(self._connections):
                self._say_gone(peer, "the sender was closed")
                self._lose(peer, "the sender was closed")
            self._selector.close()
            self._wake_up.close()
            self._woken.close()
            if self._listener is not None:
                self._listener.close()
            self._board.close()
