"""The worker's end of several models: finds each by its name, and commits them together."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from torch import nn

from sync_collector.policy_module import module_of
from sync_collector.schemes import POLICY
from sync_core import Address, OptionError, Receiver
from sync_core.models import receive_together, resolve


class Joint:
    """Feeds several models of a worker, each with what its own sender sends.

    Args:
        parts: where names are looked up: ``policy``, ``env``, and the models beside them.
    """

    def __init__(self, parts: SimpleNamespace) -> None:
        self._parts = parts
        self._receivers: dict[str, Receiver] = {}
        # Which of the models are views of what arrives.
        self._views: dict[str, bool] = {}

    @property
    def version(self) -> int:
        """The version that the policy has."""
        policy = self._receivers.get(POLICY)
        return 0 if policy is None else policy.version

    def connect(self, name: str, address: Address) -> None:
        """Get a model's weights from a sender from now on.

        Raises:
            ModelPathError: there is no such model here.
            OptionError: it shares parameters with another one, and only one of them has zero_copy.
        """
        if name in self._receivers:
            self._receivers.pop(name).close()
        self._check_shared(name, views=address.zero_copy)
        model = self._found(name) if name == POLICY else name
        self._receivers[name] = Receiver(address, model, context=self._parts)
        self._views[name] = address.zero_copy

    def _found(self, name: str) -> Any:
        found = resolve(self._parts, name)
        return module_of(found) if name == POLICY else found

    def _check_shared(self, name: str, *, views: bool) -> None:
        # What is copied into a parameter that views a version would be in the memory of other
        # workers too; where that cannot be written to, the write would end this one.
        own = _parameters(self._found(name))
        for other in self._receivers:
            if views != self._views[other] and own & _parameters(self._found(other)):
                raise OptionError(
                    f"{name!r} and {other!r} share parameters, and only one of them has "
                    "zero_copy: what is copied would be written into memory that workers only "
                    "read; write 'zero_copy': True for both, or leave it out"
                )

    @property
    def receivers(self) -> dict[str, Receiver]:
        """What writes into each model, by name."""
        return self._receivers

    def receive(self, versions: Mapping[str, int], timeout: float) -> bool:
        """See `receive_together`."""
        return receive_together(self._receivers, versions, timeout)


def _parameters(model: Any) -> set[int]:
    return set(map(id, model.parameters())) if isinstance(model, nn.Module) else set()


def execute(parts: Any, path: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What a path leads to, called if it can be.

    Raises:
        ModelPathError: it leads nowhere.
        TypeError: there are arguments, and nothing to call with them.
    """
    found = resolve(parts, path)
    if callable(found):
        return found(*args, **kwargs)
    if args or kwargs:
        raise TypeError(
            f"{path!r} leads to a {type(found).__name__}, which takes no arguments; leave them out"
        )
    return found
