"""The layers ``bf16`` and ``fp16``: the matrices of a model travel in half the bytes."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from sync_core import BindContext, Layout, SendContext, Update, hookimpl
from sync_core.models import cast_within, modules_in, plain_name
from sync_plugin_std.layers.regrouping import check_matches, compiled


class _Cast:
    """Casts what is wider; workers cast what arrives to the dtypes of their models.

    What workers may hold in float32 beside matrices in 16 bits is left as it is: a model's buffers
    (running statistics, rotary frequencies), and all that has fewer than two dimensions (biases,
    norms, the corrections of routers), which is less than a thousandth of a language model's bytes.
    So a worker's values are those that it would have made of the trainer's itself, in its own
    dtype, whatever the dtypes of other workers.

    Args:
        names: patterns of the names of the tensors to cast, instead; ``*`` stands for anything.
    """

    capabilities = frozenset({"cast"})
    _wire_dtype: ClassVar[torch.dtype]

    def __init__(self, *names: str) -> None:
        self._names = names
        self._patterns = {name: compiled(name) for name in names}
        # The positions of the tensors that are cast, in the layout that they are of.
        self._known: tuple[Layout, tuple[int, ...]] | None = None

    def bind(self, context: BindContext) -> Self:
        """Return a layer with its own plan, for one end."""
        del context
        return type(self)(*self._names)

    @hookimpl(wrapper=True)
    def prepare_weights(self, context: SendContext) -> Generator[None, Update, Update]:
        """Cast what is floating-point and wider than the wire's dtype.

        Raises:
            ModelError: a pattern matches no tensor, or a value is too large for the wire's dtype.
        """
        prepared = yield
        known = self._known
        # Weights that are given by hand have the model's layout, and come without the model.
        if known is None or (known[0] is not prepared.layout and known[0] != prepared.layout):
            known = self._known = prepared.layout, self._choose(prepared, context.model)
        if known[1]:
            tensors = list(prepared.tensors)
            for position in known[1]:
                name, tensor = prepared.layout.specs[position].name, tensors[position]
                tensors[position] = cast_within(name, tensor, self._wire_dtype)
            prepared.replace(tensors)
        return prepared

    def _choose(self, update: Update, model: Any) -> tuple[int, ...]:
        layout = update.layout
        if self._patterns:
            matched = {
                position
                for name, position in layout.index.items()
                if any(pattern.fullmatch(name) for pattern in self._patterns.values())
            }
            if self._known is None:
                check_matches(self, self._patterns, layout.names)
        else:
            buffers, names = _buffers(model), set(_names_of_buffers(model))
            matched = {
                position
                for position, tensor in enumerate(update.tensors)
                if tensor.dim() > 1
                and layout.specs[position].name not in names
                and not _is_within(tensor, buffers)
            }
        return tuple(
            position
            for position, spec in enumerate(layout.specs)
            if position in matched
            and spec.dtype.is_floating_point
            and spec.dtype.itemsize > self._wire_dtype.itemsize
        )


class BFloat16(_Cast):
    """Matrices travel as bfloat16: the range of float32, with 8 bits of precision.

    Also named ``bf16``.
    """

    _wire_dtype = torch.bfloat16


class Float16(_Cast):
    """Matrices travel as float16: 11 bits of precision; a magnitude over 65504 is an error.

    Also named ``fp16``.
    """

    _wire_dtype = torch.float16


def _buffers(model: Any) -> list[tuple[torch.device, int, int]]:
    """Return where the buffers of a model are in memory, those of two or more dimensions."""
    leaves = list(_leaves(model))
    buffers = [b for each in leaves if isinstance(each, nn.Module) for b in each.buffers()]
    # A state_dict does not tell its buffers; a TensorDict of a module's own tensors does.
    if any(isinstance(each, nn.Parameter) for each in leaves):
        plain = (each for each in leaves if isinstance(each, Tensor))
        buffers += [each for each in plain if not isinstance(each, nn.Parameter)]
    return [(b.device, b.data_ptr(), b.nbytes) for b in buffers if b.dim() > 1]


def _names_of_buffers(model: Any) -> Iterator[str]:
    """Yield the names of a model's buffers, which computed weights have elsewhere in memory."""
    for prefix, module in modules_in(model):
        plain = plain_name(module)
        yield from (prefix + plain(n) for n, _ in module.named_buffers(remove_duplicate=False))


def _leaves(model: Any) -> Iterator[Any]:
    if isinstance(model, Mapping):
        for each in model.values():
            yield from _leaves(each)
    else:
        yield model


def _is_within(tensor: Tensor, places: list[tuple[torch.device, int, int]]) -> bool:
    """Return whether the tensor is one of these, or a view of one that another layer has made."""
    start = tensor.data_ptr()
    return any(d == tensor.device and p <= start < p + nbytes for d, p, nbytes in places)
