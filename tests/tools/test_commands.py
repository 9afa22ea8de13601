"""Commands of other distributions, found by their entry points."""

from __future__ import annotations

from pathlib import Path

import pytest

from sync_tools.main import main

HELLO = """
from sync_tools import Command

HELLO = Command("says hello", __name__)
WRONG = "a text"


def add_arguments(parser):
    parser.add_argument("name")
    parser.set_defaults(run=lambda arguments, rest, parser: print("hello", arguments.name) or 0)
"""


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a distribution with commands, of which one works."""
    (tmp_path / "stranger.py").write_text(HELLO)
    info = tmp_path / "stranger-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[sync.commands]\nhello = stranger:HELLO\nwrong = stranger:WRONG\ngone = absent:GONE\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("stranger")
def test_a_command_of_another_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hello", "world"]) == 0
    assert capsys.readouterr().out == "hello world\n"
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "says hello" in capsys.readouterr().out


@pytest.mark.usefixtures("stranger")
@pytest.mark.parametrize(
    ("command", "cause"),
    [
        ("wrong", "stranger:WRONG must be a sync_tools.Command, got 'a text'"),
        ("gone", "No module named 'absent'"),
    ],
)
def test_a_command_that_does_not_import_hurts_no_other(
    command: str, cause: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command]) == 1
    error = capsys.readouterr().err
    assert f"the command {command!r} (stranger 1.0) does not import" in error
    assert cause in error
    assert error.endswith("; update stranger from where you have it\n")
    assert main(["hello", "world"]) == 0
