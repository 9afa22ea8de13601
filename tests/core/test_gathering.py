"""Large modules, whose parameters a binding gathers in one piece of memory."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.core.models import filled, received
from torch import nn

from sync_core import LayoutMismatchError, ModelError, Payload, Update
from sync_core.models import Binding
from sync_core.transports import Block


def large() -> nn.Module:
    return nn.Sequential(*(nn.Linear(300, 300) for _ in range(4)))


def written_twice(target: nn.Module, source: nn.Module) -> Binding:
    """Write as a receiver does, from a payload's body."""
    binding = Binding(target, consolidate=True)
    for _ in range(2):
        binding.write(received(source))
    return binding


def side_by_side(module: nn.Module) -> bool:
    pointers = sorted(parameter.data_ptr() for parameter in module.parameters())
    return pointers[-1] - pointers[0] < 4 * 300 * 304 * 4


def test_a_large_module_is_gathered_and_keeps_its_manners() -> None:
    source, target = large(), large()
    optimiser = torch.optim.SGD(target.parameters(), lr=0.1)
    before = [(id(p), p.requires_grad) for p in target.parameters()]
    binding = written_twice(target, source)
    assert side_by_side(target)
    assert [(id(p), p.requires_grad) for p in target.parameters()] == before
    assert all(map(torch.equal, target.parameters(), source.parameters()))
    sizes = {p.untyped_storage().nbytes() for p in target.parameters()}
    assert sizes == {300 * 300 * 4, 300 * 4}
    target(torch.ones(1, 300)).sum().backward()
    optimiser.step()
    assert not torch.equal(target[0].weight, source[0].weight)  # type: ignore[index]
    binding.write(binding.read())
    assert all(map(torch.equal, copy.deepcopy(target).parameters(), target.parameters()))


def test_a_module_whose_memory_is_viewed_is_left_where_it_is() -> None:
    source, target = large(), large()
    view = target.state_dict()
    before = [parameter.data_ptr() for parameter in target.parameters()]
    written_twice(target, source)
    assert [parameter.data_ptr() for parameter in target.parameters()] == before
    assert torch.equal(view["0.weight"], source[0].weight)  # type: ignore[index]


def test_an_array_made_by_dlpack_sees_what_is_written() -> None:
    target = large().requires_grad_(False)
    array = np.from_dlpack(target[0].weight)  # type: ignore[index]
    written_twice(target, large()).write(received(filled(large(), 3.0)))
    assert array.ctypes.data == target[0].weight.data_ptr()  # type: ignore[index]
    assert array.min() == array.max() == 3.0


def test_a_module_whose_storage_is_held_stays_there() -> None:
    target = large()
    held = next(target.parameters()).untyped_storage()
    written_twice(target, large()).write(received(filled(large(), 3.0)))
    assert torch.empty(0).set_(held).unique().tolist() == [3.0]


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "narrowed": lambda data: data[:200],
    "reshaped": lambda data: data.view(900, 100),
    "of another dtype": lambda data: data.view(torch.int32),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_gathered_module_that_fits_no_longer(
    change: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    target = large().requires_grad_(False)
    binding = written_twice(target, large())
    weight = next(target.parameters())
    weight.data = change(weight.data)
    with pytest.raises(LayoutMismatchError, match=r"0\.weight"):
        binding.write(received(large()))


def test_a_gathered_module_that_was_transposed_where_it_is() -> None:
    source, target = large(), large()
    binding = written_twice(target, source)
    weight = next(target.parameters())
    weight.data = weight.data.t()
    binding.write(received(source))
    assert torch.equal(weight, next(source.parameters()))


def test_a_module_written_in_inference_mode_can_still_be_trained() -> None:
    target = large()
    with torch.inference_mode():
        written_twice(target, filled(large(), 3.0))
    assert side_by_side(target)
    target(torch.ones(1, 300)).sum().backward()
    assert target[0].weight.grad is not None  # type: ignore[index]


def test_a_module_in_shared_memory_stays_there() -> None:
    source, target = large(), large().share_memory()
    written_twice(target, source)
    assert all(parameter.is_shared() for parameter in target.parameters())
    assert all(map(torch.equal, target.parameters(), source.parameters()))


def test_a_gathered_module_that_is_moved_again_is_still_written() -> None:
    source, target = large(), large()
    binding = written_twice(target, source)
    target[1].weight.data = torch.zeros(300, 300)  # type: ignore[index]
    received = Payload.from_bytes(
        Payload(3, binding.layout, tuple(Binding(source).read().tensors)).to_bytes(), 3
    )
    binding.write(Update(received.layout, received.source))
    assert all(map(torch.equal, target.parameters(), source.parameters()))


def test_a_backward_pass_notices_that_weights_were_written() -> None:
    source, target = large(), large()
    binding = written_twice(target, source)
    loss = target(torch.ones(1, 300)).sum()
    received = Payload.from_bytes(Payload(3, binding.layout, binding.read().tensors).to_bytes(), 3)
    binding.write(Update(received.layout, received.source))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("start", range(0, 4096, 512))
def test_a_gathered_module_is_written_wherever_the_payload_lies_in_its_page(start: int) -> None:
    source, target = large(), large()
    data = Payload(1, Binding(source).layout, Binding(source).read().tensors).to_bytes()
    memory = torch.empty(len(data) + 8192, dtype=torch.uint8)
    begin = (start - memory.data_ptr()) % 4096
    block = Block(memory[begin : begin + len(data)])
    block.memory.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    binding = Binding(target, consolidate=True)
    for _ in range(2):
        filled(target, 0.0)
        binding.write(Update(block.read_layout(), block))
        assert all(map(torch.equal, target.parameters(), source.parameters()))


def test_a_gathered_module_is_written_from_several_stretches() -> None:
    source, target = large(), large()
    layout, tensors = Binding(source).layout, Binding(source).read().tensors
    memory = Block.of_bytes(Payload(1, layout, tensors).to_bytes()).memory
    cut = len(layout.header) + layout.specs[1].offset
    block = Block(memory[:cut].clone(), memory[cut:].clone())
    binding = Binding(target, consolidate=True)
    for _ in range(2):
        filled(target, 0.0)
        binding.write(Update(block.read_layout(), block))
        assert all(map(torch.equal, target.parameters(), source.parameters()))
    assert side_by_side(target)


_FORK = """
import os, torch
from sync_core import Payload, Update
from sync_core.models.binding import Binding
target = torch.nn.Linear(1024, 1024)
update = Binding(torch.nn.Linear(1024, 1024)).read()
data = Payload(1, update.layout, update.tensors).to_bytes()
payload = Payload.from_bytes(data, version=1)
update = Update(payload.layout, payload.source)
binding = Binding(target, consolidate=True)
for _ in range(2):
    binding.write(update)
before = target.weight[0, 0].item()
if not (child := os.fork()):
    target.weight.data[0, 0] = before + 1
    os._exit(0)
os.waitpid(child, 0)
assert target.weight[0, 0].item() == before
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_a_forked_child_writes_to_weights_of_its_own() -> None:
    subprocess.run([sys.executable, "-c", _FORK], check=True, timeout=60)


def test_memory_that_was_taken_away() -> None:
    module = nn.Linear(3, 2)
    binding = Binding(module)
    module.weight.untyped_storage().resize_(0)
    with pytest.raises(ModelError, match="'weight' has no memory"):
        binding.read()
    with pytest.raises(ModelError, match="'weight' has no memory"):
        binding.write(Binding(nn.Linear(3, 2)).read())
