"""The command doctor: schemes that move weights, and schemes that fail in every way."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from sync_tools.commands.doctor import Diagnosis, print_diagnoses
from sync_tools.main import main

IMPORTS = """
import os, signal, subprocess, sys, time
from pathlib import Path
from sync_core import OptionError, SyncError, hookimpl
from sync_plugin_std.schemes.none import NoneScheme
"""

PLUGINS = {
    "broken": "import a_module_that_is_not_there",
    # Starts something, and never comes back.
    "stuck": """
class Scheme(NoneScheme):
    @hookimpl
    def create_transport(self, context):
        sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(__file__).with_suffix(".pid").write_text(str(sleeper.pid))
        time.sleep(600)
""",
    "needy": """
class Scheme(NoneScheme):
    @hookimpl
    def create_transport(self, context):
        raise OptionError("scheme 'needy' calls into its workers; type: workers=[...]")
""",
    # Confirms every version, and moves none.
    "liar": """
class Scheme(NoneScheme):
    capabilities = frozenset()
    @hookimpl
    def apply_weights(self, context):
        return True if context.version else None
""",
    "crash": """
class Scheme(NoneScheme):
    @hookimpl
    def create_transport(self, context):
        os.kill(os.getpid(), signal.SIGSEGV)
""",
    "loud": """
print("hello")
class Scheme(NoneScheme):
    pass
""",
    # Keeps to the deadline, which is too short for it.
    "slow": """
class Scheme(NoneScheme):
    @hookimpl
    def create_transport(self, context):
        time.sleep(1)
        raise SyncError("the peers did not answer in time")
""",
    "deaf": """
class Scheme(NoneScheme):
    capabilities = frozenset({"cross_process"})
    @hookimpl
    def create_transport(self, context):
        if context.side == "receiver":
            raise RuntimeError("no receiver\\nfor you")
        return super().create_transport(context)
