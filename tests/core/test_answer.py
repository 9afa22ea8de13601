"""Answers of workers on their way, and invalid ones."""

from __future__ import annotations

import json
import math
from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import nn

from sync_core import (
    Answer,
    ApplyError,
    CorruptionError,
    Delivery,
    ModelError,
    ReadbackError,
    Receiver,
    Sender,
    SendError,
    WorkerError,
    WorkerLostError,
    hookimpl,
)


def test_an_answer_comes_through_json_as_it_was() -> None:
    answer = Answer(
        version=7,
        stage_seconds=0.1,
        commit_seconds=0.2,
        pause_seconds=0.3,
        known_at=10.5,
        answered_at=10.75,
        clock="b",
    )
    assert Answer.from_message(json.loads(json.dumps(answer.to_message()))) == answer


def test_what_a_newer_worker_tells_besides_is_left_out() -> None:
    message = Answer(version=7).to_message() | {"weather": "fine"}
    assert Answer.from_message(message) == Answer(version=7)


@pytest.mark.parametrize(
    "wrong",
    [
        {"version": None},
        {"version": -1},
        {"version": True},
        {"version": "7"},
        {"error": 3},
        {"failure": "weather" * 10},
        {"model_state": "fine"},
        {"failure": []},
        {"stage_seconds": -1},
        {"commit_seconds": math.nan},
        {"pause_seconds": math.inf},
        {"commit_seconds": "fast"},
        {"known_at": "noon"},
        {"answered_at": math.nan},
        {"clock": 5},
    ],
)
def test_what_is_no_answer_says_what_is_wrong(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    message = Answer(version=7).to_message() | wrong
    with pytest.raises(ValueError, match=name):
        Answer.from_message(message)


@pytest.mark.parametrize("message", [None, 5, "text", [], {}, {1: 2}])
def test_a_worker_that_answers_something_else_is_lost(message: object) -> None:
    delivery = Delivery(3, 1, 10)
    delivery.settle(message)
    assert isinstance(delivery.error, WorkerLostError)
    assert "worker 3: does not answer as agreed" in str(delivery.error)


def test_an_answer_about_another_version_ends_nothing() -> None:
    delivery = Delivery(0, 2, 10)
    delivery.settle(Answer(version=1).to_message())
    assert not delivery.wait(0)
    delivery.settle(Answer(version=2, commit_seconds=0.5).to_message())
    assert delivery.answer == Answer(version=2, commit_seconds=0.5)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("no"), ApplyError),
        (CorruptionError(0, "no"), CorruptionError),
        (ReadbackError(0, "no"), ReadbackError),
    ],
)
def test_the_sender_learns_what_kind_of_failure_it_was(
    error: Exception, kind: type[Exception]
) -> None:
    delivery = Delivery(4, 1, 10)
    delivery.settle(Answer.refusal(1, error).to_message())
    assert type(delivery.error) is kind
    assert str(delivery.error).startswith("worker 4: could not apply version 1")


class OverheatedError(WorkerError):
    """A failure that a plugin declares."""

    failure = "test-overheated"
    model_state = "bad"


def test_a_failure_that_a_plugin_declares_comes_back_as_its_class() -> None:
    def overheat(version: int) -> None:
        raise OverheatedError(0, f"90 degrees at version {version}")

    with Sender("shm", nn.Linear(2, 2), num_workers=1) as sender:
        with Receiver(sender.address(0), nn.Linear(2, 2), on_commit=overheat) as receiver:
            pending = sender.send_async()
            with pytest.raises(OverheatedError):
                receiver.receive()
            with pytest.raises(SendError, match=r"known bad(.*\n)*.*90 degrees") as info:
                pending.wait()
            assert receiver.version == 0
            assert (sender.workers[0].state, sender.workers[0].version) == ("bad", 0)
        assert type(info.value.report.workers[0].error) is OverheatedError


def test_a_failure_that_only_the_worker_knows_keeps_what_the_model_holds() -> None:
    answer = Answer.refusal(1, OverheatedError(0, "90 degrees"))
    error = Answer.from_message(answer.to_message() | {"failure": "unheard-of"}).to_error(0)
    assert (type(error), error and error.model_state) == (ApplyError, "bad")


@pytest.mark.parametrize("word", ["apply", "two words", 5])
def test_a_failure_needs_a_word_that_no_other_has(word: Any) -> None:
    with pytest.raises(TypeError, match="failure"):
        type("WrongError", (WorkerError,), {"failure": word})


