"""Several models in one sender: one version, committed in all of them or in none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tests.core.models import Counter, filled
from torch import nn

from sync_core import LayoutMismatchError, ModelError, Payload, Receiver, Sender, SendError, Update
from sync_core.models import Binding, Strategy, named_tensors, tensor_finder
from sync_plugin_std import from_getter, select

STRATEGIES: list[Strategy] = ["tensordict", "state_dict"]


def models(value: float) -> dict[str, Any]:
    return {
        "policy": filled(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), value),
        "critic": filled(nn.Linear(3, 1), value),
    }


def values(model: Any) -> set[float]:
    return {value for t in named_tensors(model).values() for value in t.double().unique().tolist()}


def deliver(sender: Sender, receiver: Receiver, *args: Any, **kwargs: Any) -> None:
    pending = sender.send_async(*args, **kwargs)
    receiver.receive()
    pending.wait()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_several_models_are_one_version(strategy: Strategy) -> None:
    source, target = models(1.0), models(0.0)
    with Sender("thread", source, num_workers=1, strategy=strategy) as sender:
        assert {"policy.0.weight", "critic.bias"} < set(sender.address(0).layout.names)
        receiver = Receiver(sender.address(0), target)
        deliver(sender, receiver)
        assert values(target) == {1.0}
        deliver(sender, receiver, models(2.0))
        assert values(target) == {2.0}
        other = models(3.0)
        deliver(sender, receiver, weights_dict={"critic": other["critic"], **other})
        assert (values(target), sender.version, receiver.version) == ({3.0}, 3, 3)


def test_every_kind_of_model_may_be_among_them() -> None:
    critic = nn.Linear(3, 1)
    source: dict[str, Any] = {
        "policy": nn.Linear(3, 2),
        "critics": {"a": critic, "b": TensorDict.from_module(nn.Linear(3, 1))},
        "old": nn.Linear(1, 1).state_dict(),
        "log_alpha": torch.tensor(0.5),
    }
    linear = ("policy", "critics.a", "critics.b", "old")
    names = {f"{name}.{part}" for name in linear for part in ("weight", "bias")}
    assert set(named_tensors(source)) == names | {"log_alpha"}
    target = {
        "policy": nn.Linear(3, 2),
        "critics": {"a": nn.Linear(3, 1), "b": nn.Linear(3, 1)},
        "old": nn.Linear(1, 1),
        "log_alpha": torch.tensor(0.0),
    }
    for strategy in STRATEGIES:
        Binding(target, strategy).write(Binding(source, strategy).read())
        sent = named_tensors(source)
        assert all(torch.equal(sent[name], new) for name, new in named_tensors(target).items())
        for tensor in sent.values():
            tensor.data.add_(1)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_shape_that_differs_in_one_leaves_all_as_they_were(strategy: Strategy) -> None:
    target = models(0.0)
    wrong = {**models(1.0), "critic": nn.Linear(3, 2)}
    with pytest.raises(LayoutMismatchError, match=r"'critic\.weight' is float32\[2, 3\] in the"):
        Binding(target, strategy).write(Binding(wrong, strategy).read())
    assert values(target) == {0.0}
    with Sender("thread", models(1.0), num_workers=1, strategy=strategy) as sender:
        with pytest.raises(LayoutMismatchError, match=r"'critic\.weight'"):
            sender.send(wrong)
        with pytest.raises(LayoutMismatchError, match=r"'critic\.weight'"):
            Receiver(sender.address(0), wrong)
        receiver = Receiver(sender.address(0), target)
        with pytest.raises(LayoutMismatchError, match=r"'critic\.weight'"):
            receiver.apply_weights(wrong)
    assert values(target) == {0.0}


class InPlace(Counter):
    """Writes its extra state before it refuses it."""

    def set_extra_state(self, state: dict[str, torch.Tensor]) -> None:
        self.count.copy_(state["count"])
        super().set_extra_state(state)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("fails", [False, True])
def test_extra_state_is_set_in_all_or_in_none(strategy: Strategy, fails: bool) -> None:
    shared = InPlace(1)
    target = {"a": shared, "b": shared, "c": InPlace(1, fails=fails)}
    five = InPlace(5)
    update = Binding({"a": five, "b": five, "c": InPlace(5)}, strategy).read()
    if fails:
        with pytest.raises(RuntimeError, match="five"):
            Binding(target, strategy).write(update)
    else:
        Binding(target, strategy).write(update)
    assert values(target) == ({1.0} if fails else {5.0})


class Refuses(nn.Linear):
    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        super().load_state_dict(state_dict, *args, **kwargs)
        raise RuntimeError("not this one")


def test_a_second_load_state_dict_that_raises_puts_the_first_back() -> None:
    target = {**models(0.0), "critic": filled(Refuses(3, 1), 0.0), "alpha": torch.tensor(0.0)}
    source = {**models(1.0), "alpha": torch.tensor(1.0)}
    with pytest.raises(RuntimeError, match="not this one"):
        Binding(target, "state_dict").write(Binding(source, "state_dict").read())
    assert values(target) == {0.0}


def test_what_two_models_share_travels_once() -> None:
    def sharing(value: float) -> dict[str, nn.Module]:
        encoder = filled(nn.Linear(4, 4), value)
        heads = [filled(nn.Linear(4, 1), value) for _ in range(2)]
        return {n: nn.Sequential(encoder, h) for n, h in zip("ab", heads, strict=True)}

    source, target = sharing(1.0), sharing(0.0)
    layout = Binding(source).layout
    assert ("b.0.weight", "a.0.weight") in layout.aliases
    assert len(layout.specs) == 6
    Binding(target).write(Binding(source).read())
    assert values(target) == {1.0}
    assert target["a"][0].weight is target["b"][0].weight  # type: ignore[index]


def test_zero_copy_points_parameters_and_copies_buffers() -> None:
    source, target = models(1.0), models(0.0)
    with Sender("thread", source, num_workers=1, zero_copy=True) as sender:
        receiver = Receiver(sender.address(0), target)
        before = {name: t.data_ptr() for name, t in named_tensors(target).items()}
        deliver(sender, receiver)
        after = named_tensors(target)
        assert {n for n, t in after.items() if t.data_ptr() == before[n]} == {
            "policy.1.running_mean",
            "policy.1.running_var",
            "policy.1.num_batches_tracked",
        }
        deliver(sender, receiver, models(2.0))
        assert values(target) == {2.0}
    lent = {name: t.data_ptr() for name, t in after.items()}
    receiver.close()
    assert values(target) == {2.0}
    assert target["policy"][0].weight.data_ptr() != lent["policy.0.weight"]


def test_models_that_are_missing_or_unknown_are_named() -> None:
    target = models(0.0)
    with Sender("thread", models(0.0), num_workers=1) as sender:
        critic = nn.Linear(3, 1)
        with pytest.raises(
            LayoutMismatchError, match=r"'policy\..*' is in the sender's layout, not"
        ):
            sender.send(weights_dict={"critic": critic})
        with pytest.raises(LayoutMismatchError, match=r"'actor\.bias' is in the weights, not"):
            sender.send(weights_dict={**models(1.0), "actor": critic})
        with pytest.raises(LayoutMismatchError, match="not in the sender's layout"):
            sender.send(critic)
        with pytest.raises(ValueError, match="both given"):
            sender.send(models(1.0), weights_dict=models(1.0))
        with pytest.raises(ModelError, match="weights_dict is a Linear; write it like"):
            sender.send(weights_dict=critic)  # type: ignore[arg-type]
        with pytest.raises(ModelError, match="'critic' is a NoneType; only tensors travel"):
            sender.send(weights_dict={"policy": target["policy"], "critic": None})
        assert sender.version == 0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_of_them_may_be_sent_alone_where_that_is_allowed(strategy: Strategy) -> None:
    target = models(0.0)
    options: Any = {"strategy": strategy, "layers": [select("*")]}
    with Sender("thread", models(0.0), num_workers=1, **options) as sender:
        receiver = Receiver(sender.address(0), target)
        deliver(sender, receiver, weights_dict={"critic": filled(nn.Linear(3, 1), 1.0)})
        assert (values(target["policy"]), values(target["critic"])) == ({0.0}, {1.0})
        with pytest.raises(LayoutMismatchError, match=r"'actor\.bias'"):
            sender.send(weights_dict={"actor": nn.Linear(3, 1)})


@pytest.mark.parametrize("zero_copy", [False, True])
def test_models_are_looked_up_in_the_context_at_every_commit(zero_copy: bool) -> None:
    first, second = models(1.0), models(2.0)
    trainer = SimpleNamespace(**first)
    worker = SimpleNamespace(nets=[models(0.0)["policy"]], critic=nn.Linear(3, 1))
    names = {"policy": "policy", "critic": "critic"}
    with Sender("thread", names, context=trainer, num_workers=1, zero_copy=zero_copy) as sender:
        paths = {"policy": "nets[0]", "critic": "critic"}
        receiver = Receiver(sender.address(0), paths, context=worker)
        deliver(sender, receiver)
        kept, old = worker.nets[0], worker.critic
        assert values({"a": kept, "b": old}) == {1.0}
        trainer.__dict__.update(second)
        deliver(sender, receiver)
        assert values({"a": kept, "b": old}) == {2.0}
        trainer.__dict__.update(models(3.0))
        worker.critic = nn.Linear(3, 1)
        deliver(sender, receiver, weights_dict={"policy": first["policy"], "critic": "critic"})
        assert [values(model) for model in (kept, worker.critic, old)] == [{1.0}, {3.0}, {2.0}]
        del worker.critic
        pending = sender.send_async()
        with pytest.raises(ModelError, match=r"'critic' leads nowhere: .* a SimpleNamespace"):
            receiver.receive()
        with pytest.raises(SendError, match="'critic' leads nowhere"):
            pending.wait()
        assert values(kept) == {1.0}


def test_a_getter_may_give_several_models() -> None:
    target = models(0.0)
    assert from_getter(lambda: models(1.0), target).receive() == 1
    assert values(target) == {1.0}


def test_references_need_a_context() -> None:
    names = {"policy": "policy"}
    with pytest.raises(ModelError, match=r"context: Sender\(…, context=…\)"):
        Sender("thread", names, num_workers=1)
    with (
        Sender("thread", {"policy": nn.Linear(1, 1)}, num_workers=1) as sender,
        pytest.raises(ModelError, match=r"context: Receiver\(…, context=…\)"),
    ):
        Receiver(sender.address(0), names)


def test_modules_are_not_searched_again_while_they_are_the_same() -> None:
    held = models(0.0)
    find = tensor_finder(held, "tensordict")
    found = find()
    assert find() is found
    held["critic"].bias = nn.Parameter(torch.ones(1))
    assert find()["critic.bias"] is held["critic"].bias
    held["critic"] = nn.Linear(3, 1)
    assert find()["critic.weight"] is held["critic"].weight
    del held["policy"]
    assert set(find()) == {"critic.weight", "critic.bias"}
    binding = Binding(held)
    held["policy"] = nn.Linear(2, 2)
    assert "policy.weight" in binding.layout.names


def test_large_modules_are_gathered_together() -> None:
    target = {name: nn.Linear(400, 400) for name in "ab"}
    binding = Binding(target, consolidate=True)
    for version in (1, 2, 3):
        source = {name: filled(nn.Linear(400, 400), version) for name in "ab"}
        data = Payload(version, binding.layout, Binding(source).read().tensors).to_bytes()
        received = Payload.from_bytes(data, version)
        binding.write(Update(received.layout, received.source))
        assert values(target) == {version}
    pointers = [tensor.data_ptr() for tensor in named_tensors(target).values()]
    assert max(pointers) - min(pointers) == 2 * 400 * 400 * 4 + 400 * 4


@pytest.mark.parametrize("several", [False, True])
def test_a_module_that_replaces_another_holds_no_version(several: bool) -> None:
    source: Any = models(1.0) if several else models(1.0)["policy"]
    names: Any = {name: name for name in source} if several else "policy"
    worker = SimpleNamespace(**models(0.0))
    with Sender("thread", source, num_workers=1, layers=[select("*")]) as sender:
        receiver = Receiver(sender.address(0), names, context=worker)
        deliver(sender, receiver)
        worker.policy = models(0.0)["policy"]
        pending = sender.send_async({next(iter(named_tensors(source))): torch.zeros(4, 3)})
        assert receiver.receive(0) is None
        with pytest.raises(SendError, match="the model has version 0; the next send"):
            pending.wait()
        assert receiver.version == 0
        deliver(sender, receiver)
        assert values(vars(worker) if several else worker.policy) == {1.0}
