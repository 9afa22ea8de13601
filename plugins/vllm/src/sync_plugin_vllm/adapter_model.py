"""Describe the trainer's LoRA adapter for vLLM: its modules, ranks and scales."""

from __future__ import annotations

import base64
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sync_core import ModelError, OptionError
from sync_core.models import ComputedWeights, plain_name

#: The prefix that PEFT adds to the names of the base model.
PREFIX = "base_model.model."
#: The tensors of an adapter that vLLM can apply: A and B of a linear layer.
TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<part>[AB])\.(?P<adapter>[^.]+)\.weight")

_SHOWN = 8
#: PEFT settings that change the result of an adapter and that vLLM does not implement.
_UNSUPPORTED = (
    "modules_to_save",
    "use_dora",
    "lora_bias",
    "trainable_token_indices",
    "target_parameters",
    "alora_invocation_tokens",
    "layer_replication",
    "use_bdlora",
    "use_qalora",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "velora_config",
)
#: PEFT initialisations that leave the base model's weights unchanged.
_INITS = ("gaussian", "eva", "orthogonal", "mica")


@dataclass(frozen=True, slots=True)
class AdapterDescription:
    """The name and the scales of an adapter: everything but its tensors.

    Args:
        adapter: its name in PEFT, such as ``"default"``.
        scaling: the factor of ``B @ A``, by the name of each module with a part of the adapter:
            ``lora_alpha`` divided by the rank or by its square root.
    """

    adapter: str
    scaling: dict[str, float]


def describe_adapter(model: Any) -> AdapterDescription:
    """Return the description of the only active adapter of a PEFT model.

    Args:
        model: the result of ``peft.get_peft_model``, or ``gathered`` of it.

    Raises:
        ModelError: the model has no such adapter, or trains tensors that vLLM's adapters cannot
            hold; the message names them.
    """
    if isinstance(model, ComputedWeights):
        model = model.model
    if not isinstance(model, nn.Module):
        raise ModelError(
            "VllmTarget(…, adapter=…) reads the settings of the adapter from the sender's model, "
            f"which is a {type(model).__name__}; type Sender(…, peft_model, …)"
        )
    plain = plain_name(model)
    layers = {plain(path): m for path, m in model.named_modules() if _is_tuner(m)}
    adapter = _acting(layers)
    _check_settings(model, adapter)
    scaling = {}
    for path, layer in layers.items():
        if adapter not in layer.scaling:
            continue
        if not path.startswith(PREFIX):
            raise ModelError(
                f"the adapter's module {path!r} is not of a model that peft.get_peft_model "
                f"returned, whose names begin with {PREFIX!r}; send that model"
            )
        if not _is_plain(layer, adapter):
            raise ModelError(
                f"the adapter {adapter!r} of {path!r}, a {type(layer).__name__}, is not plain LoRA "
                'of a linear layer, which vLLM needs; send it merged: layers=[lora("merged")]'
            )
        scaling[path.removeprefix(PREFIX)] = float(layer.scaling[adapter])
    _check_trained(model, adapter)
    return AdapterDescription(adapter, scaling)


def peft_config(ranks: Mapping[str, int], scaling: Mapping[str, float]) -> dict[str, Any]:
    r"""Return the ``adapter_config.json`` from which PEFT and vLLM compute each module's scale.

    Args:
        ranks: the rank of each module's part of the adapter.
        scaling: see `AdapterDescription`.

    Example:
        >>> config = peft_config({"q": 4, "a.k": 2}, {"q": 2.0, "a.k": 2.0})
        >>> config["r"], config["lora_alpha"], config["rank_pattern"], config["alpha_pattern"]
        (4, 8.0, {'^a\\.k': 2}, {'^a\\.k': 4.0})
    """
    alphas = {module: scaling[module] * rank for module, rank in ranks.items()}
    rank = Counter(ranks.values()).most_common(1)[0][0]
    alpha = Counter(alphas.values()).most_common(1)[0][0]
    # A pattern's key is a regular expression that matches the end of a name, unless it begins with
    # ^.
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted(ranks),
        "rank_pattern": {f"^{re.escape(n)}": r for n, r in ranks.items() if r != rank},
        "alpha_pattern": {f"^{re.escape(n)}": a for n, a in alphas.items() if a != alpha},
        "use_rslora": False,
        "bias": "none",
        "inference_mode": True,
    }


def _acting(layers: dict[str, Any]) -> str:
    """Return the name of the only active adapter."""
    names: set[str] = {n for layer in layers.values() for n in layer.active_adapters}
    names &= {name for layer in layers.values() for name in layer.scaling}
    if len(names) != 1:
        raise ModelError(
            f"vLLM applies one adapter to a request, and the model acts with {sorted(names)}; give "
            "the model that peft.get_peft_model returned, and type model.set_adapter(name)"
        )
    for path, layer in layers.items():
        if layer.disable_adapters or layer.merged:
            state, call = ("disabled", "enable_adapter_layers")
            if layer.merged:
                state, call = ("merged", "unmerge_adapter")
            raise ModelError(
                f"the adapter of {path!r} is {state}, so that vLLM would compute something else "
                f"than the trainer; type model.{call}() before the send"
            )
    [name] = names
    return name


