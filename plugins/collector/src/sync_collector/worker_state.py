"""Reads and writes the weights that a worker acts with, to save them and to go on from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from sync_collector.policy_module import module_of
from sync_collector.schemes import POLICY
from sync_core import Layout, Receiver, Update
from sync_core.models import Binding, check_match, named_tensors, resolve


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
    # What a receiver lends to a model may be part of another one, which has memory of its own
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
