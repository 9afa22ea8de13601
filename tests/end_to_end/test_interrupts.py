"""Ctrl-C at the moments of a send: the next send works, over several schemes."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from sync_core import (
    PendingSendError,
    Receiver,
    SendContext,
    Sender,
    SenderLostError,
    Update,
    hookimpl,
)
from sync_testing import interrupted
from sync_tools import StatusServer

pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]
# Interrupts of each scheme: spread over a send, and each of its last moments.
_SPREAD, _LAST = 25, 12


_SCHEMES = ["thread", "shm", "mp", "dist", "file", "store", "chunked::shm"]
_SCHEMES += ["increments::chunked::dist"]
# Those with the option ``slots``; with one, a send may have to wait for it.
_SLOTS = ["thread", "shm", "mp"]


def _spread(count: int, moments: int = _SPREAD) -> list[int]:
    """Moments of ``count``: some spread over all, and the last."""
    return [*range(0, count, max(1, count // moments)), *range(max(0, count - _LAST), count)]


def _options(scheme: str, directory: Path) -> dict[str, Any]:
    if scheme == "store":
        return {"poll": 0.001}
    return {"directory": str(directory), "poll": 0.001} if scheme == "file" else {}


def _left(before: set[threading.Thread], seconds: float = 5.0) -> list[str]:
    """The threads of ours that do not end."""
    deadline = time.monotonic() + seconds
    new = [t for t in threading.enumerate() if t not in before and t.name.startswith("sync")]
    for thread in new:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [thread.name for thread in new if thread.is_alive()]


@pytest.mark.parametrize("blocking", [True, False], ids=["send", "send_async"])
@pytest.mark.parametrize(
    ("scheme", "slots"), [*((name, {}) for name in _SCHEMES), *((n, {"slots": 1}) for n in _SLOTS)]
)
def test_the_next_send_works(
    scheme: str, blocking: bool, slots: dict[str, int], tmp_path: Path
) -> None:
    options = {**_options(scheme, tmp_path), **slots}
    with Sender(scheme, nn.Linear(4, 4), num_workers=1, timeout=10.0, **options) as sender:

        def send(moment: int | None) -> int:
            """Send, and return how many moments that had."""
            ended = False
            with interrupted(moment) as moments:
                if blocking:
                    sender.send()
                else:
                    sender.send_async()
                ended = True
            if ended and not blocking:
                sender.wait_async()
            return moments.count

        _interrupt_each(sender, send)


@pytest.mark.parametrize("scheme", _SCHEMES)
def test_the_next_send_works_after_an_interrupted_wait(scheme: str, tmp_path: Path) -> None:
    options = _options(scheme, tmp_path)
    with Sender(scheme, nn.Linear(4, 4), num_workers=1, timeout=10.0, **options) as sender:

        def wait(moment: int | None) -> int:
            pending = sender.send_async()
            with interrupted(moment) as moments:
                pending.wait()
            # Before the first moments, waiting had not begun.
            assert pending.ended or (moment is not None and moment < 2)
            if not pending.ended:
                sender.wait_async()
            return moments.count

        _interrupt_each(sender, wait)


def _interrupt_each(sender: Sender, act: Callable[[int | None], int]) -> None:
    """Interrupt at moments of ``act``, which returns how many there are; sends work after each."""
    receiver = Receiver(sender.address(0), nn.Linear(4, 4))

    def serve() -> None:
        try:
            while True:
                receiver.receive()
        except SenderLostError:
            receiver.close()

    serving = threading.Thread(target=serve)
    serving.start()
    try:
        count = max(act(None) for _ in range(3))
        for moment in _spread(count):
            act(moment)
            assert sender.send().updated == (0,), f"after an interrupt at {moment} of {count}"
    finally:
        sender.close()
        serving.join(20)
    assert not serving.is_alive()


@pytest.mark.parametrize("scheme", _SCHEMES)
def test_a_constructor_leaves_nothing(scheme: str, tmp_path: Path) -> None:
    before = set(threading.enumerate())

    def make(moment: int | None) -> int:
        with interrupted(moment) as moments:
            sender = Sender(scheme, nn.Linear(4, 4), num_workers=1, **_options(scheme, tmp_path))
            StatusServer(sender)
            sender.close()
        return moments.count

    make(None)
    for moment in _spread(make(None), 50):
        make(moment)
    gc.collect()
    assert _left(before) == []
    assert list(tmp_path.iterdir()) == []


def _receive_all(receiver: Receiver) -> None:
    # A version may be there where another thread collects the sender, and has not come to it yet.
    for _ in range(3):
        receiver.receive(timeout=5.0)


@pytest.mark.parametrize("again", [True, False], ids=["again", "forgotten"])
@pytest.mark.parametrize("scheme", _SCHEMES)
def test_a_close_is_completed(scheme: str, again: bool, tmp_path: Path) -> None:
    before = set(threading.enumerate())

    def close(moment: int | None) -> int:
        sender = Sender(scheme, nn.Linear(4, 4), num_workers=1, **_options(scheme, tmp_path))
        StatusServer(sender)
        receiver = Receiver(sender.address(0), nn.Linear(4, 4))
        sender.send_async()
        with interrupted(moment) as moments:
            sender.close()
        if again:
            sender.close()
        del sender
        gc.collect()
        with pytest.raises(SenderLostError):
            _receive_all(receiver)
        receiver.close()
        return moments.count

    close(None)
    for moment in _spread(close(None), 12):
        close(moment)
    assert _left(before) == []
    assert list(tmp_path.iterdir()) == []


class _Sends:
    """Sends while a send is being started, as a signal handler may."""

    sender: Sender | None = None

    @hookimpl
    def prepare_weights(self, update: Update, context: SendContext) -> None:
        if self.sender is not None:
            self.sender.send(timeout=1.0)


def test_a_send_within_the_start_of_a_send_is_refused() -> None:
    layer = _Sends()
    with Sender("thread", nn.Linear(2, 2), num_workers=1, layers=[layer]) as sender:
        layer.sender = sender
        with pytest.raises(PendingSendError, match="set a flag there"):
            sender.send()
        assert sender.version == 0
