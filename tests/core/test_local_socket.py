"""Sockets of one machine, whose listener may be busy or stopped."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack, closing

import pytest

from sync_plugin_std.local import LocalListener, connect_locally

pytestmark = [
    pytest.mark.timeout(30),
    pytest.mark.skipif(sys.platform != "linux", reason="sockets of Linux"),
]


def test_one_that_takes_nobody_in_keeps_nobody_for_ever() -> None:
    with closing(LocalListener()) as listener, ExitStack() as waiting:
        for _ in range(129):  # one more than it listens for
            waiting.enter_context(connect_locally(listener.name, timeout=5.0))
        begin = time.monotonic()
        with pytest.raises(BlockingIOError):
            connect_locally(listener.name, timeout=0.2)
        assert time.monotonic() - begin < 10


def test_any_timeout_will_do() -> None:
    with closing(LocalListener()) as listener:
        for timeout in (0.0, 1e-9, float("inf")):
            connect_locally(listener.name, timeout).close()


def test_there_is_none() -> None:
    listener = LocalListener()
    listener.close()
    with pytest.raises(ConnectionRefusedError):
        connect_locally(listener.name, timeout=1.0)
