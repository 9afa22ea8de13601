"""The sender of ``dist``: packs a version part by part, and sends parts once packed."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

from sync_core import Answer, Delivery, OptionError, Payload, TransportContext
from sync_core.transports import uninterrupted
from sync_plugin_dist.chunks import PartSums, cut, pack
from sync_plugin_dist.options import DistOptions
from sync_plugin_dist.process_group import TensorGroup
from sync_plugin_dist.protocol import Endpoint, listen
from sync_plugin_dist.rendezvous import Rendezvous
from sync_plugin_dist.stream import WorkerStream
from sync_plugin_dist.stream_owner import DistPeer, StreamOwner
from sync_plugin_std.local import (
    LocalListener,
    Message,
    Publisher,
    SharedMemorySender,
    SharedSlots,
    Slot,
)

_DO_WITHOUT = "type shared_memory=False, and workers of this machine are sent weights as others are"


class DistSender(SharedMemorySender[DistPeer], StreamOwner):
    """Sends versions over process groups or shared memory; see `sync_plugin_dist.protocol`.

    Args:
        context: the sender's context for `create_transport`.
        options: the options of the scheme.

    Raises:
        OptionError: the host is not this machine, or the port is in use.
    """

    def __init__(self, context: TransportContext, options: DistOptions) -> None:
        assert context.layout is not None
        self.part_nbytes = options.part_nbytes
        self.collective = options.topology == "broadcast"
        # An eighth, since three waits may follow each other: for a late worker, for a stalled
        # transfer, and for a worker that does not return after it.
        self.patience = context.timeout / 8
        self._numbers = itertools.count(1)
        # By incompletely packed slot: the number of packed bytes.
        self._packed: dict[Slot, int] = {}
        # By packed slot: its hash, if workers verify versions.
        self._sums: dict[Slot, str] = {}
        self._verifies = options.verifies
        self._shares_memory = options.shares_memory
        self._streams: dict[int, WorkerStream] = {}
        self._common_stream: WorkerStream | None = None
        self._opened = ExitStack()
        with ExitStack() as opened:
            listeners = [opened.enter_context(_listen(options.host, options.port))]
            host, port = listeners[0].getsockname()[:2]
            self._link = options.link(context, host)
            self.timeout = self._link.timeout
            local = ""
            if self._shares_memory:
                local_listener = LocalListener()
                opened.callback(local_listener.close)
                listeners.append(local_listener.socket)
                local = local_listener.name
            self._endpoint = Endpoint(options.host, port, local)
            super().__init__(
                context,
                SharedSlots(remedy=_DO_WITHOUT),
                listeners=listeners,
                peer=DistPeer,
                allocate=None if self._shares_memory else self._link.allocate,
            )
            if self.collective:
                # Made before any worker knows the address.
                self._common_stream = WorkerStream(self)
            self._opened = opened.pop_all()

    @property
    def publisher(self) -> Publisher:
        """The publisher with the slots and workers."""
        return self._publisher

    def address(self, worker_id: int) -> Endpoint:
        """Return the endpoint, which is the same for all workers."""
        del worker_id
        return self._endpoint

    def send(
        self,
        payload: Payload,
        worker_ids: Sequence[int],
        announced: Callable[[], None] | None = None,
    ) -> dict[int, Delivery]:
        """Announce the version, call ``announced``, and pack while workers ask for it.

        Workers on this machine get the offer once the version is packed.
        """
        self.collect_answers()
        slot = self._publisher.reserve(payload.nbytes, worker_ids)
        try:
            with self._publisher.lock:
                self._packed[slot] = 0
                self._sums.pop(slot, None)
                if announced is not None:
                    self._publisher.expect(worker_ids)
                deliveries = self._publisher.announce(slot, payload, worker_ids)
                self.offer_to(worker_ids)
            if announced is not None:
                announced()
            self._pack_and_send(payload, slot)
        except BaseException:
            self._publisher.retract(slot)
            raise
        finally:
            with self._publisher.lock:
                slots = self._publisher.slots
                # An interrupted version counts as not packed as long as its slot exists.
                self._packed = {
                    s: n for s, n in self._packed.items() if n < s.nbytes and s in slots
                }
                self._sums = {s: each for s, each in self._sums.items() if s in slots}
        self.offer_to([i for i, peer in tuple(self._peers.items()) if peer.local])
        return deliveries

    def _pack_and_send(self, payload: Payload, slot: Slot) -> None:
        parts = cut(slot.block, slot.nbytes, self.part_nbytes) if self._verifies else []
        ends = list(itertools.accumulate(part.nbytes for part in parts))
        with PartSums() as sums:
            for done in self._pack(payload, slot):
                with self._publisher.lock, uninterrupted():
                    self._packed[slot] = done
                    for stream in self._all_streams():
                        stream.pump()
                # Hash parts while others are sent.
                while sums.count < len(parts) and ends[sums.count] <= done:
                    sums.add(parts[sums.count])
            if not self._verifies:
                return
            for part in parts[sums.count :]:
                sums.add(part)
            found = sums.result()
        with self._publisher.lock, uninterrupted():
            self._sums[slot] = found
            for stream in self._all_streams():
                stream.tell_sum()

    def welcome(self, peer: DistPeer) -> None:
        """Notify the worker that it is accepted."""
        peer.served = True
        peer.local = self._shares_memory and peer.channel.passes_descriptors
        if self._common_stream is None:
            before = self._streams.pop(peer.id, None)
            if before is not None:
                before.close()
        if peer.local:
            super().welcome(peer)
            return
        if self._common_stream is None:
            self._streams[peer.id] = WorkerStream(self)
        self.tell(peer, {"type": "welcome"})

    def offer_peer(self, peer: DistPeer) -> None:
        """Offer the worker the newest version meant for it."""
        newest = self._publisher.newest(peer.id)
        if peer.local:
            if all(slot.version != newest for slot in self._packed):
                super().offer_peer(peer)
        elif newest > max(peer.seen, peer.announced):
            peer.announced = newest
            self.tell(peer, {"type": "offer", "version": newest})

    def handle(self, peer: DistPeer, message: Message) -> None:
        """Handle a worker's message."""
        kind = message["type"]
        if peer.local:
            super().handle(peer, message)
        elif kind == "answer":
            self._publisher.answer(peer.id, Answer.from_message(message["answer"]), peer)
        elif peer.served:
            # Else another receiver has replaced this one.
            self._handle_transfer(self._stream(peer), peer, message)

    def _handle_transfer(self, stream: WorkerStream, peer: DistPeer, message: Message) -> None:
        kind = message["type"]
        if kind == "take":
            stream.ask(peer)
        elif kind == "key":
            stream.hear(peer, message)
        elif kind == "broken":
            stream.broken(int(message["number"]))
        elif kind == "give_up":
            stream.given_up(peer)
            peer.announced = 0
            self.tell(peer, {"type": "given_up"})
            self.offer_peer(peer)
        elif kind == "received":
            peer.seen = int(message["version"])
            self._publisher.give_back(peer)
            stream.received(peer)
            self.offer_peer(peer)
        else:
            raise ValueError(f"{kind!r} is not a message")

    def withdraw(self, peer: DistPeer) -> None:
        """Stop serving the worker."""
        if peer.local:
            super().withdraw(peer)
        elif peer.served:
            peer.served = False
            self._stream(peer).left(peer)

    def left(self, peer: DistPeer) -> None:
        """Release the worker's resources."""
        self.withdraw(peer)
        super().left(peer)

    def remove_worker(self, worker_id: int) -> None:
        """Remove a worker and its stream."""
        with self._publisher.lock:
            super().remove_worker(worker_id)
            stream = self._streams.pop(worker_id, None)
            if stream is not None:
                stream.close()

    def describe_loss(self, peer: DistPeer, cause: Exception) -> str:
        """Describe the loss; for a broadcast, also name the workers that continue."""
        reason = super().describe_loss(peer, cause)
        if not self.collective:
            return reason
        others = ", ".join(str(i) for i in sorted(self._peers) if i != peer.worker_id)
        return f"{reason}; the group is made again without it, for workers: {others or 'none'}"

    def torn_down(self) -> None:
        """Close the process groups."""
        for stream in self._all_streams():
            stream.close()
        self._streams.clear()
        self._opened.close()

    def packed(self, slot: Slot) -> int:
        """Return the number of bytes of the slot that can be sent."""
        return self._packed.get(slot, slot.nbytes)

    def sum_of(self, slot: Slot) -> str | None:
        """Return a version's hash; None if it is not packed yet or workers do not verify."""
        return self._sums.get(slot)

    def next_number(self) -> int:
        """Return a number for a process group."""
        return next(self._numbers)

    def open_wire(self, rendezvous: Rendezvous, size: int) -> TensorGroup:
        """Join a process group as the sender."""
        return TensorGroup(self._link, rendezvous, 0, size)

    def expected(self) -> set[int]:
        """Return the connected workers without the newest version meant for them."""
        return {i for i, peer in self._peers.items() if self._publisher.newest(i) > peer.seen}

    def revoke(self) -> None:
        """Cancel transfers of replaced versions."""
        super().revoke()
        for stream in self._all_streams():
            stream.revoke()

    def _pack(self, payload: Payload, slot: Slot) -> Iterator[int]:
        with self._publisher.lock:
            in_parts = bool(self._all_streams())
        if in_parts:
            yield from pack(payload, slot.block, self.part_nbytes)
        else:
            # No part is sent meanwhile, so all threads may copy.
            payload.pack(slot.block)
            yield slot.nbytes

    def _stream(self, peer: DistPeer) -> WorkerStream:
        return self._common_stream or self._streams[peer.id]

    def _all_streams(self) -> Sequence[WorkerStream]:
        if self._common_stream is not None:
            return [self._common_stream]
        return list(self._streams.values())


def _listen(host: str, port: int) -> socket.socket:
    try:
        return listen(host, port)
    except (OSError, UnicodeError) as error:  # a codec rejects names that are too long
        raise OptionError(
            f"cannot listen on {host:.80}, port {port or 'of any number'}: {error}; host= is an "
            "address of this machine that workers can reach, and without port= a free one is found"
        ) from error
