"""A hostile worker of a relay, or of a pool, costs its own place, and never that of another."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from sync_core import Answer, Receiver, Sender, SendError, SyncError
from sync_plugin_scale import Pool, Relay
from sync_plugin_scale.pools.admission import enter
from sync_plugin_std.local import Channel, Message
from sync_testing.fuzz import Mutator, besiege, find, hostile

pytestmark = [pytest.mark.fuzz, pytest.mark.timeout(120)]

AGAIN = Answer(version=1, error="lacks them", request="again").to_message()
ADMITTED = Answer(version=1, error="wants to be admitted", request="00" * 16).to_message()
VOCABULARY: list[dict[str, Any]] = [
    *(
        {"type": "answer", "answer": each, "held": [1]}
        for each in (Answer(version=1).to_message(), AGAIN, ADMITTED)
    ),
    {"type": "on", "version": 1, "held": [1, 2]},
    {"type": "look"},
    {"type": "take"},
    {"type": "leave", "reason": "left"},
]


@pytest.mark.parametrize("scheme", ["chunked::mp", "chunked::dist"])
def test_a_worker_of_a_relay(scheme: str, seed: int) -> None:
    mutator = Mutator(seed, VOCABULARY)
    # Two chunks.
    model = nn.Linear(1_100, 1_000)

    def attack(receiver: Receiver) -> None:
        for channel in find(receiver, Channel):
            send = hostile(channel, mutator)
            for _ in range(mutator.random.randrange(4)):
                send()
        with suppress(TimeoutError):
            receiver.receive(0.0)

    sender = Sender(scheme, model, num_workers=1, timeout=20.0)
    with sender, Relay(sender.address(0), num_workers=2) as relay:
        assert besiege(sender, model, attack, rounds=20, address=relay.address) > 3


@pytest.mark.parametrize("options", [{}, {"shared_memory": False}], ids=["memory", "streams"])
def test_those_that_want_to_be_admitted(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    mutator = Mutator(seed, VOCABULARY)
    thread, send = threading.get_ident(), Channel.send

    def mutated(channel: Channel, message: Message, descriptors: Sequence[int] = ()) -> None:
        if threading.get_ident() != thread or message["type"] in ("hello", "proof"):
            send(channel, message, descriptors)
            return
        with suppress(OSError):
            frame = mutator.frame(mutator.message(message))
            socket.send_fds(channel._socket, [frame], descriptors)

    model = nn.Linear(2, 2)
    with (
        Sender("dist", model, num_workers=0, timeout=20.0, **options) as sender,
        Pool(sender) as pool,
        Receiver(pool.address(), deepcopy(model)) as honest,
    ):
        for value in range(1, 16):
            with monkeypatch.context() as patch:
                patch.setattr(Channel, "send", mutated)
                with suppress(SyncError):
                    Receiver(pool.address(), deepcopy(model), timeout=0.1).close()
            with torch.no_grad():
                model.weight.fill_(float(value))
            pending = sender.send_async()
            deadline = time.monotonic() + 5.0
            while honest.version < pending.version:
                assert time.monotonic() < deadline
                honest.receive(1.0)
            with suppress(SendError):
                pending.wait(0.02)
        with Receiver(pool.address(), deepcopy(model)) as successor:
            assert successor.receive(5.0) == pending.version


@pytest.mark.parametrize("connects", [False, True])
def test_one_that_is_admitted_again_and_again(connects: bool) -> None:
    model = nn.Linear(2, 2)
    ended = threading.Event()
    with (
        Sender("shm", model, num_workers=0, timeout=60.0) as sender,
        Pool(sender) as pool,
        Receiver(pool.address(), deepcopy(model)) as honest,
        ExitStack() as silent,
        ThreadPoolExecutor() as threads,
        ExitStack() as ends,
    ):
        ends.callback(ended.set)

        def join() -> None:
            silent.enter_context(Receiver(pool.address(), deepcopy(model), timeout=2.0))

        def flood() -> None:
            while not ended.is_set():
                with suppress(SyncError):
                    join() if connects else enter(pool.address(), 2.0)

        def update() -> None:
            begun = time.monotonic()
            pending = sender.send_async()
            assert honest.receive(20.0) == pending.version
            assert pending.wait().updated == (0,)
            assert time.monotonic() - begun < 20.0, "the send waited for those that are silent"

        if connects:
            update()  # before the first version, sends wait for all that have connected
        for _ in range(4):
            threads.submit(flood)
        while len(sender.workers) < 20:
            time.sleep(0.01)
        update()
        update()
