"""Notices that parameters which view somebody else's memory were written to in place."""

from __future__ import annotations

import operator
from collections.abc import Mapping

from torch import Tensor

from sync_core.errors import ModelError

_writes = operator.attrgetter("_version")


def lend(named: Mapping[str, Tensor], version: int) -> Lent:
    """Note that the memory of tensors is lent; those that torch does not count are left out."""
    try:
        return Lent(named, version)
    except RuntimeError:
        return Lent({name: t for name, t in named.items() if _is_counted(t)}, version)


class Lent:
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
    # What was made in inference mode has no counter.
    try:
        _writes(tensor)
    except RuntimeError:
        return False
    return True
