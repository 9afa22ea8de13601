"""A trainer's weights as vLLM's ``WeightSource`` has them, in each version of vLLM.

In 0.32 ``metadata()`` is a method, the tensors come from ``iter(source)``, and ``held_names()``
says which a rank has. In 0.33 ``metadata`` is a property, the tensors come from ``iter_full()``,
and each entry of the metadata names its ``owners``. All that differs is in this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from sync_core import Layout, OptionError
from sync_core.models import ComputedWeights, Strategy, TensorStream


class SourceWeights(ComputedWeights):
    """The weights of a ``WeightSource`` of vLLM, one tensor after the other.

    Args:
        source: the source.
        rank: of this process in the trainer, which must have the whole of each tensor.

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
        """Return the stream of one version; nothing is gathered yet."""
        del strategy
        return TensorStream(self._layout, lambda: pairs(self._source))


def pairs(source: Any) -> Iterator[tuple[str, Tensor]]:
    """The names and whole tensors of a source; all ranks of a trainer read them together."""
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
