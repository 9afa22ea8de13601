"""The layer ``keep``: tensors that each worker has for itself, such as its exploration noise."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any

from torch import Tensor

from sync_core import ApplyContext, BindContext, Layout, SendContext, Update, hookimpl
from sync_core.models import tensor_finder
from sync_plugin_std.layers.regrouping import check_matches, compiled


class Keep:
    """Lets each worker keep tensors of its own; they do not travel. Named ``keep``.

    For buffers that belong to a worker's forward: the noise of a NoisyLinear, a cache, a counter,
    tables that depend on the longest input so far.

    Args:
        name: a pattern of the names of these tensors; ``*`` stands for anything. A pattern that
            matches no name is an error when the sender is made.
        names: more patterns.

    Example:
        >>> import torch
        >>> from sync_core import Receiver, Sender
        >>> model, copy = torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(2)
        >>> copy.running_mean += 7.0
        >>> layers = [Keep("running_*", "num_batches_tracked")]
        >>> with Sender("thread", model, num_workers=1, layers=layers) as sender:
        ...     pending = sender.send_async()
        ...     version = Receiver(sender.address(0), copy).receive()
        >>> copy.running_mean
        tensor([7., 7.])
    """

    def __init__(self, name: str, *names: str) -> None:
        self._patterns = {each: compiled(each) for each in (name, *names)}
        # At the sender: a layout, that without these tensors, and the positions that travel.
        self._known: tuple[Layout, Layout, list[int]] | None = None
        # At the receiver: a layout, the worker's own tensors, and the layout with these.
        self._whole: tuple[Layout, Mapping[str, Tensor], Layout] | None = None
        self._find: tuple[Any, Callable[[], Mapping[str, Tensor]]] | None = None

    def bind(self, context: BindContext) -> Keep:
        """Return a layer for one end of one worker."""
        del context
        return Keep(*self._patterns)

    @hookimpl(wrapper=True)
    def prepare_weights(self, context: SendContext) -> Generator[None, Update, Update]:
        """Leave these tensors out.

        Raises:
            ModelError: a pattern matches no tensor.
        """
        update = yield
        tensors = update.tensors
        if self._known is None or self._known[0] is not update.layout:
            if self._known is None and context.version == 0:
                check_matches(self, self._patterns, update.layout.names)
            specs = enumerate(update.layout.specs)
            rest = [position for position, spec in specs if not self._is_kept(spec.name)]
            aliases = {a: o for a, o in update.layout.aliases if not self._is_kept(a)}
            names = {update.layout.specs[i].name: tensors[i] for i in rest}
            layout = Layout.of({**names, **{a: names[o] for a, o in aliases.items()}})
            self._known = update.layout, layout, rest
        _, layout, rest = self._known
        update.become(layout, [tensors[position] for position in rest])
        return update

    @hookimpl(wrapper=True)
    def apply_weights(
        self, update: Update, model: object, context: ApplyContext
    ) -> Generator[None, bool, bool]:
        """Complete the update with the worker's own tensors."""
        # A worker that loads by its own function has no model that can be read.
        if model is not None:
            if self._find is None or self._find[0] is not model:
                self._find = model, tensor_finder(model, context.strategy)
            own = {n: t for n, t in self._find[1]().items() if self._is_kept(n)}
            named = {**dict(update.items()), **own}
            known = self._whole
            if known is None or known[0] is not update.layout or known[1].keys() != own.keys():
                known = self._whole = update.layout, own, Layout.of(named)
            update.become(known[2], [named[spec.name] for spec in known[2].specs])
        return (yield)

    def _is_kept(self, name: str) -> bool:
        return any(pattern.fullmatch(name) for pattern in self._patterns.values())
