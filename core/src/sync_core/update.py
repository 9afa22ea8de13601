"""The weights that a hook sees: names and tensors, changed in place by layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from sync_core.layout import Layout


class Update:
    """Named tensors on their way to or from a payload.

    A layer changes an update in place, since a hook cannot replace an argument for the hooks
    inside it.

    Args:
        layout: names, dtypes and shapes.
        tensors: in the order of ``layout.specs``.
        body: the bytes that all of them are views of, as the layout says; None when they are not.

    Example:
        >>> import torch
        >>> update = Update.of({"weight": torch.ones(2)})
        >>> update.replace([tensor.half() for tensor in update.tensors])
        >>> dict(update.items())
        {'weight': tensor([1., 1.], dtype=torch.float16)}
    """

    __slots__ = ("body", "layout", "tensors")

    def __init__(
        self, layout: Layout, tensors: Sequence[Tensor], body: Tensor | None = None
    ) -> None:
        self.layout = layout
        self.tensors = tuple(tensors)
        self.body = body

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
        for name, position in self.layout.index.items():
            yield name, self.tensors[position]

    def replace(self, tensors: Sequence[Tensor]) -> None:
        """Put other tensors under the same names."""
        self.layout = self.layout.with_tensors(tensors)
        self.tensors = tuple(tensors)
        self.body = None

    def rename(self, named: Mapping[str, Tensor]) -> None:
        """Put other tensors under other names."""
        renamed = Update.of(named)
        self.layout, self.tensors, self.body = renamed.layout, renamed.tensors, None
