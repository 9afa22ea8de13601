"""The traceback of a call in a worker: the frames of the user's code, with those around it folded.

Nothing here imports torch, which an actor of Ray may not have loaded.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from itertools import groupby
from typing import Any

__all__ = ["describe_failure"]

# The files between a call and the code of a user that it leads to.
_AROUND = re.compile(
    r"[\\/](sync_core|sync_collector|sync_plugin_(?:std|scale|ray|dist|torchrl|trl|vllm))[\\/]"
    r"(?!testing\.py$)"
    r"|[\\/](tensordict)[\\/]"
    r"|[\\/](torch)[\\/](?:nn[\\/]modules[\\/]module|utils[\\/]_contextlib)\.py$"
    r"|[\\/](contextlib)\.py$"
)
_FOLDED = "<folded>"


def describe_failure(error: BaseException) -> tuple[str, str]:
    """Return what an exception says in one line, and its traceback, for authors of worker groups.

    The traceback begins below the frame that caught the exception. Frames of sync-core, and those
    of torch and tensordict that only call a module, are one line where they lead to other code.

    Args:
        error: the exception, where it was caught.

    Example:
        >>> try:
        ...     {}["a"]
        ... except KeyError as error:
        ...     describe_failure(error)[0]
        "KeyError: 'a'"
    """
    below = error.__traceback__ and error.__traceback__.tb_next
    described = traceback.TracebackException(type(error), error, below, compact=True)
    _fold(described)
    return traceback.format_exception_only(error)[0].strip(), "".join(described.format())


class _Stack(traceback.StackSummary):
    def format_frame_summary(self, frame_summary: traceback.FrameSummary, **kwargs: Any) -> str:
        if frame_summary.filename == _FOLDED:
            return f"  [{frame_summary.name}]\n"
        return super().format_frame_summary(frame_summary, **kwargs)


def _fold(described: traceback.TracebackException) -> None:
    """Fold the stack of an exception, and those of its causes."""
    described.stack = _Stack(_folded(described.stack))
    causes = (described.__cause__, described.__context__, *(described.exceptions or ()))
    for cause in causes:
        if cause is not None:
            _fold(cause)


def _folded(stack: traceback.StackSummary) -> Iterator[traceback.FrameSummary]:
    if all(map(_package, stack)):
        yield from stack
        return
    for around, frames in groupby(stack, key=lambda frame: bool(_package(frame))):
        run = list(frames)
        # The frame that raised is always shown.
        hidden = [frame for frame in run if around and frame is not stack[-1]]
        if hidden:
            packages = ", ".join(dict.fromkeys(map(_package, hidden)))
            text = f"{len(hidden)} frames of {packages}"
            yield traceback.FrameSummary(_FOLDED, 0, text, lookup_line=False)
        yield from (frame for frame in run if frame not in hidden)


def _package(frame: traceback.FrameSummary) -> str:
    """Return the package of a frame that leads to the user's code; empty for another one."""
    found = _AROUND.search(frame.filename)
    return "" if found is None else next(filter(None, found.groups()))
