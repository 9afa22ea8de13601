"""A sender's transport for schemes whose workers connect to it and ask for versions."""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from sync_core import SenderTransport
from sync_core.transports import Roster, uninterrupted
from sync_plugin_std.local.channel import (
    MAX_MESSAGE,
    TOO_MANY_FILES,
    Channel,
    Message,
    no_more_descriptors,
    notice_silence,
    same_user,
)
from sync_plugin_std.local.handshake import MAX_HELLO, Greeting, watch_process
from sync_plugin_std.local.publisher import Publisher

_log = logging.getLogger("sync_core")
# Of connections that have not proved that they know the token.
_MAX_STRANGERS = 128
_ROOT = 0
# How long closing waits for the thread, which continues to release what there is, in seconds.
_CLOSING = 10.0
# The longest reason for which a worker says that it leaves, in characters.
_LONGEST_REASON = 60_000


@dataclass(eq=False)
class Peer:
    """A connection, of a worker once it has proved that it knows the token.

    Args:
        channel: the connection.
        expected: the only worker that may say hello on it; None for any.
        greeting: its hello, until it has proved that it knows the token.
        worker_id: the worker that has.
        pid: the worker's process.
        seen: the newest version that it has answered about.
        since: when it has connected (`time.monotonic`).
        name: its name in messages.
    """

    channel: Channel
    expected: int | None = None
    greeting: Greeting | None = None
    worker_id: int | None = None
    pid: int | None = None
    seen: int = 0
    since: float = field(default_factory=time.monotonic)
    name: str = "a stranger"


class _LeftError(Exception):
    """A worker has left, and said why."""


PeerT = TypeVar("PeerT", bound=Peer)


