"""Finds the weights for each worker of a TorchRL collector, and the model to load them into."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn

from sync_core import ModelError, OptionError
from sync_core.models import resolve


def find_sources(
    *,
    model_id: str,
    context: Any,
    model: Any,
    weights: Any,
    params_map: Mapping[int, Any] | None,
    devices: Sequence[Any] | None,
    device_map_fn: Callable[[int, Any], Any] | None,
    num_workers: int | None,
    remote_collectors: Sequence[Any] | None,
) -> dict[int, Any]:
    """Return the source of each worker's weights, by the worker's index.

    The arguments are those of `WeightSyncScheme.init_on_sender`. Workers with the same source
    object get the same weights.

    Raises:
        ModelError: no model was found.
        OptionError: the number of workers is not known.
    """
    if params_map is not None:
        return dict(params_map)
    source = weights if weights is not None else model
    if source is None and context is not None:
        source = _find_model(context, model_id)
    counted = [devices, remote_collectors, getattr(context, "create_env_fn", None)]
    if num_workers is None:
        num_workers = getattr(context, "num_workers", None) or next(
            (len(given) for given in counted if given is not None), None
        )
    if num_workers is None:
        raise OptionError(
            "the number of workers is not known; type init_on_sender(…, num_workers=n), or give "
            "the scheme to a collector that has workers, such as MultiSyncCollector"
        )
    workers = range(num_workers)
    if source is None and model_id == "policy":
        made = _make_policies(getattr(context, "policy_factory", None), num_workers)
        if made is not None:
            return dict(zip(workers, made, strict=True))
    if source is None:
        raise ModelError(
            f"no model {model_id!r} was found in {type(context).__name__}; give the collector a "
            "policy, or type init_on_sender(model=…, num_workers=n)"
        )
    if device_map_fn is not None:
        read = TensorDict.from_module(source).data if isinstance(source, nn.Module) else source
        return {index: device_map_fn(index, read) for index in workers}
    return dict.fromkeys(workers, source)


def find_devices(context: Any, num_workers: int) -> list[torch.device | None]:
    """Return the device of each worker's policy, if the collector knows it."""
    devices = getattr(context, "policy_device", None)
    if not isinstance(devices, Sequence) or isinstance(devices, str):
        devices = [devices] * num_workers
    return [None if device is None else torch.device(device) for device in devices]


def find_target(context: Any, model_id: str) -> Any:
    """Return the model of a worker.

    If the collector's own workers make their policies, the collector has no model. It then gets a
    policy from the factory, and passes on the weights received into it.
    """
    model = _find_model(context, model_id)
    if model is None and model_id == "policy":
        made = _make_policies(getattr(context, "policy_factory", None), 1)
        model = made[0] if made else None
    return model


def _find_model(context: Any, model_id: str) -> Any:
    """Return a collector's model, or None if only its workers have one."""
    get_model = getattr(context, "get_model", None)
    if get_model is None:
        return resolve(context, model_id)
    try:
        return get_model(model_id)
    except ValueError:  # raised by TorchRL if there is no policy
        return None


def _make_policies(factories: Any, num_workers: int) -> list[Any] | None:
    """Make the workers' policies: one object for all if they share a factory."""
    if callable(factories):
        factories = [factories] * num_workers
    if not factories or not all(factories):
        return None
    if all(factory is factories[0] for factory in factories):
        return [factories[0]()] * num_workers
    return [factory() for factory in factories]
