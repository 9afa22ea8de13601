"""Ctrl-C at a chosen moment leaves out finalizers, where Python discards exceptions."""

from __future__ import annotations

import itertools

from sync_core.transports import release_with
from sync_testing import interrupted


class Owner:
    """Holds what is released with it."""


def test_an_object_forgotten_within_the_block_is_released() -> None:
    for moment in itertools.count():
        released: list[int] = []
        with interrupted(moment) as moments:
            owner = Owner()
            release_with(owner, released.append, 1)
            del owner
        assert not moments.came or released in ([], [1])
        if not moments.came:
            assert released == [1]
            break
