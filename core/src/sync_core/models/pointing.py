"""Points parameters at an update's memory, so that nothing need be copied."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from sync_core.errors import ModelError
from sync_core.models.extra_state import is_json
from sync_core.models.writable import Places
from sync_core.weights.copying import copy
from sync_core.weights.layout import Layout

_device = operator.attrgetter("device")


class Pointing:
    """Which of a model's tensors zero-copy points at an update's, and which it copies into.

    That is found once for a model and a layout, so that a commit costs no Python code per tensor.

    Args:
        named: the model's tensors.
        layout: the update's; it may lack some of them.
        prefixes: what the names of tensors of modules begin with. Their buffers are copied, since
            modules write to them (running statistics, for example); and so are tensors that were
            made in inference mode.
    """

    def __init__(
        self, named: Mapping[str, Tensor], layout: Layout, prefixes: tuple[str, ...]
    ) -> None:
        self._named = named
        self._layout = layout
        index = layout.index
        matched = {
            name: tensor for name, tensor in named.items() if name in index and not is_json(name)
        }
        #: The tensors that are pointed, by their names.
        self.pointed = {
            name: tensor
            for name, tensor in matched.items()
            if (isinstance(tensor, nn.Parameter) or not name.startswith(prefixes))
            # Pointed at other memory, it could be used by nothing but inference mode.
            and not tensor.is_inference()
        }
        self._copied = [tensor for name, tensor in matched.items() if name not in self.pointed]
        self._places = Places(self._copied)
        self._order = [index[name] for name in self.pointed]
        self._order += [index[name] for name in matched if name not in self.pointed]

    def is_for(self, named: Mapping[str, Tensor], layout: Layout) -> bool:
        """Whether it was made for these, and what is copied into lies where it did."""
        return named is self._named and layout == self._layout and self._places.hold(self._copied)

    def apply(self, tensors: Sequence[Tensor]) -> None:
        """Point and copy.

        Args:
            tensors: the update's, in the order of its layout.

        Raises:
            ModelError: the model is on another device; nothing was written.
        """
        targets = list(self.pointed.values())
        sources = [tensors[position] for position in self._order]
        if not all(map(operator.eq, map(_device, targets + self._copied), map(_device, sources))):
            raise ModelError(
                f"zero_copy needs the model on {tensors[0].device}, where the weights "
                "arrive; use zero_copy=False for a model elsewhere"
            )
        copy(self._copied, sources[len(targets) :])
        # Pointed in inference mode, parameters could not be trained any more.
        with torch.inference_mode(mode=False):
            for target, source in zip(targets, sources, strict=False):
                target.data = source
