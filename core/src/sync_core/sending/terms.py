"""What a sender was asked for, and what an address tells the other side of it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial as bind
from typing import Any

from sync_core.arguments import check_layers
from sync_core.errors import OptionError
from sync_core.models.extract import Strategy, check_strategy
from sync_core.plugins.address import Address
from sync_core.plugins.contexts import TransportContext
from sync_core.plugins.verify import Verify
from sync_core.weights.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The arguments of a `sync_core.sending.sender.Sender` on which both sides have to agree.

    Raises:
        OptionError: arguments that no sender can have, or not together.
    """

    scheme: Any
    layers: Sequence[Any]
    options: Mapping[str, Any]
    model_id: str
    strategy: Strategy
    zero_copy: bool
    partial: bool
    verify: Verify | None
    timeout: float
    token: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)

    def __post_init__(self) -> None:
        check_layers(self.layers)
        check_strategy(self.strategy)
        if self.zero_copy and (self.partial or self.strategy != "tensordict"):
            raise OptionError("zero_copy needs whole updates and strategy='tensordict'")

    def address_maker(self, layout: Layout) -> Callable[..., Address]:
        """Makes addresses from a worker's id and its endpoint."""
        return bind(
            Address,
            scheme=self.scheme,
            layers=tuple(self.layers),
            options=dict(self.options),
            model_id=self.model_id,
            token=self.token,
            strategy=self.strategy,
            zero_copy=self.zero_copy,
            partial=self.partial,
            verify=self.verify,
            timeout=self.timeout,
            layout=layout,
        )

    def context(self, scheme: str, **known: Any) -> TransportContext:
        """What the sender's transport is made from; ``known`` are the fields not agreed on."""
        return TransportContext(
            side="sender",
            scheme=scheme,
            model_id=self.model_id,
            token=self.token,
            timeout=self.timeout,
            zero_copy=self.zero_copy,
            options=self.options,
            **known,
        )
