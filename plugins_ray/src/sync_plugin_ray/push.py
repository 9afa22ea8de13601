"""Sends versions by calling into actors, through Ray's own way to run a function on an actor."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.actor import ActorHandle

from sync_core import (
    Address,
    CapacityError,
    Delivery,
    OptionError,
    Payload,
    SenderTransport,
    TransportContext,
    WorkerError,
    WorkerLostError,
)
from sync_core.transports import Notice
from sync_plugin_ray.actor_side import ActorOutcome, ActorRequest, deliver, forget
from sync_plugin_ray.cluster import Cluster
from sync_plugin_ray.pull import PullSender
from sync_plugin_ray.store import LOST, ObjectStore, Publication


@dataclass(eq=False)
class _CalledActor:
    """An actor, and what it is doing for us.

    Args:
        worker_id: its id.
        actor: its handle.
        wanted: the newest version meant for it.
        delivery: the delivery of that version.
        busy: whether a call of ours is under way.
        given: what that call was given.
        introduced: whether it has a receiver for this sender.
    """

    worker_id: int
    actor: ActorHandle[Any]
    wanted: Publication | None = None
    delivery: Delivery | None = None
    busy: bool = False
    given: list[Any] = field(default_factory=list)
    introduced: bool = False


# How long closing waits for the thread that does it, in seconds.
_PATIENCE = 5.0

_Event = tuple[_CalledActor, Publication, "Future[ActorOutcome]"] | None


class PushSender(SenderTransport):
    """Updates a model in each of some actors.

    Every actor has at most one call of ours in progress. A later version replaces one that waits,
    so an actor that is stuck keeps one old version alive and no more. An actor that Ray restarts
    is given the version again.

    Args:
        context: what the sender gave to `create_transport`.
        cluster: left at the end.
        store: where versions are put.
        model_getter: see `RayOptions`.
    """

    def __init__(
        self,
        context: TransportContext,
        cluster: Cluster,
        store: ObjectStore,
        model_getter: str | None,
    ) -> None:
        actors = [_actor_of(worker) for worker in context.workers]
        self._context = context
        self._cluster = cluster
        self._store = store
        self._model_getter = model_getter
        self._mailbox: PullSender | None = None
        self._newest_for_all: Publication | None = None
        self._lock = threading.Lock()
        self._workers = {
            worker_id: _CalledActor(worker_id, actor)
            for worker_id, actor in zip(context.worker_ids, actors, strict=True)
        }
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="sync-ray-sender", daemon=True)
        self._thread.start()

    def address(self, worker_id: int) -> Any:
        """For one more reader of what this worker is sent: the mailbox."""
        self._cluster.check()
        if self._mailbox is None:
            context = replace(self._context, worker_ids=tuple(self._workers))
            self._mailbox = PullSender(context, self._cluster, self._store, owns_cluster=False)
            with self._lock:
                if self._newest_for_all is not None:
                    self._mailbox.publish(self._newest_for_all, list(self._workers))
                for worker in self._workers.values():
                    if worker.wanted not in (None, self._newest_for_all):
                        self._mailbox.publish(worker.wanted, [worker.worker_id])
        return self._mailbox.address(worker_id)

    def send(self, payload: Payload, worker_ids: Sequence[int]) -> dict[int, Delivery]:
        """Put the payload once, and call every actor that is not busy."""
        self._cluster.check()
        publication = self._store.put(payload)
        deliveries = {i: Delivery(i, payload.version, payload.nbytes) for i in worker_ids}
        with self._lock:
            if len(deliveries) == len(self._workers):
                self._newest_for_all = publication
            for worker_id, delivery in deliveries.items():
                worker = self._workers[worker_id]
                worker.wanted, worker.delivery = publication, delivery
                if not worker.busy:
                    self._call(worker)
        if self._mailbox is not None:
            self._mailbox.publish(publication, worker_ids)
        return deliveries

    def add_worker(self, worker_id: int, worker: Any = None) -> None:
        """Serve one more actor, and give it the newest version that went to all."""
        actor = _actor_of(worker)
        self._cluster.check()
        with self._lock:
            added = self._workers[worker_id] = _CalledActor(
                worker_id, actor, wanted=self._newest_for_all
            )
            if added.wanted is not None:
                self._call(added)
        if self._mailbox is not None:
            self._mailbox.add_worker(worker_id)

    def remove_worker(self, worker_id: int) -> None:
        """Forget an actor, which keeps the weights that it has."""
        with self._lock:
            worker = self._workers.pop(worker_id)
            if worker.delivery is not None:
                worker.delivery.fail(WorkerError(worker_id, "was removed from the sender"))
            self._dismiss(worker)
        if self._mailbox is not None:
            self._mailbox.remove_worker(worker_id)

    def close(self) -> None:
        """Let the actors keep what they have, in their own memory."""
        # The garbage collector may call this in a thread of Ray's, which may not call Ray, or in
        # ours, which may have the lock; so only ours ends anything, and it is not waited for long.
        self._events.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(_PATIENCE)

    def _end(self) -> None:
        with self._lock:
            for worker in self._workers.values():
                if worker.delivery is not None:
                    error = WorkerError(worker.worker_id, "the sender was closed")
                    worker.delivery.fail(error)
                self._dismiss(worker)
            self._workers.clear()
            self._newest_for_all = None
        if self._mailbox is not None:
            self._mailbox.close()
        self._cluster.leave()

    def _dismiss(self, worker: _CalledActor) -> None:
        if not (worker.introduced or worker.busy) or not self._cluster.connected:
            return
        # An actor that takes no calls keeps what it has until another sender comes.
        with suppress(ray.exceptions.RayError):
            worker.actor.__ray_call__.remote(forget, self._order(0, "", None))

    def _call(self, worker: _CalledActor) -> None:
        publication = worker.wanted
        assert publication is not None
        assert self._context.make_address is not None
        address = None
        if not worker.introduced:
            address = self._context.make_address(worker_id=worker.worker_id, endpoint=None)
        order = self._order(publication.version, publication.digest, address)
        worker.busy, worker.given = True, publication.data
        try:
            call: Any = worker.actor.__ray_call__.remote(deliver, order, *publication.data)
        except Exception as error:
            # The actor takes no more calls (max_pending_calls), or the address does not pickle.
            refused: Future[ActorOutcome] = Future()
            refused.set_exception(error)
            self._events.put((worker, publication, refused))
            return
        # The callback runs in a thread of Ray's, where no new call may be made.
        call.future().add_done_callback(lambda future: self._returned(worker, publication, future))

    def _returned(
        self, worker: _CalledActor, publication: Publication, future: Future[ActorOutcome]
    ) -> None:
        # No receiver of a removed worker reads the event, which would hold the version.
        if self._workers.get(worker.worker_id) is worker:
            self._events.put((worker, publication, future))

    def _order(self, version: int, digest: str, address: Address | None) -> ActorRequest:
        return ActorRequest(
            token=self._context.token,
            model_id=self._context.model_id,
            models=self._context.models,
            model_getter=self._model_getter,
            version=version,
            digest=digest,
            address=address,
        )

    def _serve(self) -> None:
        while (event := self._events.get()) is not None:
            worker, publication, future = event
            with self._lock:
                worker.busy = False
                if self._workers.get(worker.worker_id) is not worker:
                    continue
                again = self._settle(worker, publication, future)
                if self._cluster.connected and (again or worker.wanted is not publication):
                    self._call(worker)
        self._end()

    def _settle(
        self, worker: _CalledActor, publication: Publication, future: Future[ActorOutcome]
    ) -> bool:
        """End the delivery that a call was for; True to make the call again instead."""
        answer = self._answer(worker, publication, future)
        worker.introduced = isinstance(answer, ActorOutcome) and answer.outcome != "unknown"
        if answer is None or (isinstance(answer, ActorOutcome) and answer.outcome == "unknown"):
            return True
        delivery = worker.delivery
        if delivery is None or delivery.version != publication.version:
            self._tell(worker.worker_id, publication.version, answer)
        elif isinstance(answer, WorkerError):
            delivery.fail(answer)
        else:
            delivery.settle(answer.answer)
        return False

    def _tell(self, worker_id: int, version: int, answer: ActorOutcome | WorkerError) -> None:
        """Report a version that is not waited for: an old one, or that of a late worker."""
        if isinstance(answer, WorkerLostError):
            self._context.notify(worker_id, Notice("lost", reason=answer.message))
        elif isinstance(answer, ActorOutcome) and answer.committed:
            self._context.notify(worker_id, Notice("acknowledged", version))

    def _answer(
        self, worker: _CalledActor, publication: Publication, future: Future[ActorOutcome]
    ) -> ActorOutcome | WorkerError | None:
        """Return the actor's answer, or how it ended; None to ask again."""
        try:
            return future.result()
        except ray.exceptions.ActorUnavailableError:
            # Ray restarts the actor, and holds the next call back until it is there again.
            return None
        except ray.exceptions.RayActorError as error:
            reason = str(error).strip().splitlines()[0]
            return WorkerLostError(worker.worker_id, f"the actor is gone: {reason}")
        except LOST as error:
            return _put_again(worker, publication, error)
        except Exception as error:
            return WorkerError(worker.worker_id, f"could not run the delivery: {error}")


def _put_again(
    worker: _CalledActor, publication: Publication, lost: Exception
) -> WorkerError | None:
    reason = lost
    try:
        if publication.put_again(worker.given):
            return None
    except CapacityError as error:
        reason = error
    return WorkerError(worker.worker_id, f"could not read the object store: {reason}")


def _actor_of(worker: Any) -> ActorHandle[Any]:
    """The actor, or the one that an object such as TorchRL's `RayTransform` holds."""
    actor = worker if isinstance(worker, ActorHandle) else getattr(worker, "_actor", None)
    if not isinstance(actor, ActorHandle):
        raise OptionError(
            f"{worker!r} is not a Ray actor; workers= takes handles, which Actor.remote() returns, "
            "or paths to them: Sender('ray', …, workers=['env.transform[0]'], context=trainer)"
        )
    return actor
