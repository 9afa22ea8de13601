"""`sync-core report`: the page of the sends that `Record` has written."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from sync_core import Receiver, Sender, SendError
from sync_plugin_std import Interval, Record
from sync_tools.commands.report import page, read, timeline
from sync_tools.main import main

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Three sends: both workers are updated, the second holds one back, the second fails."""
    path = tmp_path / "run.jsonl"
    layers = [Record(path), Interval(1)]
    with Sender("thread", nn.Linear(2, 2), num_workers=2, layers=layers) as sender:
        receivers = [Receiver(sender.address(i), nn.Linear(2, 2)) for i in range(2)]
        for which in ([0, 1], [0], [0, 1]):
            pending = sender.send_async(worker_ids=which)
            for worker_id in which[: 2 if sender.version == 1 else 1]:
                receivers[worker_id].receive()
            if sender.version == 3:
                with pytest.raises(SendError):
                    pending.wait(0)
            else:
                pending.wait()
    return path


def test_a_file_has_every_report(recorded: Path) -> None:
    reports = read(recorded)
    assert [report["version"] for report in reports] == [1, 2, 3]
    assert reports[0]["time"] <= reports[2]["time"]
    assert "did not confirm version 3" in reports[2]["workers"][1]["error"]


def test_the_timeline_follows_each_worker(recorded: Path) -> None:
    drawn = timeline(read(recorded))
    assert drawn.rows == ["policy: sender", "worker 0", "worker 1"]
    first, second = (drawn.workers["policy", i] for i in range(2))
    assert (first.held, first.longest_lag, first.updates, first.failures) == (3, 0, 3, 0)
    assert (second.held, second.longest_lag, second.updates, second.failures) == (1, 2, 1, 1)
    assert [lag for row, _, _, lag in drawn.lags if row == second.row] == [0, 1, 2]
    kinds = {kind for _, kind, *_ in drawn.bars}
    assert kinds == {
        "prepare",
        "pack",
        "publish",
        "deliver",
        "stage",
        "commit",
        "pause",
        "acknowledge",
        "failed",
    }
    assert all(0 <= start < end for _, _, start, end, _ in drawn.bars)


def test_workers_of_a_trainer_that_was_started_again_have_none_of_its_versions(
    recorded: Path,
) -> None:
    with Sender("thread", nn.Linear(2, 2), num_workers=2, layers=[Record(recorded)]) as sender:
        receiver = Receiver(sender.address(0), nn.Linear(2, 2))
        for _ in range(2):
            pending = sender.send_async()
            receiver.receive()
            with pytest.raises(SendError):
                pending.wait(0)
    drawn = timeline(read(recorded))
    first, second = (drawn.workers["policy", i] for i in range(2))
    assert (first.held, first.lag, second.held, second.lag) == (2, 0, 0, 2)


def test_nothing_in_a_page_comes_from_elsewhere(recorded: Path) -> None:
    text = page(read(recorded), "<run>")
    assert not re.search(r"https?://|src=|href=|@[A-Z]+@", text)
    assert "<title>&lt;run&gt;</title>" in text


def test_what_is_recorded_is_not_run(recorded: Path) -> None:
    lines = recorded.read_text().splitlines()
    report = json.loads(lines[0]) | {"model_id": "\x1b</script><script>alert(1)</script>@DATA@"}
    text = page([report], "run")
    assert text.count("<script") == 2
    data = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    assert json.loads(data[1])["rows"][0].startswith(r"\x1b</script>")


def test_a_torn_last_line_is_not_read(recorded: Path) -> None:
    with recorded.open("a") as file:
        file.write('{"time": 1')
    assert len(read(recorded)) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read"),
        ("", "has no reports"),
        ("{}\n", "line 1, is not a report"),
        ("no json\n", "line 1, is not a report"),
    ],
)
def test_files_that_have_no_reports(
    text: str | None, message: str, tmp_path: Path, capsys: Any
) -> None:
    path = tmp_path / "run.jsonl"
    if text is not None:
        path.write_text(text)
    assert main(["report", str(path)]) == 1
    assert message in capsys.readouterr().err
    assert not path.with_suffix(".html").exists()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium")
@pytest.mark.timeout(90)
def test_a_browser_draws_the_page(recorded: Path, tmp_path: Path, capsys: Any) -> None:
    assert main(["report", str(recorded)]) == 0
    path = recorded.with_suffix(".html")
    assert capsys.readouterr().out == f"wrote {path}\n"
    options = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'c'}")
    command = [str(CHROMIUM), *options, "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=80)
    drawn = re.search(r'data-drawn="(\d+)"', done.stdout)
    assert drawn is not None, done.stdout[:2000] + done.stderr
    assert int(drawn[1]) == len(timeline(read(recorded)).bars)
    assert "did not confirm version 3" in html.unescape(done.stdout)
