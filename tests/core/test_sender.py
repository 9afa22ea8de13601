"""`Sender` without a real transport."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import threading
from collections.abc import Callable, Generator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import sync_core
from sync_core import (
    Answer,
    ApplyContext,
    ClosedError,
    Delivery,
    ModelError,
    OptionError,
    Payload,
    Receiver,
    ReceiverTransport,
    Sender,
    SenderLostError,
    SendError,
    SenderTransport,
    SendReport,
    TransportContext,
    Update,
    WorkerError,
    WorkerResult,
    hookimpl,
)
from sync_core.errors import AddressError
from sync_plugin_std import Interval, Rename, from_getter, select
from sync_plugin_std.calls import PointToPointTransport
from sync_testing import eventually


class Mailboxes:
    """A transport of one screen, by blocking calls to one worker at a time."""

    capabilities: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.boxes: dict[int, list[bytes]] = {}
        self.fails: Callable[[int], bool] = lambda _worker_id: False

    @hookimpl
    def create_transport(self, context: TransportContext) -> SenderTransport | ReceiverTransport:
        if context.side == "receiver":
            return MailboxReceiver(self, context.worker_id)
        return MailboxSender(self, context.worker_ids)


class MailboxSender(PointToPointTransport):
    def __init__(self, scheme: Mailboxes, worker_ids: Sequence[int]) -> None:
        self.scheme = scheme
        super().__init__(worker_ids)

    def address(self, worker_id: int) -> int:
        return worker_id

    def send_to(self, worker_id: int, payload: Payload) -> None:
        if self.scheme.fails(worker_id):
            raise WorkerError(worker_id, "is not at home")
        data = payload.version.to_bytes(8, "little") + payload.to_bytes()
        self.scheme.boxes.setdefault(worker_id, []).append(data)


class MailboxReceiver(ReceiverTransport):
    def __init__(self, scheme: Mailboxes, worker_id: int) -> None:
        self.box = scheme.boxes.setdefault(worker_id, [])

    def receive(self, timeout: float) -> Payload | None:
        if not self.box:
            return None
        data = self.box[-1]
        self.box.clear()
        return Payload.from_bytes(data[8:], int.from_bytes(data[:8], "little"))

    def acknowledge(self, answer: Answer) -> None: ...

    def close(self) -> None: ...


def test_a_plugin_object_serves_as_a_scheme() -> None:
    policy, copy = nn.Linear(3, 2), nn.Linear(3, 2)
    with Sender(Mailboxes(), policy, num_workers=2) as sender:
        receiver = Receiver(sender.address(1), copy)
        assert sender.send().updated == (0, 1)
        assert receiver.receive() == 1
        assert torch.equal(policy.weight, copy.weight)
        new = sender.add_worker()
        late = Receiver(sender.address(new), copy)
        assert sender.send(worker_ids=new).updated == (new,)
        assert late.receive() == 2


def test_a_worker_that_fails_keeps_no_other_from_its_update() -> None:
    scheme = Mailboxes()
    scheme.fails = lambda worker_id: worker_id == 0
    with Sender(scheme, nn.Linear(3, 2), num_workers=2) as sender:
        with pytest.raises(SendError, match="worker 0: is not at home") as failure:
            sender.send()
        assert failure.value.report.updated == (1,)
        assert "1 of 2 workers (the others have it):" in str(failure.value)
        scheme.fails = lambda _worker_id: True
        with pytest.raises(SendError, match="did not reach 2 of 2 workers:"):
            sender.send()
        scheme.fails = lambda _worker_id: False
        assert sender.send().updated == (0, 1)


def test_a_worker_that_is_removed_while_it_is_called_is_not_waited_for() -> None:
    called, answered = threading.Event(), threading.Event()

    def never(worker_id: int) -> bool:
        called.set()
        return worker_id == 0 and not answered.wait(30)

    scheme = Mailboxes()
    scheme.fails = never
    with Sender(scheme, nn.Linear(3, 2), num_workers=2) as sender:
        pending = sender.send_async()
        assert called.wait(10)
        sender.remove_worker(0)
        with pytest.raises(SendError, match="worker 0: was removed from the sender"):
            pending.wait(10)
        answered.set()


def sender_of_nobody(**options: Any) -> Sender:
    return Sender("thread", nn.Linear(1, 1), num_workers=0, **options)


def test_pushing_is_sending() -> None:
    with sender_of_nobody() as sender:
        for push in (sender.push_weights, sender.update_weights, sender, sender.send):
            assert push(nn.Linear(1, 1)).failed == {}


def test_post_hooks_run_in_order_and_also_when_everybody_is_skipped() -> None:
    class Never:
        @hookimpl
        def skip_update(self) -> bool:
            return True

    calls: list[int] = []
    with Sender("thread", nn.Linear(1, 1), num_workers=1, layers=[Never()]) as sender:
        hooks = [lambda: calls.append(1), lambda: calls.append(2)]
        for hook in hooks:
            sender.register_post_hook(hook)
        assert sender.post_hooks == tuple(hooks)
        report = sender.push_weights()
    assert (report.skipped, report.version, calls) == ((0,), 0, [1, 2])


class Counting:
    def __init__(self) -> None:
        self.increments = 0

    def increment_version(self) -> None:
        self.increments += 1


@pytest.mark.parametrize("side", ["Sender", "Receiver"])
def test_a_collector_is_registered_once_and_held_weakly(side: str) -> None:
    with sender_of_nobody() as sender:
        getter = from_getter(lambda: None, nn.Linear(1, 1))
        end = sender if side == "Sender" else getter
        assert end.collector is None
        collector = Counting()
        end.register_collector(collector)
        assert end.collector is collector
        with pytest.raises(RuntimeError, match=f"this {side} has a collector already"):
            end.register_collector(Counting())
        del collector
        gc.collect()
        assert end.collector is None
        with pytest.raises(RuntimeError, match=f"this {side} has a collector already"):
            end.register_collector(Counting())


def test_a_version_that_came_another_way_is_counted_by_the_collector() -> None:
    collector = Counting()
    with sender_of_nobody() as sender:
        sender.increment_version()
        sender.register_collector(collector)
        sender.increment_version()
        assert collector.increments == 1
        del collector
        gc.collect()
        sender.increment_version()


def test_the_count_of_versions_continues_where_it_is_told_to() -> None:
    model, copy = nn.Linear(1, 1), nn.Linear(1, 1)
    with Sender("thread", model, num_workers=1, version=5) as sender:
        receiver = Receiver(sender.address(0), copy)
        assert (sender.version, receiver.receive(0)) == (5, None)
        for newest in (5, 9):
            sender.advance(newest)
            pending = sender.send_async()
            assert sender.version == pending.version == receiver.receive() == newest + 1
            assert pending.wait().workers[0].version == newest + 1
        with pytest.raises(ValueError, match="at version 10, got 9"):
            sender.advance(9)
        assert sender.version == 10
    with pytest.raises(ValueError, match="version is -1"):
        Sender("thread", model, num_workers=1, version=-1)


def fail() -> None:
    raise RuntimeError("no time for that")


def test_a_post_hook_that_raises_loses_no_report() -> None:
    reports: list[int] = []
    options: dict[str, Any] = {"on_report": lambda report: reports.append(report.version)}
    with Sender("none", nn.Linear(2, 2), num_workers=1, **options) as sender:
        sender.register_post_hook(fail)
        for version in (1, 2):
            with pytest.raises(RuntimeError, match="no time"):
                sender.send()
            assert reports[-1] == version


@pytest.mark.parametrize("when", ["on_close", "post hook"])
def test_a_sender_closes_whatever_its_callbacks_raise(
    when: str, caplog: pytest.LogCaptureFixture
) -> None:
    sender = Sender("thread", nn.Linear(2, 2), num_workers=1)
    closed: list[str] = []
    sender.on_close(fail if when == "on_close" else lambda: closed.append("first"))
    sender.on_close(lambda: closed.append("last"))
    if when == "post hook":
        sender.register_post_hook(fail)
    receiver = Receiver(sender.address(0), nn.Linear(2, 2))
    sender.send_async()
    receiver.receive(30)
    sender.close()
    with pytest.raises(SenderLostError):
        receiver.receive(30)
    assert closed[-1] == "last"
    assert "raised while the sender was being closed" in caplog.text


def test_a_model_may_be_registered_later() -> None:
    with Sender("thread", num_workers=1) as sender:
        for call in (sender.send, lambda: sender.address(0)):
            with pytest.raises(ModelError, match="register"):
                call()
        sender.register_model(nn.Linear(2, 2))
        assert sender.address(0).layout.names == ("weight", "bias")


def test_weights_with_which_no_transport_was_made_fix_no_layout() -> None:
    with Sender("file", num_workers=1, directory="/proc/nowhere") as sender:
        sender.check(nn.Linear(2, 2))
        for weights in (nn.Linear(3, 3), nn.Linear(4, 4)):
            for call in (sender.register_model, sender.send):
                with pytest.raises(sync_core.OptionError, match="/proc/nowhere"):
                    call(weights)
        assert sender.model is None
    with Sender("thread", num_workers=0) as sender:
        sender.check(nn.Linear(2, 2))
        sender.register_model(nn.Linear(3, 3))
        with pytest.raises(sync_core.LayoutMismatchError, match="with which the sender was made"):
            sender.check(nn.Linear(2, 2))


def test_the_model_is_looked_up_in_the_context_at_every_send() -> None:
    trainer = SimpleNamespace(policy=nn.Linear(2, 2))
    target = nn.Linear(2, 2)
    with Sender("thread", context=trainer, num_workers=1) as sender:
        receiver = Receiver(sender.address(0), target)
        trainer.policy = nn.Linear(2, 2)
        pending = sender.send_async()
        receiver.receive()
        pending.wait()
        assert torch.equal(target.weight, trainer.policy.weight)
        trainer.policy = nn.Linear(3, 3)
        with pytest.raises(sync_core.LayoutMismatchError, match=r"float32\[3, 3\] in the model"):
            sender.send()


def test_weights_with_tied_tensors_may_come_untied_when_they_are_equal() -> None:
    shared = nn.Parameter(torch.ones(2))
    with Sender("thread", nn.ParameterDict({"a": shared, "b": shared}), num_workers=0) as sender:
        sender.send({"b": torch.ones(2), "a": torch.ones(2)})
        with pytest.raises(sync_core.LayoutMismatchError, match="hold different values"):
            sender.send({"a": torch.ones(2), "b": torch.zeros(2)})


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"on_failure": "ignore"}, ValueError),
        ({"strategy": "pickle"}, ValueError),
        ({"zero_copy": True, "layers": [select("*")]}, OptionError),
        ({"zero_copy": True, "strategy": "state_dict"}, OptionError),
        ({"num_workers": -1}, ValueError),
        ({"num_workers": None}, ValueError),
        ({"num_workers": 2, "workers": [object()]}, ValueError),
        ({"timeout": None}, OptionError),
        ({"timeout": "5"}, OptionError),
        ({"timeout": float("nan")}, OptionError),
        ({"timeout": -1}, OptionError),
        ({"slots": "three"}, OptionError),
        ({"slots": True}, OptionError),
        ({"slots": 0}, OptionError),
    ],
)
def test_arguments_that_do_not_fit(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        Sender("thread", nn.Linear(1, 1), **{"num_workers": 1, **options})


@pytest.mark.parametrize("timeout", ["3", float("nan"), -1, True])
def test_a_deadline_that_is_none_is_refused_before_anything_is_sent(timeout: Any) -> None:
    with Sender("thread", nn.Linear(1, 1), num_workers=1) as sender:
        receiver = Receiver(sender.address(0), nn.Linear(1, 1))
        for call in (sender.send, sender.send_async, receiver.receive):
            with pytest.raises(OptionError, match="timeout is a number of seconds, not"):
                call(timeout=timeout)
        assert sender.version == 0
        pending = sender.send_async()
        with pytest.raises(OptionError, match="timeout is a number of seconds, not"):
            pending.wait(timeout)
        assert receiver.receive() == 1
        assert pending.wait().updated == (0,)


@pytest.mark.parametrize("scheme", ["thread", "shm", "mp"])
def test_a_deadline_may_be_infinite(scheme: str) -> None:
    endless = float("inf")
    with Sender(scheme, nn.Linear(1, 1), num_workers=1, timeout=endless) as sender:
        receiver = Receiver(sender.address(0), nn.Linear(1, 1))
        pending = sender.send_async(timeout=endless)
        assert receiver.receive(endless) == 1
        assert pending.wait(endless).updated == (0,)


def test_a_scheme_that_moves_nothing_takes_no_other_weights() -> None:
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    with sync_core.Sender("none", model, num_workers=1) as sender:
        for weights in (model, model.state_dict(), copy.deepcopy(model)):
            assert sender.send(weights).updated == (0,)
        with pytest.raises(ModelError, match=r"'weight' is not what .*'none' moves nothing"):
            sender.send(other)
        assert sender.version == 3
        model.load_state_dict(other.state_dict())
        assert sender.send(other).updated == (0,)


def test_a_scheme_that_moves_nothing_has_no_use_for_another_model() -> None:
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    context = {"policy": model}
    message = r"'weight' is not what .* model has, .*'none' moves nothing: .* scheme='thread'"
    with sync_core.Sender("none", "['policy']", num_workers=1, context=context) as sender:
        sender.send()
        for own in (model, model.state_dict(), "['policy']"):
            assert Receiver(sender.address(0), own, context=context).receive() == 1
        for wrong in (other, other.state_dict(), "['other']", nn.Bilinear(2, 1, 1)):
            receiver = Receiver(sender.address(0), wrong, context={"other": other})
            with pytest.raises(ModelError, match=message):
                receiver.receive()
            assert receiver.version == 0


def test_a_scheme_that_moves_nothing_knows_tied_tensors() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    with sync_core.Sender("none", model, num_workers=1, layers=["bf16"]) as sender:
        sender.send()
        assert Receiver(sender.address(0), copy.deepcopy(model)).receive() == 1


@pytest.mark.parametrize("worker_id", [True, -1, 1.5, "1"])
def test_what_is_no_id_cannot_be_added(worker_id: Any) -> None:
    with Sender("thread", nn.Linear(1, 1), num_workers=1) as sender:
        with pytest.raises(ValueError, match="a number from 0 on, not"):
            sender.add_worker(worker_id)
        assert sender.all_worker_ids() == (0,)


def test_a_scheme_that_cannot_zero_copy_says_so() -> None:
    with pytest.raises(OptionError, match="scheme 'Mailboxes' cannot zero_copy"):
        Sender(Mailboxes(), nn.Linear(1, 1), num_workers=1, zero_copy=True)


def test_a_delivery_ends_once() -> None:
    delivery = Delivery(0, 1, 10)
    assert not delivery.wait(0)
    delivery.fail(WorkerError(0, "first"))
    delivery.acknowledge()
    assert str(delivery.error) == "worker 0: first"


def test_a_getter_is_a_sender_to_pull_from() -> None:
    server, local = nn.Linear(2, 1), nn.Linear(2, 1)
    offers: list[Any] = [None, server, server.state_dict(), {"weight": torch.ones(3)}]
    receiver = from_getter(lambda: offers.pop(0), local)
    assert receiver.update_weights() is None
    assert receiver.receive() == 1
    assert torch.equal(local.weight, server.weight)
    assert receiver.receive() == 2
    with pytest.raises(sync_core.LayoutMismatchError):
        receiver.receive()
    assert receiver.version == 2
    receiver(nn.Linear(2, 1))
    assert not torch.equal(local.weight, server.weight)
    receiver.close()
    with pytest.raises(ClosedError):
        receiver.receive()


def test_layers_change_what_a_getter_gives() -> None:
    server, local = nn.Linear(2, 1), nn.Linear(2, 1)
    seen: list[torch.dtype] = []

    class Watch:
        @hookimpl(wrapper=True)
        def apply_weights(
            self, update: Update, model: Any, context: ApplyContext
        ) -> Generator[None, bool, bool]:
            del model, context
            seen.append(update.tensors[0].dtype)
            return (yield)

    # The hooks run from the first layer on to prepare, and from the last one on to apply.
    layers = ["bf16", Interval(2), Watch()]
    receiver = from_getter(lambda: server, local, layers=layers)
    assert [receiver.receive() for _ in range(4)] == [1, None, 2, None]
    assert seen == [torch.bfloat16] * 2
    assert torch.equal(local.weight, server.weight.bfloat16().float())
    given = nn.Linear(2, 1)
    assert receiver.update_weights(given) == receiver.version == 2
    assert torch.equal(local.weight, given.weight.bfloat16().float())
    with pytest.raises(OptionError, match="layers is a list"):
        from_getter(lambda: server, local, layers="bf16")


def test_layers_rename_what_is_given_to_the_receiver_of_a_getter() -> None:
    inner, local = nn.Linear(2, 1), nn.Linear(2, 1)
    receiver = from_getter(lambda: None, local, layers=[Rename({"0.*": "*"})])
    receiver.apply_weights(nn.Sequential(inner))
    assert torch.equal(local.weight, inner.weight)
    assert receiver.version == 0


def test_a_receiver_says_what_to_pickle_instead() -> None:
    receiver = from_getter(lambda: None, nn.Linear(1, 1))
    with pytest.raises(TypeError, match="pickle the address that it was given"):
        pickle.dumps(receiver)


def test_an_address_is_what_a_receiver_wants() -> None:
    with pytest.raises(AddressError, match=r"type sender\.address"):
        Receiver("tcp://somewhere", nn.Linear(1, 1))  # type: ignore[arg-type]


def test_the_public_names() -> None:
    assert sync_core.__all__ == sorted(sync_core.__all__)
    assert all(getattr(sync_core, name) is not None for name in sync_core.__all__)
    assert not [
        name for name in sync_core.__all__ if name.startswith("_") and name != "__version__"
    ]


def test_a_send_that_is_given_up_drops_nobody() -> None:
    sender = Sender("thread", nn.Linear(2, 1), num_workers=2, on_failure="drop")
    sender.send_async().abandon()
    assert sender.all_worker_ids() == (0, 1)
    pending = sender.send_async()
    sender.remove_worker(0)
    with pytest.raises(SendError) as failure:
        pending.wait(timeout=0)
    assert failure.value.report.dropped == (0, 1)
    assert sender.all_worker_ids() == ()
    sender.close()
    for change in (sender.add_worker, lambda: sender.remove_worker(1)):
        with pytest.raises(ClosedError):
            change()


@pytest.mark.parametrize(
    ("others", "told"),
    [
        ([], r"did not reach 1 of 1 workers:\n"),
        (["updated"], r"did not reach 1 of 2 workers \(the others have it\):\n"),
        (["skipped"], r"did not reach 1 of 2 workers:\n"),
        (["updated", "skipped"], r"did not reach 1 of 3 workers \(1 committed it\):\n"),
    ],
)
def test_an_error_says_which_workers_have_the_version(others: list[str], told: str) -> None:
    results = [WorkerResult(None, 0.1, 0, error=WorkerError(0, "refused"))]
    results += [
        WorkerResult(3 if other == "updated" else None, 0.1, 0, skipped=other == "skipped")
        for other in others
    ]
    assert re.match(
        f"version 3 {told}  worker 0: refused$",
        str(SendError(SendReport(3, 0.1, dict(enumerate(results))))),
    )


def test_a_report_is_complete_where_every_worker_has_the_version() -> None:
    results = {0: WorkerResult(3, 0.1, 8), 1: WorkerResult(None, 0.1, 0, skipped=True)}
    assert SendReport(3, 0.1, {0: results[0]}).complete
    assert not SendReport(3, 0.1, results).complete


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "scheme", ["thread", "shm", Mailboxes()], ids=["thread", "shm", "mailboxes"]
)
def test_a_worker_that_joins_while_a_send_begins_gets_that_version(scheme: Any) -> None:
    begun, joins = threading.Event(), threading.Event()

    class Slow:
        capabilities: frozenset[str] = frozenset()

        @hookimpl(wrapper=True)
        def prepare_weights(self) -> Generator[None, Update, Update]:
            update = yield
            if begun.is_set():
                joins.set()
                # It joins now, or waits until the send has begun.
                adding.join(0.3)
            return update

    with Sender(scheme, nn.Linear(2, 2), num_workers=0, layers=[Slow()], timeout=10) as sender:
        sender.add_worker()
        adding = threading.Thread(target=lambda: joins.wait() and sender.add_worker())
        adding.start()
        begun.set()
        sender.send_async().abandon()
        adding.join()
        begun.clear()
        with Receiver(sender.address(1), nn.Linear(2, 2)) as receiver:
            # A mailbox answers at once, and its sender posts in a thread.
            assert eventually(lambda: receiver.receive(1.0) == 1)


def test_senders_and_receivers_say_what_they_are() -> None:
    with Sender("thread", nn.Linear(2, 1), num_workers=1) as sender:
        receiver = Receiver(sender.address(0), nn.Linear(2, 1))
        assert repr(sender) == "<Sender 'thread' of 'policy': workers=1, version=0>"
        assert repr(receiver) == "<Receiver 'thread' of 'policy': worker_id=0, version=0>"
        receiver.close()
        assert "closed" in repr(receiver)
    assert repr(sender) == "<Sender 'thread' of 'policy': closed, version=0>"
