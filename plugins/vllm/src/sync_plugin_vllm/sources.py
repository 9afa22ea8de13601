"""Read a trainer's weights from vLLM's ``WeightSource``, in each vLLM release.

In 0.32 ``metadata()`` is a method, ``iter(source)`` yields the tensors, and ``held_names()``
returns the names that a rank has. In 0.33 ``metadata`` is a property, ``iter_full()`` yields the
tensors, and each metadata entry has its ``owners``. This file hides these differences.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from sync_core import Layout, OptionError
from sync_core.models import ComputedWeights, Strategy, TensorStream


class SourceWeights(ComputedWeights):
    """Streams the weights of a ``WeightSource`` of vLLM, tensor by tensor.

    Args:
        source: the source.
        rank: this process's rank in the trainer; it must have every tensor whole.

    Raises:
        OptionError: another rank has some of the tensors.
    """

    def __init__(self, source: Any, rank: int = 0) -> None:
        super().__init__()
        self._source = source
        entries = list(_metadata(source))
        held = _held(source, entries, rank)
        lacking = [entry.name for entry in entries if entry.name not in held]
        if lacking:
            raise OptionError(
                f"rank {rank} of the trainer does not have {len(lacking)} of the tensors, such as "
                f"{lacking[0]!r}, and the engine loads what this rank sends; give a WeightSource "
                "that gathers all of them on this rank"
            )
        kinds = [(entry.name, entry.dtype, tuple(entry.shape)) for entry in entries]
        self._layout = Layout.of_kinds(kinds)

    def read(self, strategy: Strategy) -> TensorStream:
        """Return the stream of one version, without gathering any tensor yet."""
        del strategy
        return TensorStream(self._layout, lambda: pairs(self._source))


def pairs(source: Any) -> Iterator[tuple[str, Tensor]]:
    """Iterate over a source's names and whole tensors; all ranks must do so together."""
    found = source.iter_full() if hasattr(source, "iter_full") else source
    return iter(found)


def _metadata(source: Any) -> Any:
    found = source.metadata
    return found() if callable(found) else found


def _held(source: Any, entries: list[Any], rank: int) -> set[str]:
    if hasattr(source, "held_names"):
        names = source.held_names()
        return {entry.name for entry in entries} if names is None else set(names)
    owners = {entry.name: getattr(entry, "owners", None) for entry in entries}
    return {name for name, ranks in owners.items() if ranks is None or rank in ranks}
