"""The memory of a model's tensors: shared, lent by a payload, and written to."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import gcd

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from sync_core.errors import ModelError
from sync_core.models.modules import is_extra_state
from sync_core.weights.copying import copy
from sync_core.weights.layout import Layout, place_of


def check_writable(named: Mapping[str, Tensor]) -> None:
    """Raise `ModelError` where elements share memory, those of one tensor or of two.

    Tied tensors are one under several names, and no fault; nor are tensors that lie between each
    other's elements, as columns of a matrix do. Extra state may view what it likes: it is made
    again whenever it is read.

    Example:
        >>> matrix = torch.zeros(3, 4)
        >>> check_writable({"left": matrix[:, :2], "right": matrix[:, 2:]})
        >>> check_writable({"left": matrix[:, :3], "right": matrix[:, 2:]})
        Traceback (most recent call last):
        ...
        sync_core.errors.ModelError: 'left' and 'right' share memory, but are not one tensor: ...
    """
    for name, tensor in named.items():
        if _overlaps_itself(tensor):
            raise ModelError(
                f"{name!r} was made by expand() or as_strided(): its elements share memory and "
                "cannot be written one by one; clone() it first"
            )
    untied: dict[torch.device, dict[object, tuple[str, Tensor]]] = {}
    for name, tensor in named.items():
        if tensor.numel() and not is_extra_state(name):
            places = untied.setdefault(tensor.device, {})
            places.setdefault(place_of(tensor), (name, tensor))
    for places in untied.values():
        for group in _entangled(places.values()):
            _check_apart(group)


def check_held(named: Mapping[str, Tensor], again: Mapping[str, Tensor]) -> None:
    """Raise `ModelError` for a tensor that is another one when the model is read again."""
    for name, tensor in named.items():
        if tensor.data_ptr() != again[name].data_ptr() and not is_extra_state(name):
            raise ModelError(
                f"{name!r} is recomputed whenever it is read, as those of a TensorDict that is "
                "stacked lazily are, so that what is written into it is lost; give a model that "
                "holds its tensors, such as tensordict.contiguous()"
            )


class Places:
    """The addresses and strides of tensors, to notice tensors that were moved."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        tensors = list(tensors)
        self._pointers = list(map(Tensor.data_ptr, tensors))
        self._strides = list(map(Tensor.stride, tensors))

    def hold(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether these lie just so."""
        tensors = list(tensors)
        return list(map(Tensor.data_ptr, tensors)) == self._pointers and all(
            # One at a time: thousands of tuples alive at once would set off the garbage collector.
            map(operator.eq, map(Tensor.stride, tensors), self._strides)
        )


def _overlaps_itself(tensor: Tensor) -> bool:
    if tensor.is_contiguous():
        return False
    reach, certain = 0, True
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride == 0:
                return True
            certain &= stride > reach
            reach += (size - 1) * stride
    if certain:
        return False
    taken = _nothing_taken(reach + 1)
    taken.as_strided(tensor.shape, tensor.stride()).fill_(1)
    return int(taken.sum()) < tensor.numel()


def _entangled(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Groups of tensors in which each begins before the memory of those before it has ended."""
    group: list[tuple[str, Tensor]] = []
    end = 0
    for name, tensor in sorted(tensors, key=_begin):
        if group and tensor.data_ptr() >= end:
            if len(group) > 1:
                yield group
            group = []
        group.append((name, tensor))
        end = max(end, end_of(tensor))
    if len(group) > 1:
        yield group


def _check_apart(group: Sequence[tuple[str, Tensor]]) -> None:
    begin = group[0][1].data_ptr()
    sizes = (gcd(tensor.itemsize, tensor.data_ptr() - begin) for _, tensor in group)
    unit = gcd(*sizes)
    taken = _nothing_taken((max(end_of(tensor) for _, tensor in group) - begin) // unit)
    views: list[Tensor] = []
    for name, tensor in group:
        width = tensor.itemsize // unit
        view = taken.as_strided(
            (*tensor.shape, width),
            (*(stride * width for stride in tensor.stride()), 1),
            (tensor.data_ptr() - begin) // unit,
        )
        if view.any():
            taken.zero_()
            view.fill_(1)
            other = next(group[i][0] for i, earlier in enumerate(views) if earlier.any())
            raise ModelError(
                f"{other!r} and {name!r} share memory, but are not one tensor: to write one would "
                f"change the other, and nothing was written; clone() one of them, or tie them "
                "by assigning the same Parameter, here and in the trainer's model"
            )
        view.fill_(1)
        views.append(view)


def _nothing_taken(size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.bool, device="cpu")


def _begin(found: tuple[str, Tensor]) -> int:
    return found[1].data_ptr()


def end_of(tensor: Tensor) -> int:
    """The address at which the memory of a tensor that has elements ends."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in sizes)
    return tensor.data_ptr() + (last + 1) * tensor.itemsize


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
