"""Try the oldest and the newest version of Python and of what the distributions need.

    python .ci/versions.py                     # every column
    python .ci/versions.py tensordict pluggy   # some
    python .ci/versions.py --record            # and write the table into docs/start/install.md

Each run has its own environment, in which one version differs from constraints.txt: there
the tests of the column run, and each installed scheme moves weights (``sync-core doctor``).
A version that cannot be had here is reported with the reason: an interpreter that is not installed,
no wheel, or a torch that comes with the packages of CUDA, which are never downloaded. The exit
status is 1 if something was run and failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "start" / "install.md"
#: The lines of the page between which the table is.
MARKS = "<!--- versions --->", "<!--- end of versions --->"
FOLDERS = ("core[verify]", "plugins/std", "plugins/scale", "plugins/tools", "plugins/testing")
TESTING = ("pytest", "pytest-timeout", "hypothesis", "psutil", "cryptography", "safetensors")
SECONDS = 1200.0
_ALL = ("tests/core/test_stack.py", "tests/core/test_sender.py", "tests/std/test_process_group.py")
_MODELS = ("tests/core/test_extract.py", "tests/core/test_layout.py", "tests/core/test_binding.py")


@dataclass(frozen=True)
class Column:
    """A package that is tried in several versions.

    Args:
        name: its name in the table; of a package, the one that pip knows.
        oldest: the oldest version that is supported, as in the distributions' requirements.
        newest: the newest one; None for the newest that pip finds.
        tests: the tests that are run with each.
        folders: distributions that these tests need besides the usual ones.
    """

    name: str
    oldest: str
    newest: str | None
    tests: tuple[str, ...]
    folders: tuple[str, ...] = ()


COLUMNS = (
    Column("Python", "3.11", "3.14", (*_ALL, *_MODELS)),
    Column("torch", "2.9", "2.15", (*_ALL, *_MODELS)),
    Column(
        "tensordict",
        "0.8",
        None,
        (*_MODELS, "tests/collector/test_collector_rollout.py"),
        ("plugins/collector[gym]",),
    ),
    Column("pluggy", "1.6", None, ("tests/core/test_registry.py", *_ALL)),
    Column("ray", "2.50", None, ("tests/plugins_ray/test_ray_scheme.py",), ("plugins_ray",)),
)


class NotRunError(Exception):
    """A version that cannot be had here; the message is the reason."""


def main() -> int:
    """Run the columns that were named, print the table, and return the exit status."""
    names = [column.name for column in COLUMNS]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("columns", nargs="*", metavar="COLUMN", help=", ".join(names))
    parser.add_argument("--record", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    arguments = parser.parse_args()
    if unknown := {*arguments.columns} - {*names}:
        parser.error(f"no column {', '.join(unknown)}; there are {', '.join(names)}")
    if arguments.record and arguments.columns:
        parser.error("--record writes every column; leave out their names")
    chosen = [each for each in COLUMNS if not arguments.columns or each.name in arguments.columns]
    table = [(each, [_try(each, version) for version in _versions(each)]) for each in chosen]
    lines = _lines(table)
    print("\n".join(lines))
    if arguments.record:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(MARKS[0])
        _, _, after = rest.partition(MARKS[1])
        text = "\n".join([MARKS[0], *lines, MARKS[1]])
        PAGE.write_text(before + text + after, encoding="utf-8")
    return int(any("failed" in cell for _, cells in table for cell in cells))


def _versions(column: Column) -> tuple[str, ...]:
    if column.name != "Python" or column.newest is None:
        return (column.oldest, column.newest or "newest")
    first, last = (int(version.partition(".")[2]) for version in (column.oldest, column.newest))
    return tuple(f"3.{minor}" for minor in range(first, last + 1))


def _try(column: Column, version: str) -> str:
    """Return a cell: a version and its outcome."""
    print(f"{column.name} {version}:", flush=True)
    with tempfile.TemporaryDirectory(prefix="sync-versions-") as scratch:
        try:
            python, found = _environment(Path(scratch, "venv"), column, version)
        except NotRunError as reason:
            cell = f"{version}: not run, {reason}"
        else:
            cell = f"{found}: {_run_tests(python, column, Path(scratch))}"
    print(f"  {cell}", flush=True)
    return cell


def _environment(folder: Path, column: Column, version: str) -> tuple[Path, str]:
    """Make an environment that has this version; return its interpreter and the exact version."""
    interpreter = _interpreter(version) if column.name == "Python" else Path(sys.executable)
    _run([interpreter, "-m", "venv", folder], "no environment")
    python = folder / "bin" / "python"
    pins = [] if column.name == "Python" else [_requirement(column.name, version)]
    constraints = _constraints(folder, column.name)
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q", "-c", constraints]
    torch = pins[0] if column.name == "torch" else "torch"
    report = folder / "report.json"
    _run(
        [*pip, "--dry-run", "--ignore-installed", "--report", report, torch], f"no wheel of {torch}"
    )
    planned = [each["metadata"]["name"] for each in json.loads(report.read_text())["install"]]
    if any(name.startswith("nvidia-") for name in planned):
        raise NotRunError("as its torch comes only with CUDA here")
    ours = [part for each in (*FOLDERS, *column.folders) for part in ("-e", f"./{each}")]
    _run([*pip, *ours, *TESTING, *pins], f"{' '.join(pins)} cannot be installed")
    if column.name == "Python":
        return python, _output([python, "-c", "import platform; print(platform.python_version())"])
    script = f"from importlib.metadata import version; print(version({column.name!r}))"
    return python, _output([python, "-c", script])


def _requirement(package: str, version: str) -> str:
    return package if version == "newest" else f"{package}=={version}.*"


def _constraints(folder: Path, free: str) -> Path:
    """Write the constraints of the repository, but for one package."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    path = folder / "constraints.txt"
    path.write_text("".join(line for line in lines if not line.startswith(f"{free}==")))
    return path


