"""Lines of the page for users of TorchRL run, of those that need neither Ray nor RPC."""

from __future__ import annotations

import functools
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
import torch
from torch import nn

from sync_collector import Collector
from sync_collector.envs import CountingEnv
from sync_core import Receiver, Sender, SenderLostError
from sync_plugin_std import Interval, from_getter, with_pipe

pytestmark = pytest.mark.timeout(120)


def _policy(value: float = 0.0) -> nn.Linear:
    policy = nn.Linear(1, 1)
    nn.init.constant_(policy.weight, value)
    return policy


@contextmanager
def _receiving(receiver: Receiver) -> Iterator[None]:
    """Receive in a thread until the sender has closed."""

    def serve() -> None:
        with suppress(SenderLostError):
            while True:
                receiver.receive()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        thread.join(20)
        receiver.close()
    assert not thread.is_alive()


@contextmanager
def _sent(sender: Sender) -> Iterator[nn.Linear]:
    """Serve worker 0 of a sender, and return its model."""
    model = _policy(9.0)
    with _receiving(Receiver(sender.address(0), model)), sender:
        yield model


def _senders() -> None:
    for scheme in ("thread", "shm", "mp", "dist"):
        model = policy = _policy(1.0)
        for sender in (
            Sender(scheme, model, num_workers=1),
            Sender(scheme, policy, num_workers=1, strategy="state_dict"),
            Sender(scheme, policy, num_workers=1, timeout=60.0),
        ):
            with _sent(sender) as theirs:
                assert sender.send().updated == (0,)
                assert sender.send(timeout=20.0).updated == (0,)
                assert sender.push_weights(policy).updated == (0,)
                assert sender.update_weights(policy).updated == (0,)
                assert sender.send_async().wait().updated == (0,)
                assert torch.equal(theirs.weight, policy.weight)
    with _sent(Sender("dist", _policy(), num_workers=1, backend="gloo")) as theirs:
        assert theirs.weight.shape == (1, 1)


def _pipe() -> None:
    pipe, its = multiprocessing.Pipe()
    policy, theirs = _policy(1.0), _policy()
    with pipe, its:
        sender = Sender("mp", policy, workers=[pipe])
        receiver = Receiver(with_pipe(sender.address(0), its), theirs)
        with _receiving(receiver), sender:
            assert sender.send().updated == (0,)
    assert torch.equal(theirs.weight, policy.weight)


def _getter() -> None:
    policy, model = _policy(1.0), _policy()
    getter = policy.state_dict
    receiver = from_getter(getter, model, layers=[Interval(2)])
    assert receiver.receive(0.0) is not None
    receiver.update_weights(_policy(2.0).state_dict())
    assert model.weight.item() == 2.0


def _interval() -> None:
    k = 1
    with _sent(Sender("thread", _policy(), num_workers=1, layers=[Interval(k + 1)])) as theirs:
        assert theirs is not None


def _members() -> None:
    with Sender("thread", num_workers=0) as sender:
        sender.register_model(_policy(1.0))
        worker_id = sender.add_worker()
        model = _policy()
        with Receiver(sender.address(worker_id), model) as receiver:
            pending = sender.send_async()
            assert receiver.receive(5.0) == 1
            assert pending.wait().updated == (worker_id,)


def _context() -> None:
    trainer = nn.ModuleDict({"policy": _policy(1.0)})
    worker = nn.ModuleDict({"policy": _policy()})
    with (
        Sender("thread", context=trainer, num_workers=1) as sender,
        Receiver(sender.address(0), "policy", context=worker) as receiver,
    ):
        pending = sender.send_async()
        assert receiver.receive(5.0) == 1
        assert pending.wait().updated == (0,)


def _collectors() -> None:
    env_fn = functools.partial(CountingEnv, 3)
    policy = _policy()
    for sync in (False, True):
        collector = Collector(
            env_fn, policy, scheme="none", sync=sync, frames_per_batch=4, total_frames=4
        )
        with collector:
            assert sum(batch.numel() for batch in collector) == 4
    with Collector(
        env_fn, policy, scheme="thread", num_workers=2, sync=True, frames_per_batch=4
    ) as collector:
        next(iter(collector))
        assert collector.update_policy_weights_().failed == {}
        assert len(collector.cascade_execute("policy.state_dict")) == 2
        assert collector.stats() is not None
        added = collector.add_workers(1)
        collector.remove_workers(added)


_RUN: dict[str, Callable[[], None]] = {
    each.__name__: each
    for each in (_senders, _pipe, _getter, _interval, _members, _context, _collectors)
}


@pytest.mark.parametrize("name", _RUN)
def test_lines_run(name: str) -> None:
    _RUN[name]()
