"""The worker's end of several models: finds each by its name, and commits them together."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from sync_core.collector.modules import module_of
from sync_core.collector.schemes import POLICY
from sync_core.models.paths import resolve
from sync_core.plugins.address import Address
from sync_core.receiving.receiver import Receiver
from sync_core.receiving.together import receive_together


class Joint:
    """Feeds several models of a worker, each with what its own sender sends.

    Args:
        parts: where names are looked up: ``policy``, ``env``, and the models beside them.
    """

    def __init__(self, parts: SimpleNamespace) -> None:
        self._parts = parts
        self._receivers: dict[str, Receiver] = {}

    @property
    def version(self) -> int:
        """The version that the policy has."""
        policy = self._receivers.get(POLICY)
        return 0 if policy is None else policy.version

    def connect(self, name: str, address: Address) -> None:
        """Get a model's weights from a sender from now on.

        Raises:
            ModelPathError: there is no such model here.
        """
        if name in self._receivers:
            self._receivers.pop(name).close()
        found = resolve(self._parts, name)
        model = module_of(found) if name == POLICY else name
        self._receivers[name] = Receiver(address, model, context=self._parts)

    @property
    def receivers(self) -> dict[str, Receiver]:
        """What writes into each model, by name."""
        return self._receivers

    def receive(self, versions: Mapping[str, int], timeout: float) -> bool:
        """See `receive_together`."""
        return receive_together(self._receivers, versions, timeout)


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
