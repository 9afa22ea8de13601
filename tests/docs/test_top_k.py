"""The layer of docs/examples/top_k.py conforms, and with increments an update is small."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

from sync_core import Receiver, Sender
from sync_testing import LayerConformance

sys.path.append(str(Path(__file__).parents[2] / "docs" / "examples"))
top_k = importlib.import_module("top_k")

pytestmark = pytest.mark.timeout(120)


class TestTopK(LayerConformance):
    layer = top_k.TopK(0.25)
    settles = 4


def test_the_largest_changes_travel_first_and_the_rest_later() -> None:
    source, target = torch.zeros(100), torch.zeros(100)
    layers = [top_k.TopK(0.1)]
    with Sender("increments::shm", {"w": source}, num_workers=1, layers=layers) as sender:
        receiver = Receiver(sender.address(0), {"w": target})
        for step in range(11):
            pending = sender.send_async()
            receiver.receive()
            pending.wait()
            if step == 0:
                source += torch.arange(100.0)
            # Of the changes that are left, those of the ten highest elements.
            arrived = (target == source).nonzero().flatten().tolist()
            if step:
                assert arrived == [0, *range(100 - 10 * step, 100)][-100:]
        receiver.close()


def test_an_update_of_a_hundredth_is_smaller_than_a_fiftieth() -> None:
    nbytes, distance = top_k.train("increments::shm", [top_k.TopK(0.01)], 4)
    assert max(nbytes[1:]) < nbytes[0] / 50
    assert distance < 1


@pytest.mark.parametrize("fraction", [0, -0.1, 1.5, float("nan")])
def test_a_fraction_that_is_none(fraction: float) -> None:
    with pytest.raises(ValueError, match=r"fraction must be above 0 and up to 1, got"):
        top_k.TopK(fraction)
