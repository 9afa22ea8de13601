"""The control page and the events between a sender and a worker of its machine."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sync_core import Answer
from sync_plugin_std.local import ControlPage, Offer, ProcessEvent, SharedMemory

pytestmark = pytest.mark.timeout(60)

words = st.integers(0, 2**64 - 1)
seconds = st.floats(0, 1e9)
moments = st.none() | seconds
answers = st.builds(
    Answer,
    version=words,
    stage_seconds=seconds,
    commit_seconds=seconds,
    pause_seconds=seconds,
    known_at=moments,
    answered_at=moments,
    clock=st.none() | st.integers(1, 2**64 - 1).map("{:016x}".format),
)


@pytest.fixture(scope="module")
def pages() -> Iterator[tuple[ControlPage, ControlPage]]:
    """A page, as its sender and its worker have it."""
    with closing(ControlPage.create()) as page, closing(ControlPage(page.descriptor)) as there:
        yield page, there


@given(answer=answers, held=st.lists(words, max_size=16))
def test_an_answer_arrives_as_it_was_given(
    pages: tuple[ControlPage, ControlPage], answer: Answer, held: list[int]
) -> None:
    page, there = pages
    assert there.write_answer(answer, held)
    assert page.read_answer() == (answer, held)


@given(version=words, slot=words, layout=words.map("{:016x}".format))
def test_an_offer_arrives_as_it_was_given(
    pages: tuple[ControlPage, ControlPage], version: int, slot: int, layout: str
) -> None:
    page, there = pages
    page.write_offer(Offer(version, slot, layout))
    assert there.read_offer() == Offer(version, slot, layout)


def test_each_side_leaves_the_words_of_the_other(pages: tuple[ControlPage, ControlPage]) -> None:
    page, there = pages
    page.write_offer(Offer(1, 2, "03"))
    there.write_answer(Answer(version=4), [5])
    for waits in (True, False):
        page.waiting = waits
        assert there.waiting is waits
    assert there.read_offer() == Offer(1, 2, f"{3:016x}")
    assert page.read_answer() == (Answer(version=4), [5])


def test_text_has_no_place(pages: tuple[ControlPage, ControlPage]) -> None:
    _, there = pages
    assert not there.write_answer(Answer.refusal(1, ValueError("no")), [])
    assert not there.write_answer(Answer(version=1), list(range(17)))


def test_a_record_that_was_written_in_part_is_found(
    pages: tuple[ControlPage, ControlPage],
) -> None:
    page, there = pages
    there.write_answer(Answer(version=1, commit_seconds=1.5), [1])
    old = bytes(there._bytes[2048:3072])
    there.write_answer(Answer(version=2, commit_seconds=2.5), [2])
    new = bytes(there._bytes[2048:3072])
    for cut in range(0, 1024, 8):
        mixed = new[:cut] + old[cut:]
        there._bytes[2048:3072] = mixed
        if mixed not in (old, new):
            assert page.read_answer() is None


def test_times_that_no_worker_can_measure(pages: tuple[ControlPage, ControlPage]) -> None:
    page, there = pages
    for seconds_ in (math.inf, -1.0, math.nan):
        there.write_answer(Answer(version=1, commit_seconds=seconds_), [])
        with pytest.raises(ValueError, match="cannot have taken"):
            page.read_answer()


def test_memory_of_another_size_is_not_a_page() -> None:
    memory = SharedMemory.create(8192, writable=True)
    with pytest.raises(ValueError, match="there is reason for 4096 only"):
        ControlPage(memory.descriptor)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="only memory of Linux can be sealed")
def test_a_worker_cannot_cut_the_page_short() -> None:
    with closing(ControlPage.create()) as page:
        for size in (0, 8192):
            with pytest.raises(PermissionError):
                os.ftruncate(page.descriptor, size)


@pytest.fixture(params=["eventfd", "pipe"])
def event(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ProcessEvent:
    if request.param == "pipe":
        monkeypatch.delattr(os, "eventfd", raising=False)
    return ProcessEvent.create()


def test_an_event_is_taken_once(event: ProcessEvent) -> None:
    with closing(event):
        assert not event.take()
        for _ in range(3):
            event.set()
        assert event.take()
        assert not event.take()


def test_an_event_that_is_never_taken_blocks_no_writer(event: ProcessEvent) -> None:
    with closing(event):
        for _ in range(20_000):
            event.set()
        assert event.take()
