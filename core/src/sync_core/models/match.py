"""Checks that weights fit a model, and puts them into the order of its layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping

import torch
from torch import Tensor

from sync_core.errors import LayoutMismatchError, ModelError
from sync_core.models.modules import WRAPPERS, is_extra_state
from sync_core.weights.layout import Layout, TensorSpec, place_of
from sync_core.weights.payload import Update

_SHOWN = 8
_IN_SENDER = "in the sender's layout"
_CHECKPOINT = (
    "checkpoints leave these out, which the model computes; to keep its own, type "
    'Sender(…, strategy="checkpoint")'
)
_PART = (
    "to keep those of the model that are not sent, give the receiver the others: Receiver(address, "
    "{name: t for name, t in model.state_dict().items() if name in address.layout.index}); for "
    'weights that are given by hand, Sender(…, layers=[select("*")]) allows that'
)
_KEEP_NAMES = (
    "tensors of extra state may change their shapes, but not their names: let get_extra_state "
    "return the same keys each time, with torch.empty(0) where there is nothing yet"
)


def check_match(
    weights: Layout,
    model: Layout,
    *,
    partial: bool = False,
    cast: bool = False,
    not_saved: Callable[[], Collection[str]] = tuple,
) -> None:
    """Raise `LayoutMismatchError` unless every tensor of the weights fits one of the model.

    Nothing is broadcast or guessed, nor cast unless that was asked for.

    Args:
        weights: the layout of the update.
        model: the layout of what is to hold it.
        partial: whether the weights may lack some of the model's tensors.
        cast: whether two floating-point dtypes may differ.
        not_saved: returns the names of tensors of the model that checkpoints do not have.

    Example:
        >>> import torch
        >>> check_match(Layout.of({"w": torch.ones(1, 2)}), Layout.of({"w": torch.ones(3, 2)}))
        Traceback (most recent call last):
        ...
        sync_core.errors.LayoutMismatchError: the weights do not fit the model; nothing was written:
          'w' is float32[1, 2] in the weights and float32[3, 2] in the model
    """
    problems = list(_problems(weights, model, partial=partial, cast=cast))
    if not problems:
        return
    prefixed = _describe_prefix(weights, model)
    shown = _shorten(problems) if prefixed is None else [prefixed]
    if _names_of_extra_state_differ(weights, model):
        shown.append(_KEEP_NAMES)
    elif prefixed is None and not model.index.keys() >= weights.index.keys():
        shown.append(_map_names(weights))
    elif prefixed is None and (missing := model.index.keys() - weights.index.keys()):
        shown.append(_CHECKPOINT if missing <= {*not_saved()} else _PART)
    raise LayoutMismatchError(
        "the weights do not fit the model; nothing was written:\n  " + "\n  ".join(shown)
    )


def _check_sent(weights: Layout, agreed: Layout, *, partial: bool, own: bool) -> None:
    """Raise `LayoutMismatchError` unless a sender may send weights of this layout.

    Args:
        weights: the layout of the weights.
        agreed: the layout of the sender.
        partial: whether the weights may lack some tensors.
        own: whether the weights are those of the sender's own model.
    """
    where = "in the model" if own else "in the weights"
    problems = list(
        _problems(weights, agreed, partial=partial, cast=False, where=where, there=_IN_SENDER)
    )
    if not problems:
        return
    prefixed = _describe_prefix(weights, agreed)
    shown = _shorten(problems) if prefixed is None else [prefixed]
    if _names_of_extra_state_differ(weights, agreed):
        shown.append(_KEEP_NAMES)
    found = "model does" if own else "weights do"
    if not own and agreed.index.keys() - weights.index.keys():
        shown.append('layers=[select("*")] lets weights that are given by hand lack tensors')
    raise LayoutMismatchError(
        f"the {found} not fit the layout with which the sender was made; nothing was sent:\n  "
        + "\n  ".join(shown)
        + "\n  the first weights of a sender fix its layout; to send a changed model, make a new "
        "Sender, and new Receivers with models changed in the same way"
    )


def _shorten(problems: list[str]) -> list[str]:
    more = len(problems) - _SHOWN
    return [*problems[:_SHOWN], f"… and {more} more"] if more > 0 else problems


def _names_of_extra_state_differ(weights: Layout, model: Layout) -> bool:
    names = weights.index.keys() ^ model.index.keys()
    return bool(names) and all(map(is_extra_state, names))


def _describe_prefix(weights: Layout, model: Layout) -> str | None:
    """Return a remedy where names differ by the prefix of a wrapper alone; None otherwise."""
    theirs = [name for name in weights.names if name not in model.index]
    mine = [name for name in model.names if name not in weights.index]
    for prefix, wrapper in WRAPPERS.items():
        without = {name: _without(prefix, name) for name in theirs + mine}
        if not mine or {without[name] for name in theirs} != {without[name] for name in mine}:
            continue
        other = next(name for name in mine if without[name] == without[theirs[0]])
        count = f", and {len(theirs) - 1} more like these" if len(theirs) > 1 else ""
        return (
            f"{theirs[0]!r} in the weights is {other!r} in the model{count}: they differ by the "
            f"prefix {prefix + '.'!r} of {wrapper}; give the module itself, from which the prefix "
            f"is removed, or what it wraps: policy.{prefix}"
        )
    return None


def _map_names(weights: Layout) -> str:
    """Return what to type for weights whose names are not those of the model."""
    if "n_averaged" in weights.index:
        return "for an AveragedModel, send the model that it holds: Sender(…, averaged.module)"
    if any(name.startswith("base_model.model.") for name in weights.names):
        return 'for a PEFT model and workers without PEFT, type Sender(…, layers=[lora("merged")])'
    return (
        'to send other names, or leave some out, type Sender(…, layers=[rename({"old.*": "new.*", '
        '"unused.*": None, "*": "*"})]); fuse() and split() cut and join tensors'
    )


def _without(prefix: str, name: str) -> str:
    return ".".join(part for part in name.split(".") if part != prefix)


def _problems(
    weights: Layout,
    model: Layout,
    *,
    partial: bool,
    cast: bool,
    where: str = "in the weights",
    there: str = "in the model",
) -> Iterator[str]:
    for name in weights.names:
        if name not in model.index:
            yield f"{name!r} is {where}, not {there}"
    for name in model.names:
        if name not in weights.index:
            if not partial:
                yield f"{name!r} is {there}, not {where}"
            continue
        theirs, mine = weights.specs[weights.index[name]], model.specs[model.index[name]]
        # A module replaces its extra state, whatever its shape; see `Binding`.
        if is_extra_state(name) and theirs.dtype == mine.dtype:
            continue
        castable = _differ_in_float_dtype(theirs, mine)
        if (theirs.dtype, theirs.shape) != (mine.dtype, mine.shape) and not (cast and castable):
            advice = (
                f"; cast it: tensor.to({mine.dtype})"
                if there == _IN_SENDER  # layers come after this check
                else '; a layer that casts allows that: Sender(…, layers=["bf16"])'
            )
            yield (
                f"{name!r} is {_kind(theirs.dtype, theirs.shape)} {where} and "
                f"{_kind(mine.dtype, mine.shape)} {there}{advice if castable else ''}"
            )
    for name, owner in model.aliases:
        both = name in weights.index and owner in weights.index
        if both and weights.index[name] != weights.index[owner]:
            yield (
                f"{name!r} and {owner!r} are one tensor {there} and two {where}: they are tied "
                "there alone, or an adapter is merged into one of them; make the model without "
                "that, as transformers does with tie_word_embeddings=False, or tie those sent"
            )


def _differ_in_float_dtype(left: TensorSpec, right: TensorSpec) -> bool:
    floats = left.dtype.is_floating_point and right.dtype.is_floating_point
    return floats and left.shape == right.shape and left.dtype != right.dtype


def _kind(dtype: object, shape: tuple[int, ...]) -> str:
    return f"{_name_of(dtype)}{list(shape)}"


def _name_of(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def conform(
    named: Mapping[str, Tensor], layout: Layout, *, partial: bool, own: bool = False
) -> Update:
    """An update of the named tensors that fits ``layout``.

    Args:
        named: the weights.
        layout: the layout of the sender.
        partial: whether some may be missing; the update then has its own layout.
        own: whether they are those of the sender's own model.

    Raises:
        ModelError: a tensor that cannot travel.
        LayoutMismatchError: a name, dtype or shape differs, or tied tensors hold two values.
    """
    given = Update.of(named)
    untied = Layout(layout.specs)
    tied = dict(layout.aliases)
    for name, owner in tied.items():
        if name in named and owner in named and not holds_same(named[name], named[owner]):
            raise LayoutMismatchError(
                f"{name!r} and {owner!r} were one tensor when the sender was made, and hold "
                "different values in the weights; nothing was sent; tie them again "
                "(model.tie_weights()), or make a new Sender and new Receivers"
            )
    firsts = {tied.get(name, name): tensor for name, tensor in reversed(list(named.items()))}
    whole = len(firsts) == len(layout.specs)
    _check_sent(Layout.of(firsts), untied, partial=partial, own=own)
    if not whole:
        return given
    tensors = [firsts[spec.name] for spec in layout.specs]
    return Update(layout.with_tensors(tensors), tensors)


def narrows(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Return whether a floating-point dtype ends before another, of 16 bits or more.

    bfloat16 has the exponents of float32, and rounds the highest 0.2 % of its range to infinity.
    """
    return wide.itemsize > 1 and torch.finfo(narrow).max < torch.finfo(wide).max