def _check_settings(model: nn.Module, adapter: str) -> None:
    config = getattr(model, "peft_config", {}).get(adapter)
    found = {name: getattr(config, name, None) for name in _UNSUPPORTED}
    wrong = [f"{name}={value!r}" for name, value in found.items() if value]
    if (bias := getattr(config, "bias", "none")) != "none":
        wrong.append(f"bias={bias!r}")
    init = getattr(config, "init_lora_weights", True)
    if isinstance(init, str) and init.lower() not in _INITS:
        wrong.append(f"init_lora_weights={init!r}, which changes the base model,")
    if wrong:
        raise ModelError(
            f"vLLM's adapters cannot have {', '.join(wrong)} of the LoraConfig of {adapter!r}; "
            'send the adapter merged: layers=[lora("merged")]'
        )


def _check_trained(model: nn.Module, adapter: str) -> None:
    """Raise if tensors are trained that do not belong to the adapter."""
    plain = plain_name(model)
    others = [
        plain(name)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        and not ((found := TENSOR.fullmatch(plain(name))) and found["adapter"] == adapter)
    ]
    if others:
        more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
        raise ModelError(
            f"the model trains {', '.join(map(repr, others[:_SHOWN]))}{more}, for which vLLM's "
            'adapters have no place; freeze it, or send all merged: layers=[lora("merged")]'
        )


def _is_tuner(module: object) -> bool:
    """Return whether a module is a layer with LoRA."""
    layers = sys.modules.get("peft.tuners.tuners_utils")
    return isinstance(module, getattr(layers, "BaseTunerLayer", ())) and hasattr(module, "scaling")


def _is_plain(layer: Any, adapter: str) -> bool:
    """Return whether PEFT adds only ``scaling * B @ A`` to a linear layer."""
    linear = getattr(sys.modules.get("peft.tuners.lora.layer"), "Linear", None)
    tensors = {name for name, _ in layer.named_parameters() if f".{adapter}." in f".{name}."}
    return (
        linear is not None
        and getattr(type(layer), "get_delta_weight", None) is linear.get_delta_weight
        and adapter not in getattr(layer, "lora_variant", {})
        and tensors == {f"lora_{part}.{adapter}.weight" for part in "AB"}
    )


def base_names(names: Iterable[str]) -> dict[str, str]:
    """Map the names of the base model's tensors in a PEFT model to their original names.

    Example:
        >>> base_names(["base_model.model.q.base_layer.weight", "base_model.model.q.lora_A.w"])
        {'base_model.model.q.base_layer.weight': 'q.weight'}
    """
    return {
        name: name.removeprefix(PREFIX).replace(".base_layer.", ".")
        for name in names
        if ".lora_" not in name
    }


def base_samples(model: Any) -> dict[str, tuple[str, str]]:
    """Return the first column of each base model weight, and each vector whole.

    Args:
        model: the result of ``peft.get_peft_model``.

    Returns:
        By original name: the dtype, such as ``"bfloat16"``, and the bytes in base64.

    Raises:
        ModelError: the tensors are sharded, and only one rank calls this.
    """
    if isinstance(model, ComputedWeights):
        model = model.model
    named = dict(model.named_parameters(remove_duplicate=False))
    plain = plain_name(model)
    own = base_names(map(plain, named))
    found = {}
    for name, parameter in named.items():
        if plain(name) not in own:
            continue
        if hasattr(parameter, "full_tensor"):
            raise ModelError(
                f"verify=True reads the base model, and {name!r} is spread over ranks; type "
                "VllmTarget(…, adapter=…) without verify"
            )
        sample = parameter.detach()
        sample = (sample[..., 0] if sample.dim() > 1 else sample).cpu().contiguous()
        data = sample.reshape(-1).view(torch.uint8).numpy().tobytes()
        dtype = str(sample.dtype).removeprefix("torch.")
        found[own[plain(name)]] = dtype, base64.b64encode(data).decode()
    return found


def read_sample(dtype: str, data: str) -> Tensor:
    """Decode a sample from `base_samples`: a one-dimensional tensor.

    Raises:
        OptionError: the sample is not valid.
    """
    kind = getattr(torch, dtype, None)
    try:
        if not isinstance(kind, torch.dtype):
            raise TypeError(f"{dtype!r} is not a dtype")
        return torch.frombuffer(bytearray(base64.b64decode(data, validate=True)), dtype=kind)
    except (TypeError, ValueError) as error:
        raise OptionError(f"a sample of the base model cannot be read: {error}") from error