""",
}


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on sys.path, where the schemes of this page are installed."""
    for name, source in PLUGINS.items():
        (tmp_path / f"doctored_{name}.py").write_text(IMPORTS + source)
        info = tmp_path / f"doctored_{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: doctored-{name}\nVersion: 1.0\n"
        )
        (info / "entry_points.txt").write_text(f"[sync.schemes]\n{name} = doctored_{name}:Scheme\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def doctor(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    # Loading torch takes long on a busy machine.
    patience = [] if "--timeout" in arguments else ["--timeout", "90"]
    status = main(["doctor", *arguments, *patience, "--json"])
    told = json.loads(capfd.readouterr().out)
    assert {*told} == {"schemes", "findings"}
    return status, {each["name"]: each for each in told["schemes"]}


@pytest.mark.long
@pytest.mark.timeout(180)
def test_the_standard_schemes_work(capfd: pytest.CaptureFixture[str]) -> None:
    status, found = doctor(capfd, "shm", "mp", "thread", "none")
    assert {name: each["verdict"] for name, each in found.items()} == dict.fromkeys(found, "ok")
    assert list(found) == ["shm", "mp", "thread", "none"]
    assert all(0 < each["milliseconds"] < 30_000 for each in found.values())
    assert found["shm"]["distribution"] == "sync-plugin-std"
    assert status == 0


@pytest.mark.timeout(180)
def test_a_scheme_that_fails_stops_no_other(
    plugins: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status, found = doctor(capfd, "crash", "broken", "liar", "deaf", "loud")
    assert status == 1
    verdicts = {name: each["verdict"] for name, each in found.items()}
    assert verdicts == dict.fromkeys(("crash", "broken", "liar", "deaf"), "failed") | {"loud": "ok"}
    problems = {name: each["problem"] for name, each in found.items()}
    assert "killed by signal 11" in problems["crash"]
    assert problems["broken"] == (
        "scheme 'broken' (doctored-broken 1.0) does not import: "
        "ModuleNotFoundError: No module named 'a_module_that_is_not_there'; update "
        "doctored-broken from where you have it, or leave it out: SYNC_DISABLE=doctored-broken"
    )
    assert "workers have other weights" in problems["liar"]
    assert "update doctored-liar from" in problems["liar"]
    assert problems["deaf"].startswith("worker 0: BenchWorker.connect raised RuntimeError: no rec")
    assert "sync-core bench deaf" in problems["deaf"]
    assert not any("\n" in problem for problem in problems.values() if problem)
    assert problems["loud"] is None


@pytest.mark.timeout(120)
@pytest.mark.long
def test_a_scheme_that_hangs_is_ended_with_all_that_it_started(
    plugins: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status, found = doctor(capfd, "stuck", "--timeout", "1")
    assert status == 1
    assert "hung for more than 1 s" in found["stuck"]["problem"]
    assert "sync-core doctor stuck --timeout 4" in found["stuck"]["problem"]
    sleeper = int((plugins / "doctored_stuck.pid").read_text())
    deadline = time.monotonic() + 10
    while _runs(sleeper):
        assert time.monotonic() < deadline, "what the scheme had started still runs"
        time.sleep(0.05)


@pytest.mark.timeout(120)
def test_a_scheme_that_fails_at_its_deadline_may_need_more_time(
    plugins: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status, found = doctor(capfd, "slow", "--timeout", "0.5")
    assert status == 1
    assert found["slow"]["problem"] == (
        "the peers did not answer in time; if this machine is slow, type: "
        "sync-core doctor slow --timeout 2"
    )


def _runs(pid: int) -> bool:
    # Without a parent that reaps it, a container may keep what has ended as a zombie.
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


@pytest.mark.timeout(120)
def test_a_scheme_that_needs_something_of_the_user_has_not_failed(
    plugins: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status, found = doctor(capfd, "needy")
    assert status == 0
    assert found["needy"]["verdict"] == "skipped"
    assert found["needy"]["problem"].endswith("type: workers=[...]")


@pytest.mark.timeout(120)
def test_in_a_pipe_a_scheme_keeps_to_one_line(
    plugins: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "needy"]) == 0
    head, needy, *_ = capfd.readouterr().out.splitlines()
    assert head.split()[:3] == ["scheme", "distribution", "verdict"]
    assert needy.split()[:4] == ["needy", "doctored-needy", "1.0", "skipped"]
    assert needy.rstrip().endswith("type: workers=[...]")


def test_80_columns_are_enough(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = "scheme 'ray' (sync-plugin-ray 0.1.0) does not import: " + "No module named x " * 4
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    print_diagnoses(
        [
            Diagnosis("ray", "sync-plugin-ray", "0.1.0", "failed", None, problem),
            Diagnosis("thread", "sync-plugin-std", "0.1.0", "ok", 1234.567, None),
        ]
    )
    out = re.sub(r"\x1b\[\d+m", "", capsys.readouterr().out)
    assert max(map(len, out.splitlines())) <= 80
    assert "sync-plugin-std 0.1.0  ok       1234.57" in out
    assert "…" not in out


@pytest.mark.usefixtures("without_dist")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["doctor", "shn"], "no scheme 'shn' is installed; did you mean 'shm'?"),
        (["doctor", "shm", "rpc"], "pip install sync-plugin-dist"),
    ],
)
def test_a_name_that_nothing_provides(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert not captured.out


@pytest.mark.timeout(120)
@pytest.mark.long
def test_options_of_a_scheme(capfd: pytest.CaptureFixture[str]) -> None:
    status, found = doctor(capfd, "shm", "--slots", "4")
    assert (status, found["shm"]["verdict"]) == (0, "ok")
    # One that the user has given is refused: nothing more can come from the user.
    status, found = doctor(capfd, "shm", "--slot=4")
    assert (status, found["shm"]["verdict"]) == (1, "failed")
    assert "has no option 'slot'; its options are: directory, slots" in found["shm"]["problem"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["none", "--timeout", "0"],
        ["none", "--timeout", "nan"],
        ["none", "--slots"],
        ["none", "--layers", "bf16"],
        ["none", "shm", "--slots", "4"],
        ["--slots=4"],
    ],
)
def test_arguments_that_make_no_sense(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", *arguments])
