"""The inbox of a receiver in an actor, which the sender fills by calling the actor."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from sync_plugin_ray.mailbox import MailboxOffer

if TYPE_CHECKING:
    # It imports torch, which takes seconds that not all actors need.
    from sync_core import Answer

# Inboxes by their readers' secret names.
_inboxes: weakref.WeakValueDictionary[str, Inbox] = weakref.WeakValueDictionary()


def take_calls(concurrency_group: str) -> None:
    """Allow senders to call this actor in one of its concurrency groups.

    Receivers that are made in the actor afterwards get versions only by such calls, which takes
    half the time of asking the mailbox. A call waits up to a quarter of a second for the receiver's
    answer. So the group needs two threads per receiver and no other methods. Workers of the group
    ``ray`` have such a concurrency group. In an asynchronous actor, which has one thread for all
    calls of a group, receivers continue to ask the mailbox.

    Two calls per receiver count toward the actor's ``max_pending_calls``; a send to an actor with
    too many pending calls fails. Just after `Sender.send_async`, ``receive(0)`` may find nothing,
    since the call has not arrived yet; a receiver that waits finds the version.

    Args:
        concurrency_group: a group that ``ray.remote(concurrency_groups={…: 2})`` has defined for
            the actor's class. If an actor is called in an undefined group, Ray ends the actor.

    Example:
        >>> take_calls("weights")  # doctest: +SKIP
    """
    Inbox.group = "" if _in_an_event_loop() else concurrency_group


class Inbox:
    """Holds the newest version for one receiver until it has answered.

    Args:
        reader: the receiver's secret name.
    """

    #: The concurrency group given to `take_calls`; empty before that.
    group: ClassVar[str] = ""

    def __init__(self, reader: str) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._offer: MailboxOffer | None = None
        self._answer: Answer | None = None
        # The version for whose answer a call waits.
        self._awaited = 0
        # Older versions are ignored, since Ray runs two calls of one group in any order.
        self._newest = 0
        #: Called after a version was handed in, before the wait for the answer.
        self.on_arrival: Callable[[], None] = _nothing
        #: Whether `wake` was called.
        self.woken = False
        _inboxes[reader] = self

    def take(self, seen: int) -> MailboxOffer | None:
        """Return the version that was handed in, if it is newer than the one seen."""
        with self._lock:
            if self._offer is not None and self._offer.version <= seen:
                self._offer = None
            return self._offer

    def wait(self, condition: Callable[[], bool], deadline: float) -> bool:
        """Wait until a version was handed in or a condition holds; return False at the deadline.

        A thread that makes the condition true must call `nudge`. After `wake` this does not wait.
        """
        with self._lock:
            left = max(0.0, deadline - time.monotonic())
            self._changed.wait_for(
                lambda: self.woken or self._offer is not None or condition(), left
            )
            return not self.woken and (self._offer is not None or condition())

    def nudge(self) -> None:
        """Make waiting threads check their condition."""
        with self._lock:
            self._changed.notify_all()

    def wake(self) -> None:
        """End all waits from now on."""
        with self._lock:
            self.woken = True
            self._changed.notify_all()

    def answer(self, answer: Answer) -> bool:
        """Answer a version; return False if its call no longer waits."""
        with self._lock:
            if self._offer is not None and self._offer.version <= answer.version:
                self._offer = None
            if answer.version != self._awaited:
                return False
            self._answer, self._awaited = answer, 0
            self._changed.notify_all()
            return True

    def hand(self, offer: MailboxOffer, patience: float) -> Answer | None:
        """Hand a version to the receiver, and wait for its answer.

        Return None if no answer comes in time or a newer version comes first. The answer then goes
        to the mailbox.
        """
        with self._lock:
            if offer.version < self._newest:
                return None
            self._newest = self._awaited = offer.version
            self._offer, self._answer = offer, None
            self._changed.notify_all()
        self.on_arrival()
        with self._lock:
            self._changed.wait_for(lambda: self.woken or self._awaited != offer.version, patience)
            if self._awaited == offer.version:
                self._awaited = 0
            answer = self._answer
            return answer if answer is not None and answer.version == offer.version else None


def _nothing() -> None:
    return


def _in_an_event_loop() -> bool:
    # Ray runs the methods of an asynchronous actor in an event loop.
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def hand(reader: str, offer: MailboxOffer, patience: float, instance: Any) -> dict[str, Any] | None:
    """Hand a version to the receiver in this actor, and return its answer, if any.

    Args:
        reader: the receiver's secret name.
        offer: the version.
        patience: how long to wait for the answer, in seconds.
        instance: the actor's instance, given by Ray.
    """
    del instance
    inbox = _inboxes.get(reader)
    answer = None if inbox is None else inbox.hand(offer, patience)
    return None if answer is None else answer.to_message()
