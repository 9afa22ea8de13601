"""Reads of a control page in tight loops, while another process writes to it as fast as it can.

    python tests/chaos/torn_records.py                    # 10 million reads, and a million in order
    python tests/chaos/torn_records.py --reads 100000

``unordered`` breaks the protocol: the reader takes no event, and so sees records that are being
written. Each must be found by its checksum. ``ordered`` keeps to it: every record is read after its
event was taken, and there must be none that is torn. Ends with code 1 otherwise.
"""

from __future__ import annotations

import argparse
import multiprocessing
import select
import sys
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd

from sync_core import Answer
from sync_plugin_std.local import ControlPage, Offer, ProcessEvent

# Reads between two offers in the ordered kind, where each costs two changes of process.
_ORDERED_SHARE = 10


@dataclass
class Reads:
    """The counts of one reader.

    Args:
        reads: how many times it has read.
        whole: how many records were whole, and new.
        found: how many were torn, as their checksum says.
        torn: how many were torn, and had the right checksum.
    """

    reads: int = 0
    whole: int = 0
    found: int = 0
    torn: int = 0


def answer_of(version: int) -> Answer:
    """The answer in which every word says the version."""
    seconds = float(version)
    return Answer(
        version=version,
        stage_seconds=seconds,
        commit_seconds=seconds,
        pause_seconds=seconds,
        known_at=seconds,
        answered_at=seconds,
        clock=f"{version:016x}",
    )


def is_whole(answer: Answer, held: list[int]) -> bool:
    """Return whether all words of an answer are of one version."""
    return answer == answer_of(answer.version) and held == [answer.version] * 16


def write(pipe: Connection, ordered: bool) -> None:
    """Write answers until the reader closes its end."""
    descriptors = [duplicate.detach() for duplicate in pipe.recv()]
    page = ControlPage(descriptors[0])
    offers, answers = (ProcessEvent(d, d) for d in descriptors[1:])
    poll = select.poll()
    poll.register(offers.reader, select.POLLIN)
    poll.register(pipe, select.POLLIN)
    version = 0
    while True:
        if ordered:
            poll.poll()
            if not offers.take():
                return
            version = page.read_offer().version
        else:
            version += 1
            if version % 1024 == 0 and pipe.poll():
                return
        page.write_answer(answer_of(version), [version] * 16)
        answers.set()


def read(page: ControlPage, reads: int, *, offers: ProcessEvent, answers: ProcessEvent) -> Reads:
    """Read as the protocol says: offer, wait for the event of the answer, read."""
    poll = select.poll()
    poll.register(answers.reader, select.POLLIN)
    seen = Reads()
    for version in range(1, reads + 1):
        page.write_offer(Offer(version, version, f"{version:016x}"))
        offers.set()
        while not answers.take():
            if not poll.poll(60_000):
                raise TimeoutError("the writer does not answer")
        seen.reads += 1
        _look(page, seen, version)
    return seen


def read_at_any_time(page: ControlPage, reads: int) -> Reads:
    """Read without an event."""
    seen = Reads()
    while (found := page.read_answer()) is not None and found[0].version == 0:
        continue  # until the writer has begun
    for _ in range(reads):
        seen.reads += 1
        _look(page, seen, None)
    return seen


def _look(page: ControlPage, seen: Reads, expected: int | None) -> None:
    found = page.read_answer()
    if found is None:
        seen.found += 1
    elif is_whole(*found) and expected in (None, found[0].version):
        seen.whole += 1
    else:
        seen.torn += 1


def hunt(kind: str, reads: int) -> Reads:
    """Read in this process what another one writes."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=write, args=(theirs, kind == "ordered"), daemon=True)
    process.start()
    theirs.close()
    with (
        closing(mine),
        closing(ControlPage.create()) as page,
        closing(ProcessEvent.create()) as offers,
        closing(ProcessEvent.create()) as answers,
    ):
        page.write_answer(Answer(version=0), [])
        mine.send([DupFd(d) for d in (page.descriptor, offers.reader, answers.writer)])
        if kind == "ordered":
            seen = read(page, reads, offers=offers, answers=answers)
        else:
            seen = read_at_any_time(page, reads)
        mine.send(None)
    process.join(10)
    return seen


def main() -> None:
    """Run both kinds, and print what was seen."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reads", type=int, default=10_000_000, help="of the unordered kind")
    arguments = parser.parse_args()
    wrong = False
    _say("| kind | reads | whole | torn, found by the checksum | torn, not found |")
    _say("| --- | ---: | ---: | ---: | ---: |")
    for kind, reads in (
        ("unordered", arguments.reads),
        ("ordered", max(1, arguments.reads // _ORDERED_SHARE)),
    ):
        seen = hunt(kind, reads)
        wrong |= bool(seen.torn) or (kind == "ordered" and bool(seen.found))
        _say(f"| {kind} | {seen.reads:,} | {seen.whole:,} | {seen.found:,} | {seen.torn:,} |")
    sys.exit(wrong)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
