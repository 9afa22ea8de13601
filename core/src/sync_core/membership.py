"""The state of every worker as its sender sees it, and what may change it; see protocol.md."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Literal

from sync_core.announcer import Announcer
from sync_core.errors import WorkerError, WorkerLostError, WorkerTimeoutError
from sync_core.notice import Notice
from sync_core.transport import Delivery

# A worker in quarantine is tried again after one deadline, then two, four, … up to so many: a
# worker that stays silent costs the sender a share of its time that shrinks to a sixteenth.
_LONGEST_QUARANTINE = 16


class WorkerState(StrEnum):
    """What the sender knows of a worker."""

    #: It was added, and has not been heard of.
    CONNECTING = "connecting"
    #: It has committed the newest version meant for it.
    CURRENT = "current"
    #: It lives, and has not committed the newest version meant for it.
    BEHIND = "behind"
    #: A send has ended before the worker answered.
    SUSPECT = "suspect"
    #: The transport has found it gone.
    LOST = "lost"
    #: It has failed, and sends do not wait for it for some time.
    QUARANTINED = "quarantined"
    #: Another is being started in its place, for which sends do not wait.
    RESTARTING = "restarting"


#: States in which sends do not wait for a worker.
UNWAITED = frozenset({WorkerState.QUARANTINED, WorkerState.RESTARTING})


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """What a sender knows of one worker.

    Args:
        seat: tells it from others that had its id before.
        since: when it came into its state (`time.monotonic`).
        state: its state.
        version: the newest version that it has acknowledged; 0 for none.
        wanted: the newest version meant for it; 0 for none.
        failures: how many sends it has failed in a row.
        error: the last failure, if it has not acknowledged the newest version since.
        retry_at: when a send waits for it again, while it is in quarantine; 0 once one does.
        returned: whether it has come back from quarantine, and no report has said so.
    """

    seat: int
    since: float
    state: WorkerState = WorkerState.CONNECTING
    version: int = 0
    wanted: int = 0
    failures: int = 0
    error: WorkerError | None = None
    retry_at: float = 0.0
    returned: bool = False


@dataclass(frozen=True, slots=True)
class MembershipEvent:
    """A worker has come into another state.

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


def waited_for(worker: WorkerStatus, now: float) -> bool:
    """Whether a send that begins now waits for the worker."""
    if worker.state is WorkerState.QUARANTINED:
        return now >= worker.retry_at
    return worker.state is not WorkerState.RESTARTING


def sent(worker: WorkerStatus, version: int, now: float) -> WorkerStatus:
    """A version goes out to the worker; one in quarantine may be tried by that."""
    state = WorkerState.BEHIND if worker.state is WorkerState.CURRENT else worker.state
    retry_at = 0.0 if waited_for(worker, now) else worker.retry_at
    return replace(worker, wanted=version, state=state, retry_at=retry_at)


def connected(worker: WorkerStatus, now: float) -> WorkerStatus:
    """A receiver has taken the worker's place; it has acknowledged nothing."""
    if worker.state is WorkerState.QUARANTINED:
        return replace(worker, version=0, retry_at=now)
    state = WorkerState.BEHIND if worker.wanted else WorkerState.CURRENT
    return replace(worker, version=0, state=state)


def acknowledged(worker: WorkerStatus, version: int) -> WorkerStatus:
    """The worker has committed a version, which counts for that version and no newer one."""
    if worker.state is WorkerState.RESTARTING or not worker.version < version <= worker.wanted:
        return worker
    if version == worker.wanted:
        return replace(
            worker,
            state=WorkerState.CURRENT,
            version=version,
            failures=0,
            error=None,
            returned=worker.returned or worker.state is WorkerState.QUARANTINED,
        )
    quarantined = worker.state is WorkerState.QUARANTINED
    state = WorkerState.QUARANTINED if quarantined else WorkerState.BEHIND
    return replace(worker, state=state, version=version)


def failed(worker: WorkerStatus, version: int, error: WorkerError) -> WorkerStatus:
    """The worker did not get a version, or could not commit it."""
    if version != worker.wanted or worker.version == version:
        return worker
    state = WorkerState.BEHIND
    if worker.state in UNWAITED:
        tried = worker.state is WorkerState.QUARANTINED and not worker.retry_at
        return replace(worker, failures=worker.failures + tried, error=error)
    if isinstance(error, WorkerTimeoutError):
        state = WorkerState.SUSPECT
    elif isinstance(error, WorkerLostError):
        state = WorkerState.LOST
    return replace(worker, state=state, failures=worker.failures + 1, error=error)


def lost(worker: WorkerStatus, error: WorkerError) -> WorkerStatus:
    """The worker is gone, whether or not anything was sent to it."""
    state = worker.state if worker.state in UNWAITED else WorkerState.LOST
    return replace(worker, state=state, error=error)


def quarantined(worker: WorkerStatus, now: float, timeout: float) -> WorkerStatus:
    """Sends stop waiting for the worker, twice as long each time that it fails again."""
    if worker.version == worker.wanted:
        return replace(worker, returned=True)  # its answer has come meanwhile
    doubled = 2 ** min(max(0, worker.failures - 1), 30)
    retry_at = now + timeout * min(doubled, _LONGEST_QUARANTINE)
    return replace(worker, state=WorkerState.QUARANTINED, retry_at=retry_at)


def restarting(worker: WorkerStatus) -> WorkerStatus:
    """Another is being started in the worker's place."""
    return replace(worker, state=WorkerState.RESTARTING)


