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
    sent: Collection[str], loaded: Collection[str] | None, model: Any, *, quantized: bool
) -> None:
    """Raise unless every name that was sent was loaded, and every parameter was sent.

    Args:
        sent: the names that were sent, as in a checkpoint.
        loaded: what the model's ``load_weights`` has returned: its own names, such as
            ``model.layers.0.self_attn.qkv_proj.weight``; None where it does not report them.
        model: vLLM's model.
        quantized: whether the model has parameters, such as scales, that no checkpoint need have.

    Raises:
        LayoutMismatchError: the names are in the message.
    """
    if loaded is None:
        raise LayoutMismatchError(
            f"load_weights of {type(model).__name__} does not say what it has loaded, so that "
            "names cannot be accounted for"
        )
    unmatched = [
        name
        for name in sent
        if not is_tied(name, model)
        and not name.endswith(_COMPUTED)
        and not _is_dropped(name, model)
        and not any(candidate in loaded for candidate in _candidates(name, model))
    ]
    missing = [] if quantized else [n for n, _ in model.named_parameters() if n not in loaded]
    # A fused parameter counts as loaded when one of its parts was.
    for fused, parts in getattr(model, "packed_modules_mapping", {}).items():
        for name in loaded:
            owner, found, rest = name.rpartition(f"{fused}.")
            if found:
                wanted = [f"{owner}{part}.{rest}" for part in parts]
                given = [n for n in wanted if n in sent]
                if given and len(given) < len(wanted):
                    missing += [n for n in wanted if n not in given]
    if not unmatched and not missing:
        return
    problems = []
    if unmatched:
        problems.append(f"sent, and not loaded: {_listed(unmatched)}")
    if missing:
        problems.append(f"not sent: {_listed(missing)}")
    raise LayoutMismatchError(
        f"the weights do not fit vLLM's {type(model).__name__}: {'; '.join(problems)}. Send the "
        'names of its checkpoint: Sender(…, strategy="checkpoint"), or layers that rename'
    )


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
