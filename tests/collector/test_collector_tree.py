"""A collector that is itself a worker passes on the weights that it receives."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import torch
from torch import Tensor, nn

from sync_collector import Collector
from sync_collector.envs import CountingEnv
from sync_collector.testing import Scale
from sync_core import (
    LayoutMismatchError,
    ModelError,
    OptionError,
    PendingSend,
    Sender,
    SenderLostError,
    SendError,
    WorkerGroup,
)
from sync_plugin_std.workers import ProcessGroup, ThreadGroup
from sync_testing import descendants, eventually

pytestmark = pytest.mark.timeout(60)


class Refusing(Scale):
    """Has a state that a worker's copy does not take."""

    takes = True

    def get_extra_state(self) -> Tensor:
        return torch.zeros(1)

    def set_extra_state(self, state: Any) -> None:
        del state
        if not self.takes:
            raise RuntimeError("this copy refuses")


class WithPid(CountingEnv):
    """Knows the id of its process."""

    def getpid(self) -> int:
        return os.getpid()


class WithScale(CountingEnv):
    """Has its own model."""

    def __init__(self) -> None:
        super().__init__(1000)
        self.scale = Scale()


def inner(workers: str = "thread", **options: Any) -> Collector:
    options = {"num_workers": 2, "frames_per_batch": 4, "sync": True, "timeout": 20.0, **options}
    policy = options.pop("policy", None) or Scale()
    return Collector(lambda: WithPid(1000), policy, scheme="shm", workers=workers, **options)


def register(collector: Collector, addresses: Any) -> None:
    collector.register_scheme_receiver(addresses)


def comes_to_hold(collector: Collector, value: float, path: str = "policy.weight.item") -> bool:
    """Wait until both workers have it: a busy machine takes more than half a second."""

    def holds() -> bool:
        if collector.cascade_execute(path) == [value, value]:
            return True
        collector.receive_weights(timeout=0.1)
        return False

    return eventually(holds, 20.0)


def receive(collector: Collector) -> dict[str, int]:
    return dict(collector.receive_weights(timeout=20.0))


def held(collector: Collector) -> list[float]:
    return [weight.item() for weight in collector.cascade_execute("policy.weight")]


def act(collector: Collector) -> list[float]:
    return list(next(collector)["action"].unique().tolist())


@pytest.fixture
def sender() -> Iterator[Sender]:
    with Sender("shm", Scale(5.0), num_workers=2, timeout=20.0) as made:
        yield made


@pytest.mark.parametrize(("group", "workers"), [(ThreadGroup, "thread"), (ProcessGroup, "thread")])
def test_weights_reach_the_workers_of_workers(
    sender: Sender, group: type[WorkerGroup], workers: str
) -> None:
    with group(lambda _: inner(workers), 2, timeout=50.0) as collectors:
        for i in range(2):
            collectors.call(i, register, {"policy": sender.address(i)}).result(20)
        for weight in (5.0, 6.0):
            pending = sender.send_async(Scale(weight))
            received = [collectors.call(i, receive) for i in range(2)]
            assert pending.wait().updated == (0, 1)
            assert [each.result(20) for each in received] == [{"policy": int(weight) - 4}] * 2
            for i in range(2):
                assert collectors.call(i, held).result(20) == [weight] * 2
                assert collectors.call(i, act).result(20) == [weight]


class Tied(nn.Module):
    """Acts with a weight that it has under two names."""

    def __init__(self, weight: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([weight]))
        self.also = self.weight

    def forward(self, observation: Tensor) -> Tensor:
        return self.also.expand(observation.shape)


