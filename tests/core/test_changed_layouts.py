"""Models whose names or shapes change after their sender, or their receiver, was made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sync_core import LayoutMismatchError, ModelError, Receiver, Sender, SendError
from sync_plugin_scale import Sharded
from sync_plugin_std import select


def net() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 2))


def resize(model: nn.Sequential) -> None:
    model[0] = nn.Embedding(6, 2)


def widen(model: nn.Sequential) -> None:
    model[1] = nn.Linear(2, 3)


def append(model: nn.Sequential) -> None:
    model.append(nn.Linear(2, 2))


def remove(model: nn.Sequential) -> None:
    del model[1]


def cast(model: nn.Sequential) -> None:
    model.to(torch.bfloat16)


CHANGES = [resize, widen, append, remove, cast]
Change = Callable[[nn.Sequential], None]
WAY_OUT = "make a new Sender, and new Receivers with models changed in the same way"


def deliver(sender: Sender, receiver: Receiver, weights: Any = None) -> None:
    pending = sender.send_async(weights, timeout=10)
    receiver.receive(10)
    pending.wait()


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("how", ["own", "given", "registered", "several", "state_dict"])
def test_a_changed_trainer_is_told_to_make_a_new_sender(change: Change, how: str) -> None:
    several = how == "several"
    model = net()
    strategy: Any = "state_dict" if how == "state_dict" else "tensordict"
    options: dict[str, Any] = {"num_workers": 1, "strategy": strategy}
    with Sender("thread", {"policy": model} if several else model, **options) as sender:
        target = net()
        receiver = Receiver(sender.address(0), {"policy": target} if several else target)
        deliver(sender, receiver)
        other = net()
        changed = other if how in {"given", "registered"} else model
        change(changed)
        act: Callable[[], Any] = sender.send
        if how == "given":
            act = lambda: sender.send(other)  # noqa: E731
        if how == "registered":
            act = lambda: sender.register_model(other)  # noqa: E731
        with pytest.raises(LayoutMismatchError, match=f"nothing was sent(?s:.*){WAY_OUT}$") as e:
            act()
        kind = "the weights do not fit" if how == "given" else "the model does not fit"
        assert str(e.value).startswith(kind)
        assert not {"rename", "bf16"} & {*str(e.value).split()}
        if how in {"given", "registered"}:
            # The model that the sender had is sent still.
            deliver(sender, receiver)
        receiver.close()
    change(target)
    again = {"policy": changed} if several else changed
    with Sender("thread", again, **options) as sender:
        receiver = Receiver(sender.address(0), {"policy": target} if several else target)
        deliver(sender, receiver)


@pytest.mark.parametrize("scheme", ["increments::shm", Sharded("shm", 0, 1)])
def test_senders_that_pack_otherwise_say_the_same(scheme: Any) -> None:
    model = net()
    with Sender(scheme, model, num_workers=0) as sender:
        resize(model)
        with pytest.raises((LayoutMismatchError, ModelError), match=WAY_OUT):
            sender.send()


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_worker_is_told_what_was_changed(change: Change) -> None:
    target = net()
    with Sender("thread", net(), num_workers=1) as sender:
        receiver = Receiver(sender.address(0), target)
        change(target)
        with pytest.raises(LayoutMismatchError, match="changed after its Receiver was made; undo"):
            deliver(sender, receiver)
        with pytest.raises(SendError, match="changed after its Receiver was made"):
            sender.wait_async()
        receiver.close()


def test_a_receiver_that_never_fitted_is_not_said_to_be_changed() -> None:
    with Sender("thread", net(), num_workers=1) as sender:
        target = net()
        append(target)
        with pytest.raises(LayoutMismatchError) as refused:
            Receiver(sender.address(0), target)
        assert "changed" not in str(refused.value)


class Scaled(nn.Module):
    """Has extra state that is empty at first, as TransformerEngine's before FP8 runs."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def empty() -> Tensor:
    return torch.empty(0, dtype=torch.uint8)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"strategy": "state_dict"},
        {"zero_copy": True},
        {"layers": ["checksum"]},
        {"layers": ["readback", "checksum"]},
        pytest.param({"layers": [select("*")]}, id="select"),
        {"scheme": "increments::shm"},
        {"layers": ["bf16"]},
        {"layers": ["zstd"]},
    ],
    ids=str,
)
@pytest.mark.parametrize("several", [False, True])
def test_extra_state_may_grow_and_shrink(options: dict[str, Any], several: bool) -> None:
    trainer, worker = Scaled(empty()), Scaled(empty())
    both = ({"a": trainer}, {"a": worker}) if several else (trainer, worker)
    with Sender(model=both[0], num_workers=1, **{"scheme": "shm", **options}) as sender:
        receiver = Receiver(sender.address(0), both[1])
        for n in (0, 546, 546, 70_000, 3, 0, 9):
            trainer.state = torch.full((n,), n % 251, dtype=torch.uint8)
            with torch.no_grad():
                trainer.weight.add_(1)
            deliver(sender, receiver)
            assert torch.equal(worker.state, trainer.state)
            assert torch.equal(worker.weight, trainer.weight)
        receiver.close()


def test_extra_state_with_other_names_is_told_to_keep_them() -> None:
    trainer = Scaled({})
    with Sender("thread", trainer, num_workers=0) as sender:
        trainer.state = {"scale": torch.ones(1)}
        with pytest.raises(LayoutMismatchError, match="not their names: let get_extra_state"):
            sender.send()


def test_extra_state_of_another_shape_needs_a_module() -> None:
    trainer = Scaled(empty())
    target = {"weight": torch.zeros(2), "_extra_state": empty()}
    with Sender("thread", trainer, num_workers=1) as sender:
        receiver = Receiver(sender.address(0), target)
        deliver(sender, receiver)
        trainer.state = torch.ones(3, dtype=torch.uint8)
        with pytest.raises(LayoutMismatchError, match=r"give the module instead of its state_dict"):
            deliver(sender, receiver)
        receiver.close()
