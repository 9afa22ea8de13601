"""The failure policy of a sender: raise, drop, quarantine or restart workers that fail."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, get_args

from sync_core.address import Address
from sync_core.errors import (
    ClosedError,
    OptionError,
    TransportError,
    UnknownWorkerError,
    WorkerError,
)
from sync_core.report import SendReport
from sync_core.sending.membership import Membership
from sync_core.sending.worker_state import WorkerStatus

if TYPE_CHECKING:
    from sync_core.sending.sender import Sender

_log = logging.getLogger("sync_core")

Word = Literal["raise", "drop", "quarantine"]
Remedy = Word | Callable[[], object]
OnFailure = Word | Callable[["WorkerFailure"], Remedy]

_WORDS: tuple[object, ...] = get_args(Word)


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """A worker that did not get a version, for ``on_failure`` to judge.

    Args:
        worker_id: the worker.
        version: the version.
        error: why the worker does not have the version.
        status: the worker's status; ``status.failures`` counts this failure.
        address: a function that returns an address for the worker, or for one in its place.
    """

    worker_id: int
    version: int
    error: WorkerError
    status: WorkerStatus
    address: Callable[[], Address] = field(repr=False)


class FailurePolicy(ABC):
    """Decides about workers that failed, as an object: ``Sender(…, on_failure=policy)``.

    A policy that needs to know nothing of the sender may be a function instead.

    Example:
        >>> class DropAfter(FailurePolicy):
        ...     def __init__(self, failures):
        ...         self.failures = failures
        ...
        ...     def __call__(self, failure):
        ...         return "drop" if failure.status.failures >= self.failures else "quarantine"
        >>> policy = torch.nn.Linear(4, 2)
        >>> options = {"num_workers": 1, "timeout": 0.01}
        >>> with Sender("thread", policy, on_failure=DropAfter(2), **options) as sender:
        ...     sender.send().quarantined  # the worker has never connected
        (0,)
    """

    def check(self, sender: Sender) -> None:
        """Raise `OptionError` if the policy does not suit a sender; called when that is made."""
        del sender

    @abstractmethod
    def __call__(self, failure: WorkerFailure) -> Remedy:
        """Return what is done about a worker that failed.

        Returns:
            ``"raise"``, ``"drop"``, ``"quarantine"``, or a function that starts another worker in
            its place. The sender calls it in its own thread, and no send waits for the worker
            meanwhile. Where it raises, the worker is put into quarantine.
        """


class FailureHandler:
    """Asks ``on_failure`` about each worker that failed, and does what it says.

    Args:
        on_failure: see `sync_core.sending.sender.Sender`.

    Raises:
        ValueError: no such remedy.
        OptionError: the remedy is ``"restart"``, which needs a worker group.
    """

    def __init__(self, on_failure: OnFailure) -> None:
        if not callable(on_failure) and on_failure not in _WORDS:
            if str(on_failure) == "restart":
                raise OptionError(
                    "on_failure='restart' is an object now; type on_failure=Restart(group, "
                    "on_restart), with: from sync_plugin_std import Restart"
                )
            names = ", ".join(map(repr, _WORDS))
            raise ValueError(
                f"on_failure must be a function, a FailurePolicy or one of {names}: {on_failure!r}"
            )
        self._on_failure = on_failure

    def check(self, sender: Sender) -> None:
        """Raise `OptionError` if the policy does not suit the sender."""
        if isinstance(self._on_failure, FailurePolicy):
            self._on_failure.check(sender)

    def apply(
        self,
        report: SendReport,
        members: Membership,
        drop: Callable[[int], None],
        address: Callable[[int], Address],
    ) -> SendReport:
        """Act on each worker that failed, and return the report with what was done."""
        workers = dict(report.workers)
        for worker_id, result in report.failed.items():
            if isinstance(result.error, TransportError):
                continue  # the worker is not at fault
            status = members.statuses.get(worker_id)
            done: Literal["drop", "quarantine", "restart"] | None = None
            if status is None or (not status.failures and status.version < report.version):
                # It was removed during the send, and another worker with its id has not failed.
                done = "drop" if self._on_failure == "drop" else None
            else:
                assert isinstance(result.error, WorkerError)

                def make_address(worker_id: int = worker_id) -> Address:
                    return address(worker_id)

                failure = WorkerFailure(
                    worker_id, report.version, result.error, status, make_address
                )
                done = _carry_out(self._choose(failure), failure, members, drop)
            workers[worker_id] = replace(result, remedy=done)
        return replace(report, workers=workers)

    def _choose(self, failure: WorkerFailure) -> Remedy:
        if not callable(self._on_failure):
            return self._on_failure
        try:
            remedy = self._on_failure(failure)
            if not callable(remedy) and remedy not in _WORDS:
                names = ", ".join(map(repr, _WORDS))
                raise ValueError(
                    f"on_failure must return {names} or a function that starts another worker, "
                    f"such as Restart(group)(failure), got {remedy!r}"
                )
        except Exception:
            _log.exception("on_failure raised about %s; the send raises, too", failure.error)
            return "raise"
        return remedy


def _carry_out(
    remedy: Remedy, failure: WorkerFailure, members: Membership, drop: Callable[[int], None]
) -> Literal["drop", "quarantine", "restart"] | None:
    """Return what was done; None where the send raises, or another thread removed the worker."""
    worker_id, seat = failure.worker_id, failure.status.seat
    if callable(remedy):
        if not members.restart(worker_id, seat):
            return None
        # In a thread, since it takes seconds that no other worker is to wait for.
        threading.Thread(
            target=_restart,
            args=(remedy, worker_id, seat, members),
            name=f"sync-restart-{worker_id}",
            daemon=True,
        ).start()
        return "restart"
    if remedy == "quarantine" and members.quarantine(worker_id, seat):
        return "quarantine"
    if remedy == "drop":
        with suppress(UnknownWorkerError, ClosedError):
            drop(worker_id)
        return "drop"
    return None


def _restart(restart: Callable[[], object], worker_id: int, seat: int, members: Membership) -> None:
    try:
        restart()
    except Exception as error:
        _log.exception("worker %d could not be restarted", worker_id)
        failure = WorkerError(worker_id, f"could not be restarted: {error!r}")
        members.not_restarted(worker_id, seat, failure)
    else:
        members.restarted(worker_id, seat)