@pytest.mark.parametrize(
    ("workers", "kind", "options"),
    [
        ("thread", Scale, {"zero_copy": True}),
        ("thread", Tied, {"layers": ["bf16"]}),
        ("process", Scale, {"zero_copy": True}),
        ("process", Tied, {}),
    ],
)
def test_policies_that_workers_make(workers: str, kind: Any, options: dict[str, Any]) -> None:
    made = partial(Collector, lambda: WithPid(1000), workers=workers, num_workers=2, timeout=20.0)
    arguments: dict[str, Any] = {"frames_per_batch": 4, "sync": True, "policy_factory": kind}
    with (
        Sender("shm", kind(5.0), num_workers=1, timeout=20.0, **options) as sender,
        made(**arguments) as collector,
    ):
        sender.send_async().abandon()
        collector.register_scheme_receiver({"policy": sender.address(0)})
        assert comes_to_hold(collector, 5.0)
        pending = sender.send_async(kind(6.0))
        collector.receive_weights(timeout=20.0)
        assert act(collector) == [6.0]
        assert pending.wait().updated == (0,)
        collector.add_workers()
        assert held(collector) == [6.0] * 3
        versions = next(collector)["policy_version"]
        assert versions.unique().tolist() == [2]


def test_several_models_that_workers_make() -> None:
    addresses = {}
    with ExitStack() as stack:
        for name, weight in (("policy", 5.0), ("env.scale", 7.0)):
            sender = stack.enter_context(Sender("shm", Scale(weight), num_workers=1))
            sender.send_async().abandon()
            addresses[name] = sender.address(0)
        made = stack.enter_context(
            Collector(
                WithScale,
                policy_factory=Scale,
                weight_sync_schemes=dict.fromkeys(addresses, "thread"),
                num_workers=2,
                frames_per_batch=4,
            )
        )
        made.register_scheme_receiver(addresses)
        assert comes_to_hold(made, 5.0)
        assert comes_to_hold(made, 7.0, "env.scale.weight.item")
        # As docs/coming-from-torchrl.md has it.
        assert [list(state) for state in made.cascade_execute("policy.state_dict")] == [
            ["weight"]
        ] * 2


def test_the_sender_is_told_when_the_workers_have_committed_and_not_before(
    sender: Sender,
) -> None:
    with inner() as made:
        made.register_scheme_receiver({"policy": sender.address(0)}, synchronize_weights=False)
        pending = sender.send_async(worker_ids=0)
        seen: list[tuple[bool, list[float]]] = []
        assert made.sender is not None
        made.sender.register_post_hook(lambda: seen.append((pending.done(), held(made))))
        assert made.receive_weights() == {"policy": 1}
        assert seen == [(False, [5.0, 5.0])]
        assert pending.wait().updated == (0,)
        assert made.receive_weights(timeout=0.05) == {}


def test_a_batch_is_preceded_by_what_has_come() -> None:
    with ExitStack() as stack:
        sender = stack.enter_context(Sender("thread", Scale(5.0), num_workers=2, timeout=20.0))
        sender.send_async().abandon()
        made = [
            stack.enter_context(inner(weight_recv_schemes={"policy": sender.address(i)}))
            for i in range(2)
        ]
        # An earlier version is there from the beginning.
        assert [held(each) for each in made] == [[5.0, 5.0]] * 2
        pending = sender.send_async(Scale(6.0))
        assert [act(each) for each in made] == [[6.0]] * 2
        assert pending.wait().updated == (0, 1)


def test_what_goes_wrong_further_down_is_told_further_up() -> None:
    policy = Refusing()
    with (
        Sender("thread", Refusing(5.0), num_workers=1, timeout=20.0) as sender,
        inner(policy=policy) as made,
    ):
        made.register_scheme_receiver({"policy": sender.address(0)})
        made.cascade_execute("policy.__setattr__", "takes", False)
        pending = sender.send_async()
        with pytest.raises(SendError, match="this copy refuses"):
            made.receive_weights()
        with pytest.raises(SendError, match="this copy refuses"):
            pending.wait()
        made.cascade_execute("policy.__setattr__", "takes", True)
        pending = sender.send_async()
        assert made.receive_weights() == {"policy": 2}
        assert pending.wait().updated == (0,)
        assert held(made) == [5.0, 5.0]


