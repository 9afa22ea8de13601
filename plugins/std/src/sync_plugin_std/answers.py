"""Answers that the thread which waits in ``send`` reads itself.

While it waits, a word of the board says so. A worker that has committed a version then writes its
answer, a record of fixed size, into a pipe of its own, which that thread reads: no other thread of
the trainer has to run. A refusal, and every answer while no thread waits, takes the socket, which
the sender's own thread serves.

A worker may see the word just before the thread stops waiting. So it looks again after it has
written: if the word is gone, it asks by the socket that its pipe be read. The thread clears the
word before it reads the pipes for the last time. Both take the lock of the pipe, so that either
the thread finds the record or the worker finds the word cleared.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Sequence
from contextlib import suppress

from sync_core import Answer

__all__ = ["AnswerPipe", "write_answer"]

_MOST_HELD = 4
# Version, clock, five times, how many slots are held, and which. Smaller than a pipe writes at
# once (PIPE_BUF), so that records are never mixed.
_RECORD = struct.Struct(f"=QQdddddQ{_MOST_HELD}Q")
_CLOCK_DIGITS = 16


def write_answer(pipe: int, answer: Answer, held: Sequence[int]) -> bool:
    """Write an answer; False where it has to take the socket.

    Args:
        pipe: the worker's end of its pipe.
        answer: the answer.
        held: the slots that the worker still reads.
    """
    if answer.error is not None or answer.digest is not None or len(held) > _MOST_HELD:
        return False
    if answer.clock is not None and len(answer.clock) != _CLOCK_DIGITS:
        return False
    record = _RECORD.pack(
        answer.version,
        0 if answer.clock is None else int(answer.clock, 16),
        answer.stage_seconds,
        answer.commit_seconds,
        answer.pause_seconds,
        math.nan if answer.known_at is None else answer.known_at,
        math.nan if answer.answered_at is None else answer.answered_at,
        len(held),
        *held,
        *[0] * (_MOST_HELD - len(held)),
    )
    # Full, or the sender is gone: the socket tells.
    with suppress(BlockingIOError, BrokenPipeError):
        return os.write(pipe, record) == len(record)
    return False


class AnswerPipe:
    """The pipe in which one worker's answers come."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        os.set_blocking(self.writer, False)

    def read(self) -> list[tuple[Answer, list[int]]]:
        """The answers that have come, each with the slots that the worker still reads.

        Raises:
            ValueError: a worker does not write such answers.
        """
        try:
            data = os.read(self.reader, 64 * _RECORD.size)
        except BlockingIOError:
            return []
        if len(data) % _RECORD.size:
            raise ValueError(
                f"{len(data)} bytes are not a number of answers of {_RECORD.size} bytes"
            )
        return [_parse(record) for record in _RECORD.iter_unpack(data)]

    def close_writer(self) -> None:
        """Close the worker's end here, once the worker has it."""
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def close(self) -> None:
        """Release both ends."""
        self.close_writer()
        os.close(self.reader)


def _parse(
    record: tuple[int, int, float, float, float, float, float, int, *tuple[int, ...]],
) -> tuple[Answer, list[int]]:
    version, clock, stage, commit, pause, known_at, answered_at, count, *held = record
    for seconds in (stage, commit, pause):
        if not 0 <= seconds < math.inf:
            raise ValueError(f"an answer cannot have taken {seconds} s")
    if count > _MOST_HELD or math.isinf(known_at) or math.isinf(answered_at):
        raise ValueError("an answer cannot be of that time, or read that many slots")
    answer = Answer(
        version=version,
        stage_seconds=stage,
        commit_seconds=commit,
        pause_seconds=pause,
        known_at=None if math.isnan(known_at) else known_at,
        answered_at=None if math.isnan(answered_at) else answered_at,
        clock=f"{clock:0{_CLOCK_DIGITS}x}" if clock else None,
    )
    return answer, held[:count]
