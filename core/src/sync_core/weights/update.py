"""The weights that a hook sees: names and tensors, changed in place by layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from sync_core.weights.block import Block, bodies_of, tensors_of
from sync_core.weights.layout import Layout


class Update:
    """Named tensors on their way to or from a payload.

    A layer changes an update in place, since a hook cannot replace an argument for the hooks
    inside it.

    Args:
        layout: names, dtypes and shapes.
        source: the tensors, in the order of ``layout.specs``; or the block that they lie in.

    Example:
        >>> import torch
        >>> update = Update.of({"weight": torch.ones(2)})
        >>> update.replace([tensor.half() for tensor in update.tensors])
        >>> dict(update.items())
        {'weight': tensor([1., 1.], dtype=torch.float16)}
    """

    __slots__ = ("layout", "source")

    def __init__(self, layout: Layout, source: Sequence[Tensor] | Block) -> None:
        self.layout = layout
        self.source = source

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """In the order of ``layout.specs``."""
        return tensors_of(self.source, self.layout)

    @property
    def bodies(self) -> tuple[Tensor, ...]:
        """The bytes that all tensors are views of, in stretches; none when they lie anywhere."""
        return bodies_of(self.source, self.layout)

    @classmethod
    def of(cls, named: Mapping[str, Tensor]) -> Update:
        """An update of named tensors.

        Raises:
            ModelError: a tensor that cannot travel; the message names it.
        """
        layout = Layout.of(named)
        return cls(layout, [named[spec.name] for spec in layout.specs])

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Every name with its tensor, tied ones under each of their names."""
        tensors = self.tensors
        for name, position in self.layout.index.items():
            yield name, tensors[position]

    def copied(self) -> Update:
        """The same weights in memory of their own; tied tensors stay tied."""
        return Update(self.layout, [tensor.detach().clone() for tensor in self.tensors])

    def replace(self, tensors: Sequence[Tensor]) -> None:
        """Put other tensors under the same names."""
        self.layout = self.layout.with_tensors(tensors)
        self.source = tuple(tensors)

    def become(self, layout: Layout, tensors: Sequence[Tensor]) -> None:
        """Put these tensors, in the order of ``layout.specs``, under another layout."""
        self.layout, self.source = layout, tuple(tensors)

    def rename(self, named: Mapping[str, Tensor]) -> None:
        """Put other tensors under other names."""
        renamed = Update.of(named)
        self.layout, self.source = renamed.layout, renamed.tensors
