"""The layer ``keep``: workers keep tensors of their own over every update."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sync_core import ModelError, Receiver, Sender
from sync_plugin_std import keep


class Noisy(nn.Module):
    """Explores by noise of its own; two of its weights are tied."""

    epsilon: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.mu, self.other = nn.Linear(3, 3), nn.Linear(3, 3)
        self.other.weight = self.mu.weight
        self.register_buffer("epsilon", torch.randn(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))


SCHEMES = ["thread", "shm", "mp", "dist", "increments::shm", "chunked::thread", "two_phase::mp"]


@pytest.mark.parametrize(
    ("scheme", "layers", "several"),
    [
        *((scheme, (), False) for scheme in SCHEMES),
        ("shm", ("bf16",), True),
        ("shm", ("checksum",), False),
    ],
)
def test_workers_keep_their_own_over_updates(
    scheme: str, layers: tuple[str, ...], *, several: bool
) -> None:
    trainer = Noisy()
    workers = [Noisy(), Noisy()]
    own = [worker.epsilon.clone() for worker in workers]
    patterns = ("policy.epsilon", "*.seen") if several else ("epsilon", "seen")

    def model(module: Noisy) -> Any:
        return {"policy": module} if several else module

    with Sender(scheme, model(trainer), num_workers=2, layers=[keep(*patterns), *layers]) as sender:
        receivers = [Receiver(sender.address(i), model(w)) for i, w in enumerate(workers)]
        for _ in range(3):
            trainer.mu.weight.data.add_(1)
            trainer.epsilon.normal_()
            for worker in workers:
                worker.seen += 1
            pending = sender.send_async()
            for receiver in receivers if "two_phase" not in scheme else ():
                assert receiver.receive(20.0) == pending.version
            if "two_phase" in scheme:
                while not pending.done():
                    for receiver in receivers:
                        receiver.receive(0.05)
            assert pending.wait().updated == (0, 1)
        for receiver in receivers:
            receiver.close()
    for worker, noise in zip(workers, own, strict=True):
        assert torch.equal(worker.epsilon, noise)
        assert worker.seen == 3
        assert worker.other.weight is worker.mu.weight
        sent = trainer.mu.weight.bfloat16().float() if "bf16" in layers else trainer.mu.weight
        assert torch.equal(worker.mu.weight, sent)
        assert torch.equal(worker.other.bias, trainer.other.bias)


def test_a_name_that_no_tensor_has_is_refused() -> None:
    with pytest.raises(ModelError, match=r"none of these patterns of the layer Keep, \('eps',\)"):
        Sender("thread", Noisy(), num_workers=1, layers=[keep("eps")])


def test_a_worker_without_the_tensor_needs_none() -> None:
    trainer = Noisy()
    worker = {n: copy.deepcopy(t) for n, t in trainer.state_dict().items() if n != "epsilon"}
    with Sender("thread", trainer, num_workers=1, layers=[keep("epsilon")]) as sender:
        trainer.mu.bias.data.add_(1)
        pending = sender.send_async()
        assert Receiver(sender.address(0), worker).receive(10.0) == 1
        pending.wait()
    assert torch.equal(worker["mu.bias"], trainer.mu.bias)
