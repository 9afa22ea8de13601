"""The layer `Record`: a file of reports that several senders may append to."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sync_core import SendReport, WorkerResult, WorkerTimeoutError
from sync_plugin_std import Record


def test_lines_of_several_records_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    workers = {i: WorkerResult(1, 0.1, 8, WorkerTimeoutError(i, "é" * 100)) for i in range(100)}

    def record(model: str) -> None:
        layer = Record(path)
        for version in range(1, 21):
            layer(SendReport(version, 0.1, workers, model_id=model))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(record, "abcd"))
    reports = [json.loads(line) for line in path.read_text().splitlines()]
    for model in "abcd":
        mine = [report for report in reports if report["model_id"] == model]
        assert [report["version"] for report in mine] == list(range(1, 21))
        assert mine[0]["workers"][3]["error"].endswith("é" * 100)


def test_a_path_that_cannot_be_written_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Record(tmp_path / "missing" / "run.jsonl")
