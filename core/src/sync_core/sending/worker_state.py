"""The state of one worker as its sender knows it, and its transitions; see protocol.md."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from sync_core.errors import (
    TransportError,
    WorkerError,
    WorkerLostError,
    WorkerTimeoutError,
)

# A worker in quarantine is tried again after one deadline, then two, four, … up to so many: a
# worker that stays silent costs the sender a share of its time that shrinks to a sixteenth.
_LONGEST_QUARANTINE = 16


class WorkerState(StrEnum):
    """The states of a worker."""

    #: The worker was added, and has not connected yet.
    CONNECTING = "connecting"
    #: The worker has committed the newest version meant for it.
    CURRENT = "current"
    #: The worker lives, and has not committed the newest version meant for it.
    BEHIND = "behind"
    #: The worker's model may hold parts of a version, or other bits than were written.
    BAD = "bad"
    #: A send has ended before the worker answered.
    SUSPECT = "suspect"
    #: The transport has found the worker gone.
    LOST = "lost"
    #: The worker has failed, and sends do not wait for it for some time.
    QUARANTINED = "quarantined"
    #: The worker is being restarted, and sends do not wait for it.
    RESTARTING = "restarting"


#: States in which sends do not wait for a worker.
UNWAITED = frozenset({WorkerState.QUARANTINED, WorkerState.RESTARTING})


@dataclass(slots=True, unsafe_hash=True)
class WorkerStatus:
    """The state of one worker and its history.

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
        joining: whether sends do not wait for it yet, since it came unasked and has committed
            nothing; see `Sender.add_worker`.
    """

    seat: int
    since: float = 0.0
    state: WorkerState = WorkerState.CONNECTING
    version: int = 0
    wanted: int = 0
    failures: int = 0
    error: WorkerError | None = None
    retry_at: float = 0.0
    returned: bool = False
    joining: bool = False


def waited_for(worker: WorkerStatus, now: float) -> bool:
    """Return whether a send that begins now waits for the worker."""
    if worker.state is WorkerState.QUARANTINED:
        return now >= worker.retry_at
    return not worker.joining and worker.state is not WorkerState.RESTARTING


def sent(worker: WorkerStatus, version: int, now: float) -> WorkerStatus:
    """Return the state after a version was sent; one in quarantine may be tried by it."""
    state = WorkerState.BEHIND if worker.state is WorkerState.CURRENT else worker.state
    retry_at = worker.retry_at
    if retry_at and waited_for(worker, now):
        retry_at = 0.0
    # Not `replace`, which takes most of the time of this, here and below.
    return WorkerStatus(
        worker.seat,
        worker.since,
        state,
        worker.version,
        version,
        worker.failures,
        worker.error,
        retry_at,
        worker.returned,
        worker.joining,
    )


def connected(worker: WorkerStatus, now: float) -> WorkerStatus:
    """Return the state after a receiver has connected, which has acknowledged nothing."""
    if worker.state is WorkerState.QUARANTINED:
        return replace(worker, version=0, retry_at=now)
    state = WorkerState.BEHIND if worker.wanted else WorkerState.CURRENT
    return replace(worker, version=0, state=state)


def acknowledged(worker: WorkerStatus, version: int) -> WorkerStatus:
    """Return the state after the worker has committed a version, and no newer one."""
    if worker.state is WorkerState.RESTARTING or not worker.version < version <= worker.wanted:
        return worker
    if version == worker.wanted:
        return WorkerStatus(
            worker.seat,
            worker.since,
            WorkerState.CURRENT,
            version,
            version,
            retry_at=worker.retry_at,
            returned=worker.returned or worker.state is WorkerState.QUARANTINED,
        )
    quarantined = worker.state is WorkerState.QUARANTINED
    state = WorkerState.QUARANTINED if quarantined else WorkerState.BEHIND
    return replace(worker, state=state, version=version, joining=False)


def failed(worker: WorkerStatus, version: int, error: WorkerError) -> WorkerStatus:
    """Return the state after the worker did not get a version, or could not commit it."""
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
    elif error.model_state == "bad":
        state = WorkerState.BAD
    # Where the transport raised the worker is not at fault.
    failures = worker.failures + (not isinstance(error, TransportError))
    known = 0 if state is WorkerState.BAD else worker.version
    return replace(worker, state=state, version=known, failures=failures, error=error)


def lost(worker: WorkerStatus, error: WorkerError) -> WorkerStatus:
    """Return the state after the worker was lost, whether or not a send is pending."""
    state = worker.state if worker.state in UNWAITED else WorkerState.LOST
    return replace(worker, state=state, error=error)


def quarantined(worker: WorkerStatus, now: float, timeout: float) -> WorkerStatus:
    """Return the state in quarantine, which lasts twice as long after each further failure."""
    if worker.version == worker.wanted:
        return replace(worker, returned=True)  # its answer has come meanwhile
    doubled = 2 ** min(max(0, worker.failures - 1), 30)
    retry_at = now + timeout * min(doubled, _LONGEST_QUARANTINE)
    return replace(worker, state=WorkerState.QUARANTINED, retry_at=retry_at)


def restarting(worker: WorkerStatus) -> WorkerStatus:
    """Return the state while the worker is being restarted."""
    return replace(worker, state=WorkerState.RESTARTING)


def restarted(worker: WorkerStatus) -> WorkerStatus:
    """Return the state after the worker was restarted, which has no version yet."""
    if worker.state is not WorkerState.RESTARTING:
        return worker  # it has connected already
    return replace(worker, state=WorkerState.CONNECTING, version=0)
