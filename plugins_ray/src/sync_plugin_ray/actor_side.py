"""The functions that a sender runs in an actor, which hand a version to the receiver there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from sync_core import Address, Answer, Layout, Payload, Receiver, ReceiverTransport, SyncError
from sync_plugin_ray.store import read


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorRequest:
    """A sender's request to an actor.

    Args:
        token: the sender's secret.
        model_id: where the model is.
        models: where several models are, which travel as one; none for a single model.
        model_getter: the method that returns it, if that is how it is found.
        version: the version.
        digest: the digest of its layout.
        address: what a receiver is made from; None when one was made before.
    """

    token: str = field(repr=False)
    model_id: str
    models: tuple[str, ...]
    model_getter: str | None
    version: int
    digest: str
    address: Address | None

    @property
    def place(self) -> str:
        """Return what tells these weights from others of the actor."""
        return " and ".join(self.models) or self.model_id


@dataclass(frozen=True, slots=True)
class ActorOutcome:
    """The outcome of a version in an actor.

    Args:
        outcome: ``"unknown"`` when the actor has no receiver for this sender, and was not given
            the address to make one.
        answer: what the actor's receiver answered, as `Answer.to_message` gives it.
    """

    outcome: Literal["answered", "unknown"]
    answer: dict[str, Any] | None = None

    @property
    def committed(self) -> bool:
        """Return whether the actor has the version."""
        return self.answer is not None and self.answer.get("error") is None


class ActorTransport(ReceiverTransport):
    """A transport that is handed its payloads in the process itself."""

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
        """Nothing is held."""
        self._payload = None


class ModelGetter:
    """Lets a model that an actor has behind a method be found at a path, like any other."""

    def __init__(self, instance: Any, method: str) -> None:
        self._get: Callable[[], Any] = getattr(instance, method)

    @property
    def model(self) -> Any:
        """Return what the method returns now."""
        return self._get()


@dataclass
class _ActorState:
    """The receivers for one model of this actor: at most one, and whose place it took."""

    token: str = ""
    receiver: Receiver | None = None
    inbox: ActorTransport = field(default_factory=ActorTransport)
    layout: Layout | None = None
    replaced: set[str] = field(default_factory=set)

    def begin(self, instance: Any, order: ActorRequest) -> None:
        self.close()
        if self.token and self.token != order.token:
            self.replaced.add(self.token)
        context, model = instance, {name: name for name in order.models} or order.model_id
        if order.model_getter is not None:
            context, model = _getter(instance, order.model_getter), "model"
        self.inbox = ActorTransport()
        assert order.address is not None
        address = replace(order.address, endpoint=self.inbox)
        self.receiver = Receiver(address, model, context=context)
        self.token = order.token

    def commit(self, order: ActorRequest, data: Sequence[Any]) -> None:
        assert self.receiver is not None
        if self.receiver.version >= order.version:
            return
        payload = Payload.unpack(
            read(data),
            order.version,
            digest=order.digest,
            known=self.layout,
            since=time.perf_counter(),
        )
        self.layout = payload.layout
        self.inbox.put(payload)
        self.receiver.receive(0)

    def answer(self, order: ActorRequest) -> Answer | None:
        """Return what the receiver has answered about this order, if it came so far."""
        answer = self.inbox.answer
        return answer if answer is not None and answer.version == order.version else None

    def close(self) -> None:
        if self.receiver is not None:
            self.receiver.close()
        self.receiver = None


# A process hosts one actor, whose calls may come from several threads.
_kept: dict[str, _ActorState] = {}
_lock = threading.Lock()


def deliver(instance: Any, order: ActorRequest, *data: Any) -> ActorOutcome:
    """Commit a version to a model of the actor.

    Args:
        instance: the actor's instance, given by Ray.
        order: what to do.
        data: what the sender has published.
    """
    with _lock:
        kept = _kept.setdefault(order.place, _ActorState())
        if order.token in kept.replaced:
            text = f"another sender has taken over {order.place!r} of this actor; close one of them"
            return _answered(Answer(version=order.version, error=text))
        try:
            if kept.token != order.token or kept.receiver is None:
                if order.address is None:
                    return ActorOutcome("unknown")
                kept.begin(instance, order)
            kept.commit(order, data)
        except Exception as error:
            answer = kept.answer(order) or Answer.refusal(order.version, error)
            where = f"in its actor, a {type(instance).__name__}: {answer.error}"
            return _answered(replace(answer, error=where))
        return _answered(kept.answer(order) or Answer(version=order.version))


def _answered(answer: Answer) -> ActorOutcome:
    return ActorOutcome("answered", answer.to_message())


def forget(instance: Any, order: ActorRequest) -> None:
    """Release what the sender has sent; the model keeps it, in its own memory."""
    del instance
    with _lock:
        kept = _kept.get(order.place)
        if kept is not None and kept.token == order.token:
            kept.close()
            del _kept[order.place]


def _getter(instance: Any, method: str) -> ModelGetter:
    try:
        return ModelGetter(instance, method)
    except AttributeError as error:
        raise SyncError(
            f"the actor, a {type(instance).__name__}, has no method {method!r}; "
            "give model_getter= the name of one that returns the model"
        ) from error
