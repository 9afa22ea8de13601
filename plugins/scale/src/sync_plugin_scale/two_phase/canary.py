"""A version on some workers first, which all get then, or which is taken back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from torch import Tensor

from sync_core import (
    Delivery,
    OptionError,
    SendReport,
    SyncError,
    TransportError,
    WorkerLostError,
    WorkerTimeoutError,
)

if TYPE_CHECKING:
    from sync_core import PendingSend, Sender


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
        """The workers that may have, or get, the weights on trial; none where there is no trial.

        A worker that was lost after the decision to commit counts: one in its place gets them. One
        that has committed the version of a `take_back` that failed for others does not.
        """
        tried = self._tried
        if tried is None:
            return ()
        workers = self._sender.workers
        # What comes after the trial's version was a `take_back`, or was committed by no worker.
        back = {i for i, worker in workers.items() if worker.version > tried.version}
        return tuple(i for i in self._of_trial(tried) if i not in back)

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
        sent = _Sent(self._sender)
        try:
            return sent.send(weights, None, timeout)
        finally:
            if sent.may_be_held():
                self._common = _Kept(sent.version, weights, None)

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
        sent = _Sent(self._sender)
        try:
            return sent.send(weights, list(worker_ids), timeout)
        finally:
            if sent.may_be_held():
                self._tried = _Kept(sent.version, weights, sent.holders())

    def promote(self, timeout: float | None = None) -> SendReport:
        """Send the weights on trial to all workers, as one more version.

        Args:
            timeout: deadline in seconds; None for the sender's.

        Raises:
            SyncError: no version is on trial.
            SendError: see `Sender.send`; the trial continues, with all workers where some have got
                the weights, or may get them.
        """
        tried = self._continued("promote()")
        sent = _Sent(self._sender)
        try:
            report = sent.send(tried.weights, None, timeout)
        except BaseException:
            if sent.may_be_held():
                # Also those that have not answered in time may have them, or join and get them.
                self._tried = _Kept(sent.version, tried.weights, None)
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
            SendError: see `Sender.send`; the trial continues, with the workers that may have its
                weights; see `trying`. Call `take_back` again, or `promote`.
        """
        tried, common = self._continued("take_back()"), self._common
        assert common is not None
        served = None
        if tried.worker_ids is not None:
            known = self._sender.all_worker_ids()
            served = [worker_id for worker_id in tried.worker_ids if worker_id in known]
        sent = _Sent(self._sender)
        try:
            report = sent.send(common.weights, served, timeout)
        finally:
            if sent.may_be_held():
                self._restores[sent.version] = common.version
        self._tried = None
        return report

    def _continued(self, call: str) -> _Kept:
        """Return the trial with the workers that it has now: what is sent next may hide some."""
        if self._tried is None:
            raise SyncError(f"{call} needs a version on trial; call try_on([…]) before it")
        if self._tried.worker_ids is not None:
            self._tried = replace(self._tried, worker_ids=self._of_trial(self._tried))
        return self._tried

    def _of_trial(self, tried: _Kept) -> tuple[int, ...]:
        """Return the workers that have got its version, or may have, since it began."""
        if tried.worker_ids is None:
            return self._sender.all_worker_ids()
        # Some may have committed it after the send had ended, or may get it as they join.
        workers = self._sender.workers.items()
        late = (i for i, worker in workers if tried.version in (worker.version, worker.wanted))
        return tuple(dict.fromkeys((*tried.worker_ids, *late)))

    def _check_no_trial(self, call: str) -> None:
        if self._tried is not None:
            raise SyncError(
                f"{call} while version {self._tried.version} is on trial with workers "
                f"{self._of_trial(self._tried)}; call promote() or take_back() before it"
            )


class _Sent:
    """One send, and what workers may hold of it, also where it raised or was interrupted.

    Args:
        sender: the sender.
    """

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._pending: PendingSend | None = None
        self.version = 0

    def send(
        self, weights: Mapping[str, Tensor], worker_ids: list[int] | None, timeout: float | None
    ) -> SendReport:
        """Send, and wait."""
        pending = self._sender.send_async(weights, worker_ids, timeout=timeout)
        self._pending, self.version = pending, pending.version
        return pending.wait()

    def may_be_held(self) -> bool:
        """Return whether a worker holds the version, or parts of it, or may yet get it."""
        return bool(self.holders())

    def holders(self) -> tuple[int, ...]:
        """Return these workers."""
        deliveries = {} if self._pending is None else self._pending.deliveries
        return tuple(i for i, delivery in deliveries.items() if _may_be_held(delivery))


def _may_be_held(delivery: Delivery) -> bool:
    error = delivery.error
    if error is None or error.model_state != "kept":
        return True
    if isinstance(error, TransportError):
        return False
    decided = getattr(delivery, "may_be_held", None)
    gone = isinstance(error, WorkerLostError | WorkerTimeoutError)
    # A scheme of others, which may decide later than its send ends.
    return bool(decided()) if decided is not None else gone
