"""The layer `Lora`: the adapters of a PEFT model, alone or merged into its weights."""

from __future__ import annotations

import re
import sys
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from sync_core import BindContext, Layout, ModelError, SendContext, Update, hookimpl
from sync_plugin_std.selection import Select

_PREFIX = "base_model.model."
#: What PEFT trains: adapters, and modules that it trains whole.
_ADAPTERS = ("*.lora_*", "*.modules_to_save.*")
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


class Lora:
    """Sends a PEFT model's LoRA adapters: alone, or merged into the weights. Also named ``lora``.

    ``Lora("adapter")`` sends the adapters, and the modules that PEFT trains whole, under PEFT's
    names. Workers have a PEFT model of the same configuration on the same base model, which never
    travels: a digest proves at each worker that it is the trainer's. For workers that may have
    another base, use ``Select("*.lora_*", "*.modules_to_save.*")``, which sends all of it once.

    ``Lora("merged")`` sends the plain model that the PEFT model stands for, to workers without
    PEFT: ``W + scale * B @ A`` of the active adapters is computed in float32 and cast to the dtype
    of ``W`` once; PEFT's prefixes and the adapters are left out of the names. Each send takes the
    memory of the weights that have adapters, and their products.

    The trainer's model is not changed. The layer stays with the sender.

    Args:
        send: ``"adapter"`` or ``"merged"``.

    Raises:
        ValueError: ``send`` is something else.

    Example:
        >>> import torch
        >>> from sync_core import Sender
        >>> model = torch.nn.Linear(2, 2)
        >>> Sender("thread", model, num_workers=1, layers=[Lora("merged")])
        Traceback (most recent call last):
        ...
        sync_core.errors.ModelError: the layer Lora found no LoRA adapters in a Linear; ...
    """

    def __init__(self, send: Literal["adapter", "merged"]) -> None:
        if send not in ("adapter", "merged"):
            raise ValueError(f"Lora sends 'adapter' or 'merged', not {send!r}")
        self._layer = _Merged() if send == "merged" else _Adapters()
        self.capabilities: frozenset[str] = getattr(self._layer, "capabilities", frozenset())

    def bind(self, context: BindContext) -> Select | _Merged:
        """A layer for one sender."""
        return self._layer.bind(context)

    @hookimpl(wrapper=True)
    def prepare_weights(self, context: SendContext) -> Generator[None, Update, Update]:
        """Merge and rename, or leave the base model out.

        Raises:
            ModelError: there are no adapters, or some that cannot be merged.
        """
        return (yield from self._layer.prepare_weights(context))


class _Adapters(Select):
    """The layer of ``Lora("adapter")``."""

    def __init__(self) -> None:
        super().__init__(*_ADAPTERS, send_rest=False)

    def bind(self, context: BindContext) -> _Adapters:
        """A layer for one sender."""
        del context
        return _Adapters()

    def _describe_none(self, layout: Layout, model: Any) -> str:
        del layout
        return _describe_no_adapters(model)


class _Merged:
    """The layer of ``Lora("merged")``, with its plan."""

    def __init__(self) -> None:
        self._plan: tuple[Layout, Any, dict[str, int | _Merge], Layout] | None = None

    def bind(self, context: BindContext) -> _Merged:
        """A layer for one sender."""
        del context
        return _Merged()

    @hookimpl(wrapper=True)
    def prepare_weights(self, context: SendContext) -> Generator[None, Update, Update]:
        """Merge, and rename."""
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
        raise ModelError("the layer Lora needs the PEFT model itself: sender.send(model)")
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
        raise ModelError(_describe_no_adapters(model))
    return found


def _describe_no_adapters(model: Any) -> str:
    return (
        f"the layer Lora found no LoRA adapters in a {type(model).__name__}; give the "
        "model that peft.get_peft_model returned, or leave the layer out"
    )


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
