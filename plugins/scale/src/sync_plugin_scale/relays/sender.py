"""The sender's side: one chunk after the other to each worker, in its own thread."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from sync_core import Delivery, Payload, SenderTransport, TransportContext, WorkerError
from sync_core.transports import Notice, unheard
from sync_plugin_scale.relays.version import AGAIN, LANES, ChunkedVersion, lane_context

if TYPE_CHECKING:
    from sync_plugin_scale.relays.chunks import Chunked

_log = logging.getLogger("sync_core")
# How often a worker may ask for a version from its first chunk. It does so once when it is new in
# its place, and once when a newer version has come first.
_MOST_RESTARTS = 32
# How long closing waits for a chunk that is being sent, in seconds; an estimate.
_PATIENCE = 5.0
#: An inner transport, a delivery of it, and its outcome; or a worker, and a notice of it.
_Event: TypeAlias = tuple[int, Delivery, WorkerError | None] | tuple[int, Notice]


@dataclass(eq=False)
class _Progress:
    """The progress of one worker with a version.

    Args:
        version: the version.
        delivery: ends when the worker has committed it, or cannot.
        index: the chunk that it gets next.
        sent: for each transport, the chunk that it was given last, and its delivery: another
            receiver in the worker's place is given that one first, and asks for the others.
        busy: the transports whose chunk was not answered.
        restarts: how often the worker has asked for the version from its first chunk.
    """

    version: ChunkedVersion
    delivery: Delivery
    index: int = 0
    sent: dict[int, tuple[int, Delivery]] = field(default_factory=dict)
    busy: set[int] = field(default_factory=set)
    restarts: int = 0


class ChunkedSender(SenderTransport):
    """Sends each worker one chunk after the other, in its own thread.

    Args:
        context: what the sender gave to `create_transport`.
        scheme: the scheme.
    """

    def __init__(self, context: TransportContext, scheme: Chunked) -> None:
        self._chunk_nbytes = scheme.nbytes
        self._notify = context.notify
        # Of the inner transports, which take the calls of one thread at a time. Callbacks of these,
        # which have locks of their own, never take it.
        self._lock = threading.RLock()
        self._number = 0
        self._workers: dict[int, _Progress | None] = dict.fromkeys(context.worker_ids)
        self._newest: ChunkedVersion | None = None
        self._events: queue.SimpleQueue[_Event | None] = queue.SimpleQueue()
        self._lanes: list[SenderTransport] = []
        with ExitStack() as opened:
            for lane in range(LANES):
                inner = lane_context(context, scheme.nbytes, lane)
                notify = unheard if lane else self._hear
                made = scheme.inner_sender(replace(inner, models=(), notify=notify))
                self._lanes.append(made)
                opened.callback(self._lanes[-1].close)
            opened.pop_all()
        self._thread = threading.Thread(target=self._run, name="sync-chunks", daemon=True)
        self._thread.start()

    def address(self, worker_id: int) -> Any:
        """Return the endpoints of the inner transports."""
        with self._lock:
            return [lane.address(worker_id) for lane in self._lanes]

    def send(self, payload: Payload, worker_ids: Sequence[int]) -> dict[int, Delivery]:
        """Pack the version, and send its first chunk; one that is streamed, while it is packed."""
        version = ChunkedVersion(payload.version, payload.nbytes, self._chunk_nbytes)
        if payload.is_streamed:
            return self._send_streamed(payload, version, worker_ids)
        payload.pack(version.block)
        version.available = version.count
        return self.begin(version, worker_ids)

    def _send_streamed(
        self, payload: Payload, version: ChunkedVersion, worker_ids: Sequence[int]
    ) -> dict[int, Delivery]:
        with self._lock:
            before = dict(self._workers), self._newest
        deliveries = self.begin(version, worker_ids)
        try:
            for done in payload.pack_in_steps(version.block):
                whole = done == payload.nbytes
                available = version.count if whole else done // self._chunk_nbytes
                if available > version.available:
                    self.more(version, available)
        except BaseException as error:
            self._withdraw(version, *before)
            for worker_id, delivery in deliveries.items():
                message = f"version {version.version} was withdrawn, since {error}"
                delivery.fail(WorkerError(worker_id, message))
            raise
        return deliveries

    def _withdraw(
        self,
        version: ChunkedVersion,
        workers: Mapping[int, _Progress | None],
        newest: ChunkedVersion | None,
    ) -> None:
        """Forget a version whose last chunk will not come, and send those before it again."""
        with self._lock:
            if self._newest is version:
                self._newest = newest
            for worker_id, progress in self._workers.items():
                if progress is None or progress.version is not version:
                    continue
                self._workers[worker_id] = earlier = workers.get(worker_id)
                if earlier is not None:
                    # Also to a worker that has it, and discards it: another receiver in its place
                    # would find chunks of the one that is forgotten, and wait for the others.
                    self._workers[worker_id] = _Progress(earlier.version, earlier.delivery)
                    self._continue(worker_id)

    def begin(self, version: ChunkedVersion, worker_ids: Sequence[int]) -> dict[int, Delivery]:
        """Send what is there of a version; `more` sends the rest."""
        deliveries = {i: Delivery(i, version.version, version.nbytes) for i in worker_ids}
        with self._lock:
            if deliveries.keys() >= self._workers.keys():
                self._newest = version
            served = [worker_id for worker_id in deliveries if worker_id in self._workers]
            for worker_id in served:
                self._workers[worker_id] = _Progress(version, deliveries[worker_id])
            for worker_id in served:
                self._continue(worker_id)
        for worker_id in deliveries.keys() - {*served}:
            # By another thread since the send began.
            deliveries[worker_id].fail(WorkerError(worker_id, "was removed from the sender"))
        return deliveries

    def more(self, version: ChunkedVersion, available: int) -> None:
        """Send further chunks of a version.

        Args:
            version: the version.
            available: how many of its chunks there are now.
        """
        with self._lock:
            version.available = available
            for worker_id in tuple(self._workers):
                self._continue(worker_id)

    def add_worker(self, worker_id: int, worker: Any = None) -> None:
        """Serve one more worker, which gets the newest version that went to all."""
        with self._lock:
            for lane in self._lanes:
                lane.add_worker(worker_id, worker)
            self._workers[worker_id] = None
            if self._newest is not None:
                delivery = Delivery(worker_id, self._newest.version, self._newest.nbytes)
                delivery.watch(partial(_report_late, self._notify))
                self._workers[worker_id] = _Progress(self._newest, delivery)
                self._continue(worker_id)

    def remove_worker(self, worker_id: int) -> None:
        """Stop serving a worker."""
        with self._lock:
            progress = self._workers.pop(worker_id)
            for lane in self._lanes:
                lane.remove_worker(worker_id)
        if progress is not None:
            progress.delivery.fail(WorkerError(worker_id, "was removed from the sender"))

    def close(self) -> None:
        """End the thread, and close the inner transports."""
        self._events.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(_PATIENCE)
        with self._lock:
            for lane in self._lanes:
                lane.close()
            progresses = list(self._workers.items())
            self._newest = None
            self._workers.clear()
        for worker_id, progress in progresses:
            if progress is not None:
                progress.delivery.fail(WorkerError(worker_id, "the sender was closed"))

    def _run(self) -> None:
        while (event := self._events.get()) is not None:
            if len(event) == 2:
                self._notify(*event)
                continue
            lane, delivery, error = event
            with self._lock:
                progress = self._workers.get(delivery.worker_id)
                if progress is not None:
                    index, sent = progress.sent.get(lane, (0, None))
                    if sent is delivery:
                        try:
                            self._act(progress, lane, index, delivery, error)
                        except Exception as failure:
                            _log.exception("worker %d is sent no more", delivery.worker_id)
                            message = f"could not be sent the next chunk: {failure!r}"
                            progress.delivery.fail(WorkerError(delivery.worker_id, message))

    def _act(
        self,
        progress: _Progress,
        lane: int,
        index: int,
        sent: Delivery,
        error: WorkerError | None,
    ) -> None:
        """Act on an outcome of a chunk, perhaps one that comes after another outcome."""
        answer = sent.latest
        if answer is not None and answer.request == AGAIN:
            # Another receiver has come in the worker's place, or it has seen a newer version first.
            progress.restarts += 1
            if progress.restarts > _MOST_RESTARTS:
                progress.index = progress.version.count
                progress.delivery.fail(_refused_all(progress))
                return
            progress.index = 0
            progress.busy.clear()
        elif error is not None and sent.error is None:
            # The worker left after its answer. The transport has reported that by a notice, and
            # another receiver may have the worker's place by now.
            return
        elif error is not None and (answer is None or answer.error is None):
            progress.delivery.fail(error)
        elif index == progress.version.count - 1 or error is not None:
            if answer is not None:
                answer = replace(answer, version=progress.version.version)
            progress.delivery.acknowledge(answer)
        else:
            progress.busy.discard(lane)
        self._continue(sent.worker_id)

    def _continue(self, worker_id: int) -> None:
        """Send a worker the next chunks that are there, one by each transport that is free."""
        progress = self._workers[worker_id]
        while progress is not None and progress.index < progress.version.available:
            lane = progress.index % LANES
            if lane in progress.busy:
                return
            self._number += 1
            payload = progress.version.payload(progress.index, self._number)
            try:
                sent = self._lanes[lane].send(payload, (worker_id,))[worker_id]
            except Exception as error:
                message = f"version {progress.version.version} could not be sent: {error!r}"
                progress.delivery.fail(WorkerError(worker_id, message))
                return
            progress.sent[lane] = progress.index, sent
            progress.busy.add(lane)
            progress.index += 1
            sent.watch(partial(_put, self._events, lane))

    def _hear(self, worker_id: int, notice: Notice) -> None:
        # An acknowledgement is about a chunk. The sender learns others after the answers before.
        if notice.kind != "acknowledged":
            self._events.put((worker_id, notice))


def _refused_all(progress: _Progress) -> WorkerError:
    message = (
        f"asked {progress.restarts} times for version {progress.version.version} from its first "
        "chunk; does another receiver use the same address?"
    )
    return WorkerError(progress.delivery.worker_id, message)


def _put(
    events: queue.SimpleQueue[_Event | None],
    lane: int,
    delivery: Delivery,
    error: WorkerError | None,
) -> None:
    events.put((lane, delivery, error))


def _report_late(notify: Any, delivery: Delivery, error: WorkerError | None) -> None:
    """Report a version that a worker got when it was added."""
    if error is None:
        notify(delivery.worker_id, Notice("acknowledged", version=delivery.version))
