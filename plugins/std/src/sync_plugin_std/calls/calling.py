"""A sender's transport that calls into its workers."""

from __future__ import annotations

import logging
import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from sync_core import (
    Delivery,
    OptionError,
    ReceiverTransport,
    SenderTransport,
    WorkerError,
    WorkerLostError,
)
from sync_core.errors import AddressError
from sync_core.transports import Publication, Roster, uninterrupted

if TYPE_CHECKING:
    from sync_core import Address, Answer, Payload, TransportContext


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryRequest:
    """A sender's request to a worker that it calls; pickles.

    Args:
        token: the sender's secret.
        model_id: where the model is.
        models: where several models are, which travel as one; none for a single model.
        place: what else the worker needs to find the model: `CallingTransport.place_of`.
        version: the version; 0 to release the sender.
        timeout: how long the delivery may take, in seconds.
        address: what a receiver is made from; None when one was made before.
    """

    token: str = field(repr=False)
    model_id: str
    models: tuple[str, ...] = ()
    place: Any = None
    version: int = 0
    timeout: float = 60.0
    address: Address | None = None


@dataclass(frozen=True, slots=True)
class DeliveryOutcome:
    """The outcome of a call; pickles.

    Args:
        answer: what the receiver answered, as `Answer.to_message` gives it; None where the sender
            has it by other means, or where it is not known.
        known: whether the worker has a receiver for this sender. If not, and the request had no
            address to make one, the sender calls again with one.
        joined: with the first outcome of a receiver, which has nothing of this sender yet: True, or
            an argument for `CallingTransport.joined`; None with its later ones.
    """

    answer: Mapping[str, Any] | None = None
    known: bool = True
    joined: Any = None


class HandedTransport(ReceiverTransport):
    """A receiver's transport that is handed its payloads in its own process.

    Example:
        >>> import torch
        >>> from sync_core import Layout, Payload
        >>> transport = HandedTransport()
        >>> transport.put(Payload(1, Layout.of({"w": torch.ones(2)}), (torch.ones(2),)))
        >>> transport.receive(timeout=0).version
        1
    """

    def __init__(self) -> None:
        self.answer: Answer | None = None
        self._payload: Payload | None = None

    def put(self, payload: Payload) -> None:
        """Let the next `receive` find this."""
        self._payload, self.answer = payload, None

    def receive(self, timeout: float) -> Payload | None:
        """Return what was handed in."""
        del timeout
        payload, self._payload = self._payload, None
        return payload

    def acknowledge(self, answer: Answer) -> None:
        """Keep the answer for the call that brought the payload."""
        self.answer = answer

    def close(self) -> None:
        """Keep what was handed in: a receiver that is given another model connects once more."""


@dataclass(eq=False)
class CalledWorker:
    """A worker, and the call to it.

    Args:
        worker_id: its id.
        handle: what it is called by.
        called: the version of its last call; None where that call must be repeated.
        busy: whether that call is in progress.
        given: for the transport: what the call in progress was given.
        introduced: whether the worker has a receiver for this sender.
        addressed: whether the call in progress brought an address to make one from.
    """

    worker_id: int
    handle: Any
    called: Publication | None = None
    busy: bool = False
    given: Any = None
    introduced: bool = False
    addressed: bool = False


_log = logging.getLogger("sync_core")
# How long `close` waits for the thread that does it, in seconds.
_PATIENCE = 5.0

_Event = tuple[CalledWorker, Callable[[CalledWorker], None]] | None


