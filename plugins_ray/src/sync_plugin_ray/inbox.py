"""The inbox of a receiver: versions that arrive by a call into its actor, or by a mailbox."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

from sync_core import Answer
from sync_plugin_ray.mailbox import MailboxOffer

# What took longer to come here, in seconds, as to a process that was stopped, may be outdated.
_FRESH = 0.05

# Trays by the secret names of their readers.
_trays: weakref.WeakValueDictionary[str, Inbox] = weakref.WeakValueDictionary()


def take_calls(concurrency_group: str) -> None:
    """Say, in an actor, that senders may call it in one of its concurrency groups.

    Receivers that are made in the actor from then on are handed their versions by such calls,
    which takes half of what asking for them takes. A call waits there until the receiver has
    answered, for a quarter of a second at most, so the group needs a thread or more for
    each receiver, and to do nothing else. Workers of the group ``ray`` have one. Receivers in an
    asynchronous actor, which has one thread for all calls of a group, continue asking.

    A call is one of the actor's ``max_pending_calls``. It takes a moment after `Sender.send_async`,
    in which ``receive(0)`` finds nothing; a receiver that waits finds it.

    Args:
        concurrency_group: one of those that ``ray.remote(concurrency_groups={…: 2})`` has given
            the actor's class. Ray ends an actor that is called in a group which it does not have.

    Example:
        >>> take_calls("weights")  # doctest: +SKIP
    """
    Inbox.group = "" if _in_an_event_loop() else concurrency_group


class Inbox:
    """Holds at most one version for one receiver.

    Args:
        reader: the receiver's secret name.
    """

    #: Where calls may bring something, as `take_calls` has said; empty for nowhere.
    group: ClassVar[str] = ""

    def __init__(self, reader: str) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._offer: MailboxOffer | None = None
        # When the call that brought it stops waiting.
        self._until = 0.0
        self._answer: Answer | None = None
        # The least that anything took to come here, by two clocks that may differ.
        self._least: float | None = None
        # The version whose answer the call that brought it waits for.
        self._handed = 0
        # Older ones come too late.
        self._oldest = 0
        #: Called once something was handed in, and has returned before the answer is waited for.
        self.on_arrival: Callable[[], None] = _nothing
        #: Whether `wake` was called.
        self.woken = False
        _trays[reader] = self

    def take(self, seen: int) -> MailboxOffer | None:
        """Return what was handed in, if it is newer than the version seen.

        Not the time until it is taken, which needs the interpreter,
        or the process is stopped: there may be something newer by now.
        """
        with self._lock:
            offer, self._offer = self._offer, None
            if offer is None or offer.version <= seen or time.monotonic() >= self._until:
                return None
            return offer

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
            if answer.version != self._handed:
                return False
            self._answer, self._handed = answer, 0
            self._changed.notify_all()
            return True

    def clear(self, version: int) -> None:
        """Drop versions older than this one, and end waits for their answers.

        Ray runs two calls of one group in any order, so what is older may come after this, too.
        """
        with self._lock:
            self._oldest = max(self._oldest, version)
            if self._offer is not None and self._offer.version < version:
                self._offer, self._answer, self._handed = None, None, 0
                self._changed.notify_all()

    def hand(self, offer: MailboxOffer, sent_at: float, patience: float) -> Answer | None:
        """Let the receiver find a version, and wait for its answer.

        None where that does not come in time: no thread may look for the version, so it
        is not kept here. An answer that comes later goes to the mailbox. None, too, for what comes
        late: it is not found here instead of a newer one.
        """
        with self._lock:
            if not self._is_fresh(time.time() - sent_at) or offer.version < self._oldest:
                return None
            self._oldest = offer.version
            self._offer, self._answer, self._handed = offer, None, offer.version
            self._until = time.monotonic() + patience
            self._changed.notify_all()
        self.on_arrival()
        with self._lock:
            self._changed.wait_for(lambda: self.woken or self._handed != offer.version, patience)
            if self._handed == offer.version:
                self._offer, self._handed = None, 0
                return None
            return self._answer

    def _is_fresh(self, took: float) -> bool:
        least = self._least
        self._least = took if least is None else min(took, least)
        return abs(took) <= _FRESH if least is None else took <= least + _FRESH


def _nothing() -> None:
    return


def _in_an_event_loop() -> bool:
    # Where Ray runs the methods of an asynchronous actor.
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def take_back(reader: str, version: int, instance: Any) -> None:
    """Return what a sender runs in an actor before it offers a newer version in another way.

    Args:
        reader: the receiver's secret name.
        version: the newer version.
        instance: the actor's instance, given by Ray.
    """
    del instance
    tray = _trays.get(reader)
    if tray is not None:
        tray.clear(version)


def hand(
    reader: str, offer: MailboxOffer, sent_at: float, patience: float, instance: Any
) -> dict[str, Any] | None:
    """Give a version to the receiver in this actor, and return its answer, if any.

    Args:
        reader: the receiver's secret name.
        offer: the version.
        sent_at: when it was called (`time.time` there).
        patience: how long to wait for the answer, in seconds.
        instance: the actor's instance, given by Ray.
    """
    del instance
    tray = _trays.get(reader)
    answer = None if tray is None else tray.hand(offer, sent_at, patience)
    return None if answer is None else answer.to_message()