class ServingTransport(SenderTransport, Generic[PeerT]):
    """Serves workers that connect over sockets, in its own thread.

    A connection begins with `shake_hands`, by which both ends prove to know the token, and ends
    with ``{"type": "gone", "reason": …}`` from the sender, ``{"type": "leave", "reason": …}`` from
    the worker, or by hanging up. A subclass handles what is said between. The publisher's lock is
    held whenever a method of a subclass is called.

    Args:
        token: returns what a worker must know, by its id: `TransportContext.worker_token`. Or one
            token for all workers, any of which may then give itself out as another.
        publisher: the versions, and the workers that they are for.
        peer: makes a peer of a channel and the only worker that may say hello on it, if any.
        listeners: listening sockets, where workers connect by themselves; closed at the end, but
            left open where no thread can be started.
    """

    def __init__(
        self,
        token: Callable[[int], str] | str,
        publisher: Publisher,
        peer: type[PeerT],
        listeners: Sequence[socket.socket] = (),
    ) -> None:
        self._token_of = (lambda _: token) if isinstance(token, str) else token
        self._publisher = publisher
        self._make_peer = peer
        self._listeners = tuple(listeners)
        self._peers: dict[int, PeerT] = {}
        self._connections: set[PeerT] = set()
        self._paused = False
        with ExitStack() as opened, uninterrupted():
            self._wake_up, self._woken = map(opened.enter_context, socket.socketpair())
            self._selector = opened.enter_context(selectors.DefaultSelector())
            self._selector.register(self._woken, selectors.EVENT_READ)
            for listener in self._listeners:
                listener.setblocking(False)
                self._selector.register(listener, selectors.EVENT_READ, listener)
            self._thread = threading.Thread(target=self._serve, name="sync-sender", daemon=True)
            self._thread.start()
            # The thread's from now on.
            self._closing = opened.pop_all()

    @abstractmethod
    def welcome(self, peer: PeerT) -> None:
        """Answer the hello of a worker, by a first message."""

    @abstractmethod
    def offer_peer(self, peer: PeerT) -> None:
        """Let the worker know of the newest version meant for it, if it has not seen that."""

    @abstractmethod
    def handle(self, peer: PeerT, message: Message) -> None:
        """Act on a message other than a hello.

        Raises:
            Exception: it is not a message of this scheme; the worker is lost.
        """

    def withdraw(self, peer: PeerT) -> None:
        """Take back what was offered, as the sender has nothing more for this worker."""

    def left(self, peer: PeerT) -> None:
        """Release what the connection held, which is closed already."""

    def describe_loss(self, peer: PeerT, cause: Exception) -> str:
        """Return why a worker was lost whose connection has ended."""
        if isinstance(cause, _LeftError):
            return str(cause)
        if isinstance(cause, ConnectionError):
            return f"its process {peer.pid} is gone: {cause}"
        return f"its process {peer.pid} does not keep to the protocol: {cause!r:.300}"

    def connect(self, connection: socket.socket, worker_id: int | None = None) -> PeerT:
        """Serve one more connection; only ``worker_id`` may say hello on it, if that is given."""
        with self._publisher.lock, uninterrupted():
            peer = self._make_peer(Channel(connection, MAX_HELLO), worker_id)
            self._connections.add(peer)
            self._selector.register(peer.channel, selectors.EVENT_READ, peer)
            self._wake_up.send(b"\0")
            return peer

    def offer_to(self, worker_ids: Sequence[int]) -> None:
        """Offer the newest version to those of these workers that are connected."""
        with self._publisher.lock, uninterrupted():
            if self._paused:
                self._resume_listening()
            for worker_id in worker_ids:
                peer = self._peers.get(worker_id)
                if peer is not None:
                    self.offer_peer(peer)

    def tell(self, peer: PeerT, message: Message, descriptors: Sequence[int] = ()) -> bool:
        """Send a message; False when the worker is gone, which is then known."""
        try:
            peer.channel.send(message, descriptors)
        except ConnectionError as error:
            self._lose(peer, self.describe_loss(peer, _cause(peer, error)))
            return False
        return True

    def add_worker(self, worker_id: int, worker: Any = None) -> None:
        """Serve one more worker."""
        del worker
        self._publisher.add_worker(worker_id)

    def remove_worker(self, worker_id: int) -> None:
        """Forget a worker, and let it know."""
        with self._publisher.lock:
            self._publisher.remove_worker(worker_id)
            peer = self._peers.pop(worker_id, None)
            if peer is not None:
                self._say_gone(peer, f"worker {worker_id} {Roster.REMOVED}")

    def close(self) -> None:
        """Let the workers know, and end the thread."""
        with self._publisher.lock, uninterrupted():
            if not self._publisher.closed:
                # Workers that have left before are known to have, however late the thread is.
                for peer in tuple(self._connections):
                    self.guard(peer, self._listen_to, peer)
                self._publisher.close()
                self._wake_up.send(b"\0")
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSING)

    def _serve(self) -> None:
        while not self._publisher.closed:
            for key, _ in self._selector.select():
                with self._publisher.lock:
                    if key.fileobj is self._woken:
                        self._woken.recv(4096)
                    elif isinstance(key.data, socket.socket):
                        self._accept(key.data)
                    elif key.data in self._connections:
                        self.guard(key.data, self._listen_to, key.data)
        self._tear_down()

    def guard(self, peer: PeerT, act: Callable[..., object], *arguments: Any) -> None:
        """Act on what a peer has sent, or left in shared memory: an error ends its connection.

        Whatever it is, the peer loses its place, and the others and the thread do not notice.
        """
        try:
            act(*arguments)
        except Exception as error:
            self._lose(peer, self.describe_loss(peer, _cause(peer, error)))

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError as error:
            if error.errno in TOO_MANY_FILES:
                self._pause_listening()
            return  # otherwise the worker has given up already
        if not same_user(connection, _ROOT):
            connection.close()
            return
        strangers = [p for p in self._connections if p.worker_id is None and p.expected is None]
        if len(strangers) >= _MAX_STRANGERS:
            self._lose(min(strangers, key=lambda peer: peer.since), "it has not said hello")
        try:
            notice_silence(connection)
            self.connect(connection)
        except OSError as error:
            # The limit of open files, for example. The thread continues for the other workers.
            _log.warning("a worker's connection was closed, as it cannot be served: %r", error)
            connection.close()

    def _pause_listening(self) -> None:
        """Accept no worker while no descriptor is left: the listeners would stay readable."""
        _log.warning("a worker cannot connect: %s", no_more_descriptors())
        self._paused = True
        for listener in self._listeners:
            self._selector.unregister(listener)

    def _resume_listening(self) -> None:
        """Try again, as descriptors may have become free."""
        self._paused = False
        for listener in self._listeners:
            self._selector.register(listener, selectors.EVENT_READ, listener)

    def _listen_to(self, peer: PeerT) -> None:
        peer.channel.read()
        while (message := peer.channel.pop_message()) is not None:
            if peer.worker_id is None:
                self._admit(peer, message)
            elif message["type"] == "leave":
                raise _left(peer, message)
            else:
                self.handle(peer, message)

    def _admit(self, peer: PeerT, message: Message) -> None:
        if peer.greeting is None:
            try:
                peer.greeting = Greeting.of(message)
            except ConnectionError as error:
                peer.channel.send({"type": "gone", "reason": f"the worker is refused: {error}"})
                raise
            peer.channel.send(peer.greeting.challenge(self._token_of(peer.greeting.worker_id)))
            return
        token = self._token_of(peer.greeting.worker_id)
        if message["type"] != "proof" or not peer.greeting.proves(token, "worker", message):
            raise ConnectionError("it does not know the token")
        watch_process(peer.channel, peer.greeting.pid, peer.greeting.pids)
        worker_id, peer.pid, peer.greeting = peer.greeting.worker_id, peer.greeting.pid, None
        if peer.channel.process is not None:
            self._selector.register(peer.channel.process, selectors.EVENT_READ, peer)
        if peer.expected not in (None, worker_id) or not self._publisher.joined(worker_id, peer):
            self._say_gone(peer, f"the sender has no worker {worker_id} any more")
            return
        peer.worker_id = worker_id
        peer.channel.limit = MAX_MESSAGE
        peer.name = f"worker {worker_id} (process {peer.pid})"
        replaced = self._peers.get(worker_id)
        if replaced is not None:
            self._say_gone(replaced, "another receiver was given the same address")
        self._peers[worker_id] = peer
        self.welcome(peer)
        self.offer_peer(peer)

    def refuse(self, peer: PeerT, reason: str) -> None:
        """End the connection of a worker that cannot be served, and let it know why."""
        _log.warning("a worker's connection is closed: %s", reason)
        self._say_gone(peer, reason)
        self._lose(peer, reason)

    def _say_gone(self, peer: PeerT, reason: str) -> None:
        # Slots that it reads stay lent until it disconnects: it may still read those weights.
        self.withdraw(peer)
        self.tell(peer, {"type": "gone", "reason": reason})

    def _lose(self, peer: PeerT, reason: str) -> None:
        if peer not in self._connections:
            return
        self._connections.discard(peer)
        self._selector.unregister(peer.channel)
        if peer.channel.process is not None:
            with suppress(KeyError):  # not yet registered, if there was no memory for that
                self._selector.unregister(peer.channel.process)
        peer.channel.close()
        if peer.worker_id is not None and self._peers.get(peer.worker_id) is peer:
            del self._peers[peer.worker_id]
        try:
            self.left(peer)
        except Exception as error:
            _log.warning("what %s has left cannot be used: %r", peer.name, error)
        if self._paused:
            self._resume_listening()
        if peer.worker_id is not None:
            self._publisher.lost(peer.worker_id, peer, reason)
        elif peer.greeting is not None:
            # A stranger may fail no send; should the send fail, this is likely to be why.
            worker_id = peer.greeting.worker_id
            self._publisher.remark(
                worker_id, f"a receiver that has another token for worker {worker_id} was refused"
            )

    def _tear_down(self) -> None:
        with self._publisher.lock:
            for peer in tuple(self._connections):
                self._say_gone(peer, Roster.CLOSED)
                self._lose(peer, Roster.CLOSED)
            self._closing.close()
            for listener in self._listeners:
                listener.close()
            self.torn_down()

    def torn_down(self) -> None:
        """Release the rest; the thread ends after this."""


def _left(peer: Peer, message: Message) -> _LeftError:
    reason = str(message.get("reason", "left without a reason"))[:_LONGEST_REASON]
    return _LeftError(f"{reason} (process {peer.pid})")


def _cause(peer: Peer, error: Exception) -> Exception:
    """Return why a connection has ended: the worker's last message, if it was not read yet."""
    if peer.worker_id is None or not isinstance(error, ConnectionError):
        return error
    # The first error may be that of a write; the messages before it are still there.
    for _ in range(2):
        with suppress(ConnectionError):
            peer.channel.read()
    while (message := peer.channel.pop_message()) is not None:
        if message.get("type") == "leave":
            return _left(peer, message)
    return error


def farewell(reason: str) -> Message:
    """The last message of a worker to a `ServingTransport`; see `ReceiverTransport.leave`."""
    return {"type": "leave", "reason": reason[:_LONGEST_REASON]}
