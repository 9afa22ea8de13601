"""The layer `MergedLora`: a PEFT model travels as the plain model that it stands for."""

from __future__ import annotations

import re
import sys
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from sync_core import BindContext, Layout, ModelError, SendContext, Update, hookimpl

_PREFIX = "base_model.model."
_ADAPTER = re.compile(r"\.lora_[A-Za-z_]+\.")
_ORIGINAL = ".original_module."
_SAVED = re.compile(r"\.modules_to_save\.([^.]+)\.")


@dataclass(frozen=True, slots=True)
class _Merge:
    """One weight, the positions of its adapters' matrices, and the module that has them."""

    weight: int
    adapters: tuple[tuple[str, int, int], ...]
    module: Any

    def result(self, tensors: tuple[Tensor, ...]) -> Tensor:
        """The weight with its adapters: in float32, cast once."""
        weight = tensors[self.weight].detach()
        if self.module.merged:
            return weight  # they are in it
        merged = weight.float()
        for adapter, a, b in self.adapters:
            delta = tensors[b].detach().float() @ tensors[a].detach().float()
            if self.module.fan_in_fan_out:
                delta = delta.T
            merged = merged + delta * self.module.scaling[adapter]
        return merged.to(weight.dtype)


class MergedLora:
    """Sends the weights of a PEFT model with its active LoRA adapters merged.

    Workers have the plain model, and need no PEFT: ``W + scale * B @ A`` is computed in float32 and
    cast to the dtype of ``W`` once; PEFT's prefixes and the adapters are left out of the names. The
    trainer's model is not changed. Each send takes the memory of the weights that have adapters,
    and their products. It stays with the sender.

    To send the adapters alone to workers that have the same PEFT model, use
    ``Select("*.lora_*", "*.modules_to_save.*")``.

    Example:
        >>> import torch
        >>> from sync_core import Sender
        >>> model = torch.nn.Linear(2, 2)
        >>> Sender("thread", model, num_workers=1, layers=[MergedLora()])
        Traceback (most recent call last):
        ...
        sync_core.errors.ModelError: the layer MergedLora found no LoRA adapters in a Linear; ...
    """

    def __init__(self) -> None:
        self._plan: tuple[Layout, Any, dict[str, int | _Merge], Layout] | None = None

    def bind(self, context: BindContext) -> MergedLora:
        """A layer for one sender."""
        del context
        return MergedLora()

    @hookimpl(wrapper=True)
    def prepare_weights(self, context: SendContext) -> Generator[None, Update, Update]:
        """Merge, and rename.

        Raises:
            ModelError: there are no adapters, or some that cannot be merged.
        """
        update = yield
        tensors, model = update.tensors, context.model
        if self._plan is None or self._plan[:2] != (update.layout, model):
            made_of = _find(update.layout, model)
            named = {name: _made(source, tensors) for name, source in made_of.items()}
            self._plan = update.layout, model, made_of, Layout.of(named)
        _, _, made_of, layout = self._plan
        update.become(layout, [_made(made_of[spec.name], tensors) for spec in layout.specs])
        return update


def _made(source: int | _Merge, tensors: tuple[Tensor, ...]) -> Tensor:
    return tensors[source] if isinstance(source, int) else source.result(tensors)


def _find(layout: Layout, model: Any) -> dict[str, int | _Merge]:
    """For each name that travels, the position of a tensor, or the merge that makes it."""
    if not isinstance(model, nn.Module):
        raise ModelError("the layer MergedLora needs the PEFT model itself: sender.send(model)")
    kind = getattr(sys.modules.get("peft.tuners.lora"), "LoraLayer", ())
    found: dict[str, int | _Merge] = {}
    merges = 0
    adapted = {
        _plain(f"{name}."): module
        for name, module in model.named_modules()
        if isinstance(module, kind)
    }
    for name in layout.names:
        if _ADAPTER.search(name) or _ORIGINAL in name:
            continue
        position = layout.index[name]
        owner, _, rest = name.partition("base_layer.")
        module = adapted.get(_plain(owner)) if rest == "weight" else None
        if module is None:
            found[_plain(name)] = position
        else:
            found[_plain(name)] = _merge(layout, owner, position, module)
            merges += 1
    if not merges:
        raise ModelError(
            f"the layer MergedLora found no LoRA adapters in a {type(model).__name__}; give the "
            "model that peft.get_peft_model returned, or leave the layer out"
        )
    return found


def _merge(layout: Layout, owner: str, weight: int, module: Any) -> _Merge:
    adapters = []
    for adapter in module.active_adapters if not module.disable_adapters else ():
        names = [f"{owner}lora_{part}.{adapter}.weight" for part in "AB"]
        if any(module.use_dora.values()) or any(name not in layout.index for name in names):
            raise ModelError(
                f"the adapter {adapter!r} of {owner.rstrip('.')!r} is not plain LoRA (DoRA, or "
                "that of an embedding); merge it yourself: model.merge_adapter(), and after the "
                "send model.unmerge_adapter()"
            )
        adapters.append((adapter, layout.index[names[0]], layout.index[names[1]]))
    return _Merge(weight, tuple(adapters), module)


def _plain(name: str) -> str:
    """A name without what PEFT adds to it."""
    name = _SAVED.sub(".", name.removeprefix(_PREFIX))
    return name.replace(".base_layer.", ".")
