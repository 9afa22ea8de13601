"""The command line: list and bench."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

import sync_core
from sync_core import Sender, registry
from sync_plugin_std import Record
from sync_tools.main import GROUP, main


def test_list_shows_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--json"]) == 0
    plugins = {(p["kind"], p["name"]): p for p in json.loads(capsys.readouterr().out)}
    shm = plugins["schemes", "shm"]
    assert shm["distribution"] == "sync-plugin-std"
    assert shm["hooks"] == ["create_transport"]
    assert "zero_copy" in shm["capabilities"]
    assert plugins["layers", "interval"]["hooks"] == ["skip_update"]
    assert "cross_process" in plugins["worker groups", "process"]["capabilities"]
    assert all(plugin["error"] is None for plugin in plugins.values())
    assert shm["requires"] == "sync-core==0.1.*"
    assert shm["options"] is None
    assert plugins["layers", "interval"]["options"] == ["pushes"]
    assert plugins["worker groups", "process"]["options"] == ["torch_threads"]
    assert not any(plugin["disabled"] or plugin["conflicts"] for plugin in plugins.values())


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"sync-core {sync_core.__version__}\n"


@pytest.mark.parametrize("command", ["list", "--help", "plan --mb 100"])
@pytest.mark.long
def test_a_reader_that_ends_early_ends_a_command_quietly(command: str) -> None:
    started = subprocess.Popen(
        [sys.executable, "-u", "-m", "sync_tools", *command.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    assert started.stdout is not None
    assert started.stdout.readline()
    started.stdout.close()
    _, errors = started.communicate(timeout=60)
    assert (errors, started.returncode in (0, 1)) == ("", True)


@pytest.mark.parametrize("with_errors", [False, True])
@pytest.mark.long
def test_what_is_written_when_a_command_ends_has_no_reader(with_errors: bool) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(
        [sys.executable, "-m", "sync_tools", "list"],
        stdout=writing,
        stderr=writing if with_errors else subprocess.PIPE,
        timeout=60,
        check=False,
    )
    os.close(writing)
    assert ended.returncode == 1
    assert not ended.stderr


def test_other_broken_pipes_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object) -> int:
        raise BrokenPipeError("a socket")

    monkeypatch.setattr("sync_tools.commands.listing.listed", run)
    with pytest.raises(BrokenPipeError, match="a socket"):
        main(["list"])


def test_list_with_nothing_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = registry.entry_points_of
    monkeypatch.setattr(
        registry, "entry_points_of", lambda group: found(group) if group == GROUP else []
    )
    assert main(["list"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "schemes: none is installed; to install some, type:" in lines
    assert "pip install sync-plugin-std  # none, thread, shm, mp, file" in lines
    assert "pip install sync-plugin-dist  # dist, rpc" in lines


@pytest.mark.parametrize("columns", ["40", "80"])
def test_list_cuts_nothing_off_in_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("SYNC_DISABLE", "bf16")
    assert main(["list"]) == 0
    out = re.sub(r"\x1b\[\d+m", "", capsys.readouterr().out)
    assert "…" not in out
    assert ("sync-plugin-std" in out) is (columns == "80")  # else it is broken into lines
    assert "bf16: disabled; to use it, take it out of SYNC_DISABLE" in out.splitlines()


def test_list_in_a_pipe_keeps_a_plugin_to_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    (shm,) = [line for line in lines if line[:1] == ["shm"]]
    assert shm[1] == "sync-plugin-std"
    assert shm[-1] == "zero_copy"


def test_list_says_why_a_plugin_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module, scheme in (("broken", "pigeon"), ("first", "owl"), ("second", "owl")):
        (tmp_path / f"{module}.py").write_text("raise RuntimeError('a [/] is not a markup')")
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[sync.schemes]\n{scheme} = {module}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert "(broken 1.0) does not import: RuntimeError: a [/] is not a markup" in out
    assert out.count("first 1.0 and second 1.0; name one, as first:owl, or remove one") == 2
    assert main(["list", "--json"]) == 0
    plugins = {p["distribution"]: p for p in json.loads(capsys.readouterr().out)}
    assert (plugins["first"]["conflicts"], plugins["second"]["conflicts"]) == (
        ["second"],
        ["first"],
    )
    monkeypatch.setenv("SYNC_DISABLE", "second,broken")
    assert main(["list"]) == 0
    assert capsys.readouterr().out.count("disabled; to use it, take it out of SYNC_DISABLE") == 2
    assert main(["list", "--json"]) == 0
    plugins = {p["distribution"]: p for p in json.loads(capsys.readouterr().out)}
    assert plugins["second"]["disabled"]
    assert plugins["second"]["error"] is None
    assert plugins["first"]["conflicts"] == []


_WITHOUT_RICH = """
import sys
sys.modules["rich"] = None  # importing it fails
from torch import nn
from sync_core import Receiver, Sender
from sync_plugin_std import Record
from sync_tools import StatusServer
from sync_tools.main import main

record, page = sys.argv[1:]
layers = [Record(record)]
with Sender("thread", nn.Linear(2, 2), num_workers=1, layers=layers, timeout=60) as sender:
    with Receiver(sender.address(0), nn.Linear(2, 2)) as receiver:
        pending = sender.send_async()
        receiver.receive(60)
        pending.wait()
    status = StatusServer(sender).address
    bench = ["thread", "--workers", "1", "--model", "small", "--rounds", "7"]
    for command in (
        ["list"],
        ["plan", "--params", "7e9"],
        ["doctor", "none", "--timeout", "90"],
        ["bench", *bench],
        ["watch", status, "--once"],
        ["report", record, "--output", page],
    ):
        print("$", *command)
        assert main(command) == 0, command
