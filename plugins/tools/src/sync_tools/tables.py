"""Prints text in the terminal: tables that fit its width, and colours.

Text may come from workers, files and package metadata, so `paint`, `print_line` and `format_table`
escape unprintable characters (`sync_core.printable`).
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterator, Sequence
from itertools import zip_longest

from sync_core.printable import printable

__all__ = ["format_table", "paint", "print_line", "print_table", "terminal_width"]

_GAP = 2
# The smallest width of a column, in characters.
_NARROWEST = 4
_COLOURS = {"red": "31", "green": "32", "yellow": "33"}


def terminal_width() -> int | None:
    """Return the width of the terminal in characters; None if the output is redirected."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def paint(text: str, colour: str | None) -> str:
    """Return printable text, coloured if standard output is a terminal that shows colours.

    Args:
        text: the text.
        colour: ``"red"``, ``"green"`` or ``"yellow"``; None for the default colour.

    Example:
        >>> paint("failed", "red")  # not in a terminal
        'failed'
    """
    text = printable(text)
    if not text or colour is None or not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m"


def print_line(text: str = "", colour: str | None = None) -> None:
    """Print a line of text; see `paint` for the arguments."""
    sys.stdout.write(f"{paint(text, colour)}\n")


def format_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str | None]],
    *,
    right: Collection[str] = (),
    whole: Collection[str] = (),
    colours: Sequence[str | None] = (),
    width: int | None = None,
) -> str:
    """Return a table as lines of text, beginning with the names of the columns.

    Args:
        columns: the names of the columns.
        rows: the rows, with one cell per column; None is an empty cell.
        right: right-aligned columns, such as numbers.
        whole: columns whose cells are never wrapped.
        colours: the colour of each row, as `paint` takes it.
        width: the characters of a line; the cells of the widest columns are wrapped until the table
            fits. None leaves every row on one line.

    Example:
        >>> print(format_table(("scheme", "ms"), [("shm", "0.76"), ("ray", "11.20")], right={"ms"}))
        scheme     ms
        shm      0.76
        ray     11.20
    """
    cells = [[*columns], *([printable(cell or "") for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    foldable = [number for number, name in enumerate(columns) if name not in whole]
    while width is not None and foldable and sum(widths) + _GAP * (len(widths) - 1) > width:
        widest = max(foldable, key=widths.__getitem__)
        if widths[widest] <= _NARROWEST:
            break
        widths[widest] -= 1
    align = [str.rjust if name in right else str.ljust for name in columns]
    lines = []
    for row, colour in zip_longest(cells, (None, *colours)):
        for parts in zip_longest(*map(_fold, row, widths), fillvalue=""):
            aligned = (
                put(part, room) for put, part, room in zip(align, parts, widths, strict=True)
            )
            lines.append(paint((" " * _GAP).join(aligned).rstrip(), colour))
    return "\n".join(lines)


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str | None]],
    *,
    right: Collection[str] = (),
    whole: Collection[str] = (),
    colours: Sequence[str | None] = (),
) -> None:
    """Print a table that fits the terminal; see `format_table` for the arguments."""
    table = format_table(
        columns, rows, right=right, whole=whole, colours=colours, width=terminal_width()
    )
    sys.stdout.write(f"{table}\n")


def _fold(cell: str, width: int) -> Iterator[str]:
    """Yield the lines of a cell; long words are broken, and no text is cut off."""
    yield from textwrap.wrap(cell, width, break_on_hyphens=False) or [""]
