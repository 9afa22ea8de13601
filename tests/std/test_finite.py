"""The layer ``finite``: a version with NaN or infinite values reaches no worker."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sync_core import ModelError, Receiver, Sender
from sync_plugin_std import Stream

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.float8_e4m3fn,
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_version_that_is_not_finite_is_refused_and_named(dtype: torch.dtype, value: str) -> None:
    if dtype is torch.float8_e4m3fn and value != "nan":
        pytest.skip("this dtype has no infinity")
    # Their sum is infinite.
    large = torch.full((5,), torch.finfo(dtype).max, dtype=torch.float64).to(dtype)
    good = {"count": torch.tensor([3]), "empty": torch.zeros(0), "v": large, "w": large.clone()}
    bad = {**good, "w": torch.tensor([0.0, 1.0, float(value), 0.0, 0.0]).to(dtype)}
    copy = {name: tensor.clone() for name, tensor in good.items()}
    with (
        Sender("thread", good, num_workers=1, layers=["finite"]) as sender,
        Receiver(sender.address(0), copy) as receiver,
    ):
        pending = sender.send_async()
        assert receiver.receive(10.0) == 1
        pending.wait()
        with pytest.raises(ModelError, match=r"version 2 .*NaN or infinite, in 'w'; no worker"):
            sender.send(bad)
        assert receiver.receive(0) is None
        pending = sender.send_async()
        assert receiver.receive(10.0) == 2
        pending.wait()


def test_it_reads_streams_and_what_other_layers_have_made() -> None:
    model = nn.Linear(4, 4)
    specs = [(name, tensor.dtype, tensor.shape) for name, tensor in model.named_parameters()]
    values = [torch.ones(4, 4), torch.full((4,), float("inf"))]
    with (
        Sender(
            "thread", Stream(specs, lambda: iter(values)), num_workers=1, layers=["bf16", "finite"]
        ) as sender,
        pytest.raises(ModelError, match="in 'bias'"),
    ):
        sender.send()
