"""One more transport of a sender's scheme, for a companion of the sender."""

from __future__ import annotations

import secrets
from dataclasses import replace

from sync_core.address import Address
from sync_core.errors import OptionError
from sync_core.hooks import TransportContext
from sync_core.registry import Plugin
from sync_core.transports.transport import unheard
from sync_core.weights.layout import Layout
from sync_core.wrapping import WrappingSender, make_sender


class SideChannel(WrappingSender):
    """A transport of the innermost scheme, whose `address` returns whole addresses.

    Args:
        plugin: the sender's scheme.
        context: that of the sender's own transport.
        layout: the layout of what travels.
        places: how many receivers there may be at a time.

    Raises:
        OptionError: the scheme cannot serve receivers that come later.
    """

    def __init__(
        self, plugin: Plugin, context: TransportContext, layout: Layout, places: int
    ) -> None:
        moves, known = plugin.innermost, plugin.capabilities
        if context.workers or "late_join" not in known or {"joined", "same_object"} & known:
            raise OptionError(
                f"{plugin.describe()} serves no workers that come later; give the id of a worker: "
                "sender.address(0)"
            )
        self._context = replace(
            context,
            scheme=moves.name,
            token=secrets.token_hex(16),
            secret=secrets.token_hex(32),
            worker_ids=tuple(range(places)),
            models=(),
            layout=layout,
            zero_copy=False,
            notify=unheard,
        )
        # An installed scheme is found by its name where the address is unpickled.
        self._scheme = moves.object if moves.distribution is None else moves.name
        super().__init__(make_sender(moves, self._context))

    def address(self, worker_id: int) -> Address:
        """Return the address of one of the places; see `Address.connect`."""
        layout = self._context.layout
        assert layout is not None
        return Address(
            scheme=self._scheme,
            layers=(),
            layouts=(),
            options=dict(self._context.options),
            worker_id=worker_id,
            model_id=self._context.model_id,
            endpoint=self.transport.address(worker_id),
            token=self._context.worker_token(worker_id),
            sender_token=self._context.token,
            strategy="tensordict",
            zero_copy=False,
            cast=False,
            timeout=self._context.timeout,
            layout=layout,
            source_layout=layout,
        )
