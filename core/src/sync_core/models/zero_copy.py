"""Parameters that are views of a payload, and the detection of writes to them."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from sync_core.errors import ModelError
from sync_core.models.aliasing import Places
from sync_core.models.extra_state import is_extra_state
from sync_core.weights.copying import copy
from sync_core.weights.layout import Layout

_writes = operator.attrgetter("_version")


class WriteGuard:
    """Tensors whose memory is lent, and how often each had been written to when it was.

    torch has no read-only tensors, but counts the in-place changes of each, those by views and
    by ``detach()`` too. It counts neither writes by ``.data`` or numpy, nor those of
    optimizers with ``fused=True``, nor those to tensors made in inference mode.

    Args:
        named: the tensors.
        version: the version of the weights in their memory.
    """

    def __init__(self, named: Mapping[str, Tensor], version: int) -> None:
        self._version = version
        self._names = list(named)
        self._tensors = list(named.values())
        self._before = list(map(_writes, self._tensors))
        self._pointers = list(map(Tensor.data_ptr, self._tensors))

    def check(self) -> None:
        """Raise `ModelError` for the first tensor that was written to where it was lent."""
        now = list(map(_writes, self._tensors))
        if now == self._before:
            return
        for name, tensor, pointer, before, count in zip(
            self._names, self._tensors, self._pointers, self._before, now, strict=True
        ):
            # A tensor that was moved since then may do with its own memory as it likes.
            if count != before and tensor.data_ptr() == pointer:
                raise ModelError(
                    f"{name!r} was written to in place after version {self._version} was "
                    "committed, but with zero_copy=True it views memory that other workers may "
                    "read too, and is read-only; for weights that can be written to, type "
                    "Sender(…, zero_copy=False). Nothing was committed now; the next version "
                    "will be"
                )


def _is_counted(tensor: Tensor) -> bool:
    # Tensors made in inference mode have no counter.
    try:
        _writes(tensor)
    except RuntimeError:
        return False
    return True


_device = operator.attrgetter("device")


class ParameterViews:
    """The tensors of a model that become views of an update, and those that are copied.

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
            name: tensor
            for name, tensor in named.items()
            if name in index and not (is_extra_state(name) and name.startswith(prefixes))
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
        """Return whether it was made for these, and what is copied into lies where it did."""
        return named is self._named and layout == self._layout and self._places.hold(self._copied)

    def guard(self, version: int) -> WriteGuard:
        """Return a guard of what is pointed, but for tensors that torch does not count."""
        try:
            return WriteGuard(self.pointed, version)
        except RuntimeError:
            counted = {name: t for name, t in self.pointed.items() if _is_counted(t)}
            return WriteGuard(counted, version)

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
        # Whatever is kept until a tensor was written to is found to be old.
        increment_version(targets)
