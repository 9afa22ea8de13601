"""Ctrl-C at moments of a sender over Ray: the next send works, and closing completes."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import ray
from tests.plugins_ray.agents import linear

from sync_core import Receiver, Sender, SenderLostError
from sync_testing import eventually, interrupted

pytestmark = pytest.mark.timeout(180)
# Moments that are interrupted, spread over all.
_SENDS, _LIVES = 40, 15


@pytest.fixture(params=["pushed", "pulled"])
def make(request: pytest.FixtureRequest, actors: list[Any]) -> Callable[[], Sender]:
    """A function that makes a sender of actors that it calls, or of a receiver."""
    ray.get([actor.pid.remote() for actor in actors])
    given: dict[str, Any] = {"workers": actors} if request.param == "pushed" else {"num_workers": 1}
    return lambda: Sender("ray", linear(1.0), model_id="policy", timeout=20.0, **given)


@contextmanager
def served(sender: Sender) -> Iterator[None]:
    """Receive what is not pushed, in a thread."""
    if sender.all_worker_ids() != (0,):
        yield
        return
    receiver = Receiver(sender.address(0), linear())

    def serve() -> None:
        with suppress(SenderLostError):
            while True:
                receiver.receive()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        sender.close()
        thread.join(30)
        receiver.close()


def test_the_next_send_works(make: Callable[[], Sender]) -> None:
    with make() as sender, served(sender):

        def send(moment: int | None) -> int:
            with interrupted(moment) as moments:
                sender.send()
            return moments.count

        count = max(send(None) for _ in range(3))
        for moment in range(0, count, max(1, count // _SENDS)):
            send(moment)
            assert sender.send().failed == {}, f"after an interrupt at {moment} of {count}"


def test_nothing_is_left(make: Callable[[], Sender]) -> None:
    before = set(threading.enumerate())

    def live(moment: int | None) -> int:
        with interrupted(moment) as moments:
            sender = make()
            sender.send_async()
            sender.close()
        return moments.count

    count = live(None)
    for moment in range(0, count, max(1, count // _LIVES)):
        live(moment)
    gc.collect()
    assert eventually(lambda: not _new(before), 30), _new(before)


def _new(before: set[threading.Thread]) -> list[str]:
    new = set(threading.enumerate()) - before
    return [thread.name for thread in new if thread.name.startswith("sync")]
