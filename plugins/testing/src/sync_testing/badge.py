"""Makes a badge from a report: ``python -m sync_testing.badge conformance.json badge.svg``.

A file whose name ends in ``.json`` is written for https://shields.io/badges/endpoint-badge.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

from sync_testing.report import PluginResult, read_report

__all__ = ["badge", "main"]

_COLOURS = {"passed": ("brightgreen", "#4c1"), "failed": ("red", "#e05d44")}
_OTHER = ("yellow", "#dfb317")
# The approximate width of a letter in 11 px Verdana, and the padding on both sides, in px.
_LETTER, _MARGIN = 7, 10
_SVG = """<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img" \
aria-label="{label}: {message}"><title>{label}: {message}</title>
<g shape-rendering="crispEdges"><rect width="{left}" height="20" fill="#555"/>\
<rect x="{left}" width="{right}" height="20" fill="{colour}"/></g>
<g fill="#fff" text-anchor="middle" font-family="Verdana,Geneva,DejaVu Sans,sans-serif" \
font-size="11"><text x="{left_middle}" y="14">{label}</text>\
<text x="{right_middle}" y="14">{message}</text></g></svg>
"""


def badge(version: str, results: Sequence[PluginResult]) -> tuple[str, str, str]:
    """Return the label, the message and the verdict of a badge.

    Args:
        version: the version of the suite.
        results: the results in a report.

    Example:
        >>> results = [PluginResult("scheme", "owl", "SchemeConformance", counts={"passed": 9})]
        >>> badge("0.1.0", results)
        ('sync-testing 0.1.0', '9 passed, not all ran', 'partial')
    """
    counts = {
        name: sum(result.counts.get(name, 0) for result in results)
        for name in ("passed", "failed", "xfailed")
    }
    verdicts = {result.verdict for result in results}
    known = f", {counts['xfailed']} known to fail" if counts["xfailed"] else ""
    label = f"sync-testing {version}"
    if "failed" in verdicts:
        return label, f"{counts['failed']} failed", "failed"
    if verdicts != {"passed"}:
        return label, f"{counts['passed']} passed, not all ran", "partial"
    return label, f"{counts['passed']} passed{known}", "partial" if known else "passed"


def main(arguments: Sequence[str] | None = None) -> None:
    """Make a badge from the arguments of the command line."""
    parser = argparse.ArgumentParser(prog="python -m sync_testing.badge", description=__doc__)
    parser.add_argument("report", type=Path, help="what --report wrote")
    parser.add_argument("badge", type=Path, help="the badge: NAME.svg or NAME.json")
    parsed = parser.parse_args(arguments)
    if parsed.badge.suffix not in (".svg", ".json"):
        parser.error(f"{parsed.badge} must end in .svg or .json")
    try:
        label, message, verdict = badge(*read_report(parsed.report))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    shields, colour = _COLOURS.get(verdict, _OTHER)
    if parsed.badge.suffix == ".json":
        content = {"schemaVersion": 1, "label": label, "message": message, "color": shields}
        text = json.dumps(content) + "\n"
    else:
        left, right = (len(part) * _LETTER + _MARGIN for part in (label, message))
        text = _SVG.format(
            width=left + right,
            left=left,
            right=right,
            left_middle=left / 2,
            right_middle=left + right / 2,
            label=escape(label),
            message=escape(message),
            colour=colour,
        )
    parsed.badge.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
