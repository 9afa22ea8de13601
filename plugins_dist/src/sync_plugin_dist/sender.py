"""The sender's side of ``dist``: packs a version part by part, and sends what is packed."""

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
    """Serves workers over its own process groups, or in memory; see `sync_plugin_dist.protocol`.

    Args:
        context: what the sender gave to `create_transport`.
        options: the options of the scheme.

    Raises:
        OptionError: the host is not this machine, or the port is taken.
    """

    def __init__(self, context: TransportContext, options: DistOptions) -> None:
        assert context.layout is not None
        self.part_nbytes = options.part_nbytes
        self.collective = options.topology == "broadcast"
        # Three waits may follow each other: for a late worker, for a stalled transfer, and for
        # a worker that does not return after it.
        self.patience = context.timeout / 8
        self._numbers = itertools.count(1)
        # The bytes packed so far, of slots that are not packed entirely.
        self._packed: dict[Slot, int] = {}
        # Of slots that are packed, where workers verify what they are sent.
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
                # Before any worker knows the address.
                self._common_stream = WorkerStream(self)
            self._opened = opened.pop_all()

    @property
    def publisher(self) -> Publisher:
        """The slots and the workers."""
        return self._publisher

    def address(self, worker_id: int) -> Endpoint:
        """Return where to connect, the same for every worker."""
        del worker_id
        return self._endpoint

    def send(
        self,
        payload: Payload,
        worker_ids: Sequence[int],
        announced: Callable[[], None] | None = None,
    ) -> dict[int, Delivery]:
        """Let the workers ask, and pack meanwhile; ``announced`` is called before that.

        Workers of this machine are offered the version once it is packed.
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
                # An interrupted version counts as not packed for as long as its slot exists.
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
                # While they are sent.
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
        """Let the worker know that it is served."""
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
        """Tell the worker of the newest version meant for it."""
        newest = self._publisher.newest(peer.id)
        if peer.local:
            if all(slot.version != newest for slot in self._packed):
                super().offer_peer(peer)
        elif newest > max(peer.seen, peer.announced):
            peer.announced = newest
            self.tell(peer, {"type": "offer", "version": newest})

    def handle(self, peer: DistPeer, message: Message) -> None:
        """Act on what a worker says."""
        kind = message["type"]
        if peer.local:
            super().handle(peer, message)
        elif kind == "answer":
            self._publisher.answer(peer.id, Answer.from_message(message["answer"]), peer)
        elif peer.served:
            # Otherwise another receiver has its place.
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
        """Serve the worker no longer."""
        if peer.local:
            super().withdraw(peer)
        elif peer.served:
            peer.served = False
            self._stream(peer).left(peer)

    def left(self, peer: DistPeer) -> None:
        """Release what belongs to the worker."""
        self.withdraw(peer)
        super().left(peer)

    def remove_worker(self, worker_id: int) -> None:
        """Forget a worker, and its stream."""
        with self._publisher.lock:
            super().remove_worker(worker_id)
            stream = self._streams.pop(worker_id, None)
            if stream is not None:
                stream.close()

    def describe_loss(self, peer: DistPeer, cause: Exception) -> str:
        """Also name the workers that continue without it, where workers are served together."""
        reason = super().describe_loss(peer, cause)
        if not self.collective:
            return reason
        others = ", ".join(str(i) for i in sorted(self._peers) if i != peer.worker_id)
        return f"{reason}; the group is made again without it, for workers: {others or 'none'}"

    def torn_down(self) -> None:
        """Release the wires."""
        for stream in self._all_streams():
            stream.close()
        self._streams.clear()
        self._opened.close()

    def packed(self, slot: Slot) -> int:
        """Return how many bytes of the slot may be sent already."""
        return self._packed.get(slot, slot.nbytes)

    def sum_of(self, slot: Slot) -> str | None:
        """Return the sum of a version; None where it is not packed, or workers do not verify."""
        return self._sums.get(slot)

    def next_number(self) -> int:
        """A number for a wire."""
        return next(self._numbers)

    def open_wire(self, rendezvous: Rendezvous, size: int) -> TensorGroup:
        """The sender's end of a wire."""
        return TensorGroup(self._link, rendezvous, 0, size)

    def expected(self) -> set[int]:
        """The workers that are connected, and have not the newest version meant for them."""
        return {i for i, peer in self._peers.items() if self._publisher.newest(i) > peer.seen}

    def revoke(self) -> None:
        """Take back what still is on its way, and has been replaced."""
        super().revoke()
        for stream in self._all_streams():
            stream.revoke()

    def _pack(self, payload: Payload, slot: Slot) -> Iterator[int]:
        with self._publisher.lock:
            in_parts = bool(self._all_streams())
        if in_parts:
            yield from pack(payload, slot.block, self.part_nbytes)
        else:
            # No chunk is sent meanwhile, so all threads may copy.
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
    except (OSError, UnicodeError) as error:  # a name that is too long is refused by a codec
        raise OptionError(
            f"cannot listen on {host:.80}, port {port or 'of any number'}: {error}; host= is an "
            "address of this machine that workers can reach, and without port= a free one is found"
        ) from error
