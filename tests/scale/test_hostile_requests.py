"""Requests for shards of any content: one that cannot be served is an error of one kind."""

from __future__ import annotations

import base64
import json
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.scale.test_shards import like, trainer, weights

from sync_core import Receiver, SendError, WorkerState
from sync_core.errors import PayloadError
from sync_plugin_scale import join_addresses
from sync_plugin_scale.shards.endpoint import HeldTensor
from sync_plugin_scale.shards.request import Request

HELD = [HeldTensor("w", torch.float32, ((0, 4), (0, 2)), (8, 2))]
NUMBERS = st.integers() | st.floats() | st.sampled_from([10**400, float("inf"), -1, 0, 2, 4])
REGIONS = st.lists(st.lists(NUMBERS, max_size=3) | NUMBERS, max_size=3)


def packed(text: str) -> str:
    return base64.b85encode(zlib.compress(text.encode())).decode()


@pytest.mark.fuzz
@given(st.lists(st.tuples(REGIONS, st.lists(NUMBERS, max_size=3)), max_size=3))
def test_any_request(content: Any) -> None:
    try:
        request = Request.from_text(packed(json.dumps(content)), HELD)
    except PayloadError:
        return
    assert all(position == 0 for position, _ in request.regions)


@pytest.mark.parametrize(
    "text",
    [
        packed("[[[[0,1e999]],[0]]]"),
        packed("[" * 100_000),
        packed('[[[[0,1]],["0"]]]'),
        packed(json.dumps([[[[0, 1], [0, 1]], [0] * 10_000_000]])),
        "\ud800",
        "",
    ],
    ids=["infinite", "deep", "text", "long", "surrogate", "empty"],
)
def test_bad_requests(text: str) -> None:
    with pytest.raises(PayloadError, match="not a request"):
        Request.from_text(text, HELD)


def test_more_than_there_is() -> None:
    held = [HeldTensor("w", torch.float32, ((0, 64),), (64,))]
    content = [[[[0, 64 - i]], [0]] for i in range(9)]
    with pytest.raises(PayloadError, match="more than 4 times"):
        Request.from_text(packed(json.dumps(content)), held)


def test_a_bad_request_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = weights(w=(4, 2))
    with trainer(whole, 2, num_workers=2, timeout=4.0) as senders, ExitStack() as stack:

        def worker(worker_id: int) -> Receiver:
            address = join_addresses([sender.address(worker_id) for sender in senders])
            return stack.enter_context(Receiver(address, like(whole)))

        with ThreadPoolExecutor(2) as pool:
            honest = pool.submit(worker(0).receive, 10.0)
            monkeypatch.setattr(Request, "to_text", lambda _: packed("[[[[0,1e999]],[0]]]"))
            hostile = pool.submit(worker(1).receive, 2.0)
            sends = [sender.send_async() for sender in senders]
            for rank, send in enumerate(sends):
                expected = f"worker 1: has sent rank {rank} what is not a request for shards: "
                with pytest.raises(SendError, match=expected):
                    send.wait()
            assert honest.result() == 1
            assert hostile.exception() is not None or hostile.result() is None
        assert all(sender.workers[0].state is WorkerState.CURRENT for sender in senders)
