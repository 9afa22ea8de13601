"""The messages on the page about errors are those that the code raises."""

from __future__ import annotations

import builtins
import re
from pathlib import Path

import sync_core.errors

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "error-messages.md"
#: Messages that the code puts together, or that are Python's.
_MADE = re.compile(r"is float32\[|^AttributeError: |^RemoteCallError: |^TypeError: create_env_fn")


def test_every_message_is_in_the_code() -> None:
    code = "\n".join(
        path.read_text(encoding="utf-8")
        for folder in ("core", "plugins", "plugins_dist", "plugins_ray")
        for path in (ROOT / folder).rglob("src/**/*.py")
    )
    # Strings that are continued on the next line are one.
    code = re.sub(r'"\s*\n\s*f?"', "", code)
    rows = re.findall(r"^\| (?:`(\w+)` \| )?(.+?) \| [^|]+ \|$", PAGE.read_text(), re.MULTILINE)
    assert len(rows) > 20
    messages = [part for _, message in rows for part in re.findall(r"`([^`]+)`", message)]
    quoted = [part for part in messages if not _MADE.search(part)]
    missing = [part for part in quoted if not all(p.strip() in code for p in part.split("…"))]
    assert not missing
    for error in filter(None, (error for error, _ in rows)):
        assert hasattr(sync_core.errors, error) or hasattr(builtins, error), error