def test_several_models() -> None:
    models = {"policy": Scale(1.0), "critic": Scale(2.0)}
    schemes = {"policy": "thread", "critic": "thread"}
    with ExitStack() as stack:
        senders = {
            name: stack.enter_context(Sender("thread", model, num_workers=1, model_id=name))
            for name, model in models.items()
        }
        made = stack.enter_context(
            Collector(
                CountingEnv,
                Scale(),
                weight_sync_schemes=schemes,
                models={"critic": Scale()},
                frames_per_batch=2,
                weight_recv_schemes={name: each.address(0) for name, each in senders.items()},
            )
        )
        pending: list[PendingSend] = [senders["critic"].send_async()]
        assert made.receive_weights() == {"critic": 1}
        pending.append(senders["policy"].send_async())
        assert made.receive_weights() == {"policy": 1}
        assert [each.wait().updated for each in pending] == [(0,), (0,)]
        assert made.cascade_execute("policy.weight.item") == [1.0]
        assert made.cascade_execute("critic.weight.item") == [2.0]


def test_a_sender_that_has_gone(sender: Sender) -> None:
    with inner() as made:
        made.register_scheme_receiver({"policy": sender.address(0)})
        sender.close()
        with pytest.raises(SenderLostError):
            made.receive_weights()
        # It is said once; the collector continues.
        assert act(made) == [0.0]
        with pytest.raises(ValueError, match="nothing to receive from"):
            made.receive_weights()


def test_a_collector_that_is_shut_down_leaves_its_senders() -> None:
    with Sender("thread", Scale(5.0), num_workers=1, timeout=0.2) as sender:
        made = inner(weight_recv_schemes={"policy": sender.address(0)})
        made.shutdown()
        with pytest.raises(SendError):
            sender.send()


def test_a_collector_that_is_shut_down_while_it_listens_leaves_its_senders() -> None:
    with Sender("shm", Scale(5.0), num_workers=1, timeout=20.0) as sender:
        made = inner(weight_recv_schemes={"policy": sender.address(0)})
        listening = threading.Thread(target=made.receive_weights, kwargs={"timeout": 300.0})
        listening.start()
        time.sleep(0.2)
        next(made)  # which does not wait for listeners
        made.shutdown()
        listening.join(20.0)
        assert not listening.is_alive()
        with pytest.raises(SendError, match="closed its receiver"):
            sender.send()


def with_two_models(scheme: str, stack: ExitStack) -> tuple[dict[str, Sender], Collector]:
    """A collector that receives its policy and another model from two senders."""
    senders = {
        name: stack.enter_context(
            Sender(scheme, Scale(5.0), num_workers=1, model_id=name, timeout=20.0)
        )
        for name in ("policy", "critic")
    }
    addresses = {name: each.address(0) for name, each in senders.items()}
    made = Collector(
        CountingEnv,
        Scale(),
        weight_sync_schemes={"policy": "thread", "critic": "thread"},
        models={"critic": Scale()},
        frames_per_batch=2,
        timeout=20.0,
    )
    stack.enter_context(made).register_scheme_receiver(addresses, synchronize_weights=False)
    return senders, made


@pytest.mark.parametrize("scheme", ["thread", "shm"])
def test_one_of_several_senders_may_go(scheme: str) -> None:
    with ExitStack() as stack:
        senders, made = with_two_models(scheme, stack)
        senders["critic"].close()
        with pytest.raises(SenderLostError):
            made.receive_weights()
        pending = senders["policy"].send_async()
        assert made.receive_weights() == {"policy": 1}
        assert pending.wait().updated == (0,)
        made.shutdown()
        with pytest.raises(SendError, match="closed its receiver"):
            senders["policy"].send()


def test_a_collector_that_is_shut_down_while_it_listens_to_several_senders() -> None:
    with ExitStack() as stack:
        senders, made = with_two_models("shm", stack)
        listening = threading.Thread(target=made.receive_weights, kwargs={"timeout": 300.0})
        listening.start()
        next(made)  # which does not wait for listeners
        made.shutdown()
        listening.join(20.0)
        assert not listening.is_alive()
        for thread in threading.enumerate():
            if thread.name.startswith("sync-upstream"):
                thread.join(20.0)
                assert not thread.is_alive()
        for sender in senders.values():
            with pytest.raises(SendError, match="closed its receiver"):
                sender.send()


def test_weights_come_in_the_background_too(sender: Sender) -> None:
    batches: list[Any] = []
    buffer = SimpleNamespace(extend=batches.append)
    with inner(replay_buffer=buffer, weight_recv_schemes={"policy": sender.address(0)}) as made:
        made.start()
        assert sender.send(worker_ids=0).updated == (0,)
        with made.pause():
            batches.clear()
        while not batches:
            time.sleep(0.01)
        assert batches[0]["action"].unique().tolist() == [5.0]


