"""Load weights into a vLLM model; only this file uses vLLM's private interface.

vLLM reloads a model layer by layer: each layer gets empty tensors of the checkpoint's shapes, is
loaded, and packs its weights for its kernels as at the start of the engine. Two kinds of layers
would keep the weights packed at the start, which this file corrects:

- a layer that shares all its tensors, such as a tied ``lm_head``: vLLM loads nothing into it.
- mixture-of-experts layers on the CPU: vLLM packs them only when it makes their kernel.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Module
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta, to_meta_tensor

from sync_core.errors import LayoutMismatchError
from sync_plugin_vllm.names import FusedNames, without_lora

_logger = init_logger(__name__)

#: Name, dtype and shape of a tensor.
Kind: TypeAlias = tuple[str, torch.dtype, tuple[int, ...]]


def reload_weights(
    model: Any, named: Iterable[tuple[str, Tensor]], model_config: Any, device: torch.device
) -> Collection[str]:
    """Load weights with the model's own loader, and pack all layers again for their kernels.

    Args:
        model: vLLM's model.
        named: the names and tensors of a checkpoint.
        model_config: vLLM's configuration of the model.
        device: the model's device.

    Returns:
        The names of the model's tensors that were loaded, as reported by the loader.
    """
    with torch.no_grad(), _new_expert_kernels(model, device):
        initialize_layerwise_reload(model)
        try:
            loaded = model.load_weights(named)
        finally:
            # Restores the tensors that vLLM computes with even if loading has failed.
            finalize_layerwise_reload(model, model_config)
        for layer in _tied_layers(model):
            layer.quant_method.process_weights_after_loading(layer)
    return loaded or ()


@contextmanager
def _new_expert_kernels(model: Module, device: torch.device) -> Iterator[None]:
    """Let experts on the CPU make a new kernel, which packs their weights.

    On other devices vLLM keeps the kernels, since CUDA graphs refer to their memory.
    """
    methods = [getattr(layer, "quant_method", None) for layer in model.modules()]
    kernels = {
        method: method.moe_kernel
        for method in methods
        if device.type == "cpu" and isinstance(method, FusedMoEMethodBase)
    }
    for method in kernels:
        method.moe_kernel = None
    try:
        yield
    finally:
        for method, kernel in kernels.items():
            if method.moe_kernel is None:  # loading failed before these experts
                method.moe_kernel = kernel


def _tied_layers(model: Module) -> Iterator[Any]:
    """Iterate over the layers whose tensors were loaded into another layer, in model order."""
    owners: dict[int, Module] = {}
    tied: dict[Module, None] = {}
    for layer in model.modules():
        for parameter in layer.parameters(recurse=False):
            if owners.setdefault(id(parameter), layer) is not layer:
                tied[layer] = None
    for layer in tied:
        if isinstance(getattr(layer, "quant_method", None), QuantizeMethodBase):
            yield layer


def rehearse_loading(model: Any, kinds: Sequence[Kind]) -> None:
    """Check shapes: run the model's loader with tensors without memory.

    Args:
        model: vLLM's model, which keeps its weights.
        kinds: the name, dtype and shape of each tensor of a checkpoint.

    Raises:
        LayoutMismatchError: a tensor's shape does not fit the model; the message names the tensor.
    """
    what = f"vLLM's {type(model).__name__} does not take"
    for name, shape, taken in _too_large(model, kinds):
        raise LayoutMismatchError(f"{what} {name!r} of shape {shape}: it takes {taken}")
    current = ""

    def empty() -> Iterator[tuple[str, Tensor]]:
        nonlocal current
        for name, dtype, shape in kinds:
            current = f"{name!r} of shape {list(shape)}"
            yield name, torch.empty(shape, dtype=dtype, device="meta")

    with torch.no_grad(), _on_meta(model):
        try:
            model.load_weights(empty())
        except NotImplementedError:
            # This loader reads values, so the load itself checks such tensors.
            _logger.debug("the shapes could not be checked from %s on", current, exc_info=True)
        except Exception as error:
            reason = str(error) or type(error).__name__
            raise LayoutMismatchError(f"{what} {current}: {reason}") from error


def _too_large(model: Module, kinds: Sequence[Kind]) -> Iterator[tuple[str, list[int], str]]:
    """Return tensors that vLLM's loader would silently truncate.

    Returns:
        Name, shape, and the loaded part.
    """
    fused = FusedNames(model)
    layers = {
        without_lora(f"{path}.{leaf}"): layer
        for path, layer in model.named_modules()
        for leaf, _ in layer.named_parameters(recurse=False)
    }
    for name, _, shape in kinds:
        owner = next((found for found in fused.owners(name) if found in layers), "")
        layer: Any = layers.get(owner)
        if isinstance(layer, LinearBase):
            rows = layer.output_size
            sizes, parts = getattr(layer, "output_partition_sizes", []), fused.parts(owner)
            for size, part in zip(sizes, parts, strict=False):
                if len(sizes) == len(parts) and part.split(".")[-2] in name.split("."):
                    rows = size * layer.tp_size
            if shape[0] > rows or (len(shape) == 2 and shape[1] != layer.input_size):
                yield name, list(shape), f"{[rows, layer.input_size][: len(shape)]}"
        elif isinstance(layer, RoutedExperts) and owner.endswith("_weight"):
            config = layer.moe_config
            inner = config.intermediate_size_per_partition_unpadded * config.tp_size
            taken = inner * config.hidden_dim_unpadded
            if len(shape) == 3:
                taken *= config.num_logical_experts * (2 if "w13_" in owner else 1)
            if prod(shape) != taken:
                yield name, list(shape), f"experts of {config.hidden_dim_unpadded} times {inner}"


@contextmanager
def _on_meta(model: Module) -> Iterator[None]:
    """Give a model tensors without memory, with the shapes that its loader expects."""
    kept = [
        (layer, dict(layer._parameters), dict(layer._buffers), {*layer._non_persistent_buffers_set})
        for layer in model.modules()
    ]
    try:
        for layer in model.modules():
            restore_layer_on_meta(layer, get_layerwise_info(layer))
            for tensors in (layer._parameters, layer._buffers):
                for name, tensor in tensors.items():
                    if tensor is None:
                        continue
                    empty: Any = to_meta_tensor(tensor)
                    if hasattr(tensor, "weight_loader"):
                        # Not the loader of the last reload, which ignores tensors after its end.
                        empty.weight_loader = _get_original_loader(tensor)
                    tensors[name] = empty
        yield
    finally:
        for layer, parameters, buffers, names in kept:
            for now, before in (
                (layer._parameters, parameters),
                (layer._buffers, buffers),
            ):
                now.clear()
                now.update(before)  # type: ignore[arg-type]
            layer._non_persistent_buffers_set = names
