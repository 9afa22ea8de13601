"""The workers of a transport's sender, and the version that each of them is owed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sync_core.errors import WorkerError, WorkerLostError
from sync_core.transports.transport import Answer, Delivery, Notice, unheard


@dataclass(frozen=True, eq=False, slots=True)
class Publication:
    """A version that a transport has put once, for any number of workers.

    Args:
        version: the version.
        nbytes: the size of what each worker gets, in bytes.
        content: what the transport keeps of the version: bytes, a slot, a key.
    """

    version: int
    nbytes: int
    content: Any = field(default=None, repr=False)


@dataclass(eq=False, slots=True)
class _Worker:
    owed: Publication | None = None
    delivery: Delivery | None = None
    reader: object = None
    lost: str | None = None


class Roster:
    """Decides which version each worker of a sender is owed; every thread may call each method.

    A version that is published for some workers replaces the one that each of them was owed. A
    version that is published for every worker is also owed to workers that are added later. The
    roster keeps no other version alive.

    The roster calls ``notify`` and ends deliveries with its lock held, so that the sender learns
    of them in the order in which they happened. Its lock is taken below the locks of a transport.

    Args:
        worker_ids: the workers.
        notify: see `TransportContext`.

    Example:
        >>> from sync_core.transports import Publication, Roster
        >>> roster = Roster([0, 1])
        >>> deliveries = roster.publish(Publication(version=1, nbytes=64), [0, 1])
        >>> roster.add(2).version
        1
        >>> roster.connected(0, reader := object())
        True
        >>> roster.answered(0, reader, Answer(version=1))
        >>> deliveries[0].ended, deliveries[1].ended
        (True, False)
    """

    #: Why a worker gets no further version: a clause about it, and one about the sender.
    REMOVED, CLOSED = "was removed from the sender", "the sender was closed"

    def __init__(
        self, worker_ids: Iterable[int] = (), notify: Callable[[int, Notice], None] = unheard
    ) -> None:
        # Reentrant, as the garbage collector may close a receiver in a thread that holds it.
        self._lock = threading.RLock()
        self._notify = notify
        self._workers = {worker_id: _Worker() for worker_id in worker_ids}
        self._owed_to_new: Publication | None = None
        self._closed = False

    @property
    def worker_ids(self) -> tuple[int, ...]:
        """The workers."""
        return tuple(self._workers)

    @property
    def owed_to_new(self) -> Publication | None:
        """The version that workers are owed when they are added."""
        return self._owed_to_new

    def publish(self, publication: Publication, worker_ids: Sequence[int]) -> dict[int, Delivery]:
        """Owe a version to these workers, and to workers that are added later if these are all.

        Args:
            publication: the version.
            worker_ids: the workers; none for a version that is only for workers added later,
                which is possible only while there are no workers.

        Returns:
            A delivery for each of them. Those to workers that were removed or lost have failed.
        """
        version, nbytes = publication.version, publication.nbytes
        deliveries = {i: Delivery(i, version, nbytes) for i in worker_ids}
        with self._lock:
            # Another thread may have removed some of them meanwhile.
            if not self._closed and deliveries.keys() >= self._workers.keys():
                self._owed_to_new = publication
            for worker_id, delivery in deliveries.items():
                worker = self._workers.get(worker_id)
                if worker is None:
                    reason = self.CLOSED if self._closed else self.REMOVED
                    delivery.fail(WorkerError(worker_id, reason))
                    continue
                worker.owed, worker.delivery = publication, delivery
                if worker.lost is not None:
                    delivery.fail(WorkerLostError(worker_id, worker.lost))
        return deliveries

    def withdraw(
        self, publication: Publication, before: Mapping[int | None, Publication] | None = None
    ) -> None:
        """Owe a version to no worker any more, such as one whose packing was interrupted.

        Args:
            publication: the version.
            before: of a version that could not be offered, what `all_owed` returned before, which
                workers are owed again. A worker that commits it all the same causes a notice.
        """
        owed = before or {}
        with self._lock:
            if self._owed_to_new is publication:
                self._owed_to_new = owed.get(None)
            for worker_id, worker in self._workers.items():
                if worker.owed is publication:
                    # One without a delivery was added after it was published.
                    worker.owed = owed.get(worker_id if worker.delivery else None)
                    worker.delivery = worker.delivery if before is None else None

    def all_owed(self) -> dict[int | None, Publication]:
        """Return what each worker is owed, and under None what workers added later are owed."""
        with self._lock:
            owed: dict[int | None, Publication | None] = {None: self._owed_to_new}
            owed.update((i, worker.owed) for i, worker in self._workers.items())
            return {i: each for i, each in owed.items() if each is not None}

    def wanted(self, worker_id: int, after: int = 0) -> Publication | None:
        """Return the version that a worker is owed.

        Args:
            worker_id: the worker.
            after: the newest version that the worker has seen.

        Returns:
            None where the worker is owed nothing newer than that, or was removed.
        """
        with self._lock:
            worker = self._workers.get(worker_id)
            owed = None if worker is None else worker.owed
            return None if owed is None or owed.version <= after else owed

    def owed(self, besides: Iterable[int] | None = None) -> set[Publication]:
        """Return the versions that a worker, or one that is added later, may still ask for.

        Args:
            besides: workers for which the next version is about to be published, so that what is
                owed to them alone is left out; None where no version is.
        """
        with self._lock:
            replaced = () if besides is None else frozenset(besides)
            rest = [worker.owed for i, worker in self._workers.items() if i not in replaced]
            if besides is None or rest:
                rest.append(self._owed_to_new)
            return set(filter(None, rest))

    def awaited(self) -> set[int]:
        """Return the workers of which the last delivery has not ended."""
        with self._lock:
            known = self._workers.items()
            return {i for i, worker in known if worker.delivery and not worker.delivery.ended}

    def connected(self, worker_id: int, reader: object) -> bool:
        """Record that a receiver has taken a worker's place; it has no version yet.

        Args:
            worker_id: the worker.
            reader: stands for the receiver in later calls: an object, or a name.

        Returns:
            False where there is no such worker.
        """
        with self._lock:
            worker = self._workers.get(worker_id)
            if worker is None:
                return False
            worker.reader, worker.lost = reader, None
            self._notify(worker_id, Notice("connected"))
            return True

    def dismissed(self, worker_id: int, reader: object) -> str | None:
        """Return why a receiver gets no further version; None while it has the worker's place."""
        with self._lock:
            worker = self._workers.get(worker_id)
            if self._closed:
                return self.CLOSED
            if worker is None or worker.reader is None:
                return f"worker {worker_id} {self.REMOVED}"
            if worker.reader != reader:
                return "another receiver was given the same address"
            return None

    def answered(
        self, worker_id: int, reader: object, answer: Answer | Mapping[str, Any]
    ) -> Publication | None:
        """End the delivery that a worker has answered, or report a commit of another version.

        The answer of a receiver that another one has replaced changes nothing.

        Args:
            worker_id: the worker.
            reader: the receiver; None where the sender has called the worker, which may have any.
            answer: the answer, or the message that `Answer.to_message` made of it. A worker whose
                message is not an answer is lost.

        Returns:
            The version that the worker is still owed, if that is newer than what it answered.
        """
        if not isinstance(answer, Answer):
            try:
                answer = Answer.from_message(answer)
            except ValueError as error:
                self.lost(worker_id, reader, f"does not answer as agreed: {error}")
                return None
        with self._lock:
            worker = self._heard(worker_id, reader)
            if worker is None:
                return None
            if worker.delivery is not None and worker.delivery.version == answer.version:
                worker.delivery.acknowledge(answer)
            elif answer.error is None:
                self._notify(worker_id, Notice("acknowledged", answer.version))
            owed = worker.owed
            return None if owed is None or owed.version <= answer.version else owed

    def failed(self, worker_id: int, reader: object, version: int, error: WorkerError) -> None:
        """Fail the delivery of a version that did not get to a worker, and of no later one.

        Args:
            worker_id: the worker.
            reader: see `answered`.
            version: the version; 0 for the loss of a worker that was sent nothing.
            error: the reason. A loss is reported where the worker is not sent that version; any
                other error changes nothing then.
        """
        with self._lock:
            worker = self._heard(worker_id, reader)
            if worker is None:
                return
            if worker.delivery is not None and worker.delivery.version == version:
                worker.delivery.fail(error)
            elif isinstance(error, WorkerLostError):
                self._notify(worker_id, Notice("lost", reason=error.message))

    def lost(self, worker_id: int, reader: object, reason: str) -> None:
        """Fail what a worker has not answered, and what is published for it until it comes back.

        The loss of a receiver that another one has replaced, or that is known to be lost, changes
        nothing.

        Args:
            worker_id: the worker.
            reader: see `answered`.
            reason: a clause such as ``"closed its receiver"``.
        """
        with self._lock:
            worker = self._heard(worker_id, reader)
            if worker is None or worker.lost is not None:
                return
            worker.lost = reason
            self._notify(worker_id, Notice("lost", reason=reason))
            if worker.delivery is not None:
                worker.delivery.fail(WorkerLostError(worker_id, reason))

    def expect(self, worker_ids: Iterable[int]) -> None:
        """Count lost workers as reachable again: they may get the versions published from now."""
        with self._lock:
            for worker_id in worker_ids:
                if worker_id in self._workers:
                    self._workers[worker_id].lost = None

    def remark(self, worker_id: int, remark: str) -> None:
        """Add a clause to the report, should a worker not confirm what it was sent last."""
        with self._lock:
            worker = self._workers.get(worker_id)
            if worker is not None and worker.delivery is not None:
                worker.delivery.remark = remark

    def add(self, worker_id: int, reader: object = None) -> Publication | None:
        """Add a worker; return the version that it is owed, the last that went to all.

        Args:
            worker_id: the worker.
            reader: what counts as its receiver until one connects.
        """
        with self._lock:
            self._workers[worker_id] = _Worker(self._owed_to_new, reader=reader)
            return self._owed_to_new

    def remove(self, worker_id: int) -> bool:
        """Forget a worker, and fail what it has not answered; return False where there is none."""
        with self._lock:
            worker = self._workers.pop(worker_id, None)
            if worker is not None and worker.delivery is not None:
                worker.delivery.fail(WorkerError(worker_id, self.REMOVED))
            return worker is not None

    def close(self) -> None:
        """Forget every worker and version, and fail what was not answered."""
        with self._lock:
            self._closed = True
            workers, self._workers = self._workers, {}
            self._owed_to_new = None
            for worker_id, worker in workers.items():
                if worker.delivery is not None:
                    worker.delivery.fail(WorkerError(worker_id, self.CLOSED))

    def _heard(self, worker_id: int, reader: object) -> _Worker | None:
        """Return the worker, unless another receiver has its place."""
        worker = self._workers.get(worker_id)
        return worker if worker is not None and reader in (None, worker.reader) else None
