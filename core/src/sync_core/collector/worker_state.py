"""Reads and writes the weights that a worker acts with, to save them and to go on from them."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

from torch import Tensor, nn

from sync_core.collector.modules import module_of
from sync_core.collector.schemes import POLICY
from sync_core.models.binding import Binding
from sync_core.models.compare import check_match
from sync_core.models.extract import named_tensors
from sync_core.receiving.receiver import Receiver
from sync_core.weights.layout import Layout
from sync_core.weights.update import Update


def read_models(parts: SimpleNamespace) -> dict[str, dict[str, Tensor]]:
    """A copy of the weights of each model of a worker, by name.

    Args:
        parts: what the worker has.
    """
    return {
        name: {key: tensor.detach().clone() for key, tensor in named_tensors(model).items()}
        for name, model in _models(parts).items()
    }


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
        saved: the weights.

    Raises:
        LayoutMismatchError: a model has changed since; it was not written to.
        ModelError: a model is missing.
    """
    for name, model in _models(parts).items():
        weights = dict(saved.get(name, {}))
        receiver = receivers.get(name)
        if receiver is None:
            Binding(model).write(Update.of(weights))
        else:
            receiver.apply_weights(weights)


def check_models(parts: SimpleNamespace, saved: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Raise `LayoutMismatchError` unless `write_models` can write these weights."""
    for name, model in _models(parts).items():
        check_match(Layout.of(saved.get(name, {})), Binding(model).layout)


def _models(parts: SimpleNamespace) -> dict[str, nn.Module]:
    found = {name: part for name, part in vars(parts).items() if name != "env"}
    found[POLICY] = module_of(found.get(POLICY))
    return {name: part for name, part in found.items() if isinstance(part, nn.Module)}
