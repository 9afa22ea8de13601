"""The layer `Record`: the report of every send, in a file that ``sync-core report`` reads."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from sync_core import Reporter, SendReport


class Record(Reporter):
    """Appends every report to a file: ``Sender(…, layers=[Record("run.jsonl")])``.

    A line is the JSON of one report (`SendReport.as_dict`), with the time of its end, in seconds
    since 1970. ``sync-core report run.jsonl`` makes an HTML page of it. Senders, also those of
    several processes, may append to one file.

    Args:
        path: the file; it is made if there is none.

    Raises:
        OSError: the file cannot be written.

    Example:
        >>> import tempfile
        >>> from sync_core import Sender
        >>> from torch import nn
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "run.jsonl")
        ...     layers = [Record(path)]
        ...     with Sender("none", nn.Linear(4, 2), num_workers=1, layers=layers) as sender:
        ...         report = sender.send()
        ...     json.loads(path.read_text())["version"]
        1
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._append(b"")

    def __call__(self, report: SendReport) -> None:
        """Append a report."""
        line = json.dumps({"time": time.time()} | report.as_dict())
        self._append(f"{line}\n".encode())

    def _append(self, data: bytes) -> None:
        # Without a buffer a line is one write, which others that append do not tear.
        with self.path.open("ab", buffering=0) as file:
            file.write(data)
