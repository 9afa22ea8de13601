"""A sender's transport that sends to one worker at a time."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from sync_core import Answer, Delivery, Payload, SenderTransport, WorkerError, WorkerLostError
from sync_core.transports import Block, Notice, Publication, Roster, unheard


@dataclass(eq=False, slots=True)
class _Served:
    """A worker, what wakes its thread (False: to end), and the version that was sent last."""

    worker_id: int
    wakes: SimpleQueue[bool] = field(default_factory=SimpleQueue)
    sent: Publication | None = None


class PointToPointTransport(SenderTransport):
    """Turns a blocking `send_to` into a transport: a thread for every worker.

    The payload is copied once for all workers. While a worker is busy with one version, later
    ones replace each other, so that it is given the newest next; a slow worker keeps no other
    waiting.

    Args:
        worker_ids: the workers to serve.
        notify: `TransportContext.notify`, for commits of workers that were added later or are late.

    Example:
        >>> import torch
        >>> from sync_core import Layout
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

    def __init__(
        self, worker_ids: Sequence[int], notify: Callable[[int, Notice], None] = unheard
    ) -> None:
        self.roster = Roster((), notify)
        self._served: dict[int, _Served] = {}
        self._of_thread = threading.local()
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
        # Another worker with this id may have the place of the one that this thread serves.
        served = getattr(self._of_thread, "served", self._served.get(worker_id))
        return (
            served is None
            or bool(self.roster.dismissed(worker_id, served))
            or self.roster.wanted(worker_id) is not served.sent
        )

    def send(self, payload: Payload, worker_ids: Sequence[int]) -> dict[int, Delivery]:
        """Copy the payload, and wake the workers' threads."""
        block = Block.allocate(payload.nbytes)
        payload.pack(block)
        copy = Payload.unpack(block, payload.version)
        deliveries = self.roster.publish(Publication(copy.version, copy.nbytes, copy), worker_ids)
        for worker_id in worker_ids:
            if (served := self._served.get(worker_id)) is not None:
                served.wakes.put(True)
        return deliveries

    def add_worker(self, worker_id: int, worker: Any = None) -> None:
        """Start the worker's thread, and give it the newest version that went to all."""
        del worker
        self._served[worker_id] = served = _Served(worker_id)
        self.roster.add(worker_id, served)
        served.wakes.put(True)
        threading.Thread(
            target=self._serve, args=(served,), name=f"sync-worker-{worker_id}", daemon=True
        ).start()

    def remove_worker(self, worker_id: int) -> None:
        """End what is on its way to the worker, and its thread after what it is doing."""
        served = self._served.pop(worker_id, None)
        self.roster.remove(worker_id)
        if served is not None:
            served.wakes.put(False)

    def close(self) -> None:
        """End every thread, after what it is doing."""
        self.roster.close()
        for worker_id in tuple(self._served):
            self.remove_worker(worker_id)

    def _serve(self, served: _Served) -> None:
        self._of_thread.served = served
        while served.wakes.get():
            self._send_newest(served)

    def _send_newest(self, served: _Served) -> None:
        worker_id = served.worker_id
        wanted = self.roster.wanted(worker_id)
        if wanted in (None, served.sent) or self.roster.dismissed(worker_id, served):
            return
        served.sent = wanted
        try:
            answer = self.send_to(worker_id, wanted.content) or Answer(version=wanted.version)
        except WorkerError as error:
            self.roster.failed(worker_id, served, wanted.version, error)
        except Exception as error:
            lost = WorkerLostError(worker_id, f"send_to raised {error!r}")
            self.roster.failed(worker_id, served, wanted.version, lost)
        else:
            self.roster.answered(worker_id, served, answer)
