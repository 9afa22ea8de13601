"""The receivers of ``dist``: over process groups, or in shared memory."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from sync_core import (
    Answer,
    CapacityError,
    Layout,
    Payload,
    ReceiverTransport,
    SenderLostError,
    SyncError,
    TransportContext,
)
from sync_core.errors import PayloadError
from sync_core.transports import Block, uninterrupted
from sync_plugin_dist.chunks import cut
from sync_plugin_dist.control import ControlChannel, connect
from sync_plugin_dist.descriptors import advice, enough_descriptors
from sync_plugin_dist.options import DistOptions
from sync_plugin_dist.process_group import TensorGroup
from sync_plugin_dist.protocol import Farewell, Transfer
from sync_plugin_dist.rendezvous import BrokenGroupError, Rendezvous
from sync_plugin_std.local import (
    Channel,
    Message,
    SharedMemoryReceiver,
    farewell,
    shake_hands,
)

_log = logging.getLogger("sync_core")


def create_receiver(context: TransportContext, options: DistOptions) -> ReceiverTransport:
    """Connect to a sender, and return the receiver for the kind of connection.

    Args:
        context: the receiver's context for `create_transport`.
        options: the options of the scheme.

    Raises:
        SenderLostError: the sender is gone or refuses this worker.
    """
    connection = connect(context)
    if connection.family == socket.AF_UNIX:
        return LocalReceiver(context, Channel(connection))
    return StreamReceiver(context, options, connection)


class LocalReceiver(SharedMemoryReceiver):
    """Reads versions from the memory of a sender on this machine."""

    def __init__(self, context: TransportContext, channel: Channel) -> None:
        self._farewell: Farewell | None = context.endpoint.farewell
        super().__init__(context, channel)

    def leave(self, reason: str) -> None:
        """Notify the sender, unless it is gone."""
        super().leave(_reason(self._farewell, reason))


def _reason(farewell: Farewell | None, usual: str) -> str:
    """Return the reason why a receiver leaves."""
    return usual if farewell is None or not farewell.reason else farewell.reason


class StreamReceiver(ReceiverTransport):
    """Receives versions into its own memory, over process groups.

    Args:
        context: the receiver's context for `create_transport`.
        options: the options of the scheme.
        connection: a socket connected to the sender, which this receiver closes.

    Raises:
        SenderLostError: the sender is gone or refuses this worker.
    """

    def __init__(
        self, context: TransportContext, options: DistOptions, connection: socket.socket
    ) -> None:
        self._timeout = context.timeout
        self._farewell: Farewell | None = context.endpoint.farewell
        self._blocks: list[Block] = []
        self._layout = context.layout
        layout = Layout(()) if context.layout is None else context.layout
        self._most_nbytes = layout.most_nbytes
        self._wire: TensorGroup | None = None
        self._rendezvous: Rendezvous | None = None
        # A complete version that waits for its sum.
        self._arrived: tuple[Transfer, Block] | None = None
        self._offered = 0
        self._seen = 0
        self._asked = 0.0
        # Whether a reply is pending: the replies to two requests look the same.
        self._asking = False
        # Whether `give_up` was sent and not confirmed; until then, messages are ignored.
        self._giving_up = False
        self._line = ControlChannel(connection, self._put_key)
        self._link = options.link(context, connection.getsockname()[0])
        try:
            channel = self._line.channel
            shake_hands(channel, context.worker_token(), context.worker_id, context.timeout)
            self._next(context.timeout)
        except BaseException:
            self._line.close()
            raise

    def receive(self, timeout: float) -> Payload | None:
        """Return the newest version, waiting until it is one that was not seen.

        A version that is offered before the timeout is fetched, however long that takes, since
        giving it up would end the process group for all members. A silent sender is given up after
        the receiver's own timeout, or up to 50 % later after a recent message.

        Raises:
            CapacityError: no file descriptors for a connection or no memory for a version are left.
        """
        try:
            return self._receive(timeout)
        except SyncError:
            raise
        except (LookupError, TypeError, ValueError) as error:
            raise SenderLostError(f"the sender does not keep to the protocol: {error!r}") from error
        except BaseException:
            self._give_up()
            raise

    def acknowledge(self, answer: Answer) -> None:
        """Send the answer to the sender."""
        self._line.send({"type": "answer", "answer": answer.to_message()})

    def wake(self) -> None:
        """End all waits, as if the sender were gone."""
        self._line.channel.wake()

    def leave(self, reason: str) -> None:
        """Notify the sender, unless it is gone."""
        with suppress(SenderLostError):
            self._line.send(farewell(_reason(self._farewell, reason)))

    def close(self) -> None:
        """Disconnect from the sender."""
        self._end_wire()
        self._line.close()
        self._blocks.clear()

    def _receive(self, timeout: float) -> Payload | None:
        deadline = time.monotonic() + timeout
        while self._asking or self._await_offer(deadline):
            payload = self._fetch()
            if payload is not None or time.monotonic() > deadline:
                return payload
        return None

    def _give_up(self) -> None:
        """Withdraw the request for a version after an interrupt, such as Ctrl-C."""
        with uninterrupted(), suppress(SenderLostError):
            self._giving_up = True
            self._asking = False
            self._offered = self._seen
            self._end_wire()
            self._line.send({"type": "give_up"})

    def _await_offer(self, deadline: float) -> bool:
        """Wait for an offer; return whether there is one."""
        while self._offered <= self._seen:
            message = self._line.hear(max(0.0, deadline - time.monotonic()))
            if message is None:
                return False
            self._note(message)
        return True

    def _fetch(self) -> Payload | None:
        """Return the offered version; None if the offer was withdrawn or the version is late."""
        self._asked = time.perf_counter()
        self._take()
        deadline = time.monotonic() + self._timeout
        while True:
            # At least half of the timeout: after a longer stop of this process, the sender may be
            # alive and reply. In that time each of three suspects is served once, for an eighth.
            message = self._next(max(self._timeout / 2, deadline - time.monotonic()))
            if message["type"] == "wire":
                self._open_wire(message)
            elif message["type"] in ("data", "sum"):
                payload = (
                    self._read(message) if message["type"] == "data" else self._verify(message)
                )
                if payload is not None:
                    return payload
            elif message["type"] == "nothing":
                self._asking = False
                self._offered = self._seen
                return None
            elif message["type"] == "again":
                self._note(message)
                if time.monotonic() > deadline:
                    return None
                self._take()
            else:
                self._note(message)

    def _take(self) -> None:
        if not self._asking:
            self._asking = True
            self._line.send({"type": "take"})

    def _open_wire(self, message: Message) -> None:
        self._end_wire()
        number = message["number"]
        if not enough_descriptors(message["size"]):
            error = CapacityError(advice(message["size"]))
            self._line.send({"type": "broken", "number": number})
            self.acknowledge(Answer.refusal(self._offered, error))
            raise error
        self._rendezvous = Rendezvous(
            number, self._line.send, self._hear_keys, timeout=self._link.timeout
        )
        try:
            self._wire = TensorGroup(self._link, self._rendezvous, message["rank"], message["size"])
        except BrokenGroupError:
            self._line.send({"type": "broken", "number": number})

    def _hear_keys(self, seconds: float) -> None:
        if self._line.begins_again():
            raise BrokenGroupError("the sender begins again")
        self._line.read_one(seconds)

    def _put_key(self, message: Message) -> None:
        if self._rendezvous is not None and message["number"] == self._rendezvous.number:
            self._rendezvous.put(message)

    def _read(self, message: Message) -> Payload | None:
        transfer = Transfer.from_message(message, self._most_nbytes)
        wire, version = self._wire, transfer.version
        if wire is None or wire.number != transfer.number:
            return None
        try:
            block = self._take_block(transfer.nbytes)
        except CapacityError as error:
            self.acknowledge(Answer.refusal(version, error))
            self._give_up()
            raise
        try:
            wire.receive(cut(block, transfer.nbytes, transfer.part), version, self._line)
        except BrokenGroupError:
            # Do not reuse the block, since an abandoned collective may still write to it.
            self._end_wire()
            self._line.send({"type": "broken", "number": transfer.number})
            return None
        self._arrived = transfer, block
        return None if self._link.verify else self._accept()

    def _verify(self, message: Message) -> Payload | None:
        """Return the arrived version if its hash is the sender's; else request it again."""
        told = message["number"], message["version"]
        if self._arrived is None or self._wire is None:
            return None
        transfer, _ = self._arrived
        if told != (transfer.number, transfer.version):
            return None
        if message["sum"] == self._wire.sum:
            return self._accept()
        _log.warning(
            "version %d came with other bytes than the sender has packed: another worker of the "
            "group, or a process in the network, has changed them; it is fetched again",
            transfer.version,
        )
        self._end_wire()
        self._line.send({"type": "broken", "number": transfer.number})
        return None

    def _accept(self) -> Payload | None:
        assert self._arrived is not None
        (transfer, block), self._arrived = self._arrived, None
        self._asking = False
        self._line.send({"type": "received", "version": transfer.version})
        release = partial(self._blocks.append, block)
        return self._unpack(block, transfer.version, transfer.digest, release)

    def _unpack(
        self, block: Block, version: int, digest: str, release: Callable[[], None]
    ) -> Payload:
        self._seen = version
        try:
            payload = Payload.unpack(
                block,
                version,
                digest=digest,
                known=self._layout,
                release=release,
                since=self._asked,
            )
        except PayloadError as error:
            release()
            self.acknowledge(Answer.refusal(version, error))
            raise
        self._layout = payload.layout
        return payload

    def _take_block(self, nbytes: int) -> Block:
        while self._blocks:
            block = self._blocks.pop()
            if block.nbytes >= nbytes:
                return block
        return self._link.allocate(nbytes)

    def _note(self, message: Message) -> None:
        if message["type"] == "given_up":
            self._giving_up = False
        elif self._giving_up:
            return
        elif message["type"] == "offer":
            self._offered = message["version"]
        elif message["type"] in ("again", "wire"):
            self._asking = False
            self._end_wire()

    def _next(self, timeout: float) -> Message:
        message = self._line.hear(timeout)
        if message is None:
            raise SenderLostError(f"the sender did not answer within {self._timeout:g} s")
        return message

    def _end_wire(self) -> None:
        self._rendezvous = self._arrived = None
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()
