"""The arguments of an update, in each of the forms that users may give."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

from sync_collector.schemes import POLICY
from sync_core.checks import check_mapping


class UpdateArguments(TypedDict, total=False):
    """The arguments that say which weights an update sends, to which workers; see `Collector`."""

    weights: Any
    policy: Any
    worker_ids: int | Iterable[int] | None
    model_id: str | None
    weights_dict: Mapping[str, Any] | None


def check_name(name: str, models: Sequence[str]) -> None:
    """Raise `KeyError` unless there is a model of this name."""
    if name not in models:
        listed = ", ".join(map(repr, models))
        raise KeyError(f"there is no model {name!r}; the models are: {listed}")


def chosen(
    given: Iterable[Any],
    model_id: str | None,
    weights_dict: Mapping[str, Any] | None,
    models: Sequence[str],
) -> dict[str, Any]:
    """The weights given in one of several ways, by model; None for the trainer's own.

    Args:
        given: weights, of which at most one is not None.
        model_id: whose they are; None for the policy's.
        weights_dict: the weights of several models.
        models: the models that there are.

    Returns:
        Nothing if all models were meant.

    Raises:
        TypeError: the weights of several models are not a mapping from names.
        ValueError: several were given.
        KeyError: a model that there is not.
    """
    one_of = [weights for weights in given if weights is not None]
    if weights_dict is not None:
        check_mapping(weights_dict, "weights_dict", "{'policy': policy}")
    if model_id is not None:
        check_name(model_id, models)
    if weights_dict is not None and (one_of or model_id is not None):
        raise ValueError("weights_dict says it all; leave out model_id and other weights")
    if len(one_of) > 1:
        raise ValueError("give one of policy_or_weights, weights and policy, not several")
    if weights_dict is None and model_id is None and not one_of:
        return {}
    if weights_dict is not None and not weights_dict:
        raise ValueError("weights_dict names no model; leave it out to update all of them")
    names = weights_dict or {model_id or POLICY: one_of[0] if one_of else None}
    for name in names:
        check_name(name, models)
    return dict(names)
