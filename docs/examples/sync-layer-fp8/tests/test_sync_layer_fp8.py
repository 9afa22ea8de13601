"""The layer `fp8` does what every layer does, in fewer bytes."""

from __future__ import annotations

import torch

from sync_core import Receiver, Sender
from sync_core.testing import LayerConformance
from sync_core.testing.loopback import Loopback


class TestFloat8(LayerConformance):
    layer = "fp8"
    tolerance = 1 / 14


def test_it_takes_a_quarter_of_the_bytes() -> None:
    source, target = torch.nn.Linear(512, 512), torch.nn.Linear(512, 512)
    sent = []
    for layers in ([], ["fp8"]):
        with Sender(Loopback(), source, num_workers=1, layers=layers) as sender:
            receiver = Receiver(sender.address(0), target)
            pending = sender.send_async()
            receiver.receive()
            sent.append(pending.wait().nbytes)
    assert sent[1] < 0.27 * sent[0]