def restarted(worker: WorkerStatus) -> WorkerStatus:
    """Another was started, which has no version yet."""
    if worker.state is not WorkerState.RESTARTING:
        return worker  # it has connected already
    return replace(worker, state=WorkerState.CONNECTING, version=0)


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
        self._lock = threading.Lock()
        self._workers: dict[int, WorkerStatus] = {}
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
        """What is known of each worker now."""
        with self._lock:
            return dict(self._workers)

    def subscribe(self, callback: Callable[[MembershipEvent], object]) -> Callable[[], None]:
        """Call ``callback`` with every event from now on; the function returned ends that."""
        return self._announcer.subscribe(callback)

    def close(self) -> None:
        """Tell nobody anything any more, once what has happened has been told."""
        self._announcer.close()

    def add(self, worker_id: int) -> None:
        """There is one more worker; it is to have the newest version that went to all."""
        with self._lock:
            self._seats += 1
            self._next_id = max(self._next_id, worker_id + 1)
            worker = WorkerStatus(self._seats, self._clock(), wanted=self._newest_for_all)
            self._workers[worker_id] = worker
            self._announce(worker_id, None, worker, "it was added")

    def remove(self, worker_id: int) -> None:
        """There is one less."""
        with self._lock:
            self._announce(worker_id, self._workers.pop(worker_id), None, "it was removed")

    def sent(
        self, version: int, deliveries: Mapping[int, Delivery]
    ) -> dict[int, Literal["quarantine", "restart"]]:
        """A version is on its way; the workers not to be waited for, and why."""
        unwaited: dict[int, Literal["quarantine", "restart"]] = {}
        with self._lock:
            now = self._clock()
            if deliveries.keys() == self._workers.keys():
                self._newest_for_all = version
            seats: dict[int, int] = {}
            for worker_id in deliveries.keys() & self._workers.keys():
                worker = self._workers[worker_id]
                seats[worker_id] = worker.seat
                if not waited_for(worker, now):
                    quarantined = worker.state is WorkerState.QUARANTINED
                    unwaited[worker_id] = "quarantine" if quarantined else "restart"
                self._put(worker_id, sent(worker, version, now), f"version {version} was sent")
        for worker_id, seat in seats.items():
            # The seat, since one that was removed may answer when its id is another's.
            deliveries[worker_id].watch(partial(self._answered, worker_id, seat))
        return unwaited

    def notify(self, worker_id: int, notice: Notice) -> None:
        """The transport knows something; see `Notice`."""
        with self._lock:
            worker = self._workers.get(worker_id)
            if worker is None:
                return
            if notice.kind == "connected":
                self._put(worker_id, connected(worker, self._clock()), "it has connected")
            elif notice.kind == "acknowledged":
                self._acknowledge(worker_id, worker, notice.version)
            else:
                error = WorkerLostError(worker_id, notice.reason)
                self._put(worker_id, lost(worker, error), notice.reason)

    def quarantine(self, worker_id: int) -> None:
        """Let no send wait for the worker for a time."""
        with self._lock:
            worker = self._workers[worker_id]
            after = quarantined(worker, self._clock(), self._timeout)
            self._put(worker_id, after, f"it has failed: {worker.error}")

    def restart(self, worker_id: int) -> int:
        """Another takes the worker's place; its seat, for `restarted` or `not_restarted`."""
        with self._lock:
            worker = self._workers[worker_id]
            self._put(worker_id, restarting(worker), f"it has failed: {worker.error}")
            return worker.seat

    def restarted(self, worker_id: int, seat: int) -> None:
        """The other was started."""
        with self._lock:
            worker = self._workers.get(worker_id)
            if worker is not None and worker.seat == seat:
                self._put(worker_id, restarted(worker), "another was started in its place")

    def not_restarted(self, worker_id: int, seat: int, error: WorkerError) -> None:
        """The other could not be started; that is tried again after the quarantine."""
        with self._lock:
            worker = self._workers.get(worker_id)
            if worker is not None and worker.seat == seat:
                worker = replace(worker, failures=worker.failures + 1, error=error)
                after = quarantined(worker, self._clock(), self._timeout)
                self._put(worker_id, after, f"no other could be started: {error.message}")

    def take_returned(self, worker_ids: Collection[int]) -> tuple[int, ...]:
        """Those of these workers that have come back from quarantine; each is told once."""
        with self._lock:
            returned = tuple(i for i in worker_ids if i in self and self._workers[i].returned)
            for worker_id in returned:
                self._workers[worker_id] = replace(self._workers[worker_id], returned=False)
            return returned

    def __contains__(self, worker_id: int) -> bool:
        return worker_id in self._workers

    def _answered(
        self, worker_id: int, seat: int, delivery: Delivery, error: WorkerError | None
    ) -> None:
        with self._lock:
            worker = self._workers.get(worker_id)
            if worker is None or worker.seat != seat:
                return
            if error is None:
                self._acknowledge(worker_id, worker, delivery.version)
            else:
                self._put(worker_id, failed(worker, delivery.version, error), error.message)

    def _acknowledge(self, worker_id: int, worker: WorkerStatus, version: int) -> None:
        reason = f"it has committed version {version}"
        self._put(worker_id, acknowledged(worker, version), reason)

    def _put(self, worker_id: int, after: WorkerStatus, reason: str) -> None:
        before = self._workers[worker_id]
        if after.state is not before.state:
            after = replace(after, since=self._clock())
            self._announce(worker_id, before, after, reason)
        self._workers[worker_id] = after

    def _announce(
        self, worker_id: int, before: WorkerStatus | None, after: WorkerStatus | None, reason: str
    ) -> None:
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
