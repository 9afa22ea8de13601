"""What all cases build upon: the layer, workers that it serves, and how much may be lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, ClassVar

import pytest
import torch

from sync_core import Sender
from sync_core.testing.cases import Conformance
from sync_core.testing.layers.link import Link
from sync_core.testing.loopback import Loopback
from sync_core.testing.schemes.models import fingerprints


class LayerCases(Conformance):
    """Base of the cases; see `LayerConformance` for the attributes."""

    layer: ClassVar[Any]
    tolerance: ClassVar[float] = 0.0

    @pytest.fixture
    def senders(self) -> Iterator[ExitStack]:
        """What the case opens here is closed at its end."""
        with ExitStack() as stack:
            yield stack

    def link(
        self, senders: ExitStack, source: Any, *targets: Any, layers: Any = None, **options: Any
    ) -> Link:
        """A sender of the layer, with a worker for each target."""
        sender = Sender(
            Loopback(), source, num_workers=len(targets), layers=layers or [self.layer], **options
        )
        return Link(senders.enter_context(sender), list(targets))

    def check(self, got: Any, sent: Any) -> None:
        """Names and kinds are those that were sent; values too, but for what may be lost."""
        assert _kinds(got) == _kinds(sent)
        for name, tensor in sent.items():
            mine, theirs = got[name].detach(), tensor.detach()
            if not theirs.is_floating_point() or theirs.dtype.itemsize == 1 or not self.tolerance:
                assert fingerprints({name: mine}) == fingerprints({name: theirs})
                continue
            allowed = self.tolerance * float(theirs.abs().max()) if theirs.numel() else 0.0
            torch.testing.assert_close(
                mine.double(), theirs.double(), rtol=0.0, atol=allowed, equal_nan=True, msg=name
            )


def _kinds(named: Any) -> dict[str, str]:
    """Names, dtypes and shapes."""
    return {name: f"{tensor.dtype} {list(tensor.shape)}" for name, tensor in named.items()}
