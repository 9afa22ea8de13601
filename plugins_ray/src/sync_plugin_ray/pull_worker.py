"""A worker that connects by its address, as its sender sees it; calls bring it versions."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ray.exceptions import ActorUnavailableError, RayActorError

from sync_core import Delivery, WorkerLostError
from sync_plugin_ray.inbox import hand, take_back
from sync_plugin_ray.mailbox import Event, MailboxOffer
from sync_plugin_ray.store import Publication

# How long a call waits in the actor for the receiver to answer, in seconds. A receiver that looks
# later finds the version in the mailbox.
_PATIENCE = 0.25


@dataclass(eq=False)
class PullWorker:
    """One worker.

    Args:
        wanted: the newest version meant for it.
        delivery: the delivery of that version.
        since: when it was last known to do something, while it is waited for.
        reader: the secret name of its receiver; empty before one has come.
        actor: the actor that this runs in, if it runs in one.
        group: the concurrency group in which that may be called at any time; empty for none.
        pid: its process.
        probed: whether the actor was asked if it lives.
        committed: the version that its receiver has committed last.
        called: whether a call is bringing it a version, or waits for the answer.
        handed: the version that was brought to it last, unless the mailbox is to offer that.
        handed_to: the receiver that it was brought to.
        left: why its receiver has left; empty while there is one.
    """

    wanted: Publication | None = None
    delivery: Delivery | None = None
    since: float = 0.0
    reader: str = field(default="", repr=False)
    actor: Any = None
    group: str = ""
    pid: int = 0
    probed: bool = False
    committed: int = 0
    called: bool = False
    handed: Publication | None = None
    handed_to: str = field(default="", repr=False)
    left: str = ""

    def joined(self, event: Event) -> None:
        """A receiver has come in its place."""
        self.reader, self.actor, self.group = event.reader, event.actor, event.group
        self.pid, self.probed, self.committed = event.pid, False, 0
        self.handed, self.handed_to, self.left = None, "", ""

    @property
    def offer(self) -> MailboxOffer | None:
        """Return the mailbox's entry for it."""
        if self.wanted is None:
            return None
        handed_to = self.handed_to if self.handed is self.wanted else ""
        return _offer(self.wanted, handed_to)

    def hand(self, publication: Publication) -> Future[Any] | None:
        """Bring it a version by a call; return the result, or None where that is not possible.

        That holds for a worker that has not committed the version before: during a call,
        a receiver that asks would find the older one.
        """
        self.handed = None
        behind = self.wanted is not None and self.committed < self.wanted.version
        if self.called or behind or self.actor is None or not self.group:
            return None
        try:
            answer = self._call(hand, self.reader, _offer(publication), time.time(), _PATIENCE)
        except Exception:
            # The actor takes no more calls (max_pending_calls); the mailbox does.
            return None
        self.called, self.handed, self.handed_to = True, publication, self.reader
        future: Future[Any] = answer.future()
        return future

    def lost(self, worker_id: int, error: BaseException | None) -> WorkerLostError | None:
        """Return the message for a call that failed because its actor is dead; None for others.

        One that Ray restarts is not gone; whether it will receive, the deadline tells.
        """
        if not isinstance(error, RayActorError) or isinstance(error, ActorUnavailableError):
            return None
        reason = str(error).strip().splitlines()[0]
        message = f"its actor, which was process {self.pid}, is gone: {reason}"
        return WorkerLostError(worker_id, message)

    def take_back(self, version: int) -> Any | None:
        """Drop what a call brings once there is a newer version.

        A reference to wait for, if a call brings something.
        """
        if not self.called or not self.handed_to:
            return None
        reader, self.handed_to = self.handed_to, ""
        try:
            return self._call(take_back, reader, version)
        except Exception:
            # As above; a worker that finds the older version there finds the newer one next.
            return None

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        call: Any = self.actor.__ray_call__.options(concurrency_group=self.group)
        # One argument instead of five: to serialise each separately took 0.1 ms of a call.
        return call.remote(partial(function, *args))


def _offer(publication: Publication, handed_to: str = "") -> MailboxOffer:
    return MailboxOffer(publication.version, publication.digest, publication.data, handed_to)
