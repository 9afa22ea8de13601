"""Layers, captured graphs, shards and batches of models on a GPU, in trainers and workers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch._inductor import config as inductor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from sync_collector import Collector
from sync_collector.envs import CountingEnv
from sync_core import Receiver, Sender, gathered
from sync_plugin_scale import Sharded, join_addresses
from sync_plugin_std import select

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.timeout(180),
]

# Some tensors are copied side by side, and one is too large for that.
WIDTHS = (16, 600, 600, 4)


def perceptron(value: float) -> nn.Sequential:
    """A model whose every parameter holds a value."""
    pairs = itertools.pairwise(WIDTHS)
    model = nn.Sequential(*[nn.Linear(*pair, device="cuda") for pair in pairs])
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


def receive(sender: Sender, receiver: Receiver, worker_id: int = 0) -> None:
    """Send a version to a worker, which receives it."""
    pending = sender.send_async()
    assert receiver.receive(30.0)
    assert pending.wait(30).updated == (worker_id,)


def equal(left: nn.Module, right: nn.Module) -> bool:
    """Return whether two models hold the same values."""
    pairs = zip(left.parameters(), right.parameters(), strict=True)
    return all(torch.equal(one.cpu(), other.cpu()) for one, other in pairs)


@pytest.mark.parametrize(("layer", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_casts_give_what_the_gpu_gives(layer: str, dtype: torch.dtype) -> None:
    trainer, worker = perceptron(0.0), perceptron(0.0).to(dtype)
    with (
        Sender("shm", trainer, num_workers=1, layers=[layer]) as sender,
        Receiver(sender.address(0), worker) as receiver,
    ):
        for seed in range(3):
            torch.manual_seed(seed)
            for parameter in trainer.parameters():
                nn.init.normal_(parameter)
            receive(sender, receiver)
            pairs = zip(trainer.parameters(), worker.parameters(), strict=True)
            assert all(torch.equal(one.to(dtype), other) for one, other in pairs)


def test_a_frozen_parameter_that_was_written_by_its_data_travels() -> None:
    trainer, worker = perceptron(1.0), perceptron(0.0)
    first = next(trainer.parameters())
    first.requires_grad = False
    with (
        Sender("shm", trainer, num_workers=1, layers=[select(trainable=True)]) as sender,
        Receiver(sender.address(0), worker) as receiver,
    ):
        receive(sender, receiver)
        for value in (2.0, 3.0):
            nn.init.constant_(trainer.get_parameter("2.weight"), value)
            first.data.view(-1)[-1] = value
            receive(sender, receiver)
            assert equal(trainer, worker)


def test_a_cast_that_autocast_keeps_follows_a_version() -> None:
    trainer, worker = perceptron(1.0), perceptron(0.0)
    rows = torch.ones(2, WIDTHS[0], device="cuda")
    with (
        Sender("shm", trainer, num_workers=1) as sender,
        Receiver(sender.address(0), worker) as receiver,
        torch.autocast("cuda", torch.bfloat16),
    ):
        for value in (0.5, 0.25):
            worker(rows)
            for parameter in trainer.parameters():
                nn.init.constant_(parameter, value)
            receive(sender, receiver)
            assert torch.equal(worker(rows), trainer(rows))


def test_a_compiled_worker_computes_with_each_version() -> None:
    trainer, worker = perceptron(0.01), perceptron(0.0)
    compiled = torch.compile(worker, mode="reduce-overhead")
    rows = torch.ones(2, WIDTHS[0], device="cuda")
    with (
        torch.no_grad(),
        # Its other threads are processes, which stay.
        inductor.patch(compile_threads=1),
        Sender("shm", trainer, num_workers=1) as sender,
        Receiver(sender.address(0), compiled) as receiver,
    ):
        for value in (0.01, 0.02, 0.03, 0.04):
            for parameter in trainer.parameters():
                nn.init.constant_(parameter, value)
            receive(sender, receiver)
            # The first calls record the graph.
            for _ in range(3):
                torch.testing.assert_close(compiled(rows), trainer(rows))


def test_steps_of_a_captured_optimizer_are_sent() -> None:
    trainer, worker = perceptron(0.01), perceptron(0.0)
    optimizer = optim.Adam(trainer.parameters(), capturable=True)
    rows = torch.ones(2, WIDTHS[0], device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        trainer(rows).square().mean().backward()
        optimizer.step()

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    with (
        Sender("increments::shm", trainer, num_workers=1) as sender,
        Receiver(sender.address(0), worker) as receiver,
    ):
        before = perceptron(0.01)
        for _ in range(4):
            graph.replay()
            receive(sender, receiver)
            assert equal(trainer, worker)
            assert not equal(trainer, before)
            before.load_state_dict(trainer.state_dict())


@pytest.mark.parametrize("scheme", ["shm", "dist", "increments::shm"])
def test_a_model_may_lie_on_several_devices(scheme: str) -> None:
    def spread(value: float) -> nn.Sequential:
        model = perceptron(value)
        model[1].cpu()
        return model

    trainer, worker = spread(1.0), spread(0.0)
    with (
        Sender(scheme, trainer, num_workers=1) as sender,
        Receiver(sender.address(0), worker) as receiver,
    ):
        for value in (2.0, 3.0):
            for parameter in trainer.parameters():
                nn.init.constant_(parameter, value)
            receive(sender, receiver)
            assert equal(trainer, worker)
            assert [p.device for p in worker.parameters()] == [
                p.device for p in trainer.parameters()
            ]


def test_load_gets_tensors_for_a_gpu() -> None:
    trainer, worker = perceptron(1.0), perceptron(0.0)

    def load(weights: Any) -> None:
        worker.load_state_dict(dict(weights))

    with (
        Sender("shm", trainer, num_workers=1) as sender,
        Receiver(sender.address(0), load=load) as receiver,
    ):
        receive(sender, receiver)
        assert equal(trainer, worker)


@pytest.mark.parametrize(
    "make",
    [
        lambda model: (Sharded("shm", 0, 1), model, lambda s: join_addresses([s.address(0)])),
        lambda model: ("shm", gathered(model), lambda s: s.address(0)),
    ],
    ids=["sharded", "gathered"],
)
def test_a_model_under_fsdp2(make: Callable[[nn.Module], Any], tmp_path: Any) -> None:
    torch.distributed.init_process_group(
        "nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        trainer, worker = perceptron(1.0), perceptron(0.0)
        fully_shard(trainer, mesh=init_device_mesh("cuda", (1,)))
        optimizer = optim.SGD(trainer.parameters(), lr=0.1)
        scheme, weights, address = make(trainer)
        with (
            Sender(scheme, weights, num_workers=1) as sender,
            Receiver(address(sender), worker) as receiver,
        ):
            for _ in range(3):
                trainer(torch.ones(2, WIDTHS[0], device="cuda")).mean().backward()
                optimizer.step()
                receive(sender, receiver)
                whole = {name: t.full_tensor() for name, t in trainer.state_dict().items()}
                for name, tensor in worker.state_dict().items():
                    assert torch.equal(tensor, whole[name]), name
    finally:
        torch.distributed.destroy_process_group()


class Acts(nn.Module):
    """A policy whose action is its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, observation: Tensor) -> Tensor:
        assert observation.device == self.weight.device
        return self.weight.expand(observation.shape)


