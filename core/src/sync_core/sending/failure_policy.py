"""The failure policy of a sender: raise, drop, quarantine or restart workers that fail."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from sync_core.address import Address
from sync_core.checks import check_function
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
from sync_core.worker_group import WorkerGroup

_log = logging.getLogger("sync_core")

Remedy = Literal["raise", "drop", "quarantine", "restart"]
OnFailure = Remedy | Callable[["WorkerFailure"], Remedy]

_REMEDIES = get_args(Remedy)


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """A worker that did not get a version, for ``on_failure`` to judge.

    Args:
        worker_id: the worker.
        version: the version.
        error: why it does not have that.
        status: what is known of it; ``status.failures`` counts this failure.
    """

    worker_id: int
    version: int
    error: WorkerError
    status: WorkerStatus


class FailurePolicy:
    """Chooses what is done about failures, and does it.

    Args:
        on_failure: see `sync_core.sending.sender.Sender`.
        group: the worker group that restarts workers; see `Sender`.
        on_restart: called in a restarted worker; see `Sender`.
        called: whether the sender calls its workers by handles.
        timeout: how long ``on_restart`` may take, in seconds.

    Raises:
        ValueError: no such remedy.
        OptionError: the policy restarts workers, which is not possible here.
    """

    def __init__(
        self,
        on_failure: OnFailure,
        group: WorkerGroup | None,
        on_restart: Callable[[Any, Address], object] | None,
        *,
        called: bool,
        timeout: float,
    ) -> None:
        if not callable(on_failure) and on_failure not in _REMEDIES:
            names = ", ".join(map(repr, _REMEDIES))
            raise ValueError(f"on_failure must be a function or one of {names}: {on_failure!r}")
        if on_failure == "restart" and group is None:
            raise OptionError("on_failure='restart' needs the group of the workers: group=…")
        if on_restart is not None:
            check_function(on_restart, "on_restart")
        if group is not None and not isinstance(group, WorkerGroup):
            raise OptionError(
                f"group={group!r} is not a worker group; give the one that runs the workers, such "
                "as sync_plugin_std.workers.process_group.ProcessGroup(…)"
            )
        if group is not None and "restart" not in group.capabilities:
            raise OptionError(f"group={type(group).__name__} cannot restart its workers")
        if group is not None and called:
            raise OptionError(
                "a worker that is started again has a new handle, so group= is for workers that "
                "connect by their addresses; leave workers= out, or replace such a worker by "
                "sender.remove_worker(i) and sender.add_worker(i, worker=…)"
            )
        self._on_failure = on_failure
        self._group = group
        self._on_restart = on_restart
        self._timeout = timeout

    def apply(
        self,
        report: SendReport,
        members: Membership,
        drop: Callable[[int], None],
        address: Callable[[int], Address],
    ) -> SendReport:
        """Do something about every worker that failed; the report says what."""
        workers = dict(report.workers)
        for worker_id, result in report.failed.items():
            if isinstance(result.error, TransportError):
                continue  # the worker is not at fault
            status = members.statuses.get(worker_id)
            if status is None or (not status.failures and status.version < report.version):
                # It was removed during the send, and another worker with its id has not failed.
                remedy: Remedy = "drop" if self._on_failure == "drop" else "raise"
            else:
                assert isinstance(result.error, WorkerError)
                failure = WorkerFailure(worker_id, report.version, result.error, status)
                remedy = self._choose(failure)
                if not self._carry_out(remedy, failure, members, drop, address):
                    remedy = "raise"
            workers[worker_id] = replace(result, remedy=None if remedy == "raise" else remedy)
        return replace(report, workers=workers)

    def _choose(self, failure: WorkerFailure) -> Remedy:
        if not callable(self._on_failure):
            return self._on_failure
        try:
            remedy = self._on_failure(failure)
            if remedy not in _REMEDIES:
                raise ValueError(f"on_failure returned {remedy!r}, not one of {_REMEDIES}")
            if remedy == "restart" and self._group is None:
                raise OptionError("on_failure returned 'restart', and the sender has no group=")
        except Exception:
            _log.exception("on_failure could not judge %s; the send raises", failure.error)
            return "raise"
        return remedy

    def _carry_out(
        self,
        remedy: Remedy,
        failure: WorkerFailure,
        members: Membership,
        drop: Callable[[int], None],
        address: Callable[[int], Address],
    ) -> bool:
        """Return whether the worker was still a member; another thread may remove it."""
        worker_id, seat = failure.worker_id, failure.status.seat
        if remedy == "drop":
            with suppress(UnknownWorkerError, ClosedError):
                drop(worker_id)
        elif remedy == "quarantine":
            return members.quarantine(worker_id, seat)
        elif remedy == "restart":
            return self._restart(worker_id, seat, members, address)
        return True

    def _restart(
        self, worker_id: int, seat: int, members: Membership, address: Callable[[int], Address]
    ) -> bool:
        if not members.restart(worker_id, seat):
            return False
        # In a thread, since it takes seconds that no other worker is to wait for.
        threading.Thread(
            target=self._restart_now,
            args=(worker_id, seat, members, address),
            name=f"sync-restart-{worker_id}",
            daemon=True,
        ).start()
        return True

    def _restart_now(
        self, worker_id: int, seat: int, members: Membership, address: Callable[[int], Address]
    ) -> None:
        group = self._group
        assert group is not None
        try:
            group.restart(worker_id)
            if self._on_restart is not None:
                call = group.call(worker_id, self._on_restart, address(worker_id))
                call.result(self._timeout)
        except Exception as error:
            _log.exception("worker %d could not be restarted", worker_id)
            failure = WorkerError(worker_id, f"could not be restarted: {error!r}")
            members.not_restarted(worker_id, seat, failure)
        else:
            members.restarted(worker_id, seat)
