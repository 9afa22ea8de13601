"""Extras: small tensors that travel beside the weights of one version.

They lie behind the weights, under names with a prefix that no model's tensor has. So a transport
carries them without knowing of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from sync_core.errors import ModelError, PayloadError
from sync_core.weights.block import Block
from sync_core.weights.layout import (
    ALIGNMENT,
    EXTRA_PREFIX,
    Layout,
    TensorSpec,
    check_tensor,
)
from sync_core.weights.payload import Payload, Update
from sync_core.weights.streamed import TensorStream

# The name under which the base of an update travels. Names with a dot are for the core and layers.
_BASE = "sync.base"
# The most that extras of a send may take, in bytes; receivers expect no more than 1 MB.
_MOST = 1 << 16

Kinds = tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]


def checked(given: Mapping[str, Tensor], agreed: Kinds | None) -> dict[str, Tensor]:
    """Return the extras of a send.

    Args:
        given: by name.
        agreed: those of the first send that had some.

    Raises:
        ModelError: a name or tensor that cannot travel, or another than the agreed ones.
    """
    if not isinstance(given, Mapping):
        raise ModelError(f"extras must be a mapping from names to tensors, got {given!r:.200}")
    for name, tensor in given.items():
        if not isinstance(name, str) or "." in name:
            raise ModelError(f"the name of an extra must be text without dots, got {name!r}")
        if not isinstance(tensor, Tensor):
            raise ModelError(f"the extra {name!r} must be a tensor; type torch.tensor({tensor!r})")
        check_tensor(name, tensor)
    extras = {name: tensor.detach() for name, tensor in given.items()}
    nbytes = sum(tensor.nbytes for tensor in extras.values())
    if nbytes > _MOST:
        raise ModelError(
            f"extras may have {_MOST} bytes, got {nbytes}; send larger tensors as weights: "
            "Sender(scheme, {'policy': policy, 'more': {name: tensor}})"
        )
    if agreed is not None and kinds_of(extras) != agreed:
        raise ModelError(
            f"the extras of a send must have the names, dtypes and shapes of the first ones, "
            f"{_described(agreed)}; got {_described(kinds_of(extras))}"
        )
    return extras


def kinds_of(extras: Mapping[str, Tensor]) -> Kinds:
    """Return names, dtypes and shapes."""
    return tuple((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in extras.items())


def attached(update: Update) -> tuple[Layout, Sequence[Tensor] | Block]:
    """Return the layout and the source of a payload: those of an update, with its extras."""
    extras = update.extras
    if update.base:
        extras = {**extras, _BASE: torch.tensor([update.base], device="cpu")}
    if not extras:
        return update.layout, update.source
    layout = _with(update.layout, kinds_of(extras))
    if isinstance(update.source, TensorStream):
        return layout, update.source.followed_by(layout, tuple(extras.values()))
    return layout, (*update.tensors, *extras.values())


def detached(payload: Payload) -> Update:
    """Return the weights of a payload, with its extras beside them."""
    plain = payload.layout.plain
    if plain is payload.layout:
        return Update(plain, payload.source)
    tensors, count = payload.tensors, len(plain.specs)
    extras = _named(payload.layout, tensors[count:])
    base = _read_base(extras.pop(_BASE, None))
    return Update(plain, tensors[:count], base, extras)


def check_base(payload: Payload, held: int) -> None:
    """Raise `PayloadError` unless a payload brings all that a model of version ``held`` lacks."""
    if payload.layout.plain is payload.layout:
        return
    position = payload.layout.index.get(EXTRA_PREFIX + _BASE)
    base = 0 if position is None else _read_base(payload.tensors[position])
    if base > held:
        raise PayloadError(
            f"version {payload.version} brings only what changed after version {base}, and the "
            f"model has version {held}; the next send brings everything"
        )


def of_user(extras: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of the extras that the sender's caller gave."""
    if not extras:
        return {}
    return {name: tensor.clone() for name, tensor in extras.items() if "." not in name}


def _named(layout: Layout, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    specs = layout.specs[len(layout.specs) - len(tensors) :]
    names = (spec.name.removeprefix(EXTRA_PREFIX) for spec in specs)
    return dict(zip(names, tensors, strict=True))


def _read_base(tensor: Tensor | None) -> int:
    if tensor is None:
        return 0
    if (tensor.dtype, tuple(tensor.shape)) != (torch.int64, (1,)):
        raise PayloadError(f"the base of a payload must be int64[1], got {tensor.dtype}")
    return int(tensor.item())


def _described(kinds: Kinds) -> str:
    return ", ".join(str(TensorSpec(*kind, 0)) for kind in kinds) or "none"


@lru_cache(maxsize=64)
def _with(layout: Layout, kinds: Kinds) -> Layout:
    end, specs = layout.body_nbytes, list(layout.specs)
    for name, dtype, shape in kinds:
        specs.append(TensorSpec(EXTRA_PREFIX + name, dtype, shape, end + -end % ALIGNMENT))
        end = specs[-1].offset + specs[-1].nbytes
    return Layout(tuple(specs), layout.aliases)
