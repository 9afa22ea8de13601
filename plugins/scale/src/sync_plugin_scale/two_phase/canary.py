"""A version on some workers first, which all get then, or which is taken back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from torch import Tensor

from sync_core import (
    OptionError,
    SendError,
    SendReport,
    SyncError,
    WorkerError,
    WorkerResult,
    WorkerTimeoutError,
)

if TYPE_CHECKING:
    from sync_core import Sender


@dataclass(frozen=True, slots=True)
class _Kept:
    """The weights of a version, and the workers that have it; None for all."""

    version: int
    weights: Mapping[str, Tensor]
    worker_ids: tuple[int, ...] | None


class Canary:
    """Tries a version on some workers of a sender, and promotes it to all or takes it back.

    Versions only grow: a version that is taken back is replaced by a newer one with the weights
    that the other workers have. It keeps two copies of the weights, in the memory of the host. All
    sends of the sender go through it. It is for one thread.

    Args:
        sender: a sender of a scheme with the capability ``all_or_none``, such as
            ``"two_phase::shm"``, that has a model.

    Raises:
        OptionError: the sender's workers commit a version each alone.

    Example:
        >>> import torch
        >>> from threading import Thread
        >>> from sync_core import Receiver, Sender
        >>> policy, copy = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
        >>> with Sender("two_phase::thread", policy, num_workers=1) as sender:
        ...     canary, receiver = Canary(sender), Receiver(sender.address(0), copy)
        ...     worker = Thread(target=lambda: [receiver.receive() for _ in range(3)])
        ...     worker.start()
        ...     versions = [canary.send().version, canary.try_on([0]).version]
        ...     versions.append(canary.take_back().version)
        ...     worker.join()
        >>> versions, dict(canary.restores)
        ([1, 2, 3], {3: 1})
    """

    def __init__(self, sender: Sender) -> None:
        if "all_or_none" not in sender.capabilities:
            raise OptionError(
                f"Canary needs a scheme whose workers commit together, got {sender.scheme!r}; type "
                f"Sender('two_phase::{sender.scheme}', …)"
            )
        self._sender = sender
        self._common: _Kept | None = None
        self._tried: _Kept | None = None
        self._restores: dict[int, int] = {}

    @property
    def trying(self) -> tuple[int, ...]:
        """The workers that have a version on trial; none where there is no trial."""
        tried = self._tried
        if tried is None:
            return ()
        if tried.worker_ids is None:
            return self._sender.all_worker_ids()
        # Some may have committed it after the send had ended.
        workers = self._sender.workers.items()
        late = (i for i, worker in workers if worker.version == tried.version)
        return tuple(dict.fromkeys((*tried.worker_ids, *late)))

    @property
    def restores(self) -> Mapping[int, int]:
        """For each version that replaced one that was taken back, the version that it repeats."""
        return MappingProxyType(self._restores)

    def send(self, timeout: float | None = None) -> SendReport:
        """Send the sender's model to all workers.

        Args:
            timeout: deadline in seconds; None for the sender's.

        Raises:
            SyncError: a version is on trial.
            SendError: see `Sender.send`. Where some workers have the version all the same, a trial
                returns to it.
        """
        self._check_no_trial("send()")
        weights = self._sender.snapshot()
        try:
            report = self._sender.send(weights, timeout=timeout)
        except SendError as failure:
            if self._may_be_held(failure.report):
                self._common = _Kept(failure.report.version, weights, None)
            raise
        self._common = _Kept(report.version, weights, None)
        return report

    def try_on(self, worker_ids: Iterable[int], timeout: float | None = None) -> SendReport:
        """Send the sender's model, as it is now, to some workers.

        Args:
            worker_ids: the workers.
            timeout: deadline in seconds; None for the sender's.

        Raises:
            SyncError: a version is on trial already, or no version was sent to all.
            SendError: see `Sender.send`. Where some workers have the version all the same, as with
                ``failed="leave_out"``, or where ``on_commit`` raised, it is on trial with these.
        """
        self._check_no_trial("try_on()")
        if self._common is None:
            raise SyncError("no version to return to; call canary.send() before try_on()")
        weights = self._sender.snapshot()
        try:
            report = self._sender.send(weights, list(worker_ids), timeout=timeout)
        except SendError as failure:
            self._begin(failure.report, weights)
            raise
        self._begin(report, weights)
        return report

    def promote(self, timeout: float | None = None) -> SendReport:
        """Send the weights on trial to all workers, as one more version.

        Args:
            timeout: deadline in seconds; None for the sender's.

        Raises:
            SyncError: no version is on trial.
            SendError: see `Sender.send`; the trial continues, with all workers where some have got
                the weights.
        """
        tried = self._trial("promote()")
        try:
            report = self._sender.send(tried.weights, timeout=timeout)
        except SendError as failure:
            if self._may_be_held(failure.report):
                # Also those that have not answered in time may have them, or join and get them.
                self._tried = _Kept(failure.report.version, tried.weights, None)
            raise
        self._common = _Kept(report.version, tried.weights, None)
        self._tried = None
        return report

    def take_back(self, timeout: float | None = None) -> SendReport:
        """Send the weights that the others have to the workers of the trial, as one more version.

        Args:
            timeout: deadline in seconds; None for the sender's.

        Raises:
            SyncError: no version is on trial.
            SendError: see `Sender.send`; the trial continues.
        """
        tried, common = self._trial("take_back()"), self._common
        assert common is not None
        served = None
        if tried.worker_ids is not None:
            known = self._sender.all_worker_ids()
            served = [worker_id for worker_id in self.trying if worker_id in known]
        report = self._sender.send(common.weights, served, timeout=timeout)
        if report.workers:
            self._restores[report.version] = common.version
        self._tried = None
        return report

    def _begin(self, report: SendReport, weights: Mapping[str, Tensor]) -> None:
        if self._may_be_held(report):
            self._tried = _Kept(report.version, weights, _holding(report))

    def _may_be_held(self, report: SendReport) -> bool:
        """Return whether some workers hold a version, or may commit it after its send has ended."""
        late = any(isinstance(r.error, WorkerTimeoutError) for r in report.workers.values())
        return bool(_holding(report)) or (late and "aborts" not in self._sender.capabilities)

    def _trial(self, call: str) -> _Kept:
        if self._tried is None:
            raise SyncError(f"{call} needs a version on trial; call try_on([…]) before it")
        return self._tried

    def _check_no_trial(self, call: str) -> None:
        if self._tried is not None:
            raise SyncError(
                f"{call} while version {self._tried.version} is on trial with workers "
                f"{self.trying}; call promote() or take_back() before it"
            )


def _holding(report: SendReport) -> tuple[int, ...]:
    """Return the workers that hold a version, or parts of it: also some that have failed."""
    return tuple(i for i, result in report.workers.items() if _holds(result))


def _holds(result: WorkerResult) -> bool:
    if isinstance(result.error, WorkerError):
        return result.error.model_state != "kept"
    return result.version is not None
