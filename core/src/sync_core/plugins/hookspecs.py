"""The four hooks, and the markers that plugins use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from sync_core.plugins.contexts import ApplyContext, SendContext, SkipContext, TransportContext
    from sync_core.transports.transport import ReceiverTransport, SenderTransport
    from sync_core.weights.update import Update

PROJECT = "sync"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec(firstresult=True)
def create_transport(context: TransportContext) -> SenderTransport | ReceiverTransport | None:
    """Make one side of a transport; backends only.

    Args:
        context: says by ``context.side`` which side is wanted, and with what options.

    Returns:
        A `SenderTransport` or a `ReceiverTransport`, as asked for.
    """


@hookspec(firstresult=True)
def prepare_weights(update: Update, context: SendContext) -> Update | None:
    """Give the update to send.

    Its tensors are the trainer's own, so an implementation puts others in their place and
    changes none of them. A layer is a wrapper that changes the update after its ``yield`` and
    returns it; layers do so in the order in which the user gave them.

    Args:
        update: the weights as extracted from the model.
        context: the version, and the workers that it is for.
    """


@hookspec(firstresult=True)
def apply_weights(update: Update, model: Any, context: ApplyContext) -> bool | None:
    """Load an update into a model, all of it or nothing, and return True.

    A layer is a wrapper that changes the update in place before its ``yield``, so that layers
    undo themselves in mirrored order. A backend that returns None leaves the loading to the core.

    Args:
        update: what arrived; its tensors are good only during the call, unless
            ``context.zero_copy`` is set.
        model: what the receiver was given as its model.
        context: the version, the worker, and how to load.
    """


@hookspec(firstresult=True)
def skip_update(context: SkipContext) -> bool | None:
    """Say whether a worker is left out of a push: True, False, or None for no opinion.

    Args:
        context: the worker, and how many pushes it has missed.
    """
