"""The function `deliver`, which a sender runs in an actor to update a model there."""

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
    """Makes the model that an actor's method returns available under a path."""

    def __init__(self, instance: Any, method: str) -> None:
        self._get: Callable[[], Any] = getattr(instance, method)

    @property
    def model(self) -> Any:
        """The current result of the method."""
        return self._get()


class ActorReceiver(CalledReceiver):
    """The receiver for one model of an actor. The place in its requests is ``model_getter``."""

    _layout: Layout | None = None
    _token: list[Any] | None = None

    def find_model(self, request: DeliveryRequest, context: Any) -> tuple[Any, Any]:
        """Return the model's path, and the object that has it: the actor's instance or a getter."""
        if request.place is None:
            return super().find_model(request, context)
        return "model", _getter(context, request.place)

    def joined(self, address: Address) -> Any:
        """Return a token of this process."""
        self._token = liveness.make_token(address.endpoint)
        return self._token

    def close(self) -> None:
        """Close the receiver, and release its token."""
        super().close()
        if self._token is not None:
            liveness.release(self._token)
        self._token = None

    def unpack(self, request: DeliveryRequest, content: Any) -> Payload:
        """Return the payload from the published data."""
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


# One per process, since a process hosts one actor; several threads may call.
_receivers = CalledReceivers(ActorReceiver)


def deliver(instance: Any, request: DeliveryRequest, *content: Any) -> DeliveryOutcome:
    """Commit a version to a model of this actor.

    Args:
        instance: the actor's instance, given by Ray.
        request: the request of the sender.
        content: the digest of the version's layout, and the published data.
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
