"""The workers of a sender, and the changes of their states."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

from sync_core.checks import normalize_one
from sync_core.errors import TransportError, WorkerError, WorkerLostError
from sync_core.report import Unwaited
from sync_core.sending.worker_state import (
    WorkerState,
    WorkerStatus,
    acknowledged,
    connected,
    failed,
    lost,
    quarantined,
    restarted,
    restarting,
    sent,
    waited_for,
)
from sync_core.transports.transport import Delivery, Notice

_log = logging.getLogger("sync_core")
# How long closing waits for pending notifications, in seconds.
_PATIENCE = 1.0
_REASONS: dict[WorkerState, Unwaited] = {
    WorkerState.QUARANTINED: "quarantine",
    WorkerState.RESTARTING: "restart",
}

Event = TypeVar("Event")


class Announcer(Generic[Event]):
    """Calls every subscriber with every event; a thread is started for the first of them.

    Args:
        name: the thread's.

    Example:
        >>> announcer = Announcer("example")
        >>> unsubscribe = announcer.subscribe(print)
        >>> announcer.announce("hello")
        >>> announcer.close()
        hello
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Event], object]] = []
        #: Whether there are subscribers.
        self.heard = False
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def subscribe(self, callback: Callable[[Event], object]) -> Callable[[], None]:
        """Call ``callback`` with every event from now on; the function returned ends that."""
        # The same function may be subscribed twice, and is then to be removed once at a time.
        entry = _Entry(callback)
        with self._lock:
            self._callbacks.append(entry)
            self.heard = not self._closed
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._tell, name=self._name, daemon=True)
                self._thread.start()

        def unsubscribe() -> None:
            with self._lock:
                if entry in self._callbacks:
                    self._callbacks.remove(entry)
                    self.heard = bool(self._callbacks) and not self._closed

        return unsubscribe

    def announce(self, event: Event) -> None:
        """Notify all subscribers, soon; may be called with locks held."""
        if self.heard:
            self._events.put(event)

    def close(self) -> None:
        """Deliver the events announced so far, and no later ones."""
        with self._lock:
            self._closed, self.heard = True, False
            thread = self._thread
        self._events.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join(_PATIENCE)

    def _tell(self) -> None:
        while (event := self._events.get()) is not None:
            for callback in tuple(self._callbacks):
                try:
                    callback(event)
                except Exception:
                    _log.exception("a subscriber raised when it was called with %r", event)


class _Entry(Generic[Event]):
    def __init__(self, callback: Callable[[Event], object]) -> None:
        self._callback = callback

    def __call__(self, event: Event) -> None:
        self._callback(event)


@dataclass(frozen=True, slots=True)
class MembershipEvent:
    """A worker has changed its state.

    Args:
        worker_id: the worker.
        before: the state that it was in; None when it was added.
        after: the state that it is in; None when it was removed.
        version: the newest version that it has acknowledged.
        reason: one sentence.
    """

    worker_id: int
    before: WorkerState | None
    after: WorkerState | None
    version: int
    reason: str


