"""Requests for shards of any content: one that cannot be served is an error of one kind."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sync_core.errors import PayloadError
from sync_core.shards.request import HeldTensor, Request

HELD = [HeldTensor("w", torch.float32, ((0, 4), (0, 2)), (8, 2))]
NUMBERS = st.integers() | st.floats() | st.sampled_from([10**400, float("inf"), -1, 0, 2, 4])
REGIONS = st.lists(st.lists(NUMBERS, max_size=3) | NUMBERS, max_size=3)


def packed(text: str) -> str:
    return base64.b85encode(zlib.compress(text.encode())).decode()


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
