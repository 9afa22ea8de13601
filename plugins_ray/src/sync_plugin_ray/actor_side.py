"""The function that a sender runs in an actor, which hands a version to the receiver there."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from sync_core import Address, Layout, Payload, SyncError
from sync_plugin_ray import liveness
from sync_plugin_ray.store import read
from sync_plugin_std.calls import (
    CalledReceiver,
    CalledReceivers,
    DeliveryOutcome,
    DeliveryRequest,
)


class ModelGetter:
    """Lets a model that an actor has behind a method be found at a path, like any other."""

    def __init__(self, instance: Any, method: str) -> None:
        self._get: Callable[[], Any] = getattr(instance, method)

    @property
    def model(self) -> Any:
        """Return what the method returns now."""
        return self._get()


class ActorReceiver(CalledReceiver):
    """The receiver for one model of the actor; ``model_getter`` is the place in its requests."""

    _layout: Layout | None = None
    _token: list[Any] | None = None

    def find_model(self, request: DeliveryRequest, context: Any) -> tuple[Any, Any]:
        """Return the path of the model, and the actor's instance or what gets the model."""
        if request.place is None:
            return super().find_model(request, context)
        return "model", _getter(context, request.place)

    def joined(self, address: Address) -> Any:
        """Return a token of this process."""
        self._token = liveness.make_token(address.endpoint)
        return self._token

    def close(self) -> None:
        """Close the receiver, and end the use of its token."""
        super().close()
        if self._token is not None:
            liveness.release(self._token)
        self._token = None

    def unpack(self, request: DeliveryRequest, content: Any) -> Payload:
        """Return the payload in what the sender has published."""
        digest, *data = content
        payload = Payload.unpack(
            read(data),
            request.version,
            digest=digest,
            known=self._layout,
            since=time.perf_counter(),
        )
        self._layout = payload.layout
        return payload


# A process hosts one actor, whose calls may come from several threads.
_receivers = CalledReceivers(ActorReceiver)


def deliver(instance: Any, request: DeliveryRequest, *content: Any) -> DeliveryOutcome:
    """Commit a version to a model of the actor.

    Args:
        instance: the actor's instance, given by Ray.
        request: what to do.
        content: the digest of the version's layout, and what the sender has published.
    """
    where = f"in its actor, a {type(instance).__name__}"
    return _receivers.deliver(request, content, context=instance, where=where)


def _getter(instance: Any, method: str) -> ModelGetter:
    try:
        return ModelGetter(instance, method)
    except AttributeError as error:
        raise SyncError(
            f"the actor, a {type(instance).__name__}, has no method {method!r}; "
            "give model_getter= the name of one that returns the model"
        ) from error
