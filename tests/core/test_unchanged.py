"""Sends of weights that did not change are noticed, and warned about once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sync_core import Layout, LayoutMismatchError, Payload, Receiver, Sender, SendError
from sync_core.sending.unchanged import Repeats
from sync_core.transports import Block
from sync_plugin_std import SendGroup, Stream

WARNING = "had the same weights"


@contextmanager
def updated(sender: Sender, *models: nn.Module) -> Iterator[Callable[..., Any]]:
    """Send, with a receiver for each model."""
    with ExitStack() as stack:
        receivers = [
            stack.enter_context(Receiver(sender.address(i), model))
            for i, model in enumerate(models)
        ]

        def send(weights: Any = None, worker_ids: Any = None) -> bool | None:
            pending = sender.send_async(weights, worker_ids)
            for i in pending.worker_ids:
                receivers[i].receive(10.0)
            return pending.wait(10.0).unchanged

        yield send


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records if WARNING in r.message]


def change(model: nn.Module) -> None:
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 1


def test_three_equal_sends_are_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(4, 2)
    with Sender("thread", model, num_workers=1) as sender, updated(sender, nn.Linear(4, 2)) as send:
        assert [send(), send()] == [None, True]
        assert not warnings(caplog)
        assert send() is True
        (message,) = warnings(caplog)
        assert "the last 3 sends of 'policy'" in message
        assert "up to version 3" in message
        assert send() is True
        change(model)
        assert send() is False
        # All bytes are compared from the first repetition on.
        assert [send(), send(), send()] == [None, True, True]
    assert len(warnings(caplog)) == 1
    assert [r.levelno for r in caplog.records if WARNING in r.message] == [logging.WARNING]


@pytest.mark.parametrize(
    "scheme", ["thread", "shm", "mp", "none", "increments::shm", "chunked::shm"]
)
def test_every_scheme_tells(scheme: str) -> None:
    model = nn.Linear(300, 200)
    copy = model if scheme == "none" else nn.Linear(300, 200)
    with Sender(scheme, model, num_workers=1) as sender, updated(sender, copy) as send:
        told = [send(), send(), send()]
        change(model)
        told.append(send())
    assert told == [None, True, True, False]


def test_what_a_wrapper_packs_in_place_of_a_version_is_not_compared() -> None:
    weight, sealed = torch.ones(64), torch.ones(1)
    repeats, told = Repeats(), []
    for version in (1, 2):
        payload = Payload(version, Layout.of({"weight": weight}), [weight])
        # As a wrapping scheme that compresses does.
        shorter = replace(payload, layout=Layout.of({"sealed": sealed}), source=[sealed])
        shorter.pack(Block.allocate(shorter.nbytes))
        told.append(repeats.look(payload))
    assert told == [None, True]


def test_a_change_of_one_element_is_never_called_unchanged() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(1 << 19, generator=generator)
    layout, repeats = Layout.of({"w": weight}), Repeats()
    version = 0

    def look() -> bool | None:
        nonlocal version
        version += 1
        repeats._looked = 0.0
        return repeats.look(Payload(version, layout, [weight]))

    assert [look(), look()] == [None, True]
    for _ in range(40):
        position = int(torch.randint(weight.numel(), (1,), generator=generator))
        weight[position] += 1
        assert look() is not True
    # Checksums were given up for a time; later they are made again.
    assert True in [look() for _ in range(70)]


def test_sends_right_after_each_other_are_not_all_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight, now = torch.zeros(8), 100.0
    monkeypatch.setattr("sync_core.sending.unchanged.time.perf_counter", lambda: now)
    layout, repeats = Layout.of({"w": weight}), Repeats()
    told = []
    for version in range(1, 15):
        weight += 1
        told.append(repeats.look(Payload(version, layout, [weight])))
    assert told == [None, *[False] * 8, *[None] * 5]
    now += 0.02
    assert repeats.look(Payload(20, layout, [weight])) is False
    now += 0.02
    told = [repeats.look(Payload(version, layout, [weight])) for version in (21, 22)]
    assert told == [None, True]


def test_a_run_that_has_just_changed_one_element_is_not_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Linear(1000, 1000)
    sender = Sender("thread", model, num_workers=1)
    with sender, updated(sender, nn.Linear(1000, 1000)) as send:
        told = []
        for _ in range(6):
            with torch.no_grad():
                model.weight.view(-1)[1] += 1  # not in the sample
            told.append(send())
    assert True not in told
    assert not warnings(caplog)


def test_sends_to_some_workers_do_not_count(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(4, 2)
    copies = [nn.Linear(4, 2), nn.Linear(4, 2)]
    with Sender("thread", model, num_workers=2) as sender, updated(sender, *copies) as send:
        send()
        assert [send(None, i) for i in (0, 1, 0, 1)] == [None] * 4
        assert send() is True
    assert not warnings(caplog)


def test_a_send_to_a_worker_that_was_added_does_not_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Linear(4, 2)
    with Sender("thread", model, num_workers=1) as sender:
        for count in (1, 2, 3):
            if count > 1:
                sender.add_worker()
            copies = [nn.Linear(4, 2) for _ in range(count)]
            with updated(sender, *copies) as send:
                send()
    assert not warnings(caplog)


def test_sends_that_are_tried_again_do_not_count(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(4, 2)
    with Sender("thread", model, num_workers=1) as sender:
        for _ in range(4):
            with pytest.raises(SendError):
                sender.send(timeout=0.05)
        with updated(sender, nn.Linear(4, 2)) as send:
            assert [send(), send()] == [True, True]
            assert not warnings(caplog)
            send()
    assert len(warnings(caplog)) == 1


def test_a_model_that_is_not_trained_is_not_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(4, 2).requires_grad_(False)
    with Sender("thread", model, num_workers=1) as sender, updated(sender, nn.Linear(4, 2)) as send:
        assert [send() for _ in range(5)] == [None, *[True] * 4]
    assert not warnings(caplog)


def test_one_of_several_models_may_stay_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    models = {"actor": nn.Linear(4, 2), "critic": nn.Linear(4, 2)}
    group = SendGroup({n: Sender("none", m, num_workers=1) for n, m in models.items()})
    told = []
    for _ in range(4):
        told.append(group.send().unchanged)
        change(models["actor"])
    told += [group.send().unchanged for _ in range(3)]
    group.close()
    assert told == [None, False, False, False, False, None, True]
    assert not warnings(caplog)


def test_extras_are_no_weights() -> None:
    model = nn.Linear(4, 2)
    with Sender("none", model, num_workers=1) as sender:
        told = [sender.send(extras={"step": torch.tensor(i)}).unchanged for i in range(4)]
        told.append(sender.send().unchanged)
    assert told == [None, True, True, True, True]


def test_streams_are_compared_where_they_are_packed() -> None:
    model = nn.Linear(40, 20)
    specs = [("weight", torch.float32, (20, 40)), ("bias", torch.float32, (20,))]

    def tensors() -> Iterator[Tensor]:
        yield model.weight.detach().clone()
        yield model.bias.detach().clone()

    sender = Sender("thread", Stream(specs, tensors), num_workers=1)
    with sender, updated(sender, nn.Linear(40, 20)) as send:
        told = [send(), send()]
        change(model)
        told.append(send())
    assert told == [None, True, False]


def test_other_weights_begin_anew_and_a_failed_send_changes_nothing() -> None:
    model = nn.Linear(4, 2)
    with Sender("thread", model, num_workers=1) as sender, updated(sender, nn.Linear(4, 2)) as send:
        send()
        with pytest.raises(LayoutMismatchError):
            sender.send(nn.Linear(4, 3))
        assert send() is True


def test_tensors_that_cannot_be_read_are_not_compared() -> None:
    strided = torch.zeros(8, 8).t()[:, ::2]
    layout = Layout.of({"w": strided})
    repeats = Repeats()
    assert [repeats.look(Payload(v, layout, [strided])) for v in (1, 2, 3)] == [None] * 3

    def packed(version: int) -> Payload:
        payload = Payload(version, layout, [strided])
        payload.pack(Block.allocate(layout.nbytes))
        return payload

    assert [repeats.look(packed(version)) for version in (4, 5)] == [None, True]


def test_an_empty_tensor_and_none_at_all() -> None:
    empty = torch.zeros(0, 3)
    layout = Layout.of({"e": empty, "w": torch.ones(3)})
    repeats = Repeats()
    told = [repeats.look(Payload(v, layout, [empty, torch.ones(3)])) for v in (1, 2)]
    assert told == [None, True]
    nothing = Layout(())
    assert [repeats.look(Payload(v, nothing, ())) for v in (3, 4)] == [None, None]


WENT_BACK = "has the weights of version"


@pytest.mark.parametrize("scheme", ["thread", "shm", "dist"])
@pytest.mark.parametrize("width", [4, 400])
def test_a_version_that_went_back_is_reported_and_warned_about_once(
    scheme: str, width: int, caplog: pytest.LogCaptureFixture
) -> None:
    model, worker = nn.Linear(width, width), nn.Linear(width, width)
    states = []
    with Sender(scheme, model, num_workers=1) as sender, ExitStack() as stack:
        receiver = stack.enter_context(Receiver(sender.address(0), worker))

        def send(given: Any = None) -> int:
            pending = sender.send_async(given)
            receiver.receive(10.0)
            return pending.wait(10.0).equals

        for _ in range(3):
            states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
            assert send() == 0
            model.weight.data.add_(1)
        # Given by hand: on purpose.
        assert [send(states[1]), send(states[1])] == [2, 0]
        assert not [r for r in caplog.records if WENT_BACK in r.message]
        model.load_state_dict(states[0])
        assert send() == 1
        model.load_state_dict(states[2])
        assert send() == 3
    (warning,) = [r.message for r in caplog.records if WENT_BACK in r.message]
    assert "version 6 of 'policy' has the weights of version 1," in warning
    assert "sender.paused(" in warning


def test_a_flag_that_goes_back_is_no_version_that_went_back() -> None:
    model = nn.Linear(400, 400)
    flag = torch.zeros((), dtype=torch.bool)
    model.register_buffer("flag", flag)
    sends = Repeats()
    layout = Layout.of(dict(model.state_dict()))
    for version in range(1, 6):
        model.weight.data[399, 399] += 1  # not in the sample
        flag.logical_not_()
        sends.look(Payload(version, layout, list(model.state_dict().values())))
        assert sends.equals == 0
