"""A module whose tensors were moved side by side is sent as bytes, and stays what it was."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from sync_core import ModelError, Payload, Receiver, Sender, SendError, Update
from sync_core.models import Binding, consolidate


def model() -> Any:
    return nn.Sequential(nn.Linear(30, 50), nn.BatchNorm1d(50), nn.Linear(50, 7))


def filled(module: Any, value: float) -> Any:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)
    return module


def addresses(module: nn.Module) -> list[int]:
    return [tensor.data_ptr() for tensor in (*module.parameters(), *module.buffers())]


def packed(update: Update) -> bytes:
    return Payload(1, update.layout, update.source).to_bytes()


def test_a_module_keeps_its_values_and_its_optimiser_goes_on() -> None:
    torch.manual_seed(0)
    policy, other = model(), model()
    other.load_state_dict(policy.state_dict())
    optimisers = [torch.optim.Adam(m.parameters(), lr=0.1) for m in (policy, other)]
    before = [(id(p), p.requires_grad, p.shape, p.dtype) for p in policy.parameters()]
    assert consolidate(policy) is policy
    assert [(id(p), p.requires_grad, p.shape, p.dtype) for p in policy.parameters()] == before
    for _ in range(3):
        for module, optimiser in zip((policy, other), optimisers, strict=True):
            optimiser.zero_grad()
            module(torch.ones(4, 30)).sum().backward()
            optimiser.step()
    update = Binding(policy).read()
    assert update.bodies
    assert packed(update) == packed(Binding(other).read())


def test_each_tensor_is_saved_and_copied_by_itself() -> None:
    policy = consolidate(model())
    for parameter in policy.parameters():
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
    for other in (copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))):
        assert packed(Binding(other).read()) == packed(Binding(policy).read())
        filled(other, 3.0)
        assert not torch.equal(other[0].weight, policy[0].weight)


def test_what_is_loaded_into_it_is_sent() -> None:
    policy, other = consolidate(model()), filled(model(), 2.0)
    policy.load_state_dict(other.state_dict())
    update = Binding(policy).read()
    assert update.bodies
    assert packed(update) == packed(Binding(other).read())


def test_it_is_moved_once() -> None:
    policy = consolidate(model())
    before = addresses(policy)
    held = policy.state_dict()
    assert addresses(consolidate(policy)) == before
    bindings = [Binding(policy), Binding(policy)]
    assert all(binding.read().bodies for binding in bindings)
    del bindings, held
    gc.collect()
    # The memory is there for as long as the tensors are.
    assert Binding(policy).read().bodies


def test_two_senders_of_one_module() -> None:
    policy = consolidate(model())
    for value in (2.0, 3.0):
        for scheme in ("thread", "shm"):
            target = model()
            with Sender(scheme, filled(policy, value), num_workers=1) as sender:
                pending = sender.send_async()
                filled(policy, 9.0)
                with Receiver(sender.address(0), target) as receiver:
                    assert receiver.receive() == 1
                assert pending.wait().updated == (0,)
            assert target[0].weight.unique().tolist() == [value]


def test_several_models_are_moved_together() -> None:
    models = consolidate({"actor": model(), "critics": {"a": nn.Linear(3, 1)}})
    assert Binding(models).read().bodies
    # Under other names they are another version, which is read tensor by tensor.
    assert not Binding(models["actor"]).read().bodies
    target: dict[str, Any] = {"actor": model(), "critics": {"a": nn.Linear(3, 1)}}
    Binding(target).write(Binding(models).read())
    assert torch.equal(target["critics"]["a"].weight, models["critics"]["a"].weight)


def test_tied_and_empty_tensors_and_other_dtypes() -> None:
    policy: Any = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5).bfloat16())
    policy[1].weight = policy[0].weight
    policy.register_parameter("none", nn.Parameter(torch.empty(0, 3)))
    policy.register_buffer("flag", torch.tensor(True))
    consolidate(policy)
    assert policy[1].weight is policy[0].weight
    target = copy.deepcopy(policy)
    filled(policy, 4.0)
    Binding(target).write(Binding(policy).read())
    assert packed(Binding(target).read()) == packed(Binding(policy).read())


def test_under_a_layer() -> None:
    policy, target = consolidate(filled(model(), 1.0 + 2**-12)), model()
    with Sender("thread", policy, num_workers=1, layers=["bf16"]) as sender:
        pending = sender.send_async()
        Receiver(sender.address(0), target).receive()
        pending.wait()
    assert target[0].weight.unique().tolist() == [1.0]
    assert policy[0].weight.unique().tolist() == [1.0 + 2**-12]


def pointed_elsewhere(policy: nn.Sequential) -> None:
    policy[0].weight.data = torch.zeros(50, 30)


def transposed(policy: Any) -> None:
    policy[2].weight.data = policy[2].weight.data.t()


def reshaped(policy: Any) -> None:
    policy[2].weight.data = policy[2].weight.data.view(50, 7)


def replaced(policy: nn.Sequential) -> None:
    policy[2].weight = nn.Parameter(torch.zeros(7, 50))


def replaced_a_buffer(policy: nn.Sequential) -> None:
    policy[1].running_mean = torch.zeros(50)


def shared(policy: nn.Sequential) -> None:
    policy.share_memory()


def in_half_precision(policy: nn.Sequential) -> None:
    policy.half()


@pytest.mark.parametrize(
    "change",
    [
        pointed_elsewhere,
        transposed,
        reshaped,
        replaced,
        replaced_a_buffer,
        shared,
        in_half_precision,
    ],
)
@pytest.mark.parametrize("read_before", [True, False])
def test_one_that_was_changed_is_read_as_it_is(
    change: Callable[[nn.Sequential], None], read_before: bool
) -> None:
    policy = consolidate(model())
    binding = Binding(policy)
    if read_before:
        assert binding.read().bodies
    change(policy)
    filled(policy, 3.0)
    update = binding.read()
    assert not update.bodies
    assert packed(update) == packed(Binding(copy.deepcopy(policy)).read())


@pytest.mark.parametrize(
    ("values", "view"),
    [
        (torch.ones(3) + 2j, torch.Tensor.conj),
        (torch.ones(3) + 2j, torch._neg_view),
        (torch.ones(3), torch._neg_view),
    ],
)
def test_a_view_that_negates_is_sent_as_what_it_shows(values: torch.Tensor, view: Any) -> None:
    policy = consolidate(nn.ParameterList([values.clone()]))
    policy[0].data = view(policy[0].data)
    shown = policy[0].detach().resolve_conj().resolve_neg()
    assert torch.equal(received(policy).tensors[0], shown)


def test_what_a_relay_received_is_passed_on_as_bytes() -> None:
    source, relay = nn.Linear(600, 600), nn.Linear(600, 600)
    binding, reading = Binding(relay, consolidate=True), Binding(relay)
    binding.write(received(source))
    assert reading.read().bodies
    assert packed(reading.read()) == packed(Binding(source).read())


def received(source: nn.Module) -> Update:
    payload = Payload.from_bytes(packed(Binding(source).read()), 1)
    return Update(payload.layout, payload.source)


def test_zero_copy_points_a_worker_away_from_it() -> None:
    target, source = consolidate(model()), filled(model(), 2.0)
    update = received(source)
    Binding(target).write(update, zero_copy=True)
    assert target[0].weight.data_ptr() == update.tensors[0].data_ptr()
    assert packed(Binding(target).read()) == packed(Binding(source).read())


class Doubling(nn.Linear):
    """Its own way of loading weights."""

    def _load_from_state_dict(self, state_dict: Any, *args: Any) -> None:
        doubled = {name: 2 * tensor for name, tensor in state_dict.items()}
        super()._load_from_state_dict(doubled, *args)


def test_a_module_loads_what_it_is_sent_in_its_own_way() -> None:
    target, source = consolidate(Doubling(3, 3)), filled(Doubling(3, 3), 2.0)
    Binding(target, "state_dict").write(received(source))
    assert target.weight.unique().tolist() == [4.0]


def with_a_state_dict() -> tuple[Any, Any]:
    policy = model()
    return policy, policy.state_dict()


def with_a_view() -> tuple[Any, Any]:
    policy = model()
    return policy, policy[2].weight[0]


def with_an_array() -> tuple[Any, Any]:
    policy = model()
    return policy, policy[2].weight.detach().numpy()


def in_a_graph() -> tuple[Any, Any]:
    policy = model()
    return policy, policy(torch.ones(2, 30)).sum()


def in_shared_memory() -> tuple[Any, Any]:
    return model().share_memory(), None


def transposed_before() -> tuple[Any, Any]:
    policy = model()
    transposed(policy)
    return policy, None


def on_memory_of_an_array() -> tuple[Any, Any]:
    policy = model()
    policy[2].weight.data = torch.from_numpy(np.zeros((7, 50), dtype=np.float32))
    return policy, None


def fused() -> tuple[Any, Any]:
    policy: Any = nn.Module()
    whole = torch.zeros(4, 3)
    policy.query, policy.key = nn.Parameter(whole[:2]), nn.Parameter(whole[2:])
    del whole
    return policy, None


def tied_by_memory_alone() -> tuple[Any, Any]:
    policy = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    policy[1].weight.data = policy[0].weight.data
    return policy, None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (with_a_state_dict, "'0.weight' cannot be moved to other memory: something else holds"),
        (with_a_view, "'2.weight' cannot be moved to other memory: something else holds"),
        (with_an_array, "'2.weight' cannot be moved to other memory: its memory cannot be"),
        (in_a_graph, "cannot be moved to other memory: something else holds"),
        (in_shared_memory, "'0.weight' cannot be moved to other memory: it lies in shared"),
        (transposed_before, "'2.weight' cannot be moved to other memory: it is not contiguous"),
        (on_memory_of_an_array, "'2.weight' cannot be moved to other memory: its memory cannot be"),
        (fused, "'query' cannot be moved to other memory: something else holds"),
        (tied_by_memory_alone, "'0.weight' cannot be moved to other memory: something else"),
    ],
)
def test_nothing_is_moved_where_somebody_would_notice(
    make: Callable[[], tuple[Any, Any]], message: str
) -> None:
    policy, held = make()
    before = addresses(policy)
    with pytest.raises(ModelError, match=message):
        consolidate(policy)
    assert addresses(policy) == before
    assert not Binding(policy).read().bodies
    del held


class Counting(nn.Linear):
    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(3)

    def set_extra_state(self, state: Any) -> None:
        del state


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Counting(2, 2), "'_extra_state' is recomputed whenever it is read"),
        ({"policy": nn.Linear(2, 2), "step": torch.zeros(1)}, "'step' is not a module's"),
        (model().state_dict(), "'0.weight' is not a module's"),
        (nn.Identity(), "Identity has no tensors"),
        (nn.LazyLinear(2), "no shape yet"),
        (nn.Linear(2, 2, device="meta"), "meta device"),
    ],
)
def test_what_cannot_be_moved(given: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        consolidate(given)


def test_a_module_moved_in_inference_mode_can_still_be_trained() -> None:
    policy = model()
    with torch.inference_mode():
        consolidate(policy)
    policy(torch.ones(4, 30)).sum().backward()
    assert policy[0].weight.grad is not None
    assert Binding(policy).read().bodies


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_module_on_a_gpu() -> None:
    with pytest.raises(ModelError, match="only tensors of the CPU are moved"):
        consolidate(nn.Linear(2, 2, device="cuda"))


def plain(tmp_path: Path) -> torch.Tensor:
    del tmp_path
    return torch.zeros(600, 600)


def on_an_array(tmp_path: Path) -> torch.Tensor:
    del tmp_path
    return torch.from_numpy(np.zeros((600, 600), dtype=np.float32))


def on_a_buffer(tmp_path: Path) -> torch.Tensor:
    del tmp_path
    return torch.frombuffer(bytearray(600 * 600 * 4), dtype=torch.float32).view(600, 600)


def in_a_file(tmp_path: Path) -> torch.Tensor:
    name = str(tmp_path / "weights")
    return torch.from_file(name, shared=True, size=600 * 600).view(600, 600)


def loaded(tmp_path: Path) -> torch.Tensor:
    save_file({"weight": torch.zeros(600, 600)}, tmp_path / "weights")
    return load_file(tmp_path / "weights")["weight"]


@pytest.mark.parametrize("make", [plain, on_an_array, on_a_buffer, in_a_file, loaded])
@pytest.mark.parametrize("asked", [{}, {"consolidate": True}])
def test_a_receiver_moves_what_torch_allocated_and_only_if_it_is_asked(
    make: Callable[[Path], torch.Tensor], asked: Any, tmp_path: Path
) -> None:
    source, target = nn.Linear(600, 600), nn.Linear(600, 600)
    target.weight.data = make(tmp_path)
    before = addresses(target)
    with (
        Sender("thread", source, num_workers=1) as sender,
        Receiver(sender.address(0), target, **asked) as receiver,
    ):
        sender.send_async()
        receiver.receive()
    assert (addresses(target) != before) is (make is plain and bool(asked))
    assert torch.equal(target.weight, source.weight)


def test_a_module_of_which_a_part_was_moved_is_moved_again() -> None:
    policy = consolidate(model())
    replaced(policy)
    assert Binding(consolidate(policy)).read().bodies


NO_MEMORY = """
import resource, torch
from torch import nn
from sync_core import Receiver, Sender, SendError

