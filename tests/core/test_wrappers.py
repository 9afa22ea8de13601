"""Models wrapped by torch.compile, DistributedDataParallel and DataParallel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from sync_core import LayoutMismatchError, Receiver, Sender, Update
from sync_core.models.binding import Binding
from sync_core.models.extract import Strategy

pytestmark = [
    pytest.mark.timeout(120),
    # Of torch's own, when it imports what compiles.
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]

STRATEGIES: list[Strategy] = ["tensordict", "state_dict"]


def net() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model.register_buffer("scratch", torch.zeros(1), persistent=False)
    return model


def compiled(module: nn.Module) -> Any:
    return torch.compile(module)


@contextmanager
def process_group() -> Iterator[None]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def distributed(module: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module)


WRAPPINGS: list[Callable[[nn.Module], nn.Module]] = [
    compiled,
    nn.DataParallel,
    distributed,
    lambda module: compiled(distributed(module)),
    lambda module: nn.Sequential(nn.ReLU(), compiled(module)),
]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("wrap", WRAPPINGS)
def test_a_wrapped_model_fits_a_plain_one(wrap: Any, strategy: Strategy) -> None:
    with process_group():
        wrapped = wrap(net())
        plain = nn.Sequential(nn.ReLU(), net()) if isinstance(wrapped, nn.Sequential) else net()
        for value, (source, target) in enumerate(((wrapped, plain), (plain, wrapped)), start=1):
            for tensor in (*source.parameters(), *source.buffers()):
                tensor.data.fill_(value)
            with (
                Sender("thread", source, num_workers=1, strategy=strategy) as sender,
                Receiver(sender.address(0), target) as receiver,
            ):
                pending = sender.send_async()
                assert receiver.receive() == 1
                assert pending.wait().updated == (0,)
            tensors = (*target.parameters(), *target.buffers())
            assert {v for t in tensors for v in t.flatten().tolist()} == {value}


@pytest.mark.parametrize("wrap", [compiled, nn.DataParallel])
def test_a_state_dict_of_a_wrapped_model_says_what_to_give(wrap: Any) -> None:
    wrapped = wrap(nn.Linear(2, 3))
    prefix = "_orig_mod" if wrap is compiled else "module"
    message = (
        rf"(?s)'{prefix}\.weight' in the weights is 'weight' in the model, and 1 more like these: "
        rf"they differ by the prefix '{prefix}\.' of .*policy\.{prefix}$"
    )
    with pytest.raises(LayoutMismatchError, match=message):
        Binding(nn.Linear(2, 3)).write(Update.of(wrapped.state_dict()))