def cast_within(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in another floating-point dtype, in which no finite value is infinite.

    Raises:
        ModelError: the dtype cannot hold a value; the message has the name and the value.
    """
    cast = tensor.detach().to(dtype)
    if not tensor.numel() or not narrows(tensor.dtype, dtype):
        return cast
    # In 8 bits, too large a value is NaN, and torch finds no extremes.
    seen = cast.to(tensor.dtype) if dtype.itemsize == 1 else cast
    # They take a tenth of the time of the cast, and both are NaN where one value is.
    if not all(map(math.isfinite, torch.aminmax(seen))):
        beyond = tensor.detach().isfinite() & ~seen.isfinite()
        if beyond.any():
            raise ModelError(
                f"{name!r} has the value {tensor[beyond][0].item():.6g}, and {_name_of(dtype)}, to "
                f"which it is cast, ends at {torch.finfo(dtype).max:.6g}; keep the weights within "
                "that, or choose a dtype of a wider range for the layer or the worker's model"
            )
    return cast


def holds_same(left: Tensor, right: Tensor) -> bool:
    """Return whether two tensors have the same dtype and shape, and the same values bit by bit."""
    if place_of(left) == place_of(right):
        return True
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    # NaN is equal to nothing, and torch compares not all dtypes.
    return torch.equal(_bits(left), _bits(right.to(left.device)))


def _bits(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A single element is contiguous whatever its stride, which a view of its bytes has to lose.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
