"""Accounts for the names of weights: loaded, fused, dropped on purpose, or an error."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from sync_core.errors import LayoutMismatchError

_SHOWN = 8
#: Buffers that old checkpoints have, and that every model of vLLM computes itself.
_COMPUTED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


def is_tied(name: str, model: Any) -> bool:
    """Return whether a model has a weight under another name, so that it must not be loaded twice.

    Args:
        name: of a weight that was sent.
        model: vLLM's model.
    """
    config = getattr(model, "config", None)
    return bool(getattr(config, "tie_word_embeddings", False)) and name.endswith("lm_head.weight")


def without_lora(name: str) -> str:
    """The name of a tensor of vLLM as it is in an engine that takes no LoRA adapters."""
    return name.replace(".base_layer.", ".")


def names_of(model: Any) -> frozenset[str]:
    """The names of all tensors of a model."""
    named = (model.named_parameters, model.named_buffers)
    return frozenset(name for each in named for name, _ in each(remove_duplicate=False))


def tied_names(model: Any) -> dict[str, str]:
    """The names of tensors that a model has under several names, each with the first of these."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = first.setdefault(id(parameter), name)
        if owner != name:
            tied |= {name: owner, owner: owner}
    return tied


def check_tied(sent: Mapping[str, Tensor], tied: Mapping[str, str], model: Any) -> None:
    """Raise where a model uses one tensor for two names that were sent with different values.

    Args:
        sent: what was sent under the names of ``tied``.
        tied: see `tied_names`.
        model: vLLM's model.

    Raises:
        LayoutMismatchError: the names are in the message.
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
    """Raise unless the model takes every name that is sent, and every parameter is sent.

    Args:
        sent: the names that are sent, as in a checkpoint.
        taken: names of the model, such as ``model.layers.0.self_attn.qkv_proj.weight``: all that
            it has, before loading; those that its ``load_weights`` returned, afterwards.
        model: vLLM's model.
        quantized: whether the model has parameters, such as scales, that no checkpoint need have.
        advice: the sentence that ends the message.

    Raises:
        LayoutMismatchError: the names are in the message.
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
    """Maps each fused tensor of vLLM to the tensors of the checkpoint.

    Args:
        model: vLLM's model.
    """

    def __init__(self, model: Any) -> None:
        self._mapper = getattr(model, "hf_to_vllm_mapper", None)
        self._packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
        #: By the first two words, such as ``experts.3``: a fused name, and the part of a
        #: checkpoint's name that it replaces.
        self._experts: dict[str, set[tuple[str, str]]] = {}
        #: By fused name, for each expert and shard: the parts that hold it, each alone.
        self._shards: dict[str, dict[tuple[int, str], list[str]]] = {}
        for fused, part, expert, shard in _expert_mapping(model):
            head = ".".join(part.split(".")[:2])
            self._experts.setdefault(head, set()).add((fused, part))
            if part.endswith("."):
                shards = self._shards.setdefault(fused, {})
                shards.setdefault((expert, shard), []).append(part)

    def owners(self, name: str) -> Iterator[str]:
        """The names under which vLLM may hold a tensor of a checkpoint."""
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
        """The tensors of a checkpoint that a fused one consists of, in order; none for others."""
        for owner, parts in self._packed.items():
            head, found, tail = fused.rpartition(f".{owner}.")
            if found and len(parts) > 1:
                return [f"{head}.{part}.{tail}" for part in parts]
        return []

    def missing(self, fused: str, sent: Collection[str]) -> list[str]:
        """The tensors that a fused one lacks, given those that were sent for it."""
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
    """A fused tensor, a part of the checkpoint's name, the expert, and the shard, for each part."""
    for layer in model.modules():
        mapping = getattr(layer, "get_expert_mapping", None)
        if mapping is not None:
            takes_fused = "include_fused" in inspect.signature(mapping).parameters
            found: list[tuple[str, str, int, str]] = (
                mapping(include_fused=True) if takes_fused else mapping()
            )
            return found  # all layers with experts have the same
    return []


def _routed(fused: str) -> str:
    """Return the name of a fused tensor in models that hold it in a separate module."""
    return fused.replace("experts.", "experts.routed_experts.", 1)


def _expert_of(name: str) -> str:
    """The two words of a name that say which expert it is of; empty for no expert."""
    _, found, rest = name.partition("experts.")
    return found + rest.partition(".")[0] if found else ""


def _is_dropped(name: str, model: Any) -> bool:
    """Return whether the model's own mapping says that it has no use for a weight."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    return mapper is not None and mapper.map_name(name) is None


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more
