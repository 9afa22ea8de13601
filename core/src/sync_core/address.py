"""The address of one worker: all that a receiver must know to reach and to fit its sender."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sync_core.hooks import ApplyContext, TransportContext
from sync_core.models.extract import Strategy
from sync_core.verify import Verify
from sync_core.weights.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The address of one worker's weights, made by `Sender.address`; it can be pickled.

    Args:
        scheme: the scheme's name, or the plugin object that the sender was given.
        layers: the layers that the receiver needs, as they were given to the sender.
        layouts: for each of them, the layout that it was given in `prepare_weights`.
        options: the options of the scheme.
        worker_id: the worker that the address is for.
        model_id: the model's name.
        endpoint: what the transport needs to reach its sender.
        token: the secret that proves that a peer was given this address.
        strategy: how weights are read and written.
        zero_copy: whether the receiver's parameters become views of what arrives.
        partial: whether updates may lack some of the model's tensors.
        cast: whether what arrives is cast to the dtypes of the receiver's model.
        verify: what is proved of every update; see `Sender`.
        timeout: the default deadline of blocking calls, in seconds.
        layout: the layout that the receiver's model must have, but for ``cast``: that of the
            trainer's model as the layers have changed it that no receiver undoes.
        source_layout: the layout of the trainer's model, before any layer changes it.
        increments: whether versions may come as increments.
    """

    scheme: Any
    layers: tuple[Any, ...]
    layouts: tuple[Layout, ...] = field(repr=False)
    options: dict[str, Any] = field(repr=False)
    worker_id: int
    model_id: str
    endpoint: Any = field(repr=False)
    token: str = field(repr=False)
    strategy: Strategy
    zero_copy: bool
    partial: bool
    cast: bool
    verify: Verify | None
    timeout: float
    layout: Layout = field(repr=False)
    source_layout: Layout = field(repr=False)
    increments: bool = False

    def transport_context(self, scheme: str, timeout: float) -> TransportContext:
        """Return what the receiver's transport is made from."""
        return TransportContext(
            side="receiver",
            scheme=scheme,
            model_id=self.model_id,
            token=self.token,
            timeout=timeout,
            zero_copy=self.zero_copy,
            options=self.options,
            worker_id=self.worker_id,
            endpoint=self.endpoint,
            layout=self.layout,
        )

    def apply_context(self, version: int, held: int = 0) -> ApplyContext:
        """Return the context for loading a version."""
        return ApplyContext(
            model_id=self.model_id,
            version=version,
            worker_id=self.worker_id,
            zero_copy=self.zero_copy,
            partial=self.partial,
            cast=self.cast,
            held=held,
            layout=self.layout,
            source_layout=self.source_layout,
        )
