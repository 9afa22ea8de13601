"""A check that receivers act with the very model of the sender in their process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol
from weakref import WeakValueDictionary

from torch import Tensor

from sync_core.errors import ModelError
from sync_core.models.extract import Strategy, named_tensors
from sync_core.models.match import holds_same
from sync_core.models.multi_model import same


class Owner(Protocol):
    """An object that knows a sender's model."""

    def own_model(self) -> Any:
        """The model as it is now; None if there is none."""


_owners: WeakValueDictionary[str, Owner] = WeakValueDictionary()


def register_owner(token: str, owner: Owner) -> None:
    """Let receivers in this process ask for the model of the sender with this token."""
    _owners[token] = owner


def check_own(model: Any, token: str, strategy: Strategy, scheme: str) -> None:
    """Raise `ModelError` if a receiver's model has other weights than its sender's.

    In another process than the sender's nothing is known of it, and nothing raised.

    Args:
        model: the receiver's.
        token: the sender's.
        strategy: how models are read.
        scheme: how to name the scheme in the message.
    """
    owner = _owners.get(token)
    own = None if owner is None else owner.own_model()
    if own is None or same(own, model):
        return
    check_same(
        named_tensors(model, strategy).items(),
        named_tensors(own, strategy),
        f"{scheme} moves nothing: it works only with that model itself; give it to the receiver, "
        "or use scheme='thread'",
    )


def check_same(given: Iterable[tuple[str, Tensor]], own: Mapping[str, Tensor], advice: str) -> None:
    """Raise `ModelError`, with the advice, unless these are what the sender's model has."""
    for name, tensor in given:
        if name not in own or not holds_same(tensor, own[name]):
            raise ModelError(f"{name!r} is not what the sender's model has, and {advice}")
