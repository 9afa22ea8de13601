"""The inbox of a receiver in an actor, to which its sender brings versions by calls."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from sync_plugin_ray.mailbox import MailboxOffer

if TYPE_CHECKING:
    # With it comes torch: seconds, for actors that need not have it.
    from sync_core import Answer

# Inboxes by the secret names of their readers.
_inboxes: weakref.WeakValueDictionary[str, Inbox] = weakref.WeakValueDictionary()


def take_calls(concurrency_group: str) -> None:
    """Say, in an actor, that senders may call it in one of its concurrency groups.

    Receivers that are made in the actor from then on get their versions by such calls alone,
    which takes half of what asking for them takes. A call waits there until the receiver has
    answered, for a quarter of a second at most, so the group needs two threads for each receiver,
    and to do nothing else. Workers of the group ``ray`` have one. Receivers in an
    asynchronous actor, which has one thread for all calls of a group, continue asking.

    Two calls for each receiver count among the actor's ``max_pending_calls``; a send to an actor
    that takes no more fails. A call takes a moment after `Sender.send_async`, in which
    ``receive(0)`` finds nothing; a receiver that waits finds it.

    Args:
        concurrency_group: one of those that ``ray.remote(concurrency_groups={…: 2})`` has given
            the actor's class. Ray ends an actor that is called in a group which it does not have.

    Example:
        >>> take_calls("weights")  # doctest: +SKIP
    """
    Inbox.group = "" if _in_an_event_loop() else concurrency_group


class Inbox:
    """Holds the newest version for one receiver until that has answered.

    Args:
        reader: the receiver's secret name.
    """

    #: Where calls may bring something, as `take_calls` has said; empty for nowhere.
    group: ClassVar[str] = ""

    def __init__(self, reader: str) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._offer: MailboxOffer | None = None
        self._answer: Answer | None = None
        # The version whose answer the call that brought it waits for.
        self._awaited = 0
        # Older ones come too late: Ray runs two calls of one group in any order.
        self._newest = 0
        #: Called once something was handed in, and has returned before the answer is waited for.
        self.on_arrival: Callable[[], None] = _nothing
        #: Whether `wake` was called.
        self.woken = False
        _inboxes[reader] = self

    def take(self, seen: int) -> MailboxOffer | None:
        """Return what was handed in, if it is newer than the version seen."""
        with self._lock:
            if self._offer is not None and self._offer.version <= seen:
                self._offer = None
            return self._offer

    def wait(self, condition: Callable[[], bool], deadline: float) -> bool:
        """Wait until something was handed in or a condition holds; False if neither was in time.

        A thread that makes the condition true calls `nudge`. After `wake` this does not wait.
        """
        with self._lock:
            left = max(0.0, deadline - time.monotonic())
            self._changed.wait_for(
                lambda: self.woken or self._offer is not None or condition(), left
            )
            return not self.woken and (self._offer is not None or condition())

    def nudge(self) -> None:
        """Wake waiting threads to look again."""
        with self._lock:
            self._changed.notify_all()

    def wake(self) -> None:
        """End all waits from now on."""
        with self._lock:
            self.woken = True
            self._changed.notify_all()

    def answer(self, answer: Answer) -> bool:
        """Answer about a version; False where the call that brought it no longer waits."""
        with self._lock:
            if self._offer is not None and self._offer.version <= answer.version:
                self._offer = None
            if answer.version != self._awaited:
                return False
            self._answer, self._awaited = answer, 0
            self._changed.notify_all()
            return True

    def hand(self, offer: MailboxOffer, patience: float) -> Answer | None:
        """Let the receiver find a version, and wait for its answer.

        None where that does not come in time, or not before a newer version; it then goes to the
        mailbox.
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
    # Where Ray runs the methods of an asynchronous actor.
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def hand(reader: str, offer: MailboxOffer, patience: float, instance: Any) -> dict[str, Any] | None:
    """Give a version to the receiver in this actor, and return its answer, if any.

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
