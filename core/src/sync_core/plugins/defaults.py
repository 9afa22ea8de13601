"""What the core does where neither backend nor layer says otherwise."""

from __future__ import annotations

from typing import Any

from sync_core.models.binding import Binding
from sync_core.models.extract import Strategy
from sync_core.plugins.contexts import ApplyContext, SendContext, SkipContext
from sync_core.plugins.hookspecs import hookimpl
from sync_core.weights.update import Update


class Defaults:
    """The core's own implementations; a stack calls them last.

    Args:
        strategy: how the model is bound when weights are first applied to it.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._binding: Binding | None = None

    @hookimpl
    def prepare_weights(self, update: Update, context: SendContext) -> Update:
        """Send the update as it is."""
        del context
        return update

    @hookimpl
    def apply_weights(self, update: Update, model: Any, context: ApplyContext) -> bool:
        """Write the update into the model."""
        if self._binding is None or self._binding.model is not model:
            self._binding = Binding(model, self._strategy)
        self._binding.write(
            update,
            partial=context.partial,
            zero_copy=context.zero_copy,
            version=context.version,
        )
        return True

    @hookimpl
    def skip_update(self, context: SkipContext) -> bool:
        """Skip no worker."""
        del context
        return False
