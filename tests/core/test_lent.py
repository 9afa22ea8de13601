"""Zero-copy parameters are read-only: a write to one is noticed before the next commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from sync_core import LayoutMismatchError, ModelError, Receiver, Sender, Update
from sync_core.models import Binding, named_tensors


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.norm(self.first(x)))
        return result


def update() -> Update:
    return Binding(Model()).read()


def lent_to(target: object) -> Binding:
    binding = Binding(target)
    binding.write(update(), zero_copy=True, version=7)
    return binding


@torch.no_grad()
def by_add(module: Model) -> None:
    module.last.weight.add_(1)


@torch.no_grad()
def by_a_view(module: Model) -> None:
    module.last.weight[0, 0] = 1


def by_detach(module: Model) -> None:
    module.last.weight.detach().zero_()


def by_state_dict(module: Model) -> None:
    module.state_dict()["last.weight"].zero_()


@torch.inference_mode()
def by_inference(module: Model) -> None:
    module.last.weight.add_(1)


def by_an_optimiser(module: Model) -> None:
    module(torch.randn(8, 3)).sum().backward()
    torch.optim.SGD(module.last.parameters(), lr=0.1).step()


def by_init(module: Model) -> None:
    nn.init.zeros_(module.last.weight)


@pytest.mark.parametrize(
    "write",
    [by_add, by_a_view, by_detach, by_state_dict, by_inference, by_an_optimiser, by_init],
)
def test_a_write_is_an_error_that_is_said_once(write: Callable[[Model], None]) -> None:
    target = Model()
    binding = lent_to(target)
    write(target)
    before = {name: tensor.clone() for name, tensor in named_tensors(target).items()}
    new = update()
    message = (
        r"'last\.weight' was written to in place after version 7 .*type Sender\(…, zero_copy=Fa"
    )
    with pytest.raises(ModelError, match=message):
        binding.write(new, zero_copy=True, version=8)
    assert all(torch.equal(before[n], t) for n, t in named_tensors(target).items())
    binding.write(new, zero_copy=True, version=9)
    assert torch.equal(target.last.weight, dict(new.items())["last.weight"])
    binding.write(update(), zero_copy=True, version=10)


def test_what_is_no_write_is_no_error() -> None:
    target = Model()
    binding = lent_to(target)
    for version in range(8, 12):
        for parameter in target.parameters():
            parameter.requires_grad_(False).requires_grad_(True)
        target.train()
        target(torch.randn(8, 3)).sum().backward()
        target.zero_grad(set_to_none=False)
        target.eval()
        with torch.inference_mode():
            target(torch.randn(8, 3))
        with torch.no_grad():
            target.norm.running_mean.add_(1)  # type: ignore[union-attr]
        binding.write(update(), zero_copy=True, version=version)
    with pytest.raises(LayoutMismatchError):
        binding.write(Update.of({"a": torch.ones(1)}), zero_copy=True, version=13)


def test_memory_of_its_own_may_be_written_to() -> None:
    target = Model()
    binding = lent_to(target)
    for parameter in target.parameters():
        parameter.data = parameter.data.clone()
        with torch.no_grad():
            parameter.add_(1)
    binding.write(update(), zero_copy=True, version=8)
    target.first.weight = nn.Parameter(torch.zeros(4, 3))
    by_add(target.double().float())
    binding.write(update(), zero_copy=True)
    by_add(target)
    binding.write(update(), zero_copy=True, version=9)


def test_a_write_before_a_mismatch_is_still_noticed_after_it() -> None:
    target = Model()
    binding = lent_to(target)
    with pytest.raises(LayoutMismatchError):
        binding.write(Update.of({"a": torch.ones(1)}), zero_copy=True, version=8)
    by_add(target)
    with pytest.raises(ModelError, match="after version 7"):
        binding.write(update(), zero_copy=True, version=9)


def test_plain_tensors_and_several_models_are_watched() -> None:
    ours, theirs = torch.zeros(3), torch.ones(3)
    source = {"a": nn.Linear(2, 2), "b": theirs}
    binding = Binding({"a": nn.Linear(2, 2), "b": ours})
    binding.write(Binding(source).read(), zero_copy=True, version=1)
    ours.add_(1)
    with pytest.raises(ModelError, match="'b' was written to in place after version 1"):
        binding.write(Binding(source).read(), zero_copy=True, version=2)


def test_a_model_of_inference_tensors_is_copied_into_and_can_be_used() -> None:
    with torch.inference_mode():
        target = nn.Linear(2, 2)
    binding = Binding(target)
    for version in (1, 2):
        source = nn.Linear(2, 2)
        binding.write(Binding(source).read(), zero_copy=True, version=version)
        with torch.no_grad():
            assert torch.equal(target(torch.ones(2)), source(torch.ones(2)))


@pytest.fixture
def sender() -> Iterator[Sender]:
    with Sender("thread", Model(), num_workers=1, zero_copy=True, timeout=20) as sender:
        yield sender


def test_a_receiver_says_so_and_commits_the_next_version(sender: Sender) -> None:
    target = Model()
    receiver = Receiver(sender.address(0), target)
    for version in (1, 2):
        sender.send_async()
        assert receiver.receive() == version
        sender.wait_async()
    by_add(target)
    sender.send_async()
    with pytest.raises(ModelError, match=r"'last\.weight' was written to in place after version 2"):
        receiver.receive()
    with pytest.raises(Exception, match=r"'last\.weight' was written to in place"):
        sender.wait_async()
    assert receiver.version == 2
    sender.send_async()
    assert receiver.receive() == 4
    assert sender.wait_async().updated == (0,)
    receiver.apply_weights(Model())
    by_add(target)
    sender.send_async()
    assert receiver.receive() == 5
    sender.wait_async()
    receiver.close()
    by_add(target)


def test_a_receiver_whose_model_lost_its_memory_closes() -> None:
    source, target = Model(), Model()
    with Sender("thread", source, num_workers=1, timeout=5, zero_copy=True) as sender:
        receiver = Receiver(sender.address(0), target)
        pending = sender.send_async()
        receiver.receive()
        pending.wait()
        # As sharding does with parameters that are not in use; here, of all that was lent.
        target.last.weight.untyped_storage().resize_(0)
        receiver.close()
        assert target.last.weight.untyped_storage().nbytes() == 0


def test_tensors_that_tied_ones_feed_have_their_own_memory_afterwards() -> None:
    trained, copies = ([nn.Linear(4, 4), nn.Linear(4, 4)] for _ in range(2))
    trained[1].weight = trained[0].weight
    source, target = nn.Sequential(*trained), nn.Sequential(*copies)
    with Sender("thread", source, num_workers=1, zero_copy=True) as sender:
        receiver = Receiver(sender.address(0), target)
        pending = sender.send_async()
        receiver.receive()
        pending.wait()
        assert copies[0].weight.data_ptr() == copies[1].weight.data_ptr()
        receiver.close()
    with torch.no_grad():
        copies[0].weight.fill_(7.0)
    assert torch.equal(copies[1].weight, trained[1].weight)
