"""The sender's side for workers of its machine: slots in shared memory, offered by an event.

The newest version meant for a worker stands on the worker's `ControlPage`. To offer it, the sender
sets the event of offers; to accept it, the worker takes that event. The sender may take it as
well, which revokes the offer. The kernel gives it to one of them, so the holder is always known: a
worker that does not receive holds no slot, and what it accepts is the newest version at that
moment. To answer, the worker writes to the page and sets the event of answers.

While a thread waits in `send`, it waits for these events itself, and no other thread has to run.
Otherwise a worker that has answered also says ``look``, and the thread ``sync-sender`` reads the
page. A worker may find that a thread waits just before it waits no longer. So it looks again after
it has set its event; and the thread first notes that it no longer waits, and then takes the events
of workers that owe an answer for the last time. Both are calls on one event, so either the thread
finds it set, or the worker finds that no thread waits.

All else goes over the socket:

========  =====================================  ===============================================
from      message                                meaning
========  =====================================  ===============================================
both      `shake_hands`                          the beginning: both know the token
sender    ``welcome`` + 3 descriptors            accepted; the page, and the two events
sender    ``slot``, index, live + descriptor     a slot that will be offered; those there are
sender    ``live``, live                         the slots that there are, as some are no more
worker    ``look``                               its answer is on its page
worker    ``answer``, answer, held               an answer with text; reads only ``held`` from now
worker    ``on``, version, held                  asks for more, and will not answer about this one
worker    ``lacks``, index                       it could not open a slot that was announced
worker    ``leave``, reason                      it closes its receiver
sender    ``gone``, reason                       refused, replaced, removed, or the sender closes
========  =====================================  ===============================================
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from sync_core import Answer, Delivery, Payload
from sync_core.errors import CapacityError
from sync_core.transports import Block, uninterrupted
from sync_plugin_std.local.channel import Message
from sync_plugin_std.local.control_page import ControlPage, ProcessEvent
from sync_plugin_std.local.publisher import Publisher, Slot
from sync_plugin_std.local.serving import Peer, ServingTransport
from sync_plugin_std.local.shared_memory import SharedSlots

if TYPE_CHECKING:
    from sync_core import TransportContext


# So long a send is woken by the worker that is likely to answer last, and from then on by each, in
# seconds. It saves wake-ups; medians of 1,000 sends of a small model to 1, 4 and 8 workers do not
# differ by more than those of two runs do, with or without it.
_TOGETHER = 0.005


class _Control:
    """The page and the events that a sender shares with one worker.

    Args:
        ended: the event of deliveries that have ended otherwise, to be waited for as well.
    """

    def __init__(self, ended: ProcessEvent) -> None:
        with ExitStack() as opened:
            self.page = ControlPage.create()
            opened.callback(self.page.close)
            self.offers = ProcessEvent.create()
            opened.callback(self.offers.close)
            self.answers = ProcessEvent.create()
            opened.callback(self.answers.close)
            self._opened = opened.pop_all()
        self.poll = select.poll()
        self.poll.register(ended.reader, select.POLLIN)
        self.poll.register(self.answers.reader, select.POLLIN)

    @property
    def descriptors(self) -> tuple[int, int, int]:
        """The descriptors that the worker gets."""
        return self.page.descriptor, self.offers.reader, self.answers.writer

    def close(self) -> None:
        """Close everything."""
        self._opened.close()


@dataclass(eq=False)
class LocalPeer(Peer):
    """A worker on the sender's machine.

    Args:
        control: the page and the events; None before it is welcome, and after it has left.
        offered: the slot that it was offered, and has not answered about.
        unanswered: the version after which it has asked for more, and may yet answer about; or 0.
        knows: the slots that were announced to it.
    """

    control: _Control | None = None
    offered: Slot | None = None
    unanswered: int = 0
    knows: set[int] = field(default_factory=set)


PeerT = TypeVar("PeerT", bound=LocalPeer)


class SharedMemorySender(ServingTransport[PeerT]):
    """Serves workers that connect over unix sockets, and read versions where they are packed.

    A subclass gives the endpoint of workers (`address`), and may serve others in its own way, by
    `offer`, `handle`, `withdraw` and `left`. The receiver's side is `SharedMemoryReceiver`.

    Args:
        context: what the sender gave to `create_transport`.
        slots: makes the memory.
        limit: how many versions may lie in memory at a time; see `Publisher`.
        listeners: listening unix sockets, where workers connect by themselves.
        peer: makes a peer; see `ServingTransport`.
        allocate: makes memory that is not shared, where no worker is local.

    Raises:
        CapacityError: there is not enough memory.
        OptionError: the directory of the slots cannot hold them, or the limit leaves none.
    """

    def __init__(
        self,
        context: TransportContext,
        slots: SharedSlots,
        *,
        limit: int | None = None,
        listeners: Sequence[socket.socket] = (),
        peer: type[PeerT] = LocalPeer,  # type: ignore[assignment]
        allocate: Callable[[int], Block] | None = None,
    ) -> None:
        assert context.layout is not None
        self._slots = slots
        self._zero_copy = context.zero_copy
        # The thread that waits for answers; the event is set when a delivery has ended otherwise.
        # The lock protects both from being used by a thread while another one ends with them.
        self._reader_lock = threading.Lock()
        self._reader: int | None = None
        self._waiting = False
        self._ended = ProcessEvent.create()
        self._poll = select.poll()
        self._poll.register(self._ended.reader, select.POLLIN)
        try:
            publisher = Publisher(
                allocate or slots.allocate,
                context.layout.nbytes,
                limit,
                context.worker_ids,
                timeout=context.timeout,
                views=context.zero_copy and allocate is None,
                notify=context.notify,
                revoke=self.revoke,
            )
            super().__init__(context.worker_token, publisher, peer, listeners)
        except BaseException:
            self._ended.close()
            raise

    def send(self, payload: Payload, worker_ids: Sequence[int]) -> dict[int, Delivery]:
        """Pack once for all, and offer the slot to the workers that wait for it."""
        if self._waiting:
            self.collect_answers()
        try:
            return self._publisher.publish(payload, worker_ids)
        finally:
            # All: to find a slot, offers to other workers may have been taken back.
            self.offer_to(tuple(self._peers))

    def wait(self, deliveries: Sequence[Delivery], timeout: float) -> None:
        """Read the workers' answers in this thread."""
        this = threading.get_ident()
        with self._reader_lock:
            # Ctrl-C may have left this thread there.
            alone = self._reader in (None, this) and not self._publisher.closed
            if alone:
                self._reader = this
        if not alone:
            super().wait(deliveries, timeout)
            return
        deadline = time.monotonic() + timeout
        try:
            for delivery in deliveries:
                delivery.on_end = self._notice_end
            with self._publisher.lock:
                self._waiting = True
                self._show_waiting(True)
            # That of the worker which was offered its version last is likely to come last.
            together = min(deadline, time.monotonic() + _TOGETHER)
            for delivery in reversed(deliveries):
                while not delivery.ended and self._collect_next(together, delivery.worker_id):
                    continue
            for delivery in deliveries:
                while not delivery.ended and self._collect_next(deadline):
                    continue
        finally:
            self.collect_answers()
            with self._reader_lock:
                self._reader = None
                if self._publisher.closed:
                    self._ended.close()

    def close(self) -> None:
        """Let the workers know, and end the thread."""
        super().close()
        with self._reader_lock:
            if self._reader in (None, threading.get_ident()):
                self._ended.close()

    def describe_loss(self, peer: PeerT, cause: Exception) -> str:
        """Also name what ends a worker whose parameters are views of read-only memory."""
        reason = super().describe_loss(peer, cause)
        if not self._zero_copy or peer.control is None or not isinstance(cause, ConnectionError):
            return reason
        return (
            f"{reason}; if SIGSEGV ended it, it wrote to a parameter, which zero_copy=True makes "
            "read-only: type Sender(…, zero_copy=False)"
        )

    def welcome(self, peer: PeerT) -> None:
        """Give the worker what offers are read from, and what answers are written to."""
        try:
            peer.control = _Control(self._ended)
        except (OSError, CapacityError) as error:
            self.refuse(peer, f"the sender cannot serve worker {peer.worker_id}: {error}")
            return
        peer.control.page.waiting = self._waiting
        if self.tell(peer, {"type": "welcome"}, peer.control.descriptors):
            self._notice_end()

    def handle(self, peer: PeerT, message: Message) -> None:
        """Take an answer."""
        kind = message["type"]
        if kind == "look":
            self._collect_from(peer)
        elif kind == "answer":
            answer = Answer.from_message(message["answer"])
            self._take_answer(peer, answer.version, message["held"], answer)
        elif kind == "on":
            self._take_answer(peer, int(message["version"]), message["held"], None)
        elif kind == "lacks":
            peer.knows.discard(int(message["index"]))
            self._offer_again(peer)
        else:
            raise ValueError(f"{kind!r} is not a message")

    def offer_peer(self, peer: PeerT) -> None:
        """Offer the newest version meant for a worker, in place of what it has not accepted."""
        assert peer.worker_id is not None
        if peer.control is None or (peer.offered is not None and not self._revoke(peer)):
            return
        slot = self._publisher.lend(peer.worker_id, peer.seen, peer, peer.name)
        if slot is None:
            return
        peer.control.page.write_offer((slot.version, slot.index, slot.digest[:16]))
        peer.offered = slot
        news = self._slots.news(peer.knows, slot, self._publisher.slots)
        if news is None or self.tell(peer, *news):
            peer.control.offers.set()

    def withdraw(self, peer: PeerT) -> None:
        """Take back what the worker has not accepted."""
        self._revoke(peer)

    def left(self, peer: PeerT) -> None:
        """Take its last answer, and release what was shared with it."""
        if peer.control is not None:
            try:
                self._collect_from(peer)
            finally:
                peer.control.close()
                peer.control = None

    def revoke(self) -> None:
        """Take back what was offered, and was not accepted yet."""
        for peer in self._peers.values():
            self._revoke(peer)

    def _revoke(self, peer: PeerT) -> bool:
        """Take back what the worker has not accepted; False when it reads that already."""
        if peer.offered is None or peer.control is None:
            return True
        if not peer.control.offers.take():
            return False
        self._publisher.take_back(peer, peer.offered)
        peer.offered = None
        return True

    def _show_waiting(self, waits: bool) -> None:
        for peer in self._peers.values():
            if peer.control is not None:
                peer.control.page.waiting = waits

    def _collect_next(self, deadline: float, worker_id: int | None = None) -> bool:
        """Wait until a worker answers or a delivery ends otherwise; False after the deadline.

        Args:
            deadline: when the wait ends (`time.monotonic`).
            worker_id: the only worker whose answer ends the wait; None for any.
        """
        with self._publisher.lock:
            peer = None if worker_id is None else self._peers.get(worker_id)
            if peer is not None and peer.control is not None:
                poll = peer.control.poll
            else:
                poll = self._poll if worker_id is not None else self._poll_of_all()
        left = deadline - time.monotonic()
        ready = poll.poll(left * 1000) if left > 0 else []
        if not ready:
            return False
        if self._ended.reader in dict(ready):
            self._ended.take()
        self._collect(peer, everyone=worker_id is None)
        return True

    def _poll_of_all(self) -> select.poll:
        poll = select.poll()
        poll.register(self._ended.reader, select.POLLIN)
        for peer in self._peers.values():
            if peer.control is not None:
                poll.register(peer.control.answers.reader, select.POLLIN)
        return poll

    def collect_answers(self) -> None:
        """Act on answers that a wait has left where they are, as it was ended by Ctrl-C."""
        if self._waiting:
            with self._publisher.lock:
                self._show_waiting(False)
                # Those that were written before the workers could know.
                self._collect()
                # Last, so that an interrupt before it leaves all of this to the next send.
                self._waiting = False

    def _collect(self, polled: PeerT | None = None, *, everyone: bool = False) -> None:
        """Act on the answers that have come, of workers that owe one, of ``polled``, or of all."""
        # One whose event was taken must be acted on.
        with self._publisher.lock:
            for peer in tuple(self._peers.values()):
                owes = peer.offered is not None or peer.unanswered or peer is polled
                if not owes and not everyone:
                    continue
                with uninterrupted():
                    self.guard(peer, self._collect_from, peer)

    def _collect_from(self, peer: PeerT) -> None:
        if peer.control is None or not peer.control.answers.take():
            return
        found = peer.control.page.read_answer()
        if found is not None:
            answer, held = found
            self._take_answer(peer, answer.version, held, answer)

    def _take_answer(
        self, peer: PeerT, version: int, held: Sequence[int], answer: Answer | None
    ) -> None:
        assert peer.worker_id is not None
        if peer.offered is not None and peer.offered.version <= version:
            peer.offered = None
        peer.seen = max(peer.seen, version)
        # Where a thread of the worker stages, it may have accepted newer ones meanwhile.
        self._publisher.give_back(peer, held, until=version)
        if answer is None:
            peer.unanswered = version
            owed = self._publisher.roster.wanted(peer.worker_id, after=peer.seen)
        else:
            # The answer before may be read a second time, as its event is set after it is written.
            if peer.unanswered <= version:
                peer.unanswered = 0
            owed = self._publisher.roster.answered(peer.worker_id, peer, answer)
        if owed is not None:
            self._offer_again(peer)

    def _offer_again(self, peer: PeerT) -> None:
        # Another receiver may have taken its place.
        if peer.worker_id is not None and self._peers.get(peer.worker_id) is peer:
            self.offer_peer(peer)

    def _notice_end(self) -> None:
        """Wake the thread that waits for answers, unless this is it."""
        if self._reader in (None, threading.get_ident()):
            return
        with self._reader_lock:
            if self._reader is not None:
                self._ended.set()
