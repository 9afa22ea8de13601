"""Tensors by which a copy stops at a byte, and something is done before it goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sync_core import Layout


class _Gated(Tensor):
    """Something is done, once, when the elements of this tensor are first copied.

    In a fused copy of many tensors the elements before it have been copied then, and no others.
    A view of it is one of its kind: some schemes copy that, or its memory.
    """

    gate: Callable[[], object] | None
    before: int

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        name = getattr(function, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            if cls.gate is not None and name == "_foreach_copy_":
                cls._copy_until_here(*args)
            elif cls.gate is not None and ("copy" in name or name == "numpy"):
                cls._open()
            result = function(*args, **(kwargs or {}))
            if cls.gate is not None and _is_view(result, args[0] if args else None):
                return result.as_subclass(cls)
            return result

    @classmethod
    def _copy_until_here(cls, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        here = next(i for i, source in enumerate(sources) if isinstance(source, cls))
        for target, source in zip(targets[:here], sources[:here], strict=True):
            target.copy_(source)
        if cls.before and targets[here].is_contiguous():
            part = sources[here].reshape(-1)[: cls.before]
            targets[here].view(-1)[: cls.before].copy_(part)
        cls._open()

    @classmethod
    def _open(cls) -> None:
        gate, cls.gate = cls.gate, None
        if gate is not None:
            gate()


def _is_view(result: object, source: object) -> bool:
    return (
        isinstance(result, Tensor)
        and isinstance(source, Tensor)
        and result.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
    )


def gated(
    tensors: Sequence[Tensor], layout: Layout, at_byte: int, gate: Callable[[], object]
) -> tuple[Tensor, ...]:
    """The same tensors, of which one has something done when it is copied.

    Args:
        tensors: in the order of ``layout.specs``.
        layout: their layout.
        at_byte: a byte of the body; the last tensor has the gate when there are not so many.
        gate: called once.

    Example:
        >>> tensors = torch.ones(2), torch.ones(4)
        >>> targets = torch.zeros(2), torch.zeros(4)
        >>> layout = Layout.of({"a": tensors[0], "b": tensors[1]})
        >>> made = gated(tensors, layout, 64 + 8, lambda: print(*targets))
        >>> _ = torch._foreach_copy_(targets, made)
        tensor([1., 1.]) tensor([1., 1., 0., 0.])
        >>> targets[1]
        tensor([1., 1., 1., 1.])
    """
    ends = (spec.offset + spec.nbytes for spec in layout.specs)
    here = next((i for i, end in enumerate(ends) if end > at_byte), len(tensors) - 1)
    spec = layout.specs[here]
    before = max(0, at_byte - spec.offset) // spec.dtype.itemsize
    members = {"gate": staticmethod(gate), "before": min(before, tensors[here].numel())}
    kind = type("Gated", (_Gated,), members)
    made: Tensor = Tensor._make_subclass(kind, tensors[here].detach())
    return (*tensors[:here], made, *tensors[here + 1 :])