def _interpreter(version: str) -> Path:
    """Return an interpreter by its version: on the path, or of pyenv."""
    if found := shutil.which(f"python{version}"):
        answer = subprocess.run([found, "-V"], capture_output=True, text=True, check=False)
        if answer.stdout.startswith(f"Python {version}"):
            return Path(found)
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    for python in sorted(pyenv.glob(f"{version}.*/bin/python")):
        return python
    raise NotRunError("as it is not installed here")


def _run_tests(python: Path, column: Column, scratch: Path) -> str:
    # Other versions warn of other things.
    tests = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "filterwarnings=default")
    doctor = ("-m", "sync_tools", "doctor", "--timeout", "120")
    for arguments, what in (
        ((*tests, f"--basetemp={scratch / 'tests'}", *column.tests), "tests"),
        (doctor, "doctor"),
    ):
        done = subprocess.run(
            [python, *arguments], cwd=ROOT, env=_kept(), check=False, timeout=SECONDS
        )
        if done.returncode:
            return f"{what} failed"
    return "passed"


def _run(command: Sequence[str | Path], problem: str) -> None:
    done = subprocess.run(
        command, cwd=ROOT, env=_kept(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise NotRunError(f"{problem} here: {(done.stderr.splitlines() or ['?'])[-1][:120]}")


def _output(command: Sequence[str | Path]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _kept() -> dict[str, str]:
    """Return the variables of the environment, without those that lead to its packages."""
    return {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}


def _lines(table: Sequence[tuple[Column, list[str]]]) -> list[str]:
    """Return the lines of the table; each row is a column that was tried."""
    lines = ["| | supported | tried |", "|---|---|---|"]
    for column, cells in table:
        until = f" to {column.newest}" if column.newest else " or newer"
        lines.append(f"| {column.name} | {column.oldest}{until} | {'; '.join(cells)} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
