"""The layer Select: workers that lack nothing get what changes; all others get all of it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from sync_core import (
    LayoutMismatchError,
    ModelError,
    ReadbackError,
    Receiver,
    Sender,
    SendError,
    SendReport,
    gathered,
)
from sync_plugin_std import Rename, Select, Stream
from sync_plugin_std.layers import left_out
from sync_testing import Loopback


def fill(model: nn.Module, value: float) -> None:
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)


def net(value: float) -> nn.Sequential:
    """Two layers, of which the first is frozen."""
    model = nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 1))
    fill(model, value)
    model[0].requires_grad_(False)
    return model


def push(sender: Sender, *receivers: Receiver) -> SendReport:
    pending = sender.send_async()
    for receiver in receivers:
        receiver.receive(5)
    return pending.wait()


def equal(left: nn.Module, right: nn.Module) -> bool:
    pairs = zip(left.parameters(), right.parameters(), strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


@pytest.mark.parametrize("layer", ["select", Select(trainable=True), Select("1.*")])
@pytest.mark.parametrize("others", [[], ["bf16"]], ids=["alone", "bf16"])
def test_a_selection_follows_a_whole_version(layer: Any, others: list[str]) -> None:
    source, target = net(1.0), net(0.0)
    with Sender(Loopback(), source, num_workers=1, layers=[layer, *others]) as sender:
        receiver = Receiver(sender.address(0), target)
        whole = push(sender, receiver)
        fill(source[1], 2.0)
        selected = push(sender, receiver)
    assert equal(source, target)
    assert selected.nbytes < whole.nbytes


@pytest.mark.parametrize("scheme", ["thread", "shm", "dist"])
def test_who_lacks_something_gets_all_of_it(scheme: str) -> None:
    source, early, late = net(1.0), net(0.0), net(0.0)
    with Sender(scheme, source, num_workers=1, layers=[Select("1.*")]) as sender:
        receivers = [Receiver(sender.address(0), early)]
        push(sender, *receivers)
        selected = push(sender, *receivers).workers[0].nbytes
        new = sender.add_worker()
        receivers.append(Receiver(sender.address(new), late))
        # The newest version is a selection, which a new worker cannot use.
        assert receivers[1].receive(0.2) is None
        assert push(sender, *receivers).workers[0].nbytes > selected + 200
        assert equal(source, early)
        assert equal(source, late)
        # No worker receives this one.
        with pytest.raises(SendError):
            sender.send(timeout=0.1)
        fill(source[1], 3.0)
        push(sender, *receivers)
        assert equal(source, late)
        for receiver in receivers:
            receiver.close()


def test_a_change_of_what_is_left_out_is_sent() -> None:
    source, target = net(1.0), net(0.0)
    with Sender(Loopback(), source, num_workers=1, layers=[Select(trainable=True)]) as sender:
        receiver = Receiver(sender.address(0), target)
        push(sender, receiver)
        fill(source[0], 5.0)
        push(sender, receiver)
    assert equal(source, target)


@pytest.mark.parametrize("layer", [Select(trainable=True), Select("*"), Select("*1.*")])
@pytest.mark.parametrize("several", [False, True])
def test_a_model_that_has_lost_a_tensor_is_an_error(layer: Any, several: bool) -> None:
    source, target = net(1.0), net(0.0)
    models: Any = ({"a": source}, {"a": target}) if several else (source, target)
    options: Any = {"layers": [layer], "timeout": 5}
    with Sender(Loopback(), models[0], num_workers=1, **options) as sender:
        receiver = Receiver(sender.address(0), models[1])
        push(sender, receiver)
        source[1].register_parameter("bias", None)
        with pytest.raises(LayoutMismatchError, match=r"1\.bias.*not in the model"):
            sender.send()


@pytest.mark.parametrize("scheme", [Loopback(), "shm", "dist"])
@pytest.mark.parametrize(
    "others", [[], ["bf16"], ["zstd", Rename({"*": "net.*"})]], ids=["alone", "bf16", "zstd, names"]
)
def test_a_worker_that_was_changed_gets_all_of_it(scheme: Any, others: list[Any]) -> None:
    source, target = net(1.0), net(0.0)
    model = nn.ModuleDict({"net": target}) if len(others) > 1 else target
    layers = [Select(trainable=True), *others]
    with Sender(scheme, source, num_workers=1, layers=layers) as sender:
        receiver = Receiver(sender.address(0), model)
        push(sender, receiver)
        with torch.no_grad():
            next(target.parameters())[0, 0] = 7.0
        pending = sender.send_async()
        with pytest.raises(ReadbackError, match=r"leaves out tensors .* next send brings every"):
            receiver.receive(5)
        with pytest.raises(SendError, match="does not hold as the sender does"):
            pending.wait()
        assert sender.workers[0].state == "bad"
        push(sender, receiver)
        assert equal(source, target)
        # Whole tensors are proved as well.
        push(sender, receiver)
        assert sender.workers[0].state == "current"
        receiver.close()


@pytest.mark.parametrize("others", [[], ["bf16"]], ids=["alone", "bf16"])
@pytest.mark.parametrize("scheme", ["thread", "shm"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "by hand"])
def test_the_error_names_the_buffers_that_a_forward_pass_moved(
    scheme: str, others: list[Any], training: bool
) -> None:
    source = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)), nn.BatchNorm1d(8))
    target = deepcopy(source).eval()
    dtype = torch.bfloat16 if others else torch.float32
    layers = [Select("0.*"), *others]
    with Sender(scheme, source, num_workers=1, layers=layers, timeout=10) as sender:
        receiver = Receiver(sender.address(0), target.to(dtype))
        for _ in range(2):
            push(sender, receiver)
        if training:
            target.train()(torch.randn(4, 8, dtype=dtype))
        else:
            target[6].get_buffer("running_mean").add_(1)
        pending = sender.send_async()
        moved = (
            ["num_batches_tracked", "running_mean", "running_var"] if training else ["running_mean"]
        )
        names = ", ".join(f"'6.{name}'" for name in moved)
        cause = (
            r"; a forward pass in training mode .* call eval\(\)" if training else "; the next send"
        )
        with pytest.raises(ReadbackError, match=f"digest of {names}{cause}"):
            receiver.receive(5)
        with pytest.raises(SendError):
            pending.wait()
        push(sender, receiver)
        receiver.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_workers_have_from_the_start_never_travels(dtype: torch.dtype) -> None:
    source, targets = net(1.1), [net(1.1).to(dtype) for _ in range(2)]
    layers = [Select("1.*", send_rest=False), *([] if dtype == torch.float32 else ["bf16"])]
    with Sender(Loopback(), source, num_workers=1, layers=layers) as sender:
        receivers = [Receiver(sender.address(0), targets[0])]
        whole = sum(tensor.nbytes for tensor in targets[0].parameters())
        for value in (2.0, 3.0):
            fill(source[1], value)
            assert push(sender, *receivers).nbytes < whole
        receivers.append(Receiver(sender.address(sender.add_worker()), targets[1]))
        assert receivers[1].receive(0) == sender.version
        for target in targets:
            assert equal(source.to(dtype), target)


def test_a_worker_without_them_refuses_every_version() -> None:
    source, target = net(1.0), net(0.5)
    layer = Select("1.*", send_rest=False)
    with Sender("thread", source, num_workers=1, layers=[layer]) as sender:
        receiver = Receiver(sender.address(0), target)
        for _ in range(2):
            pending = sender.send_async()
            with pytest.raises(ReadbackError, match="start this worker with the trainer's check"):
                receiver.receive(5)
            with pytest.raises(SendError, match="start this worker with the trainer's checkpoint"):
                pending.wait()
        assert equal(net(0.5), target)
        fill(source[0], 3.0)
        with pytest.raises(ModelError, match="send_rest=False does not send it"):
            sender.send_async()


@pytest.mark.parametrize(
    "options",
    [
        {"layers": [Select("1.*")]},
        {"layers": [Select("1.*", send_rest=False)]},
        {"layers": [Select(trainable=True)]},
        {"layers": [Select("*")]},
    ],
    ids=["select", "held", "trainable", "given"],
)
@pytest.mark.parametrize("scheme", ["thread", "shm", "file"])
def test_a_worker_with_more_than_the_trainer_is_refused(
    scheme: str, options: dict[str, Any]
) -> None:
    target = net(1.0).append(nn.Linear(1, 1))
    with (
        Sender(scheme, net(1.0), num_workers=1, **options) as sender,
        pytest.raises(LayoutMismatchError, match=r"'2.weight' is in the model, not in the weights"),
    ):
        Receiver(sender.address(0), target)


def test_what_was_not_changed_is_not_hashed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[torch.Tensor] = []
    digest = left_out._digest

    def counted(tensor: torch.Tensor) -> bytes:
        hashed.append(tensor)
        return digest(tensor)

    monkeypatch.setattr(left_out, "_digest", counted)
    source, target = net(1.0), net(0.0)
    with Sender(Loopback(), source, num_workers=1, layers=[Select("1.*")]) as sender:
        receiver = Receiver(sender.address(0), target)
        counts = []
        for _ in range(4):
            push(sender, receiver)
            counts.append(len(hashed))
    # All four tensors of the first version, then once the two that travel and the worker's two.
    assert counts == [4, 8, 8, 8]


def write_by_data(model: nn.Sequential) -> None:
    weight: Any = model[0].weight
    weight.data.fill_(5.0)


def write_by_numpy(model: nn.Sequential) -> None:
    weight: Any = model[0].weight
    weight.detach().numpy()[:] = 5.0


def replace_with_an_equal_counter(model: nn.Sequential) -> None:
    old: Any = model[0].weight
    new = nn.Parameter(torch.empty_like(old), requires_grad=False)
    new.data.fill_(5.0)
    while new._version < old._version:
        torch.autograd.graph.increment_version(new)
    model[0].weight = new


def replace_with_one_other_element(model: nn.Sequential) -> None:
    old: Any = model[0].weight
    new = nn.Parameter(old.detach().clone(), requires_grad=False)
    new.data.view(-1)[1] = 5.0
    while new._version < old._version:
        torch.autograd.graph.increment_version(new)
    model[0].weight = new


UNCOUNTED = [
    write_by_data,
    write_by_numpy,
    replace_with_an_equal_counter,
    replace_with_one_other_element,
]


@pytest.mark.parametrize("change", UNCOUNTED)
@pytest.mark.parametrize("layer", ["select", Select("1.*")])
@pytest.mark.parametrize("others", [[], ["bf16"]], ids=["alone", "bf16"])
def test_a_change_that_torch_does_not_count_is_sent(
    change: Any, layer: Any, others: list[str]
) -> None:
    source, target = net(1.0), net(0.0)
    with Sender(Loopback(), source, num_workers=1, layers=[layer, *others]) as sender:
        receiver = Receiver(sender.address(0), target)
        for _ in range(2):
            push(sender, receiver)
        change(source)
        push(sender, receiver)
    assert equal(source, target)


@pytest.mark.parametrize("change", UNCOUNTED)
def test_a_change_that_torch_does_not_count_is_refused_where_it_never_travels(change: Any) -> None:
    source, target = net(1.0), net(1.0)
    layer = Select("1.*", send_rest=False)
    with Sender(Loopback(), source, num_workers=1, layers=[layer]) as sender:
        receiver = Receiver(sender.address(0), target)
        push(sender, receiver)
        change(source)
        with pytest.raises(ModelError, match=r"'0.weight'.* was changed after the sender was made"):
            push(sender, receiver)


def made(model: nn.Sequential) -> Stream:
    """The tensors of a model, one after the other."""
    specs = [(name, p.dtype, p.shape) for name, p in model.named_parameters()]
    return Stream(specs, model.named_parameters, model=model)


HELD = Select("1.*", send_rest=False)
RENAMED = Rename({"0.*": "0.*", "1.*": "1.*"})


@pytest.mark.parametrize("weights", [gathered, made])
@pytest.mark.parametrize(
    "layers",
    [[Select("1.*")], [HELD], [HELD, "bf16"], ["bf16", HELD], [HELD, RENAMED], [HELD, "checksum"]],
    ids=["sent once", "held", "bf16 after", "bf16 before", "renamed", "checksum"],
)
def test_what_is_made_at_each_send_is_left_out(weights: Any, layers: list[Any]) -> None:
    source, targets = net(1.0), [net(1.0), net(1.0)]
    with Sender(Loopback(), weights(source), num_workers=1, layers=layers) as sender:
        receivers = [Receiver(sender.address(0), targets[0])]
        for value in (2.0, 3.0):
            fill(source[1], value)
            report = push(sender, *receivers)
        assert report.nbytes < source[0].get_parameter("weight").nbytes
        receivers.append(Receiver(sender.address(sender.add_worker()), targets[1]))
        push(sender, *receivers)
        assert all(equal(source, target) for target in targets)
        if layers[0] is HELD:
            fill(source[0], 3.0)
            for _ in range(2):
                with pytest.raises(ModelError, match="send_rest=False does not send it"):
                    sender.send_async()


@pytest.mark.parametrize("layers", [[], ["bf16"], [RENAMED]], ids=["alone", "bf16", "renamed"])
def test_what_is_made_at_each_send_is_proved_at_the_first(layers: list[Any]) -> None:
    source, target = net(1.0), net(0.5)
    with Sender("thread", gathered(source), num_workers=1, layers=[HELD, *layers]) as sender:
        receiver = Receiver(sender.address(0), target)
        for _ in range(2):
            pending = sender.send_async()
            with pytest.raises(ReadbackError, match="start this worker with the trainer's check"):
                receiver.receive(5)
            with pytest.raises(SendError, match="start this worker with the trainer's checkpoint"):
                pending.wait()
        assert equal(net(0.5), target)


def test_what_never_travels_is_not_held_while_it_is_made() -> None:
    alive: list[Any] = []
    source = net(1.0)

    def fresh() -> Iterator[torch.Tensor]:
        for parameter in source.parameters():
            assert all(each() is None for each in alive[:-1])
            tensor = parameter.detach().clone()
            alive.append(weakref.ref(tensor))
            yield tensor

    specs = [(name, p.dtype, p.shape) for name, p in source.named_parameters()]
    with Sender(Loopback(), Stream(specs, fresh), num_workers=1, layers=[HELD]) as sender:
        receiver = Receiver(sender.address(0), net(1.0))
        push(sender, receiver)
        push(sender, receiver)
    assert len(alive) == 2 * len(specs)


@pytest.mark.parametrize("fails", [0, 1, 3])
def test_a_first_send_that_fails_proves_nothing(fails: int) -> None:
    source, target = net(1.0), net(1.0)
    broken = True

    def tensors() -> Iterator[torch.Tensor]:
        for position, parameter in enumerate(source.parameters()):
            if broken and position == fails:
                raise RuntimeError("no memory")
            yield parameter

    specs = [(name, p.dtype, p.shape) for name, p in source.named_parameters()]
    with Sender(Loopback(), Stream(specs, tensors), num_workers=1, layers=[HELD]) as sender:
        receiver = Receiver(sender.address(0), target)
        with pytest.raises(ModelError, match="the stream raised"):
            sender.send_async()
        broken = False
        # Workers must hold what the first version is for.
        fill(source, 2.0)
        pending = sender.send_async()
        with pytest.raises(ReadbackError, match="start this worker with the trainer's check"):
            receiver.receive()
        with pytest.raises(SendError, match="start this worker with the trainer's checkpoint"):
            pending.wait()
        fill(target[0], 2.0)
        push(sender, receiver)
        assert equal(source, target)


def test_the_first_send_of_what_is_made_at_each_send_has_all_of_it() -> None:
    source = net(1.0)
    with Sender(Loopback(), gathered(source), num_workers=1, layers=[HELD]) as sender:
        with pytest.raises(ModelError, match=r"lacks '0.bias'.*send the whole model first"):
            sender.send_async({"1.bias": torch.ones(1)})
        receiver = Receiver(sender.address(0), net(1.0))
        push(sender, receiver)
        pending = sender.send_async({"1.bias": torch.ones(1)})
        receiver.receive()
        assert pending.wait().updated == (0,)


@pytest.mark.parametrize("change", UNCOUNTED)
@pytest.mark.parametrize("every", [False, True], ids=["one of two", "all"])
@pytest.mark.parametrize("changed", [[1.0, 1.0], [1.0, 2.0, 2.0]], ids=["frozen", "once changed"])
def test_a_worker_that_was_changed_uncounted_is_noticed(
    change: Any, changed: list[float], *, every: bool
) -> None:
    source, target = net(1.0), net(0.0)
    frozen: list[Any] = [source[0].bias, *([source[0].weight] if every else [])]
    with Sender(Loopback(), source, num_workers=1, layers=[Select("1.*")]) as sender:
        receiver = Receiver(sender.address(0), target)
        for value in changed:
            for parameter in frozen:
                nn.init.constant_(parameter, value)
            push(sender, receiver)
        change(target)
        pending = sender.send_async()
        with pytest.raises(ReadbackError, match="does not hold as the sender does"):
            receiver.receive(5)
        with pytest.raises(SendError):
            pending.wait()
        push(sender, receiver)
    assert equal(source, target)


def test_what_a_worker_alone_was_given_of_the_model_is_sent_to_it_again() -> None:
    """The frozen weight has another value, for a while, when it is read for one worker."""
    source, models = net(1.0), [net(0.0), net(0.0)]
    frozen: Any = source[0].weight
    with Sender(Loopback(), source, num_workers=2, layers=["select"]) as sender:
        first, second = (Receiver(sender.address(i), model) for i, model in enumerate(models))
        push(sender, first, second)
        nn.init.constant_(frozen, 2.0)
        send_to(sender, second, None, worker_id=1)
        nn.init.constant_(frozen, 9.0)
        send_to(sender, first, {"1.weight": torch.full((1, 8), 5.0)}, worker_id=0)
        nn.init.constant_(frozen, 2.0)
        push(sender, first, second)
    assert [equal(source, model) for model in models] == [True, True]


def send_to(sender: Sender, receiver: Receiver, weights: Any, worker_id: int) -> None:
    pending = sender.send_async(weights, worker_id)
    receiver.receive(5)
    pending.wait()


def test_two_senders_share_no_past() -> None:
    layer = Select("1.*")
    for _ in range(2):
        source, target = net(1.0), net(0.0)
        with Sender(Loopback(), source, num_workers=1, layers=[layer]) as sender:
            push(sender, Receiver(sender.address(0), target))
        assert equal(source, target)


def test_what_chooses_nothing_is_an_error() -> None:
    with pytest.raises(ModelError, match="chooses none of 4 tensors"):
        Sender(Loopback(), net(1.0), num_workers=1, layers=[Select("lora")])
    with pytest.raises(ValueError, match="trainable=True"):
        Select("*", trainable=True)