class Membership:
    """The workers of one sender; every method may be called from any thread.

    Args:
        worker_ids: the workers.
        timeout: the sender's deadline, and the first time in quarantine, in seconds.
        clock: tells the time.

    Example:
        >>> members = Membership([0], timeout=60.0)
        >>> members.sent(1, {0: Delivery(0, version=1, nbytes=8)})
        {}
        >>> members.notify(0, Notice("acknowledged", version=1))
        >>> members.statuses[0].state
        <WorkerState.CURRENT: 'current'>
    """

    def __init__(
        self,
        worker_ids: Iterable[int],
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timeout = timeout
        self._clock = clock
        # Reentrant, as the garbage collector may close a receiver in a thread that holds it.
        self._lock = threading.RLock()
        self._workers: dict[int, WorkerStatus] = {}
        # When each came into its state: known when a status is asked for.
        self._since: dict[int, float] = {}
        #: Whether a worker may have come back from quarantine; see `take_returned`.
        self.may_have_returned = False
        self._seats = 0
        self._next_id = 0
        self._newest_for_all = 0
        self._announcer: Announcer[MembershipEvent] = Announcer("sync-membership")
        for worker_id in worker_ids:
            self.add(worker_id)

    @property
    def ids(self) -> tuple[int, ...]:
        """The workers."""
        return tuple(self._workers)

    @property
    def next_id(self) -> int:
        """An id that no worker has or had."""
        return self._next_id

    @property
    def statuses(self) -> Mapping[int, WorkerStatus]:
        """Return the status of each worker."""
        with self._lock:
            since = self._since
            return {i: replace(w, since=since.get(i, 0.0)) for i, w in self._workers.items()}

    def subscribe(self, callback: Callable[[MembershipEvent], object]) -> Callable[[], None]:
        """Call ``callback`` with every event from now on; the function returned ends that."""
        return self._announcer.subscribe(callback)

    def close(self) -> None:
        """Deliver what is pending, then stop notifying."""
        self._announcer.close()

    def add(self, worker_id: int, *, joining: bool = False) -> None:
        """Add a worker, which gets the newest version that went to all.

        Args:
            worker_id: its id.
            joining: whether sends wait for it only once it has committed that, or a newer one.
        """
        with self._lock:
            self._seats += 1
            self._next_id = max(self._next_id, worker_id + 1)
            wanted = self._newest_for_all
            worker = WorkerStatus(self._seats, wanted=wanted, joining=joining and wanted > 0)
            self._workers[worker_id], self._since[worker_id] = worker, self._clock()
            self._announce(worker_id, None, worker, "it was added")

    def remove(self, worker_id: int) -> None:
        """Remove a worker.

        Raises:
            UnknownWorkerError: there is none, as another thread has removed it.
        """
        with self._lock:
            worker = self._workers.pop(normalize_one(worker_id, self._workers))
            self._since.pop(worker_id, None)
            self._announce(worker_id, worker, None, "it was removed")

    def sent(self, version: int, deliveries: Mapping[int, Delivery]) -> dict[int, Unwaited]:
        """Note that a version is on its way; return the workers not to wait for, and the reason."""
        unwaited: dict[int, Unwaited] = {}
        reached_all = True
        seats: dict[int, int] = {}
        with self._lock:
            now = self._clock()
            for worker_id, delivery in deliveries.items():
                reached_all &= not isinstance(delivery.error, TransportError)
                worker = self._workers.get(worker_id)
                if worker is None:
                    continue
                seats[worker_id] = worker.seat
                if not waited_for(worker, now):
                    unwaited[worker_id] = _REASONS.get(worker.state, "join")
                self._put(worker_id, sent(worker, version, now), f"version {version} was sent")
            # Another thread may have removed some of them meanwhile.
            if reached_all and deliveries.keys() >= self._workers.keys():
                self._newest_for_all = version
        for worker_id, seat in seats.items():
            # The seat, since one that was removed may answer when its id is another's.
            deliveries[worker_id].watch(partial(self._answered, worker_id, seat))
        return unwaited

    def acknowledged(self, worker_ids: Iterable[int]) -> dict[int, int]:
        """Return the version that each of these workers holds completely; 0 for none.

        Left out are workers that have failed and that a send does not wait for: they may be gone.
        """
        with self._lock:
            now = self._clock()
            workers = {i: self._workers[i] for i in worker_ids if i in self._workers}
            return {
                i: worker.version if worker.state is WorkerState.CURRENT else 0
                for i, worker in workers.items()
                if worker.joining or waited_for(worker, now)
            }

    def notify(self, worker_id: int, notice: Notice) -> None:
        """Note what the transport knows about a worker; see `Notice`."""
        with self._lock:
            worker = self._workers.get(worker_id)
            if worker is None:
                return
            if notice.kind == "connected":
                self._put(worker_id, connected(worker, self._clock()), "it has connected")
            elif notice.kind == "acknowledged":
                after = acknowledged(worker, notice.version)
                self._put(worker_id, after, f"it has committed version {notice.version}")
            else:
                error = WorkerLostError(worker_id, notice.reason)
                self._put(worker_id, lost(worker, error), notice.reason)

    def quarantine(self, worker_id: int, seat: int) -> bool:
        """Put a worker into quarantine; return False if it was removed."""
        with self._lock:
            worker = self._seated(worker_id, seat)
            if worker is not None:
                after = quarantined(worker, self._clock(), self._timeout)
                self._put(worker_id, after, f"it has failed: {worker.error}")
            return worker is not None

    def restart(self, worker_id: int, seat: int) -> bool:
        """Note that a worker is being restarted; return False if it was removed."""
        with self._lock:
            worker = self._seated(worker_id, seat)
            if worker is not None:
                self._put(worker_id, restarting(worker), f"it has failed: {worker.error}")
            return worker is not None

    def restarted(self, worker_id: int, seat: int) -> None:
        """Note that a worker was restarted."""
        with self._lock:
            worker = self._seated(worker_id, seat)
            if worker is not None:
                self._put(worker_id, restarted(worker), "another was started in its place")

    def not_restarted(self, worker_id: int, seat: int, error: WorkerError) -> None:
        """Put a worker that could not be restarted into quarantine, to be restarted afterwards."""
        with self._lock:
            worker = self._seated(worker_id, seat)
            if worker is not None:
                worker = replace(worker, failures=worker.failures + 1, error=error)
                after = quarantined(worker, self._clock(), self._timeout)
                self._put(worker_id, after, f"no other could be started: {error.message}")

    def take_returned(self, worker_ids: Collection[int]) -> tuple[int, ...]:
        """Return those of these workers that have come back from quarantine, each once."""
        with self._lock:
            returned = tuple(i for i in worker_ids if i in self and self._workers[i].returned)
            for worker_id in returned:
                self._workers[worker_id] = replace(self._workers[worker_id], returned=False)
            self.may_have_returned = False
            return returned

    def __contains__(self, worker_id: int) -> bool:
        return worker_id in self._workers

    def _seated(self, worker_id: int, seat: int) -> WorkerStatus | None:
        """Return the worker, unless it was removed and another has its id."""
        worker = self._workers.get(worker_id)
        return worker if worker is not None and worker.seat == seat else None

    def _answered(
        self, worker_id: int, seat: int, delivery: Delivery, error: WorkerError | None
    ) -> None:
        with self._lock:
            worker = self._workers.get(worker_id)
            if worker is None or worker.seat != seat:
                return
            if error is None:
                after = acknowledged(worker, delivery.version)
                self._put(worker_id, after, f"it has committed version {delivery.version}")
            else:
                self._put(worker_id, failed(worker, delivery.version, error), error.message)

    def _put(self, worker_id: int, after: WorkerStatus, reason: str) -> None:
        before = self._workers[worker_id]
        self._workers[worker_id] = after
        if after.returned:
            self.may_have_returned = True
        if after.state is not before.state:
            self._since[worker_id] = self._clock()
            if self._announcer.heard:
                self._announce(worker_id, before, after, reason)

    def _announce(
        self, worker_id: int, before: WorkerStatus | None, after: WorkerStatus | None, reason: str
    ) -> None:
        if not self._announcer.heard:
            return
        known = after or before
        assert known is not None
        self._announcer.announce(
            MembershipEvent(
                worker_id,
                None if before is None else before.state,
                None if after is None else after.state,
                known.version,
                reason,
            )
        )
