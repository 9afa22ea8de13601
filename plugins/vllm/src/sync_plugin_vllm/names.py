"""Accounts for the names of weights: loaded, fused, dropped on purpose, or an error."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

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


def check_names(
    sent: Collection[str], taken: Collection[str], model: Any, *, quantized: bool
) -> None:
    """Raise unless the model takes every name that is sent, and every parameter is sent.

    Args:
        sent: the names that are sent, as in a checkpoint.
        taken: names of the model, such as ``model.layers.0.self_attn.qkv_proj.weight``: all that
            it has, before loading; those that its ``load_weights`` returned, afterwards.
        model: vLLM's model.
        quantized: whether the model has parameters, such as scales, that no checkpoint need have.

    Raises:
        LayoutMismatchError: the names are in the message.
    """
    parts: dict[str, set[str]] = {}
    unmatched = []
    for name in sent:
        if is_tied(name, model) or name.endswith(_COMPUTED) or _is_dropped(name, model):
            continue
        owner = next((found for found in _candidates(name, model) if found in taken), None)
        if owner is None:
            unmatched.append(name)
        else:
            parts.setdefault(owner, set()).add(name)
    missing = []
    for name, _ in model.named_parameters():
        if name in parts:
            missing += sorted(_parts_of(name, model) - parts[name])
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
        f"the weights do not fit vLLM's {type(model).__name__}: {'; '.join(problems)}. Send the "
        'names of its checkpoint: Sender(…, strategy="checkpoint"), or a layer that renames'
    )


def _parts_of(fused: str, model: Any) -> set[str]:
    """The names of a checkpoint that a fused parameter is made of; none for one that is not."""
    for owner, parts in getattr(model, "packed_modules_mapping", {}).items():
        head, found, tail = fused.rpartition(f".{owner}.")
        if found and len(parts) > 1:
            return {f"{head}.{part}.{tail}" for part in parts}
    return set()


def _is_dropped(name: str, model: Any) -> bool:
    """Return whether the model's own mapping says that it has no use for a weight."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    return mapper is not None and mapper.map_name(name) is None


def _candidates(name: str, model: Any) -> Iterator[str]:
    """The names under which a model may have loaded a weight."""
    yield name
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is not None:
        yield mapper.map_name(name)
    for fused, parts in getattr(model, "packed_modules_mapping", {}).items():
        for part in parts:
            if f".{part}." in name:
                yield name.replace(f".{part}.", f".{fused}.")
    # Each: the fused parameter, a part of the checkpoint's name, the expert, the shard.
    experts = getattr(model, "get_expert_mapping", None)
    for fused, part, _, _ in experts() if experts is not None else ():
        if part in name:
            yield name.replace(part, fused)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more