def test_weights_that_come_after_the_last_batch(sender: Sender) -> None:
    with inner(total_frames=4, weight_recv_schemes={"policy": sender.address(0)}) as made:
        next(made)
        pending = sender.send_async(worker_ids=0)
        assert list(made) == []
        assert pending.wait().updated == (0,)


@pytest.mark.parametrize("sync", [True, False])
def test_a_worker_that_is_found_dead_when_weights_are_passed_on(sender: Sender, sync: bool) -> None:
    options: dict[str, Any] = {"sync": sync, "on_worker_failure": "restart"}
    with inner("process", **options) as made:
        made.register_scheme_receiver({"policy": sender.address(0)}, synchronize_weights=False)
        next(made)
        psutil.Process(made.cascade_execute("env.getpid")[0]).kill()
        pending = sender.send_async(worker_ids=0)
        assert receive(made) == {"policy": 1}
        assert pending.wait().updated == (0,)
        assert held(made) == [5.0, 5.0]


def test_a_registration_that_fails_changes_nothing(sender: Sender) -> None:
    with inner() as made, Sender("thread", nn.Linear(2, 2), num_workers=1) as other:
        made.register_scheme_receiver({"policy": sender.address(0)}, synchronize_weights=False)
        with pytest.raises(LayoutMismatchError):
            made.register_scheme_receiver({"policy": other.address(0)})
        pending = sender.send_async(worker_ids=0)
        assert receive(made) == {"policy": 1}
        assert pending.wait().updated == (0,)


def test_a_collector_that_cannot_be_registered_leaves_no_workers(sender: Sender) -> None:
    before = descendants()
    with pytest.raises(KeyError, match="no model 'critic'"):
        inner("process", weight_recv_schemes={"critic": sender.address(0)})
    assert descendants() == before


def test_deadlines_of_any_length(sender: Sender) -> None:
    with inner(replay_buffer=SimpleNamespace(extend=print)) as made:
        made.register_scheme_receiver({"policy": sender.address(0)}, synchronize_weights=False)
        sender.send_async(worker_ids=0)
        assert dict(made.receive_weights(timeout=math.inf)) == {"policy": 1}
        made.start()
        with made.pause(timeout=math.inf):
            pass
        for method in (made.receive_weights, made.pause, made.shutdown):
            with pytest.raises(OptionError, match="timeout is a number of seconds"):
                method(timeout=-1)
        made.shutdown(timeout=math.inf)


def test_weights_given_by_hand() -> None:
    policy = Scale()
    with inner(policy=policy) as made:
        assert made.receive_weights(Scale(3.0)) == {}
        assert policy.weight.item() == 3.0
        assert held(made) == [3.0, 3.0]
        made.receive_weights(weights={"weight": torch.tensor([4.0])})
        assert held(made) == [4.0, 4.0]
        with pytest.raises(ValueError, match="once"):
            made.receive_weights(Scale(), weights=Scale())
        made.receive_weights(policy=Scale(5.0))
        assert held(made) == [5.0, 5.0]
        with pytest.raises(ValueError, match="once"):
            made.receive_weights(Scale(), policy=Scale())


def test_what_cannot_be_received(sender: Sender) -> None:
    with inner() as made:
        with pytest.raises(KeyError, match="no model 'critic'; the models are: 'policy'"):
            made.register_scheme_receiver({"critic": sender.address(0)})
        made.register_scheme_receiver({"policy": sender.address(0)})
        with pytest.raises(ValueError, match="come from the senders registered"):
            made.receive_weights(Scale())
    with (
        Collector(CountingEnv, policy_factory=Scale, scheme="thread", frames_per_batch=2) as made,
        pytest.raises(ModelError, match="no policy to load weights into"),
    ):
        made.receive_weights(Scale())
    with (
        Collector(CountingEnv, scheme="thread", frames_per_batch=2) as made,
        pytest.raises(ModelError, match="'policy' has no tensors to receive into"),
    ):
        made.register_scheme_receiver({"policy": sender.address(0)})
