"""Text of a peer is printed and logged as text, and forges no line."""

from __future__ import annotations

import logging
import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sync_core import Answer, OptionError, Sender, SendError, WorkerError
from sync_core.printable import LONGEST, printable

HOSTILE = (
    "boom\x1b]52;c;cm0gLXJm\x07\x1b]0;title\x07\x1b[2J\x9b31m\r\u202e\u2066\u200b\ufeff\u2028\ud800"
    "\nworker 1: current\n  worker 2: current"
)
ROOT = Path(__file__).parents[2]


def assert_printable(text: str, margin: str = "  ") -> None:
    categories = {unicodedata.category(char) for char in text.replace("\n", "").replace("\t", "")}
    assert not categories & {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}, text
    assert all(line.startswith(margin) for line in text.split("\n")[1:] if line.strip()), text
    text.encode()


@given(st.text(st.characters() | st.sampled_from("\n\r\t \x1b\u2800\ufe0f\ud800")))
def test_any_text(text: str) -> None:
    shown = printable(text)
    assert_printable(shown)
    assert printable(shown) == shown


@pytest.mark.parametrize("unit", ["x", "\n", "\x1b", "\U000e0100"])
def test_a_long_text_loses_its_middle(unit: str) -> None:
    shown = printable(f"begin{unit * 5_000_000}end")
    assert len(shown) <= LONGEST
    assert (shown[:5], shown[-3:]) == ("begin", "end")
    assert printable(shown) == shown


def test_a_traceback_stays_readable() -> None:
    text = 'ValueError: no\nTraceback (most recent call last):\n  File "a", line 1\nValueError: no'
    assert printable(text).split("\n")[1:] == [
        "  Traceback (most recent call last):",
        '    File "a", line 1',
        "  ValueError: no",
    ]


def test_an_answer_that_was_not_made_by_this_package() -> None:
    message = Answer(version=1).to_message() | {"error": HOSTILE}
    with Sender("thread", nn.Linear(2, 2), num_workers=1) as sender:
        pending = sender.send_async()
        pending.unanswered[0].settle(message)
        with pytest.raises(SendError) as caught:
            pending.wait()
        status = sender.workers[0]
    # What a worker has written is further in than the line of any worker.
    assert_printable(str(caught.value).partition("\n")[2], "    ")
    (result,) = caught.value.report.as_dict()["workers"]
    assert_printable(result["error"])
    assert_printable(str(status.error))
    assert_printable(str(OptionError(HOSTILE)))


def test_the_log(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("sync_core")
    with caplog.at_level("INFO", "sync_core"):
        try:
            raise WorkerError(0, HOSTILE) from ValueError(HOSTILE)
        except WorkerError as error:
            log.exception("worker removed: %s", HOSTILE)
            log.warning("worker %d removed: %r", 0, error)
    for record in caplog.records:
        assert_printable(record.getMessage())
    # A traceback has its own lines, and those of an exception's text are further in.
    traceback = logging.Formatter().format(caplog.records[0]).replace(HOSTILE[:4], "")
    assert not re.search(
        r"^ {0,1}(worker|boom)(?! removed)|[\x1b\x07\x9b\u202e]", traceback, re.MULTILINE
    )
    assert "ValueError:" in traceback


def test_a_log_of_plain_text_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "sync_core"):
        try:
            raise OSError("no") from ValueError("why")
        except OSError:
            logging.getLogger("sync_core").exception("worker %d", 3)
    record: Any = caplog.records[0]
    assert (record.msg, record.args) == ("worker %d", (3,))
    fresh = logging.LogRecord("", 0, "", 0, "", (), record.exc_info)
    logging.Formatter().format(fresh)
    assert fresh.exc_text == (record.exc_text or fresh.exc_text)


def test_a_record_that_does_not_fit_its_format_raises_in_no_caller() -> None:
    log = logging.getLogger("sync_core")
    record = logging.LogRecord("sync_core", 30, "", 0, "%d", ("three",), None)
    assert log.filter(record)


def test_there_is_one_logger() -> None:
    for path in ROOT.glob("**/src/**/*.py"):
        names = re.findall(r"getLogger\((.*?)\)", path.read_text(encoding="utf-8"))
        assert set(names) <= {'"sync_core"'}, path
