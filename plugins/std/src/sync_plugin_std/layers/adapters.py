"""The layer `Lora`: the adapters of a PEFT model, alone or merged into its weights."""

from __future__ import annotations

import logging
import sys
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sync_core import BindContext, Layout, ModelError, SendContext, Update, hookimpl
from sync_core.models import plain_name
from sync_plugin_std.layers.selection import Select

_log = logging.getLogger("sync_core")
_PREFIX = "base_model.model."
#: What PEFT trains: adapters, and modules that it trains whole.
_ADAPTERS = ("*.lora_*", "*.modules_to_save.*")


class Lora:
    """Sends a PEFT model's LoRA adapters: alone, or merged into the weights. Also named ``lora``.

    ``Lora("adapter")`` sends the adapters, and the modules that PEFT trains whole, under PEFT's
    names, and the other parameters that PEFT trains, such as biases. Workers have a PEFT model of
    the same configuration on the same base model, which never travels: digests prove at each worker
    that it is the trainer's, and that the same adapters act with the same scale. For workers that
    may have another base, use ``Select("*.lora_*", "*.modules_to_save.*")``, which sends all of it
    once.

    ``Lora("merged")`` sends the plain model that the PEFT model stands for at that send, to workers
    without PEFT: ``W + scale * B @ A`` of the active adapters is computed in float32 and cast to
    the dtype of ``W`` once; PEFT's prefixes and the adapters are left out of the names. Adapters of
    linear layers (with ``lora_bias``, too) and of ``target_parameters`` are merged; for an active
    adapter of another kind there is an error, unless the model has it merged already. Each send
    takes the memory of the weights that have adapters, and their products. Give it before layers
    that change tensors.

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
        #: The layer that comes with this one; see `sync_plugin_std.layers.left_out`.
        self.followed_by: tuple[str, ...] = getattr(self._layer, "followed_by", ())

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
        self._trained: frozenset[str] | None = None

    def _made(self) -> _Adapters:
        return _Adapters()

    def _chosen(
        self, layout: Layout, named: Mapping[str, Tensor], context: SendContext
    ) -> set[str]:
        if self._trained is None:
            model = context.model
            self._trained = frozenset(_trained(model) if isinstance(model, nn.Module) else ())
        return super()._chosen(layout, named, context) | (self._trained & named.keys())

    def _describe_none(self, layout: Layout, model: Any) -> str:
        del layout
        return _describe_no_adapters(model)

    def _describe_changed(self, name: str) -> str:
        return (
            f"{name!r} of the base model was changed after the sender was made, and "
            'lora("adapter") does not send the base model; make a new sender, or send it all: '
            f"layers=[select{_ADAPTERS}]"
        )


def _trained(model: nn.Module) -> Iterator[str]:
    """The names of the tensors of adapters, and of what else PEFT trains."""
    if not any(_is_tuner(module) or _is_wrapper(module) for module in model.modules()):
        return
    plain = plain_name(model)
    for path, module in model.named_modules(remove_duplicate=False):
        if _is_tuner(module) or _is_wrapper(module):
            around = "base_layer." if _is_tuner(module) else "original_module."
            for tensors in (module.named_parameters(), module.named_buffers()):
                yield from (plain(f"{path}.{n}") for n, _ in tensors if not n.startswith(around))
    # Such as biases.
    yield from (plain(name) for name, p in model.named_parameters() if p.requires_grad)


class _Merged:
    """The layer of ``Lora("merged")``, with its plan."""

    def __init__(self) -> None:
        self._plan: tuple[Layout, list[object], dict[str, int | _Merge], Layout] | None = None

    def bind(self, context: BindContext) -> _Merged:
        """A layer for one sender."""
        del context
        return _Merged()

    @hookimpl(wrapper=True)
    def prepare_weights(self, context: SendContext) -> Generator[None, Update, Update]:
        """Merge, and rename."""
        update = yield
        tensors, model = update.tensors, context.model
        if not isinstance(model, nn.Module):
            raise ModelError("the layer Lora needs the PEFT model itself: sender.send(model)")
        # Adapters are switched, merged and disabled between sends.
        modules: Iterator[Any] = model.modules()
        state: list[object] = [
            (m, list(m.active_adapters), m.disable_adapters, _is_tuner(m) and m.merged)
            for m in modules
            if _is_tuner(m) or _is_wrapper(m)
        ]
        if self._plan is None or self._plan[:2] != (update.layout, state):
            made_of = _Plan(update, model).made_of
            layout = Layout.of(_make(made_of, tensors))
            self._plan = update.layout, state, made_of, layout
        _, _, made_of, layout = self._plan
        made = _make(made_of, tensors)
        update.become(layout, [made[spec.name] for spec in layout.specs])
        return update


@dataclass(frozen=True, slots=True)
class _Merge:
    """A tensor of the base model, and the adapters that are added to it.

    Args:
        base: the position of the tensor.
        adapters: the names of adapters, and the positions of their B and A; no A for a bias.
        module: the module of the adapters, which has their scale.
    """

    base: int
    adapters: tuple[tuple[str, int, int | None], ...]
    module: Any

    def result(self, tensors: tuple[Tensor, ...]) -> Tensor:
        """The tensor with its adapters: in float32 or wider, cast once."""
        base = tensors[self.base].detach()
        dtype = torch.promote_types(base.dtype, torch.float32)
        merged = base.to(dtype)
        for adapter, b, a in self.adapters:
            delta = tensors[b].detach().to(dtype)
            if a is not None:
                delta = self._product(delta, tensors[a].detach().to(dtype), merged.dim())
            merged = merged + delta * self.module.scaling[adapter]
        return merged.to(base.dtype)

    def _product(self, b: Tensor, a: Tensor, dimensions: int) -> Tensor:
        """B @ A, as ``get_delta_weight`` of PEFT's ``Linear`` and ``ParamWrapper`` have it."""
        if dimensions == 2:
            return (b @ a).T if self.module.fan_in_fan_out else b @ a
        # The experts alternate in the columns of B, and follow each other in the rows of A.
        experts = self.module.num_experts
        b, a = b.reshape(len(b), -1, experts), a.reshape(experts, -1, a.shape[-1])
        delta = torch.einsum("ore,eri->eoi", b, a)
        transposed = getattr(self.module.get_base_layer(), "is_transposed", False)
        return delta.transpose(1, 2) if transposed else delta


