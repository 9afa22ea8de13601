"""Ctrl-C at the moments of a send: the next send works, over several schemes."""

from __future__ import annotations

import threading

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
from sync_testing.interrupts import interrupted

pytestmark = pytest.mark.timeout(120)
# Interrupts of each scheme: spread over a send, and each of its last moments.
_SPREAD, _LAST = 40, 20


@pytest.mark.parametrize("blocking", [True, False], ids=["send", "send_async"])
@pytest.mark.parametrize("scheme", ["thread", "shm", "mp", "dist"])
def test_the_next_send_works(scheme: str, blocking: bool) -> None:
    policy = nn.Linear(4, 4)
    with Sender(scheme, policy, num_workers=1, timeout=10.0) as sender:
        receiver = Receiver(sender.address(0), nn.Linear(4, 4))

        def serve() -> None:
            try:
                while True:
                    receiver.receive()
            except SenderLostError:
                receiver.close()

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

        serving = threading.Thread(target=serve)
        serving.start()
        try:
            count = max(send(None) for _ in range(3))
            spread = range(0, count, max(1, count // _SPREAD))
            for moment in (*spread, *range(max(0, count - _LAST), count)):
                send(moment)
                assert sender.send().updated == (0,), f"after an interrupt at {moment} of {count}"
        finally:
            sender.close()
            serving.join(20)
    assert not serving.is_alive()


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
