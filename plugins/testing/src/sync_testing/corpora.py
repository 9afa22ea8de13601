"""Inputs for testing parsers: keeps them in files, and searches new ones by coverage.

`explore` mutates the inputs of a corpus, and keeps each input with which the parser executes new
steps, as a start for later mutations. AFL describes the method:
https://lcamtuf.coredump.cx/afl/technical_details.txt
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from sync_testing.fuzz import Mutator

__all__ = ["explore", "read_corpus", "write_corpus"]

# The memory that a parser may use in addition to that for its input.
_SPARE_NBYTES = 64 << 20
_GROWTH = 10
# Longer inputs cover nothing new.
_LONGEST = 4096
# A step: the file, the previous line, and the line.
Step = tuple[str, int, int]


def explore(
    read: Callable[[bytes], object],
    corpus: Iterable[bytes],
    *,
    expected: tuple[type[Exception], ...] = (),
    rounds: int = 1000,
    seed: int = 0,
    seconds: float = 1.0,
    packages: tuple[str, ...] = ("sync_",),
) -> list[bytes]:
    """Call a parser with a corpus and mutations of it; return the inputs that cover new steps.

    Args:
        read: the parser.
        corpus: the first inputs, at least one.
        expected: the errors that the parser may raise.
        rounds: the number of mutated inputs.
        seed: the seed of the mutations.
        seconds: the most CPU time of a call.
        packages: prefixes of the names of the modules whose steps count.

    Returns:
        The inputs that cover a step that no input before them covers.

    Raises:
        AssertionError: the parser raised another error, ran for longer, or used more memory than
            ten times its input plus 64 MiB; the message has the input.

    Example:
        >>> def read(data: bytes) -> None:
        ...     if data.startswith(b"{"):
        ...         raise ValueError("not a list")
        >>> explore(read, [b"[", b"{"], expected=(ValueError,), rounds=9)
        []
    """
    mutator = Mutator(seed)
    # On Linux, reset the peak, which would include the process before this search.
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    known: set[Step] = set()
    reached = []
    for data in corpus:
        known |= _steps(read, data, expected, seconds, packages)
        reached.append(data)
    found = []
    for _ in range(rounds):
        data = _changed(mutator, mutator.random.choice(reached))
        steps = _steps(read, data, expected, seconds, packages)
        if not steps <= known:
            known |= steps
            reached.append(data)
            found.append(data)
    return found


def read_corpus(path: Path) -> list[bytes]:
    """Return the inputs in a file: each line is a JSON string with one character per byte."""
    return [json.loads(line).encode("latin-1") for line in path.read_text("utf-8").splitlines()]


def write_corpus(path: Path, inputs: Sequence[bytes]) -> None:
    """Write inputs for `read_corpus`.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "header.jsonl")
        ...     write_corpus(path, [b"{}", b"[1]"])
        ...     read_corpus(path)
        [b'{}', b'[1]']
    """
    lines = [json.dumps(data.decode("latin-1")) for data in inputs]
    path.write_text("".join(f"{line}\n" for line in lines), "utf-8")


def _changed(mutator: Mutator, data: bytes) -> bytes:
    """Return a mutated input; an input of JSON lines usually stays JSON."""
    if mutator.random.random() < 0.6:
        lines = data.split(b"\n")
        place = mutator.random.randrange(len(lines))
        with suppress(ValueError, RecursionError):
            message = json.loads(lines[place])
            if message is not None:
                lines[place] = json.dumps(mutator.message(message)).encode()
                return b"\n".join(lines)[:_LONGEST]
    return mutator.data(data)[:_LONGEST]


def _steps(
    read: Callable[[bytes], object],
    data: bytes,
    expected: tuple[type[Exception], ...],
    seconds: float,
    packages: tuple[str, ...],
) -> set[Step]:
    """Return the steps that a parser executes for an input."""
    steps: set[Step] = set()

    def enter(frame: FrameType, event: str, arg: Any) -> Any:
        del event, arg
        if not frame.f_globals.get("__name__", "").startswith(packages):
            return None
        name, before = frame.f_code.co_filename, 0

        def step(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal before
            del arg
            if event == "line":
                steps.add((name, before, frame.f_lineno))
                before = frame.f_lineno
            return step

        return step

    tracer, peak, began = sys.gettrace(), _peak_nbytes(), time.thread_time()
    sys.settrace(enter)
    try:
        with suppress(*expected):
            read(data)
    except Exception as error:
        raise AssertionError(f"{data[:2000]!r} raised {error!r}") from error
    finally:
        sys.settrace(tracer)
    took, grown = time.thread_time() - began, _peak_nbytes() - peak
    assert took < seconds, f"{data[:2000]!r} took {took:.1f} s"
    assert grown <= _GROWTH * len(data) + _SPARE_NBYTES, f"{data[:2000]!r} took {grown} bytes"
    return steps


def _peak_nbytes() -> int:
    """Return the peak memory of this process."""
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
