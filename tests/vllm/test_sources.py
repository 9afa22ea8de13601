"""`SourceWeights` with sources that have the interface of each version of vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from sync_core import OptionError, Receiver, Sender
from sync_plugin_vllm.sources import SourceWeights, pairs

pytestmark = pytest.mark.timeout(60)


@dataclass
class Meta:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = None


class Source32:
    """As in vLLM 0.32."""

    def __init__(self, model: torch.nn.Module, held: list[str] | None = None) -> None:
        self.model, self.held = model, held

    def metadata(self) -> list[Meta]:
        return [Meta(n, p.dtype, tuple(p.shape)) for n, p in self.model.named_parameters()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.model.named_parameters())

    def held_names(self) -> list[str] | None:
        return self.held


class Source33:
    """As in vLLM 0.33."""

    def __init__(self, model: torch.nn.Module, held: list[str] | None = None) -> None:
        self.model, self.held = model, held

    @property
    def metadata(self) -> list[Meta]:
        found = []
        for name, p in self.model.named_parameters():
            owners = None if self.held is None else (0, 1) if name in self.held else (1,)
            found.append(Meta(name, p.dtype, tuple(p.shape), owners))
        return found

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.model.named_parameters())


@pytest.mark.parametrize("kind", [Source32, Source33])
def test_each_send_reads_the_source_again(kind: Any) -> None:
    model, copy = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    with Sender("thread", SourceWeights(kind(model)), num_workers=1, timeout=30) as sender:
        receiver = Receiver(sender.address(0), copy)
        for version in (1, 2):
            pending = sender.send_async()
            assert receiver.receive() == version
            pending.wait()
            assert torch.equal(copy.weight, model.weight)
            model.weight.data.add_(1.0)
    assert [name for name, _ in pairs(kind(model))] == ["weight", "bias"]


@pytest.mark.parametrize("kind", [Source32, Source33])
def test_a_source_that_lacks_tensors_is_refused(kind: Any) -> None:
    model = torch.nn.Linear(3, 2)
    SourceWeights(kind(model, ["weight", "bias"]))
    with pytest.raises(OptionError, match="does not have 1 of the tensors, such as 'bias'"):
        SourceWeights(kind(model, ["weight"]))
