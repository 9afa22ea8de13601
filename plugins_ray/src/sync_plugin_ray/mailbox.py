"""The mailbox actor of a sender, and its address, which only Ray processes can use."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import ray

from sync_core.errors import AddressError
from sync_plugin_ray.liveness import LivenessActor

# How long a receiver that joins waits for the sender, in seconds.
_SILENCE = 5.0

EventKind = Literal["joined", "answered", "lost", "left"]


@dataclass(frozen=True, slots=True)
class MailboxOffer:
    """A version that a receiver may read.

    Args:
        version: the version.
        digest: the digest of its layout.
        data: what was published, in a list, so that Ray hands on references as they are.
    """

    version: int
    digest: str
    data: list[Any]


@dataclass(frozen=True, slots=True)
class Gone:
    """There is nothing for this receiver any more, because of ``reason``."""

    reason: str


@dataclass(frozen=True, slots=True)
class Event:
    """A receiver's event, for the sender.

    Args:
        kind: it came, answered about a version, found that a version's bytes were lost, or left.
        worker_id: the worker that it is.
        version: the version that it speaks of.
        answer: what it answered, as `sync_core.Answer.to_message` gives it.
        reader: its secret name.
        actor: the handle of the actor that it runs in, if it runs in one.
        group: the concurrency group in which that is called; empty if the receiver asks.
        pid: its process.
        token: of its process; see `sync_plugin_ray.liveness`.
        data: what was published of it, and is lost.
        reason: why it left.
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
    """Answers every worker with the newest version meant for it; an asynchronous actor.

    Ray runs the calls of an asynchronous actor in any order, so the sender gives all that it
    offers each time, with a number that grows.

    Args:
        tokens: those of the workers, by id; or one for all.
        offers: for each worker that asks the newest version meant for it; None for others.
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
        """Take the current offers, unless a later call has brought newer ones.

        Args:
            number: grows with each call.
            offers: as above.
            met: for each worker the newest of its receivers that the sender has heard of.
            tokens: those of workers that were added, which have no receiver yet.
        """
        for worker_id, token in (tokens or {}).items():
            self._tokens[worker_id] = token
            self._readers.pop(worker_id, None)
        if number > self._number:
            self._number, self._offers, self._met = number, offers, met
            await self._wake()

    async def close(self) -> None:
        """Let every receiver know that the sender has gone."""
        self._closed = True
        await self._wake()

    async def events(self) -> list[Event]:
        """Return what has happened since this was last asked; waits for something to happen."""
        events = [await self._events.get()]
        while not self._events.empty():
            events.append(self._events.get_nowait())
        return events

    async def join(self, token: str, event: Event) -> Gone | None:
        """A receiver takes a worker's place from the one before it.

        Answers once the sender has met it and told what there is, as versions for the receiver
        before may have travelled by calls; or is silent for so long that it may be standing still.
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
        """The newest version for a worker, if that is not the one that it has seen."""
        return self._answer(worker_id, reader, seen)

    async def news(
        self, worker_id: int, reader: str, seen: int, seconds: float, event: Event | None = None
    ) -> MailboxOffer | None:
        """Answer once `take` would give something, or the seconds are over.

        With its content, if that has no references: a late reader would keep an
        old version in the object store.

        Args:
            worker_id: the worker.
            reader: the receiver that asks.
            seen: the version that it has seen.
            seconds: how long to wait.
            event: an event to report first, which then takes no separate call.
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
        """Pass on what a receiver has to say, unless another has taken its place."""
        if self._is_reader(event.worker_id, event.reader):
            self._events.put_nowait(event)

    def _answer(self, worker_id: int, reader: str, seen: int) -> MailboxOffer | Gone | None:
        if self._closed:
            return Gone("the sender was closed")
        if worker_id not in self._offers or worker_id not in self._readers:
            return Gone(f"worker {worker_id} was removed from the sender")
        if not self._is_reader(worker_id, reader):
            return Gone("another receiver was given the same address")
        offer = self._offers[worker_id]
        return None if offer is None or offer.version <= seen else offer

    def _is_reader(self, worker_id: int, reader: str) -> bool:
        # As secret as the token, for which it was given.
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
    """Unpickled before the actor's handle is, which Ray alone can read, and says less of."""

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
