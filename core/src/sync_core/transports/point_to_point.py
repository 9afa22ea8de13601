"""A sender's transport that sends to one worker at a time."""

from __future__ import annotations

import queue
import threading
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from sync_core.errors import WorkerError, WorkerLostError
from sync_core.transports.transport import Answer, Delivery, SenderTransport
from sync_core.weights.block import Block
from sync_core.weights.payload import Payload

_Job = tuple[Payload, Delivery] | None
_REMOVED = "was removed from the sender"


class PointToPointTransport(SenderTransport):
    """Turns a blocking `send_to` into a transport: a thread and a queue for every worker.

    The payload is copied once for all workers. While a worker is busy with one version, later
    ones replace each other, so that it is given the newest next; a slow worker keeps no other
    waiting.

    Args:
        worker_ids: the workers to serve.

    Example:
        >>> class Loopback(PointToPointTransport):
        ...     def address(self, worker_id): return None
        ...     def send_to(self, worker_id, payload): print(worker_id, payload.version)
        >>> transport = Loopback(worker_ids=[0])
        >>> payload = Payload(1, Layout.of({"w": torch.ones(2)}), (torch.ones(2),))
        >>> transport.send(payload, [0])[0].wait(timeout=10)
        0 1
        True
        >>> transport.close()
    """

    def __init__(self, worker_ids: Sequence[int]) -> None:
        self._queues: dict[int, queue.Queue[_Job]] = {}
        # Also the one that `send_to` is at.
        self._unended: dict[int, list[Delivery]] = {}
        self._of_thread = threading.local()
        self._newest: Payload | None = None
        # Reentrant, as the garbage collector may close the transport in a thread that holds it.
        self._lock = threading.RLock()
        for worker_id in worker_ids:
            self.add_worker(worker_id)

    @abstractmethod
    def send_to(self, worker_id: int, payload: Payload) -> Answer | None:
        """Deliver a version to one worker, and return when it has committed it.

        Returns:
            The answer that the worker's transport acknowledged, if it came back; or None.

        Raises:
            WorkerError: the worker does not have the version. Any other exception counts as the
                loss of the worker.
        """

    def superseded(self, worker_id: int) -> bool:
        """Return whether `send_to` may give up: a later version waits, or the worker was removed.

        A `send_to` that waits for its worker asks this again and again.
        """
        jobs = self._queues.get(worker_id)
        # Another worker with this id may have the place of the one that this thread serves.
        served = getattr(self._of_thread, "jobs", jobs)
        return jobs is None or jobs is not served or not jobs.empty()

    def send(self, payload: Payload, worker_ids: Sequence[int]) -> dict[int, Delivery]:
        """Copy the payload, and hand it to the workers' threads."""
        block = Block.allocate(payload.nbytes)
        payload.pack(block)
        copy = Payload.unpack(block, payload.version)
        deliveries = {i: Delivery(i, payload.version, payload.nbytes) for i in worker_ids}
        with self._lock:
            for worker_id, delivery in deliveries.items():
                self._put(worker_id, (copy, delivery))
            if deliveries.keys() >= self._queues.keys():
                self._newest = copy
        return deliveries

    def add_worker(self, worker_id: int, worker: Any = None) -> None:
        """Start the worker's thread, and give it the newest version that went to all."""
        del worker
        jobs: queue.Queue[_Job] = queue.Queue()
        with self._lock:
            self._queues[worker_id] = jobs
            newest = self._newest
            if newest is not None:
                self._put(worker_id, (newest, Delivery(worker_id, newest.version, newest.nbytes)))
        threading.Thread(
            target=self._serve, args=(worker_id, jobs), name=f"sync-worker-{worker_id}", daemon=True
        ).start()

    def remove_worker(self, worker_id: int) -> None:
        """End what is on its way to the worker, and its thread after what it is doing."""
        with self._lock:
            jobs = self._queues.pop(worker_id, None)
            unended = self._unended.pop(worker_id, ())
        if jobs is not None:
            _drain(jobs, WorkerError(worker_id, _REMOVED))
            jobs.put(None)
        for delivery in unended:
            if not delivery.wait(0):
                delivery.fail(WorkerError(worker_id, _REMOVED))

    def close(self) -> None:
        """End every thread, after what it is doing."""
        for worker_id in tuple(self._queues):
            self.remove_worker(worker_id)

    def _put(self, worker_id: int, job: tuple[Payload, Delivery]) -> None:
        jobs = self._queues.get(worker_id)
        if jobs is None:
            job[1].fail(WorkerError(worker_id, _REMOVED))
            return
        reason = f"version {job[0].version} took the place of this one"
        _drain(jobs, WorkerError(worker_id, reason))
        unended = [each for each in self._unended.get(worker_id, ()) if not each.wait(0)]
        self._unended[worker_id] = [*unended, job[1]]
        jobs.put(job)

    def _serve(self, worker_id: int, jobs: queue.Queue[_Job]) -> None:
        self._of_thread.jobs = jobs
        while (job := jobs.get()) is not None:
            payload, delivery = job
            try:
                answer = self.send_to(worker_id, payload)
            except WorkerError as error:
                delivery.fail(error)
            except Exception as error:
                delivery.fail(WorkerLostError(worker_id, f"send_to raised {error!r}"))
            else:
                delivery.acknowledge(answer)


def _drain(jobs: queue.Queue[_Job], error: WorkerError) -> None:
    with suppress(queue.Empty):
        while True:
            if (job := jobs.get_nowait()) is not None:
                job[1].fail(error)
