"""The models of a worker: found by name, received together, saved and loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from sync_collector.policy_module import module_of
from sync_collector.schemes import POLICY
from sync_core import Address, Layout, OptionError, Receiver, Update
from sync_core.models import Binding, check_match, named_tensors, receive_together, resolve


def read_models(
    parts: SimpleNamespace, receivers: Mapping[str, Receiver]
) -> dict[str, Mapping[str, Tensor]]:
    """A copy of the weights of each model of a worker, by name.

    Args:
        parts: what the worker has.
        receivers: those that write into its models, by name; also into such as are found by a
            path, in its environment for example.
    """
    models = _models(parts, receivers)
    return {name: _read(model, receivers.get(name)) for name, model in models.items()}


def read_model(parts: SimpleNamespace, name: str) -> Mapping[str, Tensor]:
    """A copy of the weights of one model of a worker, found by its name; empty if it has none.

    Raises:
        ModelPathError: there is no such model.
    """
    model = _models(parts, [name]).get(name)
    return {} if model is None else _read(model, None)


def write_models(
    parts: SimpleNamespace,
    receivers: Mapping[str, Receiver],
    saved: Mapping[str, Mapping[str, Tensor]],
) -> None:
    """Let a worker act with weights that `read_models` gave.

    Args:
        parts: what the worker has.
        receivers: those that write into its models, by name; memory that they only lend to a model
            must not be written to.
        saved: the weights, by model; those of others stay.

    Raises:
        LayoutMismatchError: a model has changed since; it was not written to.
        ModelError: a model is missing.
    """
    models = _models(parts, saved)
    # Tensors that a receiver lends to a model may be part of another one, which has its own memory
    # once the receiver has written.
    for name in sorted(saved, key=lambda name: name not in receivers):
        if name in receivers:
            receivers[name].apply_weights(saved[name])
        else:
            Binding(models[name]).write(Update.of(saved[name]))


def check_models(
    parts: SimpleNamespace,
    receivers: Mapping[str, Receiver],
    saved: Mapping[str, Mapping[str, Tensor]],
) -> None:
    """Raise `LayoutMismatchError` unless `write_models` can write these weights.

    Raises:
        ModelPathError: the worker has no such model.
    """
    for name, model in _models(parts, saved).items():
        mine = Layout.of(_read(model, receivers.get(name)))
        check_match(Layout.of(saved.get(name, {})), mine)


def _models(parts: SimpleNamespace, names: Iterable[str]) -> dict[str, Any]:
    """All that a worker acts with beside its environment, and what is found by these names."""
    own = {name: part for name, part in vars(parts).items() if name != "env"}
    own[POLICY] = module_of(own.get(POLICY))
    by_path = {name: resolve(parts, name) for name in names if name not in own}
    return by_path | {name: model for name, model in own.items() if model is not None}


def _read(model: Any, receiver: Receiver | None) -> Mapping[str, Tensor]:
    read = None if receiver is None else receiver.snapshot()
    return dict(Update.of(named_tensors(model)).copied().items()) if read is None else read


class ModelReceivers:
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
        # Values copied into a parameter that views a version would be in the memory of other
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
        """Return the receiver of each model, by name."""
        return self._receivers

    def receive(self, versions: Mapping[str, int], timeout: float) -> bool:
        """See `receive_together`."""
        return receive_together(self._receivers, versions, timeout)


def _parameters(model: Any) -> set[int]:
    return set(map(id, model.parameters())) if isinstance(model, nn.Module) else set()


def execute(parts: Any, path: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the object at a path, or the result of calling it.

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
