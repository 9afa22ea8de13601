"""Send versions by running a function in actors."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import ray
from ray.actor import ActorHandle

from sync_core import (
    Delivery,
    OptionError,
    Payload,
    TransportContext,
    WorkerError,
    WorkerLostError,
)
from sync_core.transports import Publication
from sync_plugin_ray import liveness
from sync_plugin_ray.actor_side import deliver
from sync_plugin_ray.cluster import Cluster
from sync_plugin_ray.pull import PullSender
from sync_plugin_ray.store import LOST, ObjectStore
from sync_plugin_std.calls import (
    CalledWorker,
    CallingTransport,
    DeliveryOutcome,
    DeliveryRequest,
)

_NOT_STARTED = (
    "its actor has answered no call of this sender yet: Ray has no place for it, or its "
    "constructor or another call still runs; `ray status` shows what Ray waits for"
)


class PushSender(CallingTransport):
    """Updates a model in each of several actors.

    When an actor's process ends, the worker is lost. If Ray restarts the actor, it gets the newest
    version as soon as it takes calls.

    Args:
        context: the sender's context for `create_transport`.
        cluster: the cluster, left by `close`.
        store: the store for versions.
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
        self._cluster = cluster
        self._store = store
        self._model_getter = model_getter
        self._mailbox: PullSender | None = None
        self._liveness = liveness.start(liveness.LivenessActor)
        # By worker: the token of its process.
        self._tokens: dict[int, Any] = {}
        super().__init__(context, actors)

    def address(self, worker_id: int) -> Any:
        """Return the mailbox, for another reader of this worker's versions."""
        self._cluster.check()
        if self._mailbox is None:
            context = replace(self.context, worker_ids=tuple(self.workers))
            self._mailbox = PullSender(context, self._cluster, self._store, owns_cluster=False)
            with self.lock:
                owed = self.roster.all_owed()
                if (newest := owed.pop(None, None)) is not None:
                    self._mailbox.repeat(newest, list(self.workers))
                for each, wanted in owed.items():
                    if each is not None and wanted is not newest:
                        self._mailbox.repeat(wanted, [each])
        return self._mailbox.address(worker_id)

    def send(self, payload: Payload, worker_ids: Sequence[int]) -> dict[int, Delivery]:
        """Put the payload once, and call each actor that is not busy."""
        self._cluster.check()
        published = self._store.put(payload)
        deliveries = self.send_published(payload, published, worker_ids)
        for worker_id, delivery in deliveries.items():
            worker = self.workers.get(worker_id)
            if worker is not None and not worker.introduced:
                delivery.remark = _NOT_STARTED
        if self._mailbox is not None:
            publication = Publication(payload.version, payload.nbytes, published)
            self._mailbox.repeat(publication, worker_ids)
        return deliveries

    def add_worker(self, worker_id: int, worker: Any = None) -> None:
        """Add an actor, and send it the newest version that went to all workers."""
        actor = _actor_of(worker)
        self._cluster.check()
        super().add_worker(worker_id, actor)
        if self._mailbox is not None:
            self._mailbox.add_worker(worker_id)

    def remove_worker(self, worker_id: int) -> None:
        """Remove an actor, which keeps its weights."""
        super().remove_worker(worker_id)
        self._tokens.pop(worker_id, None)
        if self._mailbox is not None:
            self._mailbox.remove_worker(worker_id)

    def call(
        self, worker: CalledWorker, request: DeliveryRequest, content: Any
    ) -> Future[DeliveryOutcome]:
        """Call the actor, which may refuse more calls (max_pending_calls)."""
        self._cluster.check()  # a call would start another Ray
        published = [] if content is None else [content.digest, *content.data]
        worker.given = published[1:]
        call: Any = worker.handle.__ray_call__.remote(deliver, request, *published)
        future: Future[DeliveryOutcome] = call.future()
        return future

    def endpoint(self, worker_id: int) -> Any:
        """Return the actor from which receivers make the tokens of their processes."""
        del worker_id
        return self._liveness

    def joined(self, worker: CalledWorker, given: Any) -> None:
        """Watch the process of a new receiver."""
        super().joined(worker, given)
        worker_id = worker.worker_id
        self._tokens[worker_id] = given

        def ended() -> None:
            # The actor may run in another process already.
            if self._tokens.get(worker_id) is given:
                self.lose(worker_id, "the process of its actor has ended")

        liveness.on_end(given, ended)

    def place_of(self, worker: CalledWorker) -> str | None:
        """Return the name of the method that returns the model, if any."""
        del worker
        return self._model_getter

    def explain(
        self, worker: CalledWorker, content: Any, error: Exception
    ) -> DeliveryOutcome | WorkerError:
        """Return the result of a failed call; retry if the actor restarts or an object is lost."""
        if isinstance(error, ray.exceptions.ActorUnavailableError):
            # Ray restarts the actor, and delays the next call until the actor is ready.
            return DeliveryOutcome(known=False)
        if isinstance(error, ray.exceptions.RayActorError):
            reason = str(error).strip().splitlines()[0]
            return WorkerLostError(worker.worker_id, f"the actor is gone: {reason}")
        if isinstance(error, LOST):
            try:
                if content.put_again(worker.given):
                    return DeliveryOutcome(known=False)
            except Exception as refused:
                error = refused
            return WorkerError(worker.worker_id, f"could not read the object store: {error}")
        return super().explain(worker, content, error)

    def closed(self) -> None:
        """Leave the cluster."""
        if self._mailbox is not None:
            self._mailbox.close()
        self._tokens.clear()
        if self._cluster.connected:
            ray.kill(self._liveness)
        self._cluster.leave()


def _actor_of(worker: Any) -> ActorHandle[Any]:
    """Return the actor, or the actor held by an object such as TorchRL's `RayTransform`."""
    if type(worker).__module__.startswith("ray.util.client"):
        raise OptionError(
            "workers= has a handle of Ray Client (ray://…), by which no actor can be given "
            "weights; start the trainer in the cluster, such as with `ray job submit`, or leave "
            "workers= out and make a Receiver(sender.address(i), …) in each actor"
        )
    actor = worker if isinstance(worker, ActorHandle) else getattr(worker, "_actor", None)
    if not isinstance(actor, ActorHandle):
        raise OptionError(
            f"{worker!r} is not a Ray actor; workers= takes handles, which Actor.remote() returns, "
            "or paths to them: Sender('ray', …, workers=['env.transform[0]'], context=trainer)"
        )
    return actor
