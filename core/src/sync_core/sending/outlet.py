"""Where updates leave a sender: its plugins, and the transport that they make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

from sync_core.errors import ModelError, OptionError, SyncError, TransportError
from sync_core.models.several import names_of
from sync_core.plugins import registry
from sync_core.plugins.address import Address
from sync_core.plugins.contexts import SendContext
from sync_core.plugins.defaults import Defaults
from sync_core.plugins.hook_check import HOOKS, implemented
from sync_core.plugins.increments import BaseLayer
from sync_core.plugins.registry import Plugin
from sync_core.plugins.reporter import Reporter
from sync_core.plugins.stack import Stack
from sync_core.plugins.verify import Verification
from sync_core.release import release_with
from sync_core.sending.terms import Terms
from sync_core.stopwatch import Stopwatch
from sync_core.transports.notice import Notice
from sync_core.transports.transport import Delivery, SenderTransport
from sync_core.weights.payload import Payload
from sync_core.weights.update import Update


class Outlet:
    """Layers change an update here, and the transport takes it away.

    Args:
        terms: what the sender was asked for.

    Raises:
        PluginError: the scheme or a layer cannot be found or used.
        OptionError: the scheme cannot do what is asked of it.
    """

    def __init__(self, terms: Terms) -> None:
        self._backend = registry.find(registry.SCHEMES, terms.scheme)
        if terms.zero_copy and "zero_copy" not in self._backend.capabilities:
            raise OptionError(f"{self._backend.describe()} cannot zero_copy; leave that out")
        layers = [registry.find(registry.LAYERS, layer) for layer in terms.layers]
        #: The layers that are called with every report.
        self.reporters = [one.object for one in layers if isinstance(one.object, Reporter)]
        # A reporter without hooks is nothing to a stack, and need not reach the receivers.
        hooked = [bool(set(HOOKS) & set(implemented(layer.object))) for layer in layers]
        self._terms = replace(terms, layers=list(compress(terms.layers, hooked)))
        self._verification = Verification(
            terms.verify, self._backend, list(compress(layers, hooked)), terms.strategy
        )
        layers_used = self._verification.layers
        self._base = BaseLayer()
        #: Whether workers may get less than the whole model.
        self.increments = terms.partial and self.moves_nothing is None
        if self.increments:
            layers_used = (*layers_used, Plugin(registry.LAYERS, "base", self._base))
        self.stack = Stack(Defaults(terms.strategy), self._backend, layers_used)
        self.transport: SenderTransport | None = None
        self._make_address: Callable[..., Address]
        self._close: Callable[[], Any] | None = None

    @property
    def scheme(self) -> str:
        """The name of the scheme."""
        return self._backend.name

    @property
    def moves_nothing(self) -> str | None:
        """The scheme, to be named in a message, if workers act with the sender's own model."""
        shared = "same_object" in self._backend.capabilities
        return self._backend.describe() if shared else None

    @property
    def takes_worker_paths(self) -> bool:
        """Whether handles of workers may be paths in the sender's context."""
        return "worker_paths" in self._backend.capabilities

    def open(
        self,
        update: Update,
        model: Any,
        worker_ids: tuple[int, ...],
        workers: Sequence[Any],
        notify: Callable[[int, Notice], None],
    ) -> None:
        """Make the transport, now that it is known what will travel; once."""
        if self.transport is not None:
            return
        # No method: the transport keeps it, and must not keep its sender alive.
        self._make_address = self._terms.address_maker(update.layout)
        if self.stack.implements("prepare_weights"):
            update = self.prepare(Update(update.layout, update.source), 0, ())
        self.transport = self.stack.create_sender_transport(
            self._terms.context(
                self._backend.name,
                models=names_of(model),
                worker_ids=worker_ids,
                workers=tuple(workers),
                layout=update.layout,
                make_address=self._make_address,
                notify=notify,
            )
        )
        self._close = release_with(self, self.transport.close)

    def address(self, worker_id: int) -> Address:
        """The address of a worker.

        Raises:
            ModelError: it is not known yet what will travel.
        """
        endpoint = self._opened().address(worker_id)
        return self._make_address(worker_id=worker_id, endpoint=endpoint)

    def prepare(
        self, update: Update, version: int, worker_ids: tuple[int, ...], base: int = 0
    ) -> Update:
        """The update as the layers make it; ``base`` is the version that it builds on."""
        self._base.base = base
        model_id = self._terms.model_id
        context = SendContext(model_id=model_id, version=version, worker_ids=worker_ids)
        return self.stack.prepare_weights(update, context)

    def send(
        self, update: Update, version: int, worker_ids: tuple[int, ...], packing: Stopwatch
    ) -> dict[int, Delivery]:
        """Hand what was prepared last to the transport.

        Where the transport raises something else than a `SyncError`, every delivery has failed.
        """
        payload = Payload(version, update.layout, update.source, packing=packing)
        transport = self._opened()
        try:
            deliveries = dict(transport.send(payload, worker_ids))
        except SyncError:
            raise
        except Exception as error:
            return self._undelivered(payload, worker_ids, error)
        self._verification.guard(deliveries.values())
        return deliveries

    def close(self) -> None:
        """Close the transport, if there is one."""
        if self._close is not None:
            self._close()

    def _undelivered(
        self, payload: Payload, worker_ids: tuple[int, ...], cause: Exception
    ) -> dict[int, Delivery]:
        message = f"{self._backend.describe()} could not send version {payload.version}: {cause!r}"
        deliveries = {}
        for worker_id in worker_ids:
            deliveries[worker_id] = Delivery(worker_id, payload.version, payload.nbytes)
            error = TransportError(worker_id, message)
            error.__cause__ = cause
            deliveries[worker_id].fail(error)
        return deliveries

    def _opened(self) -> SenderTransport:
        if self.transport is None:
            raise ModelError("the sender has no model; give it one, or call register_model()")
        return self.transport
