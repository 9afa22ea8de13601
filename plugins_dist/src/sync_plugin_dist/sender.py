"""The sender's side of ``dist``: packs a version part by part, and sends what is packed."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from sync_core import (
    Answer,
    Delivery,
    Message,
    OptionError,
    Payload,
    Publisher,
    ServingTransport,
    Slot,
    TransportContext,
)
from sync_plugin_dist.lane import DistPeer, Lane, Office
from sync_plugin_dist.options import DistOptions
from sync_plugin_dist.parts import pack
from sync_plugin_dist.protocol import Endpoint, listen
from sync_plugin_dist.wire import Wire

# How many versions are kept: the newest, one that is being packed, one that somebody still gets.
_SLOTS = 3


class DistSender(ServingTransport[DistPeer], Office):
    """Serves workers over process groups of its own; see `sync_plugin_dist.protocol`.

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
        # Three may follow each other: for who is late, for a transfer that stands still, and for
        # who does not come back after it.
        self.patience = context.timeout / 8
        self._numbers = itertools.count(1)
        self._lanes: dict[int, Lane] = {}
        self._common_lane = Lane(self) if self.collective else None
        self._packing: Slot | None = None
        self._packed = 0
        listener = _listen(options.host, options.port)
        store_listener = _listen(options.host, 0)
        port, store_port = listener.getsockname()[1], store_listener.getsockname()[1]
        self._store = TCPStore(
            options.host,
            store_port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=context.timeout),
            master_listen_fd=store_listener.detach(),
        )
        self._endpoint = Endpoint(options.host, port, store_port)
        self._link = options.link(context, self._endpoint, listener.getsockname()[0])
        self.publisher = Publisher(
            self._link.allocate,
            context.layout.nbytes,
            _SLOTS,
            context.worker_ids,
            timeout=context.timeout,
            revoke=self._revoke_old,
        )
        super().__init__(context.token, self.publisher, DistPeer, listener)

    def address(self, worker_id: int) -> Endpoint:
        """Where to connect, the same for every worker."""
        del worker_id
        return self._endpoint

    def send(
        self,
        payload: Payload,
        worker_ids: Sequence[int],
        announced: Callable[[dict[int, Delivery]], None] | None = None,
    ) -> dict[int, Delivery]:
        """Let the workers ask, and pack meanwhile; ``announced`` is called before that."""
        slot = self.publisher.reserve(payload.nbytes)
        with self.publisher.changed:
            self._packing, self._packed = slot, 0
            deliveries = self.publisher.announce(slot, payload, worker_ids)
            self.offer_to(worker_ids)
        if announced is not None:
            announced(deliveries)
        try:
            for done in pack(payload, slot.block, self.part_nbytes):
                with self.publisher.changed:
                    self._packed = done
                    for lane in self._all_lanes():
                        lane.pump()
        except BaseException:
            with self.publisher.changed:
                self.publisher.retract(slot)
                self._revoke_old()
            raise
        finally:
            with self.publisher.changed:
                self._packing = None
        return deliveries

    def welcome(self, peer: DistPeer) -> None:
        """Let the worker know that it is served."""
        assert peer.worker_id is not None
        if self._common_lane is not None:
            peer.lane = self._common_lane
        else:
            peer.lane = self._lanes.setdefault(peer.worker_id, Lane(self))
        self.tell(peer, {"type": "welcome"})

    def offer(self, peer: DistPeer) -> None:
        """Tell the worker of the newest version meant for it."""
        assert peer.worker_id is not None
        newest = self.publisher.newest(peer.worker_id)
        if newest > max(peer.seen, peer.offered):
            peer.offered = newest
            self.tell(peer, {"type": "offer", "version": newest})

    def handle(self, peer: DistPeer, message: Message) -> None:
        """Act on what a worker says."""
        assert peer.worker_id is not None
        lane = peer.lane
        if lane is None:
            return  # another receiver has its place
        kind = message["type"]
        if kind == "take":
            lane.ask(peer)
        elif kind == "broken":
            lane.broken(int(message["number"]))
        elif kind == "received":
            peer.seen = int(message["version"])
            self.publisher.give_back(peer)
            lane.received(peer)
            self.offer(peer)
        elif kind == "answer":
            self.publisher.answer(peer.worker_id, Answer.from_message(message["answer"]))
        else:
            raise ValueError(f"{kind!r} is no message")

    def withdraw(self, peer: DistPeer) -> None:
        """Serve the worker no longer."""
        lane, peer.lane = peer.lane, None
        if lane is not None:
            lane.left(peer)

    def left(self, peer: DistPeer) -> None:
        """The same."""
        self.withdraw(peer)

    def describe_loss(self, peer: DistPeer, cause: Exception) -> str:
        """Also say who goes on without it, where workers are served together."""
        reason = super().describe_loss(peer, cause)
        if not self.collective:
            return reason
        others = ", ".join(str(i) for i in sorted(self._peers) if i != peer.worker_id)
        return f"{reason}; the group is made again without it, for workers: {others or 'none'}"

    def torn_down(self) -> None:
        """Release the wires and the store."""
        for lane in self._all_lanes():
            lane.close()
        self._lanes.clear()
        del self._store

    def packed(self, slot: Slot) -> int:
        """How many bytes of the slot may be sent already."""
        return self._packed if slot is self._packing else slot.nbytes

    def next_number(self) -> int:
        """A number for a wire."""
        return next(self._numbers)

    def open_wire(self, number: int, size: int) -> Wire:
        """The sender's end of a wire."""
        return Wire(self._link, number, 0, size)

    def expected(self) -> set[int]:
        """The workers that are connected, and have not the newest version meant for them."""
        return {i for i, peer in self._peers.items() if self.publisher.newest(i) > peer.seen}

    def _all_lanes(self) -> list[Lane]:
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