source, target = nn.Linear(3000, 1000), nn.Linear(3000, 1000)
sender = Sender("thread", source, num_workers=1)
receiver = Receiver(sender.address(0), target, consolidate=True)
at = target.weight.data_ptr()
for value in (1.0, 2.0):
    with torch.no_grad():
        source.weight.fill_(value)
    pending = sender.send_async()
    used = int(open("/proc/self/statm").read().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (used + 5_000_000, -1))
    version = receiver.receive()
    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
    stays = target.weight.data_ptr() == at
    print(version, receiver.version, pending.wait().updated, target.weight[0, 0].item(), stays)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are those of Linux")
def test_a_version_is_committed_where_there_is_no_memory_to_move_the_model() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NO_MEMORY], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.splitlines() == ["1 1 (0,) 1.0 True", "2 2 (0,) 2.0 True"], done.stderr


@pytest.mark.parametrize("zero_copy", [False, True])
def test_a_model_that_holds_parts_of_a_version_is_bad(
    zero_copy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        for target, source in list(zip(targets, sources, strict=True))[:1]:
            target.data.copy_(source)
        raise MemoryError("no memory for the second tensor")

    source, target = filled(model(), 1.0), model()
    with Sender("thread", source, num_workers=1, zero_copy=zero_copy) as sender:
        receiver = Receiver(sender.address(0), target)
        with monkeypatch.context() as patch:
            patch.setattr("sync_core.models.binding.copy", half)
            patch.setattr("sync_core.models.memory.copy", half)
            pending = sender.send_async()
            with pytest.raises(MemoryError):
                receiver.receive()
        with pytest.raises(SendError, match="its model is known bad"):
            pending.wait()
        assert (receiver.version, sender.workers[0].version) == (0, 0)
        pending = sender.send_async()
        assert receiver.receive() == 2
        assert pending.wait().updated == (0,)
        assert torch.equal(target[2].weight, source[2].weight)
