"""Text for terminals and logs: what a peer has written cannot act on them, or look like ours."""

from __future__ import annotations

import logging
import re
import traceback

__all__ = ["printable"]

#: A longer text loses its middle, in characters. A traceback says most at its end, and the whole
#: must fit into the buffer of a socket.
LONGEST = 60_000
_HEAD = 2_000
_GAP = " … "
# Letters and marks to Python that terminals show as nothing at all (Unicode's property
# Default_Ignorable_Code_Point, where `str.isprintable` is true).
_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u2800\u3164\ufe00-\ufe0f\uffa0"
    "\U000e0100-\U000e01ef]"
)
_UNUSUAL = re.compile(r"[^\n\t -~]")
_BLANK_LINES = re.compile(r"\n([ \t]*\n){2,}")
# Those that a continuation line begins with, at least.
_MARGIN = "  "


def printable(text: str) -> str:
    r"""Return a text that a terminal, or a log, shows as text.

    Control characters, lone surrogates, and characters that change the direction of others or are
    invisible are written out, as ``\x1b``. Lines stay lines, and every one but the first is
    indented: none looks like a line of the log, or of the table, that the text stands in. A text
    that is very long loses its middle.

    Example:
        >>> print(printable("boom\x1b[2J\nworker 1: current"))
        boom\x1b[2J
          worker 1: current
    """
    if text.isascii() and text.isprintable() and len(text) <= LONGEST:
        return text
    text = _UNUSUAL.sub(_written_out, _shortened(text).replace("\r\n", "\n"))
    if "\n" in text:
        text = _BLANK_LINES.sub("\n\n", text)
        first, *others = text.split("\n")
        if any(line.strip() and not line.startswith(_MARGIN) for line in others):
            others = [_MARGIN + line if line.strip() else "" for line in others]
        text = "\n".join([first, *others])
    return _shortened(text)


def _written_out(found: re.Match[str]) -> str:
    char = found[0]
    if char.isprintable() and not _INVISIBLE.match(char):
        return char
    return char.encode("unicode_escape").decode()


def _shortened(text: str) -> str:
    if len(text) <= LONGEST:
        return text
    return text[:_HEAD] + _GAP + text[_HEAD + len(_GAP) - LONGEST :]


class PrintableRecords(logging.Filter):
    """Lets a logger write printable text only: messages, and tracebacks of exceptions."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Make the record printable; one that is already stays as it is."""
        try:
            message = record.getMessage()
        except Exception:
            return True  # the handlers report what does not fit its format
        if (shown := printable(message)) != message:
            record.msg, record.args = shown, ()
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            shown = "".join(map(_part, parts := traceback.format_exception(error)))
            if shown != "".join(parts):
                record.exc_text = shown.rstrip("\n")
        return True


def _part(part: str) -> str:
    """Make a part of a traceback printable: a frame, or an exception with its message."""
    text = part.strip("\n")
    before, _, after = part.partition(text) if text else (part, "", "")
    return before + printable(text) + after