@pytest.mark.parametrize("scheme", ["thread", "shm"])
def test_a_collector_whose_policies_are_on_a_gpu(scheme: str) -> None:
    policy = Acts().cuda()
    with Collector(
        CountingEnv,
        policy,
        scheme=scheme,
        num_workers=2,
        frames_per_batch=8,
        total_frames=80,
        sync=True,
        policy_device="cuda",
        env_device="cpu",
        storing_device="cpu",
    ) as collector:
        for value, batch in enumerate(collector):
            assert batch.device == torch.device("cpu")
            assert batch["action"].unique().tolist() == [float(value)]
            nn.init.constant_(policy.weight, value + 1.0)
            collector.update_policy_weights_()
    assert value == 9


def test_what_a_send_takes_of_the_gpu() -> None:
    """Weights are packed in host memory: the trainer's GPU needs no second copy of them."""
    trainer = nn.ParameterList(torch.ones(1 << 24, device="cuda") for _ in range(4))
    worker = nn.ParameterList(torch.zeros(1 << 24) for _ in range(4))
    with (
        Sender("shm", trainer, num_workers=1) as sender,
        Receiver(sender.address(0), worker) as receiver,
    ):
        receive(sender, receiver)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        receive(sender, receiver)
        assert torch.cuda.max_memory_allocated() - before < 1 << 24
