"""Copies of tensors: every kind arrives, autograd hears of it, and torch's threads rest."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sync_core.transports import copy

_DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64]

_SCRIPT = """
import os, torch
from sync_core.weights.copying import copy
torch.set_num_threads(4)
targets, sources = ([torch.frombuffer(bytearray(400_000), dtype=torch.float32)] for _ in "ts")
before = len(os.listdir("/proc/self/task"))
copy(targets, sources)
print(len(os.listdir("/proc/self/task")) - before)
"""


def same(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.to(torch.complex64), right.to(torch.complex64))


def some(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(0, 2, (numel,)).to(dtype)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([1, 3, 32_767, 32_768, 50_000]),
            st.sampled_from(_DTYPES),
            st.booleans(),
        ),
        max_size=4,
    )
)
def test_every_kind_arrives(kinds: list[tuple[int, torch.dtype, bool]]) -> None:
    sources = [some(2 * n, dtype)[::2] if apart else some(n, dtype) for n, dtype, apart in kinds]
    targets = [torch.zeros_like(source, dtype=source.dtype) for source in sources]
    copy(targets, sources)
    assert all(map(same, targets, sources))


def test_a_copy_needs_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the process ends, in which Python 3.12 begins none."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    source, target = torch.rand(5_000_000), torch.zeros(5_000_000)
    copy([target], [source])
    assert torch.equal(source, target)


@pytest.mark.parametrize("source", [torch.ones(40_000, dtype=torch.int32), torch.ones(1)])
def test_what_is_not_the_same_bytes_is_converted(source: Tensor) -> None:
    target = torch.zeros(40_000)
    copy([target], [source])
    assert target.sum() == 40_000


def test_a_conjugate_is_resolved() -> None:
    source = torch.full((40_000,), 1 + 1j).conj()
    target = torch.zeros(40_000, dtype=torch.complex64)
    copy([target], [source])
    assert bool((target == 1 - 1j).all())


def test_much_is_shared_with_a_second_thread() -> None:
    sources = [torch.rand(5_000_000), torch.rand(100_000), torch.rand(7)]
    targets = [torch.zeros_like(source) for source in sources]
    copy(targets, sources)
    assert all(map(torch.equal, targets, sources))


@pytest.mark.skipif(sys.platform == "win32", reason="there are no interval timers")
def test_no_thread_writes_after_an_interrupted_copy() -> None:
    interrupts: list[int] = []

    def interrupt(number: int, _: object) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    targets, sources = ([torch.zeros(50_000_000)] for _ in "ts")
    before = signal.signal(signal.SIGALRM, interrupt)
    # An exception in a callback of the collector's, such as Hypothesis's, would be lost.
    gc.disable()
    try:
        with suppress(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.005)
            copy(targets, sources)
        assert interrupts
        # One that was about to start takes nothing.
        helpers = [each for each in threading.enumerate() if each.name == "sync-copy"]
        assert not any(helper.is_alive() for helper in helpers)
    finally:
        gc.enable()
        signal.signal(signal.SIGALRM, before)


def test_autograd_hears_of_it() -> None:
    weight = torch.ones(40_000, requires_grad=True)
    loss = (weight * weight).sum()
    copy([weight], [torch.zeros(40_000)])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.skipif(sys.platform != "linux", reason="counts the threads in /proc")
@pytest.mark.timeout(60)
def test_no_thread_of_torch_is_waited_for() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], check=True, capture_output=True, text=True, timeout=50
    )
    assert done.stdout == "0\n"
