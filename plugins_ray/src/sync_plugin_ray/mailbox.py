"""The mailbox actor of a sender, and its endpoint, which only Ray processes can use."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import ray

from sync_core.errors import AddressError
from sync_core.transports import Roster
from sync_plugin_ray.liveness import LivenessActor

# How long a joining receiver waits for the sender, in seconds.
_SILENCE = 5.0

EventKind = Literal["joined", "answered", "lost", "left"]


@dataclass(frozen=True, slots=True)
class MailboxOffer:
    """A version that a receiver may read.

    Args:
        version: the version.
        digest: the digest of its layout.
        data: the published data, in a list, so that Ray does not resolve references in it.
    """

    version: int
    digest: str
    data: list[Any]


@dataclass(frozen=True, slots=True)
class Gone:
    """The receiver gets no more versions, because of ``reason``."""

    reason: str


@dataclass(frozen=True, slots=True)
class Event:
    """A receiver's message to the sender.

    Args:
        kind: the receiver has joined, answered a version, found a version's bytes lost, or left.
        worker_id: the receiver's worker id.
        version: the version that the event is about.
        answer: its answer, encoded by `sync_core.Answer.to_message`.
        reader: the receiver's secret name.
        actor: the handle of the actor in which it runs, if any.
        group: the concurrency group for calls to the actor; empty if the receiver asks.
        pid: its process id.
        token: the token of its process; see `sync_plugin_ray.liveness`.
        data: the lost data.
        reason: the reason why it left.
    """

    kind: EventKind
    worker_id: int
    version: int = 0
    answer: Mapping[str, Any] | None = None
    reader: str = field(default="", repr=False)
    actor: Any = None
    group: str = ""
    pid: int = 0
    token: list[Any] = field(default_factory=list, repr=False)
    data: list[Any] = field(default_factory=list)
    reason: str = ""


class Mailbox(LivenessActor):
    """An asynchronous actor that gives each worker the newest version meant for it.

    Ray runs an asynchronous actor's calls in any order. So each update has all current offers and a
    number that increases.

    Args:
        tokens: the workers' tokens by id, or one token for all.
        offers: by worker, the newest version meant for it; None for workers that do not ask.
    """

    def __init__(
        self, tokens: Mapping[int, str] | str, offers: Mapping[int, MailboxOffer | None]
    ) -> None:
        self._tokens = dict.fromkeys(offers, tokens) if isinstance(tokens, str) else dict(tokens)
        self._offers = offers
        self._number = 0
        self._readers: dict[int, str] = {}
        self._met: Mapping[int, str] = {}
        self._closed = False
        self._changed = asyncio.Condition()
        self._events: asyncio.Queue[Event] = asyncio.Queue()

    async def update(
        self,
        number: int,
        offers: Mapping[int, MailboxOffer | None],
        met: Mapping[int, str],
        tokens: Mapping[int, str] | None = None,
    ) -> None:
        """Replace the offers, unless a later call has already replaced them.

        Args:
            number: increases with each call.
            offers: see `Mailbox`.
            met: by worker, the newest of its receivers that the sender knows.
            tokens: the tokens of added workers, which have no receiver yet.
        """
        for worker_id, token in (tokens or {}).items():
            self._tokens[worker_id] = token
            self._readers.pop(worker_id, None)
        if number > self._number:
            self._number, self._offers, self._met = number, offers, met
            await self._wake()

    async def close(self) -> None:
        """Notify every receiver that the sender is gone."""
        self._closed = True
        await self._wake()

    async def events(self) -> list[Event]:
        """Wait for events, and return all since the last call."""
        events = [await self._events.get()]
        while not self._events.empty():
            events.append(self._events.get_nowait())
        return events

    async def join(self, token: str, event: Event) -> Gone | None:
        """Make a receiver replace the worker's previous one.

        Return once the sender knows the receiver and has updated the offers, since versions for the
        previous receiver may have come by calls. Return also if the sender stays silent, since it
        may be stuck.
        """
        worker_id = event.worker_id
        if worker_id not in self._offers:
            return Gone(f"it has no worker {worker_id} any more")
        known = self._tokens.get(worker_id)
        if known is None or not hmac.compare_digest(token.encode(), known.encode()):
            return Gone("it does not know this receiver's token")
        self._readers[worker_id] = event.reader
        self._events.put_nowait(event)
        await self._wake()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SILENCE), self._changed:
                await self._changed.wait_for(
                    lambda: self._closed or self._met.get(worker_id) == event.reader
                )
        return None

    async def take(self, worker_id: int, reader: str, seen: int) -> MailboxOffer | Gone | None:
        """Return the newest version for a worker, unless the worker has seen it."""
        return self._answer(worker_id, reader, seen)

    async def news(
        self, worker_id: int, reader: str, seen: int, seconds: float, event: Event | None = None
    ) -> MailboxOffer | None:
        """Wait until `take` would return a version or the seconds are over.

        The offer includes the content only if that has no references, since a late reader would
        keep an old version in the object store.

        Args:
            worker_id: the worker.
            reader: the receiver that asks.
            seen: the last version that it has seen.
            seconds: how long to wait.
            event: an event to report first, which saves a call.
        """
        if event is not None:
            await self.answer(event)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds), self._changed:
                while self._answer(worker_id, reader, seen) is None:
                    await self._changed.wait()
        answer = self._answer(worker_id, reader, seen)
        if isinstance(answer, MailboxOffer) and all(
            isinstance(each, bytes) for each in answer.data
        ):
            return answer
        return None

    async def answer(self, event: Event) -> None:
        """Pass a receiver's event to the sender, unless the receiver was replaced."""
        if self._is_reader(event.worker_id, event.reader):
            self._events.put_nowait(event)

    def _answer(self, worker_id: int, reader: str, seen: int) -> MailboxOffer | Gone | None:
        if self._closed:
            return Gone(Roster.CLOSED)
        if worker_id not in self._offers or worker_id not in self._readers:
            return Gone(f"worker {worker_id} {Roster.REMOVED}")
        if not self._is_reader(worker_id, reader):
            return Gone("another receiver was given the same address")
        offer = self._offers[worker_id]
        return None if offer is None or offer.version <= seen else offer

    def _is_reader(self, worker_id: int, reader: str) -> bool:
        # The name is as secret as the token that was exchanged for it.
        known = self._readers.get(worker_id)
        return known is not None and hmac.compare_digest(known.encode(), reader.encode())

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class MailboxEndpoint:
    """The mailbox that receivers ask for versions.

    Args:
        mailbox: the actor.
    """

    mailbox: Any

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return _of, (_Cluster(), self.mailbox)


class _Cluster:
    """Checks at unpickling, before the actor's handle, that Ray is initialised."""

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return _check, ()


def _check() -> None:
    if not ray.is_initialized():
        raise AddressError(
            "an address of scheme 'ray' is for processes of the sender's cluster, and Ray does not "
            "run in this one; call ray.init(address=…) here first, or use Collector(…, "
            "workers='ray'), or scheme='shm' or 'dist'"
        )


def _of(cluster: None, mailbox: Any) -> MailboxEndpoint:
    del cluster
    return MailboxEndpoint(mailbox)