class CallingTransport(SenderTransport):
    """Calls workers, so that each commits the newest version; workers need no loop of their own.

    Every worker has at most one call in progress. A later version replaces one that waits, so a
    worker that is stuck keeps one old version alive and no more. A call runs
    `CalledReceivers.deliver` in the worker. Results are handled by one thread, which makes the next
    calls, so libraries may end futures in any thread of theirs.

    Args:
        context: the argument of `create_transport`.
        handles: what workers are called by, in the order of ``context.worker_ids``.
        roster: decides what workers are owed; None for one of this transport's own.

    Raises:
        OptionError: there are fewer or more handles than workers.
    """

    def __init__(
        self, context: TransportContext, handles: Sequence[Any], roster: Roster | None = None
    ) -> None:
        if len(handles) != len(context.worker_ids):
            raise OptionError(
                f"scheme {context.scheme!r} calls its workers and needs a handle of each, got "
                f"{len(handles)} for {len(context.worker_ids)}; type: Sender(…, workers=[…])"
            )
        self.context = context
        self.lock = threading.Lock()
        self.workers: dict[int, CalledWorker] = {
            worker_id: CalledWorker(worker_id, handle)
            for worker_id, handle in zip(context.worker_ids, handles, strict=True)
        }
        self.roster = roster or Roster(context.worker_ids, context.notify)
        self._events: SimpleQueue[_Event] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="sync-calls", daemon=True)
        self._thread.start()

    @abstractmethod
    def call(
        self, worker: CalledWorker, request: DeliveryRequest, content: Any
    ) -> Future[DeliveryOutcome]:
        """Call `CalledReceivers.deliver` in a worker, and do not wait for it.

        Args:
            worker: the worker; an exception that is raised here is one of its call.
            request: pass it on.
            content: what `publish` returned; None with a request that only releases the sender.
        """

    def publish(self, payload: Payload) -> Any:
        """Return what calls are given of a version: its bytes, as `Payload.to_bytes` makes them."""
        return payload.to_bytes()

    def explain(
        self, worker: CalledWorker, content: Any, error: Exception
    ) -> DeliveryOutcome | WorkerError:
        """Return what the exception of a call means.

        Returns:
            An error for the report; ``DeliveryOutcome(known=False)`` to call again; or
            ``DeliveryOutcome()`` to leave it to the deadline of the send.
        """
        del content
        return WorkerError(worker.worker_id, f"could not run the delivery: {error}")

    def place_of(self, worker: CalledWorker) -> Any:
        """Return what else the worker needs to find its model; None by default."""
        del worker

    def endpoint(self, worker_id: int) -> Any:
        """Return the endpoint in the addresses that receivers are made from; None by default."""
        del worker_id

    def joined(self, worker: CalledWorker, given: Any) -> None:
        """With the lock: notify the sender that a worker has a new receiver, which has no version.

        Override it where the receiver's own connection does that.

        Args:
            worker: the worker, whose process may be another one than before.
            given: what `CalledReceiver.joined` returned there.
        """
        del given
        self.roster.connected(worker.worker_id, worker)

    def lose(self, worker_id: int, reason: str) -> None:
        """Note that a worker's process has ended, and call the one that replaces it.

        May be called from any thread.

        Args:
            worker_id: the worker; it need not be served any more.
            reason: a sentence without its subject.
        """
        worker = self.workers.get(worker_id)
        if worker is not None:
            lost = WorkerLostError(worker_id, reason)
            self._events.put((worker, partial(self._settle, outcome=lost)))

    def closed(self) -> None:
        """Release what the transport has; called once, when all workers are dismissed."""

    def address(self, worker_id: int) -> Any:
        """There is none: the worker is called."""
        raise AddressError(
            f"worker {worker_id} is called by its sender, and needs no address; for receivers that "
            "connect by themselves, make a Sender without workers="
        )

    def send(self, payload: Payload, worker_ids: Sequence[int]) -> dict[int, Delivery]:
        """Publish the version once, and call every worker that is not busy."""
        return self.send_published(payload, self.publish(payload), worker_ids)

    def send_published(
        self, payload: Payload, content: Any, worker_ids: Sequence[int]
    ) -> dict[int, Delivery]:
        """Call workers with a version that was published, now or when they are not busy."""
        # A call shows whether a worker that was lost is there again.
        self.roster.expect(worker_ids)
        publication = Publication(payload.version, payload.nbytes, content)
        deliveries = self.roster.publish(publication, worker_ids)
        self.call_idle(worker_ids)
        return deliveries

    def call_idle(self, worker_ids: Sequence[int]) -> None:
        """Call those of some workers that are not busy, with what each is owed."""
        with self.lock:
            for worker_id in worker_ids:
                if (worker := self.workers.get(worker_id)) is not None:
                    self._call(worker)

    def add_worker(self, worker_id: int, worker: Any = None) -> None:
        """Serve one more worker, and give it the newest version that went to all.

        Args:
            worker_id: its id.
            worker: its handle.
        """
        with self.lock:
            self.workers[worker_id] = added = CalledWorker(worker_id, worker)
            self.roster.add(worker_id)
            self._call(added)

    def remove_worker(self, worker_id: int) -> None:
        """Forget a worker, which keeps the weights that it has."""
        with self.lock:
            worker = self.workers.pop(worker_id, None)
            self.roster.remove(worker_id)
            if worker is not None:
                self._release(worker)

    def close(self) -> None:
        """Let the workers keep what they have, in their own memory."""
        # The garbage collector may call this in a thread of the library's, which may make no call,
        # or in ours, which may have the lock; so only ours ends anything.
        self._events.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(_PATIENCE)

    def _serve(self) -> None:
        while (event := self._events.get()) is not None:
            try:
                worker, handle = event
                # Removed workers must not delay the others, not even for the lock.
                if self.workers.get(worker.worker_id) is worker:
                    handle(worker)
            except Exception:
                # The thread lives for the other workers.
                _log.exception("the result of a call into worker %d is lost", event[0].worker_id)
            del event, worker, handle  # not to be kept until the next one
        with self.lock:
            workers = list(self.workers.values())
            self.workers.clear()
            self.roster.close()
            # Events that have come since then would keep a version alive.
            self._events = SimpleQueue()
            for worker in workers:
                self._release(worker)
        self.closed()

    def _take_result(
        self, publication: Publication, future: Future[DeliveryOutcome], worker: CalledWorker
    ) -> None:
        # The lock is not held, as `explain` may take long.
        self._settle(worker, self._outcome(worker, publication.content, future), publication)

    def _settle(
        self,
        worker: CalledWorker,
        outcome: DeliveryOutcome | WorkerError,
        publication: Publication | None = None,
    ) -> None:
        """Act on the outcome of a call; without a publication, on the end of the process."""
        worker_id, version = worker.worker_id, 0 if publication is None else publication.version
        with self.lock:
            if self.workers.get(worker_id) is not worker:
                return
            worker.introduced = isinstance(outcome, DeliveryOutcome) and outcome.known
            if publication is None:
                # The result of a call in progress shows whether the worker lives.
                again = not worker.busy
            else:
                worker.busy = False
                again = isinstance(outcome, DeliveryOutcome) and not outcome.known
            if again:
                worker.called = None
            try:
                if isinstance(outcome, WorkerError):
                    self.roster.failed(worker_id, None, version, outcome)
                    return
                if outcome.joined is not None:
                    self.joined(worker, outcome.joined)
                if outcome.answer is not None:
                    self.roster.answered(worker_id, None, outcome.answer)
            except Exception as error:
                failure = WorkerError(worker_id, f"the result of its call is lost: {error!r}")
                self.roster.failed(worker_id, None, version, failure)
                raise
            finally:
                self._call(worker)

    def _call(self, worker: CalledWorker) -> None:
        """Call a worker that is not busy, if it is owed a version that it was not called about."""
        publication = self.roster.wanted(worker.worker_id)
        if publication in (None, worker.called) or worker.busy:
            return
        # Ctrl-C in between would leave the worker busy for ever.
        with uninterrupted():
            worker.busy, worker.called = True, publication
            try:
                request = self._request(worker, publication.version)
                worker.addressed = request.address is not None
                future = self.call(worker, request, publication.content)
            except Exception as error:
                future = Future()
                future.set_exception(error)
            future.add_done_callback(partial(self._returned, worker, publication))

    def _returned(
        self, worker: CalledWorker, publication: Publication, future: Future[DeliveryOutcome]
    ) -> None:
        # No receiver of a removed worker reads the event, which would hold the version.
        if self.workers.get(worker.worker_id) is worker:
            self._events.put((worker, partial(self._take_result, publication, future)))

    def _outcome(
        self, worker: CalledWorker, content: Any, future: Future[DeliveryOutcome]
    ) -> DeliveryOutcome | WorkerError:
        try:
            outcome = future.result()
            if not isinstance(outcome, DeliveryOutcome):
                wrong = f"its call returned an object of type {type(outcome).__name__!r}"
            elif not outcome.known and worker.addressed:
                wrong = "it was given an address, and has no receiver"
            else:
                return outcome
            return WorkerLostError(worker.worker_id, f"does not answer as agreed: {wrong}")
        except Exception as error:
            failure = error
        try:
            return self.explain(worker, content, failure)
        except Exception as error:
            message = f"could not run the delivery: {failure}; then explain raised {error!r}"
            return WorkerError(worker.worker_id, message)

    def _release(self, worker: CalledWorker) -> None:
        if worker.introduced or worker.busy:
            worker.introduced = True
            # A worker that takes no calls keeps what it has until another sender comes.
            with suppress(Exception):
                self.call(worker, self._request(worker, 0), None)

    def _request(self, worker: CalledWorker, version: int) -> DeliveryRequest:
        address = None
        if not worker.introduced:
            assert self.context.make_address is not None
            address = self.context.make_address(
                worker_id=worker.worker_id, endpoint=self.endpoint(worker.worker_id)
            )
        return DeliveryRequest(
            token=self.context.token,
            model_id=self.context.model_id,
            models=self.context.models,
            place=self.place_of(worker),
            version=version,
            timeout=self.context.timeout,
            address=address,
        )
