"""The receiver of the scheme ``ray``: it asks the sender's mailbox or is called."""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import ray

from sync_core import Answer, Payload, ReceiverTransport, SenderLostError, TransportContext
from sync_core.errors import PayloadError
from sync_plugin_ray import liveness
from sync_plugin_ray.cluster import Cluster
from sync_plugin_ray.inbox import Inbox
from sync_plugin_ray.mailbox import Event, EventKind, Gone, MailboxOffer
from sync_plugin_ray.store import LOST, read

# Spare time for calls to the mailbox, in seconds; one takes about a millisecond.
_GRACE = 10.0
# How long a request waits in the mailbox, in seconds.
_WATCH = 30.0
# How often a waiting receiver checks for ray.shutdown, in seconds; Ray has no event for it.
_LOOKING = 1.0
# If a reply is older than this, in seconds, the receiver asks for a newer version.
_FRESH = 0.02


class MailboxReceiver(ReceiverTransport):
    """Reads versions from the object store, from any process of the sender's cluster.

    In an actor that has called `take_calls`, the sender's calls bring the versions, and the mailbox
    reports only the end of the sender. Elsewhere the receiver asks the mailbox for versions.

    Args:
        context: the receiver's context for `create_transport`.

    Raises:
        SenderLostError: the sender is gone or refuses this worker.
    """

    def __init__(self, context: TransportContext) -> None:
        self._worker_id = context.worker_id
        self._timeout = context.timeout
        self._mailbox = context.endpoint.mailbox
        self._reader = secrets.token_hex(16)
        self._seen = 0
        self._answered: Answer | None = None
        self._layout = context.layout
        self._watch: _Watch | None = None
        self._inbox = Inbox(self._reader)
        actor = _this_actor()
        self._group = Inbox.group if actor is not None else ""
        self._cluster = Cluster()
        self._token = liveness.make_token(self._mailbox)
        try:
            came = self._event(
                "joined", actor=actor, group=self._group, pid=os.getpid(), token=self._token
            )
            refusal = self._get(
                self._mailbox.join.remote(context.worker_token(), came), context.timeout
            )
            if refusal is not None:
                raise SenderLostError(f"the sender refuses this receiver: {refusal.reason}")
        except BaseException:
            self._hang_up()
            raise

    def receive(self, timeout: float) -> Payload | None:
        """Wait for a version that was not seen, and return the newest."""
        begin = time.monotonic()
        deadline = begin + timeout
        # Offers from before this call may be outdated. A call without a timeout accepts them.
        since = begin if timeout > 0 else -math.inf
        while True:
            offer = self._next(deadline, since)
            if offer is None:
                return None
            found_at = time.perf_counter()
            try:
                data = self._fetch(offer, max(_left(deadline), self._timeout))
            except LOST:
                # The sender puts the version again, unless it has died, which the next request
                # finds.
                self._tell(self._event("lost", offer.version, data=offer.data))
                time.sleep(0.05)
                if time.monotonic() < deadline + self._timeout:
                    continue
                raise
            self._seen = offer.version
            payload = Payload.unpack(
                read(data), offer.version, digest=offer.digest, known=self._layout, since=found_at
            )
            self._layout = payload.layout
            return payload

    def acknowledge(self, answer: Answer) -> None:
        """Answer through the call that brought the version, or else through the mailbox."""
        self._answered = answer
        if self._inbox.answer(answer):
            return
        event = self._event("answered", answer.version, answer=answer.to_message())
        if self._watch is None:
            self._check()
            self._watch = self._ask_for_news(event)
        else:
            self._tell(event)

    def leave(self, reason: str) -> None:
        """Notify the sender, unless it is gone.

        The message repeats the last answer, since Ray may run this call before that one.
        """
        last = self._answered
        event = (
            self._event("left", reason=reason)
            if last is None
            else self._event("left", last.version, answer=last.to_message(), reason=reason)
        )
        with suppress(SenderLostError):
            self._tell(event)

    def wake(self) -> None:
        """End the current wait and all later ones."""
        self._inbox.wake()

    def on_arrival(self, callback: Callable[[], None]) -> bool:
        """Set a function to call for each arriving version; return False without `take_calls`."""
        self._inbox.on_arrival = callback
        return bool(self._group)

    def close(self) -> None:
        """Disconnect from the sender."""
        self._inbox.wake()
        self._hang_up()

    def _hang_up(self) -> None:
        if self._cluster.connected:
            liveness.release(self._token)
        self._cluster.leave()

    def _next(self, deadline: float, since: float) -> MailboxOffer | None:
        """Return the newest version; ask the mailbox only after it has announced one."""
        while True:
            self._check()
            offer = self._inbox.take(self._seen) or self._news(since)
            if offer is not None:
                return offer
            self._watch = self._watch or self._ask_for_news()
            found = self._inbox.wait(self._watch.done, min(deadline, time.monotonic() + _LOOKING))
            if not found and (self._inbox.woken or time.monotonic() >= deadline):
                return None

    def _news(self, since: float) -> MailboxOffer | None:
        """Return the mailbox's offer; None if it has not replied since the last request."""
        if self._watch is None:
            return self._ask()
        if not self._watch.done():
            return None
        offer, self._watch = self._watch.offer(since), None
        return offer if offer is not None and offer.version > self._seen else self._ask()

    def _ask_for_news(self, event: Event | None = None) -> _Watch:
        asked = self._worker_id, self._reader, self._seen, _WATCH, event
        return _Watch(self._mailbox.news.remote(*asked).future(), self._inbox.nudge)

    def _ask(self) -> MailboxOffer | None:
        call = self._mailbox.take.remote(self._worker_id, self._reader, self._seen)
        answer = self._get(call, 0.0)
        if isinstance(answer, Gone):
            raise SenderLostError(answer.reason)
        assert answer is None or isinstance(answer, MailboxOffer)
        return answer

    def _fetch(self, offer: MailboxOffer, timeout: float) -> list[Any]:
        if not isinstance(offer.data[0], ray.ObjectRef):
            return offer.data
        try:
            return ray.get(offer.data, timeout=timeout)
        except ray.exceptions.GetTimeoutError as error:
            late = f"version {offer.version} did not come from the object store in {timeout:g} s"
            self.acknowledge(Answer(version=offer.version, error=late))
            raise PayloadError(late) from error

    def _event(self, kind: EventKind, version: int = 0, **said: Any) -> Event:
        return Event(kind, self._worker_id, version, reader=self._reader, **said)

    def _tell(self, event: Event) -> None:
        self._check()
        self._mailbox.answer.remote(event)

    def _check(self) -> None:
        if not self._cluster.connected:
            raise SenderLostError("Ray was shut down in this process")

    def _get(self, call: Any, timeout: float) -> Any:
        try:
            return ray.get(call, timeout=timeout + _GRACE)
        except ray.exceptions.RayActorError as error:
            raise SenderLostError("the sender is gone: it has closed or died") from error
        except ray.exceptions.GetTimeoutError as error:
            raise SenderLostError(
                f"the sender's mailbox did not answer within {_GRACE:g} s"
            ) from error


class _Watch:
    """A request that waits in the mailbox for a version while the worker continues.

    Args:
        news: the future with the mailbox's reply.
        arrived: called when the reply arrives.
    """

    def __init__(self, news: Future[MailboxOffer | None], arrived: Callable[[], None]) -> None:
        self._news = news
        self._told = arrived
        self._arrived = math.inf
        news.add_done_callback(self._arrive)

    def done(self) -> bool:
        """Return whether the mailbox has replied."""
        return self._news.done()

    def offer(self, since: float) -> MailboxOffer | None:
        """Return the offer in the mailbox's reply; None if it is older than ``since`` or empty."""
        fresh = self._arrived >= max(since, time.monotonic() - _FRESH)
        if self._news.exception() is not None or not fresh:
            return None
        return self._news.result()

    def _arrive(self, news: Future[MailboxOffer | None]) -> None:
        del news
        self._arrived = time.monotonic()
        self._told()


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _this_actor() -> Any:
    context = ray.get_runtime_context()
    return context.current_actor if context.get_actor_id() is not None else None
