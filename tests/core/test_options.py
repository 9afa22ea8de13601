"""Options are held to the types that their dataclass declares, as far as types can tell."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import pytest

from sync_core import OptionError, TransportContext


class Client(Protocol):
    """Something to talk to."""

    def get(self) -> bytes:
        """Fetch."""


@dataclass(frozen=True)
class Options:
    """One of each kind."""

    slots: int | None = None
    poll: float = 0.5
    safe: bool = True
    mode: Literal["fast", "slow"] = "fast"
    hosts: Sequence[str] = ()
    pair: tuple[int, str] | None = None
    config: Mapping[str, Any] | None = None
    call: Callable[[], Any] | None = None
    client: Client | None = None


def parse(given: dict[str, Any]) -> Options:
    context = TransportContext(
        side="sender", scheme="some", model_id="policy", token="", timeout=1.0, options=given
    )
    return context.parse_options(Options)


GIVEN: list[dict[str, Any]] = [
    {"slots": 4, "poll": 1},
    {"slots": np.int64(4), "poll": np.float32(0.5)},
    {"slots": None, "safe": False, "mode": "slow"},
    {"hosts": ["a", "b"], "config": {"a": 1}},
    {"hosts": ("a",), "pair": (1, "a")},
    {"call": print, "client": object()},
]


@pytest.mark.parametrize("given", GIVEN)
def test_what_fits(given: dict[str, Any]) -> None:
    made = parse(given)
    assert {name: getattr(made, name) for name in given} == given


@pytest.mark.parametrize(
    ("given", "declared"),
    [
        ({"slots": "4"}, r"slots: int \| None, not '4'"),
        ({"slots": True}, r"slots: int \| None, not True"),
        ({"slots": 4.5}, r"slots: int \| None, not 4\.5"),
        ({"poll": None}, r"poll: float, not None"),
        ({"safe": 1}, r"safe: bool, not 1; type True or False"),
        ({"safe": "no"}, r"safe: bool, not 'no'; type True or False"),
        ({"hosts": 3}, r"hosts: Sequence\[str\], not 3"),
        ({"hosts": ["a", 3]}, r"hosts: Sequence\[str\], not \['a', 3\]"),
        ({"hosts": (None,)}, r"hosts: Sequence\[str\], not \(None,\)"),
        ({"pair": (1, 2)}, r"pair: tuple\[int, str\] \| None, not \(1, 2\)"),
        ({"pair": (1,)}, r"pair: tuple\[int, str\] \| None, not \(1,\)"),
        ({"config": {1: 2}}, r"config: Mapping\[str, Any\] \| None, not \{1: 2\}"),
        ({"config": [1]}, r"config: Mapping\[str, Any\] \| None, not \[1\]"),
        ({"call": "print"}, r"call: Callable\[\[\], Any\] \| None, not 'print'"),
    ],
)
def test_what_does_not(given: dict[str, Any], declared: str) -> None:
    with pytest.raises(OptionError, match=rf"^scheme 'some' takes {declared}$"):
        parse(given)