def _make(made_of: dict[str, int | _Merge], tensors: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """The tensors that travel; tied ones are made once, and stay tied."""
    merged = {s: s.result(tensors) for s in made_of.values() if isinstance(s, _Merge)}
    return {n: tensors[s] if isinstance(s, int) else merged[s] for n, s in made_of.items()}


class _Plan:
    """Finds, for each name that travels, the position of a tensor, or the merge that makes it.

    Every tensor of an adapter is used by a merge, or belongs to an adapter that does not act, or is
    named in an error.

    Args:
        update: the tensors of the PEFT model.
        model: the model.

    Raises:
        ModelError: the model has no adapters, or some that cannot be merged, or a layer before this
            one has changed the tensors.
    """

    def __init__(self, update: Update, model: nn.Module) -> None:
        self._layout = layout = update.layout
        # By the prefix of their tensors' names, the modules that PEFT puts around others.
        self._modules: dict[str, Any] = {}
        plain = plain_name(model)
        for path, module in model.named_modules(remove_duplicate=False):
            if _is_tuner(module) or _is_wrapper(module):
                raw = f"{path}." if path else ""
                self._modules[plain(raw)] = module
                for name, parameter in module.named_parameters():
                    self._check_unchanged(update, plain(raw + name), parameter)
        if not any(map(_is_tuner, self._modules.values())):
            raise ModelError(_describe_no_adapters(model))
        # By the prefix of its module, and its own name, the tensors of an adapter.
        self._adapters: dict[tuple[str, str], set[str]] = {}
        names = {name: self._name_sent(name) for name in layout.index}
        merges: dict[str, _Merge] = {}
        for prefix, module in self._modules.items():
            if _is_tuner(module):
                for name, merge in self._merges(prefix, module):
                    if name in merges:
                        raise self._cannot_merge(prefix, module, merge.adapters[0][0])
                    merges[name] = merge
        self.made_of: dict[str, int | _Merge] = {
            sent: merges.get(name, layout.index[name])
            for name, sent in names.items()
            if sent is not None
        }

    def _check_unchanged(self, update: Update, name: str, parameter: Tensor) -> None:
        """Refuse what a layer before this one has cast, renamed, joined, turned or left out."""
        position = self._layout.index.get(name)
        kind = f"{str(parameter.dtype).removeprefix('torch.')}{list(parameter.shape)}"
        found = "missing"
        if position is not None:
            spec, tensor = self._layout.specs[position], update.tensors[position]
            found = f"{str(spec.dtype).removeprefix('torch.')}{list(spec.shape)}"
            shared = tensor.data_ptr() == parameter.data_ptr()
            if shared and tensor.stride() != parameter.stride():
                found += " in another order"
        if found != kind:
            raise ModelError(
                'the layer lora("merged") cannot follow one that changes tensors of the model: '
                f"{name!r} is {kind} in the model, and {found} after that layer; put it first: "
                'layers=[lora("merged"), …]'
            )

    def _name_sent(self, name: str) -> str | None:
        """Return the name in the plain model; None for a tensor that PEFT has added."""
        parts, kept, i = name.split("."), [], 0
        while i < len(parts):
            prefix = "".join(f"{part}." for part in parts[:i])
            if prefix not in self._modules:
                kept.append(parts[i])
                i += 1
                continue
            module = self._modules[prefix]
            inner = _inner(prefix, module)
            if parts[i : i + len(inner)] != inner:
                if _is_tuner(module) and i + 1 < len(parts):
                    tensors = self._adapters.setdefault((prefix, parts[i + 1]), set())
                    tensors.add(".".join(parts[i:]))
                return None
            i += len(inner)
        return ".".join(kept).removeprefix(_PREFIX)

    def _merges(self, prefix: str, module: Any) -> Iterator[tuple[str, _Merge]]:
        """Yield the names of the tensors that adapters of a module change, and how."""
        if module.merged and module.disable_adapters:
            raise ModelError(
                f"the adapters {list(module.merged_adapters)} of {prefix.rstrip('.')!r} are merged "
                "and disabled; type model.unmerge_adapter() before the send"
            )
        acting = [a for a in module.active_adapters if (prefix, a) in self._adapters]
        base, weight = _base_names(prefix, module)
        if module.merged and (tied := self._tied_with(weight, module)):
            _log.warning(
                "the adapters %s are merged into %r, which is tied to %s, so that merging has "
                "changed both; %s",
                list(module.merged_adapters),
                weight,
                tied,
                _UNTIE,
            )
        if module.merged or module.disable_adapters or not acting:
            return
        index = self._layout.index
        matrices, biases = [], []
        for adapter in acting:
            a, b, bias = (f"lora_{part}.{adapter}.{of}" for part, of in _PARTS)
            tensors = self._adapters[prefix, adapter]
            if not _is_plain(module, adapter) or tensors - {bias} != {a, b} or weight not in index:
                raise self._cannot_merge(prefix, module, adapter)
            matrices.append((adapter, index[prefix + b], index[prefix + a]))
            if bias in tensors:
                if f"{base}bias" not in index:
                    raise self._cannot_merge(prefix, module, adapter)
                biases.append((adapter, index[prefix + bias], None))
        yield weight, _Merge(index[weight], tuple(matrices), module)
        if biases:
            yield f"{base}bias", _Merge(index[f"{base}bias"], tuple(biases), module)

    def _cannot_merge(self, prefix: str, module: Any, adapter: str) -> ModelError:
        tensors = ", ".join(sorted(self._adapters[prefix, adapter]))
        tied = self._tied_with(_base_names(prefix, module)[1], module)
        remedy = (
            f", and its weight is tied to {tied}, which model.merge_adapter() would change, too; "
            f"{_UNTIE}. Or send it"
            if tied
            else "; merge it yourself: model.merge_adapter(), and after the send "
            "model.unmerge_adapter(). Send what PEFT cannot merge"
        )
        return ModelError(
            f"the adapter {adapter!r} of {prefix.rstrip('.')!r}, a {type(module).__name__} with "
            f"{tensors}, is not plain LoRA of a linear layer{remedy} to workers with PEFT: "
            'layers=[lora("adapter")]'
        )

    def _tied_with(self, weight: str, module: Any) -> str:
        """Return the names of the tensors that a merge into a weight would change, too."""
        # PEFT adapts all that is tied to the tokens which it trains, alike.
        if hasattr(module, "token_indices"):
            return ""
        position = self._layout.index.get(weight)
        tied = [n for n, at in self._layout.index.items() if at == position and n != weight]
        return ", ".join(map(repr, tied))


def _base_names(prefix: str, module: Any) -> tuple[str, str]:
    """Return the prefix of the layer that PEFT has wrapped, and the name of its weight."""
    base, inner = f"{prefix}base_layer.", module.base_layer
    while _is_tuner(inner):
        base, inner = f"{base}base_layer.", inner.base_layer
    return base, base + getattr(module, "parameter_name", "weight")


_UNTIE = (
    "before peft.get_peft_model, untie them, model.config.tie_word_embeddings = False and "
    "model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone()), and make "
    "the models of workers with tie_word_embeddings=False"
)


#: The tensors of a plain adapter: A, B, and with ``lora_bias`` the bias of B.
_PARTS = (("A", "weight"), ("B", "weight"), ("B", "bias"))


def _is_plain(module: Any, adapter: str) -> bool:
    """Return whether PEFT adds ``scaling * B @ A``, which DoRA, aLoRA and subclasses do not."""
    layers = sys.modules.get("peft.tuners.lora.layer")
    function = getattr(type(module), "get_delta_weight", None)
    known = [getattr(layers, name, None) for name in ("Linear", "ParamWrapper")]
    return (
        any(kind is not None and function is kind.get_delta_weight for kind in known)
        and adapter not in getattr(module, "lora_variant", {})
        and not module.use_dora.get(adapter)
    )


def _inner(prefix: str, module: Any) -> list[str]:
    """Return the names of the modules that PEFT has wrapped in this one."""
    if _is_tuner(module):
        return ["base_layer"]
    children = dict(module.named_children())
    if "token_adapter" in children:
        return ["token_adapter"]
    if "modules_to_save" not in children:
        raise ModelError(
            f"{prefix.rstrip('.')!r} is a {type(module).__name__} of PEFT, which the layer Lora "
            "does not know; merge it yourself: model.merge_and_unload()"
        )
    saved, active = children["modules_to_save"], list(module.active_adapters)
    if module.disable_adapters or not active or any(name not in saved for name in active):
        return ["original_module"]
    return ["modules_to_save", active[0]]


def _is_tuner(module: object) -> bool:
    """Return whether PEFT has wrapped a ``base_layer`` in the module, with adapters."""
    utils = sys.modules.get("peft.tuners.tuners_utils")
    return isinstance(module, getattr(utils, "BaseTunerLayer", ()))


def _is_wrapper(module: object) -> bool:
    """Return whether PEFT has wrapped an ``original_module`` that is trained whole."""
    utils = sys.modules.get("peft.utils.other")
    return isinstance(module, getattr(utils, "AuxiliaryTrainingWrapper", ()))


def _describe_no_adapters(model: Any) -> str:
    return (
        f"the layer Lora found no LoRA adapters in a {type(model).__name__}; give the "
        "model that peft.get_peft_model returned, or leave the layer out"
    )
