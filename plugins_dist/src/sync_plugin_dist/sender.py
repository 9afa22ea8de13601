"""The sender's side of ``dist``: packs a version part by part, and sends what is packed."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

from sync_core import Answer, Delivery, OptionError, Payload, TransportContext
from sync_core.transports import (
    LocalListener,
    Message,
    Publisher,
    ServingTransport,
    SharedSlots,
    Slot,
    uninterrupted,
)
from sync_plugin_dist.chunks import pack
from sync_plugin_dist.local import LocalReaders
from sync_plugin_dist.options import DistOptions
from sync_plugin_dist.process_group import TensorGroup
from sync_plugin_dist.protocol import Endpoint, listen
from sync_plugin_dist.rendezvous import Rendezvous
from sync_plugin_dist.stream import Stream
from sync_plugin_dist.stream_owner import DistPeer, StreamOwner

_DO_WITHOUT = "type shared_memory=False, and workers of this machine are sent weights as others are"


class DistSender(ServingTransport[DistPeer], StreamOwner):
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
        self._slots = SharedSlots(remedy=_DO_WITHOUT) if options.shares_memory else None
        self._lanes: dict[int, Stream | LocalReaders] = {}
        with ExitStack() as opened:
            listeners = [opened.enter_context(_listen(options.host, options.port))]
            host, port = listeners[0].getsockname()[:2]
            self._link = options.link(context, host)
            self.timeout = self._link.timeout
            local = ""
            if options.shares_memory:
                local_listener = LocalListener()
                opened.callback(local_listener.close)
                listeners.append(local_listener.socket)
                local = local_listener.name
            self._endpoint = Endpoint(options.host, port, local)
            self.publisher = Publisher(
                self._link.allocate if self._slots is None else self._slots.allocate,
                context.layout.nbytes,
                None,
                context.worker_ids,
                timeout=context.timeout,
                views=context.zero_copy and self._slots is not None,
                notify=context.notify,
                revoke=self._revoke_old,
            )
            self._common_lane = Stream(self) if self.collective else None
            super().__init__(context.token, self.publisher, DistPeer, listeners)
            self._opened = opened.pop_all()

    def address(self, worker_id: int) -> Endpoint:
        """Return where to connect, the same for every worker."""
        del worker_id
        return self._endpoint

    def send(
        self,
        payload: Payload,
        worker_ids: Sequence[int],
        announced: Callable[[dict[int, Delivery]], None] | None = None,
    ) -> dict[int, Delivery]:
        """Let the workers ask, and pack meanwhile; ``announced`` is called before that."""
        slot = self.publisher.reserve(payload.nbytes, worker_ids)
        try:
            with self.publisher.lock:
                self._packed[slot] = 0
                if announced is not None:
                    self.publisher.expect(worker_ids)
                deliveries = self.publisher.announce(slot, payload, worker_ids)
                self.offer_to(worker_ids)
            if announced is not None:
                announced(deliveries)
            for done in self._pack(payload, slot):
                with self.publisher.lock, uninterrupted():
                    self._packed[slot] = done
                    for lane in self._all_lanes():
                        lane.pump()
        except BaseException:
            self.publisher.retract(slot)
            raise
        finally:
            with self.publisher.lock:
                slots = self.publisher.slots
                # An interrupted version counts as not packed for as long as its slot exists.
                self._packed = {
                    s: n for s, n in self._packed.items() if n < s.nbytes and s in slots
                }
        return deliveries

    def welcome(self, peer: DistPeer) -> None:
        """Let the worker know that it is served."""
        peer.served = True
        if self._common_lane is None:
            before = self._lanes.get(peer.id)
            if before is not None:
                before.close()
            self._lanes[peer.id] = self._new_lane(peer)
        self.tell(peer, {"type": "welcome"})

    def offer(self, peer: DistPeer) -> None:
        """Tell the worker of the newest version meant for it."""
        newest = self.publisher.newest(peer.id)
        if newest > max(peer.seen, peer.offered):
            peer.offered = newest
            if self.tell(peer, {"type": "offer", "version": newest}) and peer.waits:
                self._lane(peer).ask(peer)

    def handle(self, peer: DistPeer, message: Message) -> None:
        """Act on what a worker says."""
        kind = message["type"]
        if kind == "answer":
            answer = Answer.from_message(message["answer"])
            # A newer version may have been shown while this was in transfer.
            newer = [slot.index for slot in self.publisher.slots if slot.version > answer.version]
            self.publisher.give_back(peer, [*message["held"], *newer])
            self.publisher.answer(peer.id, answer, peer)
        elif kind == "reads":
            self.publisher.give_back(peer, message["held"])
        elif peer.served:
            # Otherwise another receiver has its place.
            self._handle_transfer(self._lane(peer), peer, message)

    def _handle_transfer(
        self, lane: Stream | LocalReaders, peer: DistPeer, message: Message
    ) -> None:
        kind = message["type"]
        if kind == "take":
            lane.ask(peer)
        elif kind == "lacks":
            peer.knows.discard(int(message["index"]))
        elif isinstance(lane, LocalReaders):
            if kind not in ("wait", "enough"):
                raise ValueError(f"{kind!r} is not a message")
            (lane.wait if kind == "wait" else lane.enough)(peer)
        elif kind == "key":
            lane.hear(peer, message)
        elif kind == "broken":
            lane.broken(int(message["number"]))
        elif kind == "received":
            peer.seen = int(message["version"])
            self.publisher.give_back(peer)
            lane.received(peer)
            self.offer(peer)
        else:
            raise ValueError(f"{kind!r} is not a message")

    def withdraw(self, peer: DistPeer) -> None:
        """Serve the worker no longer."""
        if peer.served:
            peer.served = False
            self._lane(peer).left(peer)

    def left(self, peer: DistPeer) -> None:
        """The same."""
        self.withdraw(peer)

    def remove_worker(self, worker_id: int) -> None:
        """Forget a worker, and its lane."""
        with self.publisher.lock:
            super().remove_worker(worker_id)
            lane = self._lanes.pop(worker_id, None)
            if lane is not None:
                lane.close()

    def describe_loss(self, peer: DistPeer, cause: Exception) -> str:
        """Also name the workers that continue without it, where workers are served together."""
        reason = super().describe_loss(peer, cause)
        if not self.collective:
            return reason
        others = ", ".join(str(i) for i in sorted(self._peers) if i != peer.worker_id)
        return f"{reason}; the group is made again without it, for workers: {others or 'none'}"

    def torn_down(self) -> None:
        """Release the wires."""
        for lane in self._all_lanes():
            lane.close()
        self._lanes.clear()
        self._opened.close()

    def packed(self, slot: Slot) -> int:
        """Return how many bytes of the slot may be sent already."""
        return self._packed.get(slot, slot.nbytes)

    def next_number(self) -> int:
        """A number for a wire."""
        return next(self._numbers)

    def open_wire(self, rendezvous: Rendezvous, size: int) -> TensorGroup:
        """The sender's end of a wire."""
        return TensorGroup(self._link, rendezvous, 0, size)

    def expected(self) -> set[int]:
        """The workers that are connected, and have not the newest version meant for them."""
        return {i for i, peer in self._peers.items() if self.publisher.newest(i) > peer.seen}

    def _pack(self, payload: Payload, slot: Slot) -> Iterator[int]:
        with self.publisher.lock:
            in_parts = any(isinstance(lane, Stream) for lane in self._all_lanes())
        if in_parts:
            yield from pack(payload, slot.block, self.part_nbytes)
        else:
            # No chunk is sent meanwhile, so all threads may copy.
            payload.pack(slot.block)
            yield slot.nbytes

    def _new_lane(self, peer: DistPeer) -> Stream | LocalReaders:
        if self._slots is not None and peer.channel.passes_descriptors:
            return LocalReaders(self, self._slots)
        return Stream(self)

    def _lane(self, peer: DistPeer) -> Stream | LocalReaders:
        return self._common_lane or self._lanes[peer.id]

    def _all_lanes(self) -> Sequence[Stream | LocalReaders]:
        if self._common_lane is not None:
            return [self._common_lane]
        return list(self._lanes.values())

    def _revoke_old(self) -> None:
        """Take back what still is on its way, and has been replaced."""
        for lane in self._all_lanes():
            lane.revoke()


def _listen(host: str, port: int) -> socket.socket:
    try:
        return listen(host, port)
    except OSError as error:
        raise OptionError(
            f"cannot listen on {host}, port {port or 'of any number'}: {error}; host= is an "
            "address of this machine that workers can reach, and without port= a free one is found"
        ) from error