def test_the_first_line_of_an_error_says_why() -> None:
    try:
        raise ModelError("'w' cannot be written\nsecond line")
    except ModelError as error:
        answer = Answer.refusal(3, error)
    first, _, rest = str(answer.to_error(0)).partition("\n")
    kept = "worker 0: could not apply version 3; it keeps the one it had"
    assert first == f"{kept}: ModelError: 'w' cannot be written"
    assert rest.startswith("  Traceback")
    assert rest.endswith("second line")
    # One that was made and not raised has no traceback, and is said once.
    assert str(Answer.refusal(3, ModelError("no")).to_error(0)) == f"{kept}: ModelError: no"


def test_a_long_error_loses_its_middle() -> None:
    message = Answer.refusal(1, ValueError("x" * 100_000 + "the end")).to_message()
    assert len(message["error"]) == 60_000
    assert message["error"].startswith("ValueError: x")
    assert message["error"].endswith("the end")


def test_the_answer_of_a_receiver_reaches_the_delivery() -> None:
    model = nn.Linear(2, 2)
    with Sender("thread", model, num_workers=1) as sender:
        receiver = Receiver(sender.address(0), nn.Linear(2, 2))
        pending = sender.send_async()
        (delivery,) = pending.unanswered.values()
        receiver.receive()
        assert pending.wait().updated == (0,)
    assert delivery.answer is not None
    assert 0 < delivery.answer.commit_seconds <= delivery.answer.pause_seconds


def test_a_refusal_of_a_receiver_reaches_the_delivery() -> None:
    def refuse(version: int) -> None:
        raise ValueError(version)

    with Sender("thread", nn.Linear(2, 2), num_workers=1) as sender:
        receiver = Receiver(sender.address(0), nn.Linear(2, 2), on_commit=refuse)
        pending = sender.send_async()
        with pytest.raises(ValueError, match="1"):
            receiver.receive()
        with pytest.raises(SendError, match="ValueError: 1"):
            pending.wait()


class RaisesLate:
    """A layer that raises when the model has been loaded already."""

    def __init__(self) -> None:
        self.raises = True

    @hookimpl(wrapper=True)
    def apply_weights(self) -> Generator[None, bool, bool]:
        result = yield
        if self.raises:
            raise ValueError("too late")
        return result


@pytest.mark.parametrize("zero_copy", [False, True])
def test_a_layer_that_raises_when_the_model_is_loaded(*, zero_copy: bool) -> None:
    model, copy, layer = nn.Linear(2, 2), nn.Linear(2, 2), RaisesLate()
    with Sender(
        "thread", model, num_workers=1, layers=[layer], zero_copy=zero_copy, timeout=10.0
    ) as sender:
        receiver = Receiver(sender.address(0), copy)
        pending = sender.send_async()
        with pytest.raises(ValueError, match="too late"):
            receiver.receive()
        with pytest.raises(SendError, match=r"has version 1, .*(\n.*)*too late"):
            pending.wait()
        assert receiver.version == 1
        assert torch.equal(copy.weight, model.weight)
        layer.raises = False
        pending = sender.send_async()
        assert receiver.receive() == 2
        assert pending.wait().updated == (0,)


def test_what_a_receiver_has_loaded_before_says_nothing_of_what_it_drops() -> None:
    with Sender("thread", nn.Linear(2, 2), num_workers=1, timeout=10.0) as sender:
        receiver = Receiver(sender.address(0), nn.Linear(2, 2))
        pending = sender.send_async()
        assert receiver.receive() == 1
        pending.wait()
        pending = sender.send_async()
        assert receiver.stage() == 2
        receiver.reject(ValueError("not wanted"))
        with pytest.raises(SendError, match="could not apply version 2; it keeps the one it had"):
            pending.wait()
        assert receiver.version == 1


@pytest.mark.parametrize("answer", [None, {}, {"version": 1, "failure": []}, "committed"])
@pytest.mark.parametrize("scheme", ["shm", "dist"])
def test_a_peer_that_answers_something_else_is_lost_and_the_sender_lives(
    scheme: str, answer: object
) -> None:
    with Sender(scheme, nn.Linear(2, 2), num_workers=1) as sender:
        receiver = Receiver(sender.address(0), nn.Linear(2, 2))
        pending = sender.send_async()
        transport: Any = receiver._connection.transport
        channel = transport._channel
        channel.send({"type": "answer", "answer": answer, "held": []})
        with pytest.raises(SendError) as info:
            pending.wait()
        assert isinstance(info.value.report.workers[0].error, WorkerLostError)
        receiver.close()
        receiver = Receiver(sender.address(0), nn.Linear(2, 2))
        pending = sender.send_async()
        assert receiver.receive() == 2
        assert pending.wait().updated == (0,)
        receiver.close()