"""


@pytest.mark.timeout(180)
@pytest.mark.long
def test_commands_print_plain_text_without_rich(tmp_path: Path) -> None:
    script = tmp_path / "commands.py"
    script.write_text(_WITHOUT_RICH)
    paths = [str(tmp_path / name) for name in ("record.jsonl", "page.html")]
    done = subprocess.run(
        [sys.executable, str(script), *paths],
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout.split("$ ")[1:]
    expected = (
        "sync-plugin-std",
        'Sender("shm", …)',
        "verdict",
        "median ms",
        "policy by thread",
        "page.html",
    )
    for output, words in zip(printed, expected, strict=True):
        assert words in output
        assert "\x1b" not in output


@pytest.mark.timeout(120)
@pytest.mark.parametrize("scheme", ["shm", "thread"])
@pytest.mark.long
def test_bench_measures_and_checks(scheme: str) -> None:
    command = ["bench", scheme, "--workers", "2", "--model", "small", "--rounds", "7", "--json"]
    output = subprocess.run(
        [sys.executable, "-m", "sync_tools", *command, "--slots", "4"],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    ).stdout
    measured = json.loads(output)
    assert len(measured["seconds"]) == 7
    assert min(measured["seconds"]) <= measured["median"] <= max(measured["seconds"])
    assert measured["options"] == {"slots": 4}
    assert (measured["share_of_limit"] is not None) == (scheme == "shm")


@pytest.mark.timeout(120)
@pytest.mark.long
def test_bench_of_increments(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "shm", "--workers", "1", "--model", "small", "--rounds", "7"]
    assert main([*command, "--changed", "0.05", "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert measured["changed"] == 0.05
    assert 0 < measured["travelled"] < measured["nbytes"] / 2
    with pytest.raises(SystemExit):
        main([*command, "--changed", "2"])
    assert "--changed is a share" in capsys.readouterr().err


@pytest.mark.timeout(120)
def test_bench_of_a_consolidated_model(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "thread", "--workers", "1", "--model", "small", "--rounds", "7"]
    assert main([*command, "--consolidate"]) == 0
    assert "consolidated" in capsys.readouterr().out


def test_bench_collector_measures_frames_and_updates(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    only = ["--scheme", "thread", "--modes", "single", "--frames", "20", "--envs", "CartPole-v1"]
    assert main(["bench", "collector", "--rounds", "7", "--json", *only]) == 0
    (measured,) = json.loads(capsys.readouterr().out)
    assert (measured["env"], measured["mode"], measured["workers"]) == ("CartPole-v1", "single", 1)
    kinds = ("sync", "refresh", "by_hand", "bare")
    for name in ("frames_per_second", *(f"{kind}_seconds" for kind in kinds)):
        assert len(measured[name]) == 7
        assert min(measured[name]) > 0
    assert main(["bench", "collector", "--rounds", "7", *only, "Pendulum-v1"]) == 0
    assert "Pendulum-v1" in capsys.readouterr().out
    assert "same weights" not in caplog.text


BENCH = ["bench", "shm", "--workers", "1", "--model", "small"]


@pytest.mark.usefixtures("without_dist")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "rpc"], "pip install sync-plugin-dist"),
        (["bench", "none"], "moves no weights"),
        (["bench", "collector", "--scheme", "none"], "moves no weights"),
        ([*BENCH, "--slots", "x"], "takes slots: int | None, not 'x'"),
        ([*BENCH, "--slots=x"], "takes slots: int | None, not 'x'"),
        ([*BENCH, "--slots", "false"], "slots: int | None, not False"),
        ([*BENCH, "--slot", "4"], "no option 'slot'"),
        (["bench", "nccl"], 'type: Sender("dist", …, backend="nccl")'),
        (["doctr"], "no command 'doctr' is installed; did you mean 'doctor'?"),
        (["check-history", "EMPTY"], "has no events, so nothing can be judged"),
        (["check-history", "."], "cannot read ."),
        (["report", "."], "cannot read ."),
        (["report", "REPORTS", "--output", "/dev/null/page"], "/dev/null/page"),
        (["serve", "EMPTY"], "is not a directory"),
        (["new-plugin", "redis", "--directory", "/dev/null"], "/dev/null"),
        (["tune-env", "NoSuchEnv-v0"], "has no environment 'NoSuchEnv-v0'"),
        (["tune-env", "no_such_module:make"], "'no_such_module' in this folder, or installed,"),
        (["tune-env", ":make"], "does not import"),
        (["tune-env", "CartPole-v1", "--scheme", "sharedmem"], 'type: Sender("shm", …)'),
    ],
)
def test_errors_are_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"EMPTY": tmp_path / "empty.jsonl", "REPORTS": tmp_path / "run.jsonl"}
    files["EMPTY"].touch()
    with Sender(
        "none", nn.Linear(2, 2), num_workers=1, layers=[Record(files["REPORTS"])]
    ) as sender:
        sender.send()
    arguments = [str(files.get(argument, argument)) for argument in arguments]
    assert main(arguments) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["bench", "shm", "--rounds", "3"],
        ["bench", "shm", "x"],
        ["bench", "shm", "--layers", "['bf16']"],
        ["bench", "collector", "--threads", "0"],
        ["bench", "collector", "--frames", "0"],
        ["bench", "collector", "--zero-copy"],
        ["bench", "collector", "--consolidate"],
        ["bench", "collector", "--model", "small"],
        ["list", "--slots", "2"],
        ["serve", ".", "--port", "99999"],
        ["check-history", "run.jsonl", "--deadline", "nan"],
        ["watch", "http://127.0.0.1:1/x", "--interval", "inf"],
    ],
)
def test_arguments_that_make_no_sense(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
