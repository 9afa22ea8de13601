"""Models wrapped by torch.compile, DistributedDataParallel and DataParallel."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from sync_core import (
    LayoutMismatchError,
    ModelError,
    Receiver,
    SendContext,
    Sender,
    Update,
    gathered,
    hookimpl,
)
from sync_core.models import Binding, ComputedWeights, named_tensors

pytestmark = [
    pytest.mark.timeout(120),
    # Of torch's own, when it imports what compiles.
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]

STRATEGIES: list[Any] = ["tensordict", "state_dict"]


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
def test_a_wrapped_model_fits_a_plain_one(wrap: Any, strategy: Any) -> None:
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


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_activation_checkpointing_changes_no_names(strategy: Any) -> None:
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers

    model = nn.Sequential(wrappers.checkpoint_wrapper(net()), nn.Linear(3, 1))
    plain = nn.Sequential(net(), nn.Linear(3, 1))
    assert Binding(model, strategy).layout == Binding(plain, strategy).layout


def test_a_checkpoint_has_no_buffers_that_are_not_persistent() -> None:
    layout = Binding(net(), "checkpoint").layout
    assert set(layout.names) == set(net().state_dict())
    with Sender("thread", net(), num_workers=1, strategy="checkpoint") as sender:
        target = net()
        pending = sender.send_async()
        Receiver(sender.address(0), target).receive()
        assert pending.wait().updated == (0,)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_what_is_sharded_says_what_to_type() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    with process_group():
        flat = FullyShardedDataParallel(nn.Linear(4, 2), device_id=torch.device("cpu"))
        sharded = nn.Sequential(nn.Linear(4, 2))
        fully_shard(sharded, mesh=dist.init_device_mesh("cpu", (1,)))  # type: ignore[attr-defined]
        for model, remedy in ((flat, "FULL_STATE_DICT"), (sharded, r"gathered\(model\)")):
            with pytest.raises(ModelError, match=remedy):
                Sender("thread", model, num_workers=1)
        with pytest.raises(ModelError, match=r"gathered\(model\)"):
            Sender("thread", sharded.state_dict(), num_workers=1)
        with Sender("thread", nn.Sequential(nn.Linear(4, 2)), num_workers=1) as sender:
            for target in (sharded, sharded.state_dict()):
                with pytest.raises(ModelError, match=r"a worker .* type Sender\(Sharded\("):
                    Receiver(sender.address(0), target)


def test_a_gathered_checkpoint_leaves_out_what_a_checkpoint_does() -> None:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(4, 2))
    model.register_buffer("frequencies", torch.ones(2), persistent=False)
    with Sender("thread", model, num_workers=1, strategy="checkpoint") as sender:
        names = sender.address(0).layout.names
    with process_group():
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))  # type: ignore[attr-defined]
        whole = gathered(model)
        with Sender("thread", whole, num_workers=1, strategy="checkpoint") as sender:
            assert sender.address(0).layout.names == names == ("0.weight", "0.bias")
        with Sender("thread", whole, num_workers=1) as sender:
            assert "frequencies" in sender.address(0).layout.names


@pytest.mark.parametrize("several", [False, True])
def test_what_is_trained_of_a_gathered_model_is_selected(*, several: bool) -> None:
    from torch.distributed.fsdp import fully_shard

    def module() -> nn.Module:
        made = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1))
        made[0].requires_grad_(False)
        return made

    with process_group():
        model, copy = module(), module()
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))  # type: ignore[attr-defined]
        source = gathered({"policy": model} if several else model)
        target = {"policy": copy} if several else copy
        nbytes = []
        with Sender("thread", source, num_workers=1, layers=["select"]) as sender:
            receiver = Receiver(sender.address(0), target)
            for _ in range(2):
                pending = sender.send_async()
                receiver.receive()
                nbytes.append(pending.wait().nbytes)
        assert nbytes[0] > 10 * nbytes[1]
        assert all(
            torch.equal(mine, theirs.full_tensor())  # type: ignore[attr-defined]
            for mine, theirs in zip(copy.parameters(), model.parameters(), strict=True)
        )


def test_weights_that_are_computed_at_every_send() -> None:
    class Counted(ComputedWeights):
        count = 0.0

        def read(self, strategy: Any) -> dict[str, Tensor]:
            self.count += 1.0
            return {
                name: tensor + self.count
                for name, tensor in named_tensors(self.model, strategy).items()
            }

    seen: list[Any] = []

    class Watch:
        @hookimpl(wrapper=True)
        def prepare_weights(self, context: SendContext) -> Generator[None, Update, Update]:
            seen.append(context.model)
            return (yield)

    model, copy = nn.Linear(1, 1), nn.Linear(1, 1)
    with Sender("thread", Counted(model), num_workers=1, layers=[Watch()]) as sender:
        receiver = Receiver(sender.address(0), copy)
        for added in (2.0, 3.0):
            pending = sender.send_async()
            receiver.receive()
            pending.wait()
            assert torch.equal(copy.weight, model.weight + added)
        assert seen == [model] * 3


def test_what_has_no_values_says_what_to_type() -> None:
    with pytest.raises(ModelError, match=r"assign=True"):
        Sender("thread", nn.Linear(2, 2, device="meta"), num_workers=1)


GATHERED = """
import sys, torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from sync_core import Receiver, Sender, gathered
from sync_plugin_std import select

rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
copy = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
layers, trained = [], model
if sys.argv[3] == "held":
    layers, trained = [select("1.*", send_rest=False)], model[1]
    copy[0].load_state_dict(model[0].state_dict())
fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)))
workers = 1 if rank == 0 else 0
with Sender("thread", gathered(model), num_workers=workers, layers=layers) as sender:
    receiver = Receiver(sender.address(0), copy) if rank == 0 else None
    for version in (1, 2):
        with torch.no_grad():
            model.reshard()
            for parameter in trained.parameters():
                parameter.mul_(2)
            # It leaves the root's parameters whole.
            model(torch.ones(1, 5))
        pending = sender.send_async()
        if rank == 0:
            assert receiver.receive() == version
        pending.wait()
        if rank == 0:
            for name, tensor in copy.state_dict().items():
                held = layers and name.startswith("0.")
                assert torch.equal(tensor, whole[name] * (1 if held else 2**version)), name
            print("version", version)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.long
@pytest.mark.parametrize("sent", ["all", "held"])
def test_an_fsdp2_model_is_gathered_where_that_is_asked_for(tmp_path: Path, sent: str) -> None:
    store = str(tmp_path / "store")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", GATHERED, str(rank), store, sent],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=60) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert [process.returncode for process in ranks] == [0, 0], outputs
    assert outputs[0][0].splitlines() == ["version 1", "version 2"]
