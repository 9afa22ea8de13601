"""The sender's side: one chunk after the other to each worker, in its own thread."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from sync_core import Answer, Delivery, Payload, SenderTransport, TransportContext, WorkerError
from sync_core.transports import Notice, Publication, Roster, unheard
from sync_plugin_scale.relays.version import LANES, ChunkedVersion, lane_context
from sync_plugin_scale.resending import AGAIN

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
        index: the chunk that it gets next.
        sent: for each transport, the chunk that it was given last, and its delivery: another
            receiver in the worker's place is given that one first, and asks for the others.
        busy: the transports whose chunk was not answered.
        restarts: how often the worker has asked for the version from its first chunk.
    """

    version: ChunkedVersion
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
        self._roster = Roster(context.worker_ids, self._report)
        self._progress: dict[int, _Progress | None] = dict.fromkeys(context.worker_ids)
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
        """Pack the version, and send its chunks; those of one that is streamed while it is made."""
        version = ChunkedVersion(payload.version, payload.nbytes, self._chunk_nbytes)
        try:
            for done in payload.pack_in_steps(version.block):
                if done < payload.nbytes:
                    self.send_ahead(version, done // self._chunk_nbytes, worker_ids)
            return self.send_packed(version, worker_ids)
        except BaseException:
            self._withdraw(version)
            raise

    def send_ahead(
        self, version: ChunkedVersion, available: int, worker_ids: Sequence[int]
    ) -> None:
        """Send the first chunks of a version that will be published.

        Args:
            version: the version.
            available: how many of its chunks there are now; not the last one.
            worker_ids: the workers for which it will be published.
        """
        if available > version.available:
            with self._lock:
                version.available = available
                for worker_id in worker_ids:
                    self._continue(worker_id, version)

    def send_packed(
        self, version: ChunkedVersion, worker_ids: Sequence[int]
    ) -> dict[int, Delivery]:
        """Owe these workers a version of which all chunks are there, and send the rest of them."""
        with self._lock:
            version.available = version.count
            publication = Publication(version.version, version.nbytes, version)
            deliveries = self._roster.publish(publication, worker_ids)
            for worker_id in worker_ids:
                progress = self._progress.get(worker_id)
                if progress is not None and any(sent.error for _, sent in progress.sent.values()):
                    # A chunk failed before there was a delivery to fail, so all are sent again.
                    self._progress[worker_id] = None
                self._send_owed(worker_id)
        return deliveries

    def _withdraw(self, version: ChunkedVersion) -> None:
        """Forget a version whose last chunk will not come, and send those before it again."""
        with self._lock:
            for worker_id, progress in self._progress.items():
                if progress is not None and progress.version is version:
                    # Also to a worker that has the one before: another receiver in its place would
                    # find chunks of the one that is forgotten, and wait for the others.
                    self._progress[worker_id] = None
                self._send_owed(worker_id)

    def add_worker(self, worker_id: int, worker: Any = None) -> None:
        """Serve one more worker, which gets the newest version that went to all."""
        with self._lock:
            for lane in self._lanes:
                lane.add_worker(worker_id, worker)
            self._progress[worker_id] = None
            self._roster.add(worker_id)
            self._send_owed(worker_id)

    def remove_worker(self, worker_id: int) -> None:
        """Stop serving a worker."""
        with self._lock:
            self._progress.pop(worker_id, None)
            for lane in self._lanes:
                lane.remove_worker(worker_id)
            self._roster.remove(worker_id)

    def close(self) -> None:
        """End the thread, and close the inner transports."""
        self._events.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(_PATIENCE)
        with self._lock:
            for lane in self._lanes:
                lane.close()
            self._progress.clear()
            self._roster.close()

    def _run(self) -> None:
        while (event := self._events.get()) is not None:
            if len(event) == 2:
                self._notify(*event)
                continue
            lane, delivery, error = event
            with self._lock:
                progress = self._progress.get(delivery.worker_id)
                if progress is not None:
                    index, sent = progress.sent.get(lane, (0, None))
                    if sent is delivery:
                        try:
                            self._act(progress, lane, index, delivery, error)
                        except Exception as failure:
                            _log.exception("worker %d is sent no more", delivery.worker_id)
                            message = f"could not be sent the next chunk: {failure!r}"
                            self._fail(delivery.worker_id, progress.version, message)

    def _act(
        self,
        progress: _Progress,
        lane: int,
        index: int,
        sent: Delivery,
        error: WorkerError | None,
    ) -> None:
        """Act on an outcome of a chunk, perhaps one that comes after another outcome."""
        answer, worker_id, version = sent.latest, sent.worker_id, progress.version
        if answer is not None and answer.request == AGAIN:
            # Another receiver has come in the worker's place, or it has seen a newer version first.
            progress.restarts += 1
            if progress.restarts > _MOST_RESTARTS:
                progress.index = version.count
                message = (
                    f"asked {progress.restarts} times for version {version.version} from its first "
                    "chunk; does another receiver use the same address?"
                )
                self._fail(worker_id, version, message)
                return
            progress.index = 0
            progress.busy.clear()
        elif error is not None and sent.error is None:
            # The worker left after its answer. The transport has reported that by a notice, and
            # another receiver may have the worker's place by now.
            return
        elif error is not None and (answer is None or answer.error is None):
            self._roster.failed(worker_id, None, version.version, error)
        elif index == version.count - 1 or error is not None:
            answer = replace(answer or Answer(version=0), version=version.version)
            self._roster.answered(worker_id, None, answer)
        else:
            progress.busy.discard(lane)
        self._continue(worker_id, version)

    def _send_owed(self, worker_id: int) -> None:
        """Send a worker the next chunks of the version that it is owed, if any."""
        owed = self._roster.wanted(worker_id)
        if owed is not None:
            self._continue(worker_id, owed.content)

    def _continue(self, worker_id: int, version: ChunkedVersion) -> None:
        """Send a worker the next chunks of a version, one by each transport that is free."""
        if worker_id not in self._progress:
            return
        progress = self._progress[worker_id]
        if progress is None or progress.version is not version:
            progress = self._progress[worker_id] = _Progress(version)
        while progress.index < version.available:
            lane = progress.index % LANES
            if lane in progress.busy:
                return
            self._number += 1
            payload = version.payload(progress.index, self._number)
            try:
                sent = self._lanes[lane].send(payload, (worker_id,))[worker_id]
            except Exception as error:
                message = f"version {version.version} could not be sent: {error!r}"
                self._fail(worker_id, version, message)
                return
            progress.sent[lane] = progress.index, sent
            progress.busy.add(lane)
            progress.index += 1
            sent.watch(partial(_put, self._events, lane))

    def _fail(self, worker_id: int, version: ChunkedVersion, message: str) -> None:
        self._roster.failed(worker_id, None, version.version, WorkerError(worker_id, message))

    def _hear(self, worker_id: int, notice: Notice) -> None:
        # An acknowledgement is about a chunk. The sender learns others after the answers before.
        if notice.kind != "acknowledged":
            self._events.put((worker_id, notice))

    def _report(self, worker_id: int, notice: Notice) -> None:
        # The inner transport reports each loss, also one for which the roster has no delivery.
        if notice.kind == "acknowledged":
            self._notify(worker_id, notice)


def _put(
    events: queue.SimpleQueue[_Event | None],
    lane: int,
    delivery: Delivery,
    error: WorkerError | None,
) -> None:
    events.put((lane, delivery, error))
