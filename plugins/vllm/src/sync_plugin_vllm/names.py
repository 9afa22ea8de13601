"""Check the names of weights: each must be loaded, fused or dropped on purpose."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from sync_core.errors import LayoutMismatchError

_SHOWN = 8
#: Buffers in old checkpoints that all vLLM models compute themselves.
_COMPUTED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


def is_tied(name: str, model: Any) -> bool:
    """Return whether a model has a weight under another name, so it must not be loaded twice.

    Args:
        name: the name of a weight that was sent.
        model: vLLM's model.
    """
    config = getattr(model, "config", None)
    return bool(getattr(config, "tie_word_embeddings", False)) and name.endswith("lm_head.weight")


def without_lora(name: str) -> str:
    """Return the name that a vLLM tensor has in an engine without LoRA."""
    return name.replace(".base_layer.", ".")


def names_of(model: Any) -> frozenset[str]:
    """Return the names of all tensors of a model."""
    named = (model.named_parameters, model.named_buffers)
    return frozenset(name for each in named for name, _ in each(remove_duplicate=False))


def tied_names(model: Any) -> dict[str, str]:
    """Map the names of a model's shared tensors to the first name of each."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = first.setdefault(id(parameter), name)
        if owner != name:
            tied |= {name: owner, owner: owner}
    return tied


def check_tied(sent: Mapping[str, Tensor], tied: Mapping[str, str], model: Any) -> None:
    """Raise if two names were sent with different values, and the model has one tensor for both.

    Args:
        sent: the tensors that were sent under the names in ``tied``.
        tied: see `tied_names`.
        model: vLLM's model.

    Raises:
        LayoutMismatchError: the check failed; the message has the names.
    """
    for name, tensor in sent.items():
        other = sent.get(tied[name], tensor)
        if tensor.data_ptr() != other.data_ptr() and not torch.equal(tensor, other):
            raise LayoutMismatchError(
                f"{name!r} and {tied[name]!r} were sent with different values, and vLLM's "
                f"{type(model).__name__} uses one tensor for both; start the engine with a "
                "checkpoint that has tie_word_embeddings=False"
            )


def check_names(
    sent: Collection[str], taken: Collection[str], model: Any, *, quantized: bool, advice: str
) -> None:
    """Raise unless the model has every sent name, and every parameter is sent.

    Args:
        sent: the sent names, as in a checkpoint.
        taken: names of the model, such as ``model.layers.0.self_attn.qkv_proj.weight``: before
            loading, all names; afterwards, the result of ``load_weights``.
        model: vLLM's model.
        quantized: whether the model may have parameters, such as scales, that checkpoints lack.
        advice: the last sentence of the message.

    Raises:
        LayoutMismatchError: the check failed; the message has the names.
    """
    fused = FusedNames(model)
    taken = {without_lora(name) for name in taken}
    parts: dict[str, set[str]] = {}
    unmatched = []
    for name in sent:
        if is_tied(name, model) or name.endswith(_COMPUTED) or _is_dropped(name, model):
            continue
        owner = next((found for found in fused.owners(name) if found in taken), None)
        if owner is None:
            unmatched.append(name)
        else:
            parts.setdefault(owner, set()).add(name)
    missing = []
    for name in map(without_lora, dict(model.named_parameters())):
        if name in parts:
            missing += fused.missing(name, parts[name])
        elif not quantized:
            missing.append(name)
    if not unmatched and not missing:
        return
    problems = []
    if unmatched:
        problems.append(f"sent, and not loaded: {_listed(unmatched)}")
    if missing:
        problems.append(f"not sent: {_listed(missing)}")
    raise LayoutMismatchError(
        f"the weights do not fit vLLM's {type(model).__name__}: {'; '.join(problems)}. {advice}"
    )


class FusedNames:
    """Maps each fused tensor of vLLM to its tensors in the checkpoint.

    Args:
        model: vLLM's model.
    """

    def __init__(self, model: Any) -> None:
        self._mapper = getattr(model, "hf_to_vllm_mapper", None)
        self._packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
        #: By the first two words, such as ``experts.3``: fused names, each with the part of the
        #: checkpoint's name that it replaces.
        self._experts: dict[str, set[tuple[str, str]]] = {}
        #: By fused name and then by expert and shard: alternative names of the part.
        self._shards: dict[str, dict[tuple[int, str], list[str]]] = {}
        for fused, part, expert, shard in _expert_mapping(model):
            head = ".".join(part.split(".")[:2])
            self._experts.setdefault(head, set()).add((fused, part))
            if part.endswith("."):
                shards = self._shards.setdefault(fused, {})
                shards.setdefault((expert, shard), []).append(part)

    def owners(self, name: str) -> Iterator[str]:
        """Iterate over the names that vLLM may use for a tensor of a checkpoint."""
        mapped = None if self._mapper is None else self._mapper.map_name(name)
        for known in (name, *([mapped] if mapped else [])):
            yield known
            for fused, parts in self._packed.items():
                for part in parts:
                    if f".{part}." in known:
                        yield known.replace(f".{part}.", f".{fused}.")
            for fused, part in self._experts.get(_expert_of(known), ()):
                if part in known:
                    yield known.replace(part, fused)
                    yield known.replace(part, _routed(fused))

    def parts(self, fused: str) -> list[str]:
        """Return a fused tensor's tensors in the checkpoint, in order; empty if it is not fused."""
        for owner, parts in self._packed.items():
            head, found, tail = fused.rpartition(f".{owner}.")
            if found and len(parts) > 1:
                return [f"{head}.{part}.{tail}" for part in parts]
        return []

    def missing(self, fused: str, sent: Collection[str]) -> list[str]:
        """Return the checkpoint tensors of a fused tensor that were not sent."""
        if parts := self.parts(fused):
            return sorted({*parts}.difference(sent))
        one = next(iter(sent))
        stem, found, _ = one.partition("experts.")
        if not found or not _expert_of(one).removeprefix("experts.").isdecimal():
            return []
        tail = one.rpartition(".")[2]
        lacking = set()
        for prefix, shards in self._shards.items():
            if fused in (f"{stem}{prefix}{tail}", f"{stem}{_routed(prefix)}{tail}"):
                for parts in shards.values():
                    names = [f"{stem}{part}{tail}" for part in parts]
                    if not any(name in sent for name in names):
                        lacking.add(names[-1])
        return sorted(lacking)


def _expert_mapping(model: Any) -> list[tuple[str, str, int, str]]:
    """Return for each part: fused name, part of the checkpoint's name, expert and shard."""
    for layer in model.modules():
        mapping = getattr(layer, "get_expert_mapping", None)
        if mapping is not None:
            takes_fused = "include_fused" in inspect.signature(mapping).parameters
            found: list[tuple[str, str, int, str]] = (
                mapping(include_fused=True) if takes_fused else mapping()
            )
            return found  # the same for all layers with experts
    return []


def _routed(fused: str) -> str:
    """Return the name of a fused tensor in models with a separate module for it."""
    return fused.replace("experts.", "experts.routed_experts.", 1)


def _expert_of(name: str) -> str:
    """Return the two words of a name that identify its expert; empty if there is none."""
    _, found, rest = name.partition("experts.")
    return found + rest.partition(".")[0] if found else ""


def _is_dropped(name: str, model: Any) -> bool:
    """Return whether the model's own name mapping drops a weight."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    return mapper is not None and mapper.map_name(name) is None


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more
