"""Each misconfiguration that doctor knows is one line with a remedy."""

from __future__ import annotations

import json
import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import sync_core
from sync_tools.commands import findings
from sync_tools.main import main

MIB = 1 << 20
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a distribution with one plugin into a folder on sys.path."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(
        distribution: str,
        *,
        group: str = "sync.layers",
        name: str = "pigeon",
        source: str = "",
        requires: str = "torch",
        to: str | None = None,
    ) -> None:
        module = f"found_{distribution}"
        monkeypatch.delitem(sys.modules, module, raising=False)
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{distribution}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n"
            f"Requires-Dist: {requires}\n"
        )
        (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {to or module}\n")

    return install


def test_a_machine_that_has_enough() -> None:
    assert not [*findings.shared_memory(16 << 30, 8 << 30)]
    assert not [*findings.descriptors(1024, 4096)]
    assert not [*findings.descriptors(resource.RLIM_INFINITY, resource.RLIM_INFINITY)]


@pytest.mark.parametrize(
    ("total", "free", "line"),
    [
        (64, 64, "/dev/shm: holds 64 MiB in all, .*; in a container, type: docker run --shm-size"),
        (8192, 100, "/dev/shm: is nearly full: 100 of 8192 MiB are free; .* ls -lS /dev/shm"),
    ],
)
def test_shared_memory(total: int, free: int, line: str) -> None:
    (finding,) = findings.shared_memory(total * MIB, free * MIB)
    assert_line(str(finding), line)


@pytest.mark.parametrize(
    ("hard", "line"),
    [
        (
            resource.RLIM_INFINITY,
            "ulimit -n: a process may open 256 files .*; type: ulimit -n 4096",
        ),
        (4096, "type: ulimit -n 4096"),
        (512, "the hard limit is 512, so root has to raise it: ulimit -Hn 4096"),
    ],
)
def test_few_descriptors(hard: int, line: str) -> None:
    (finding,) = findings.descriptors(256, hard)
    assert_line(str(finding), line)


@pytest.mark.parametrize(
    ("wanted", "cores", "line"),
    [
        ("64", 8, "OMP_NUM_THREADS=64: is more than the 8 cores .*; type: unset OMP_NUM_THREADS"),
        ("1", 8, "with one of 8 cores, as torchrun .*; type: export OMP_NUM_THREADS=8, divided"),
        ("many", 8, "OMP_NUM_THREADS=many: is not a number of threads; type: unset"),
        ("0", 8, "is not a number of threads"),
    ],
)
def test_threads_that_do_not_fit(wanted: str, cores: int, line: str) -> None:
    (finding,) = findings.threads(wanted, cores)
    assert_line(str(finding), line)


@pytest.mark.parametrize(("wanted", "cores"), [("", 8), ("4", 8), ("8,2", 8), ("1", 1)])
def test_threads_that_fit(wanted: str, cores: int) -> None:
    assert not [*findings.threads(wanted, cores)]


def test_what_is_disabled_and_what_nothing_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not [*findings.disabled()]
    monkeypatch.setenv("SYNC_DISABLE", "bf16, shn")
    lines = [str(finding) for finding in findings.disabled()]
    assert len(lines) == 2
    assert_line(lines[0], r"leaves out layer 'bf16' \(sync-plugin-std .*type: unset SYNC_DISABLE")
    assert_line(lines[1], "nothing that is installed is called 'shn'; .* sync-core list")


def test_two_distributions_for_one_name(install: Install) -> None:
    assert not [*findings.conflicts()]
    install("first")
    install("second")
    (finding,) = findings.conflicts()
    assert_line(
        str(finding),
        "pigeon: 2 distributions claim the layer 'pigeon': first 1.0 and second 1.0; name one, as "
        "first:pigeon, or remove one",
    )


@pytest.mark.parametrize(
    ("requires", "line"),
    [
        (
            "sync-core>=7",
            (
                f"owl 1.0: needs sync-core>=7, and {sync_core.__version__} is .*: "
                "pip install -U 'sync-core>=7'"
            ),
        ),
        (
            "pluggy>=99",
            r"needs pluggy>=99, and [\d.]+ is installed; install it again with",
        ),
        (
            "no-such-thing-here",
            "and none is installed; install it again with",
        ),
    ],
)
def test_a_requirement_that_is_not_met(install: Install, requires: str, line: str) -> None:
    install("owl", requires=requires)
    (finding,) = [each for each in findings.unmet_requirements() if each.about == "owl 1.0"]
    assert_line(str(finding), line)


def test_what_an_extra_needs_is_no_misconfiguration(install: Install) -> None:
    install("owl", requires="no-such-thing-here ; extra == 'verify'")
    assert "owl 1.0" not in {each.about for each in findings.unmet_requirements()}


@pytest.mark.timeout(60)
def test_a_layer_that_does_not_load(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNC_DISABLE", "sync-plugin-ray,sync-plugin-dist")
    install("owl", source="print('[hoot')\nraise RuntimeError('no feathers')")
    (finding,) = findings.check_imports()
    assert_line(
        str(finding),
        r"pigeon: layer 'pigeon' \(owl 1.0\) does not import: RuntimeError: no feathers; "
        "update owl from where you have it, or leave it out: SYNC_DISABLE=owl",
    )


@pytest.mark.timeout(60)
def test_a_plugin_that_ends_the_process(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNC_DISABLE", "sync-plugin-ray,sync-plugin-dist,sync-plugin-std")
    install("owl", source="import os; os._exit(3)")
    (finding,) = findings.check_imports()
    assert_line(str(finding), "plugins: importing all that are installed ends the process; to see")


@pytest.mark.timeout(60)
def test_a_plugin_that_hangs(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNC_DISABLE", "sync-plugin-ray,sync-plugin-dist,sync-plugin-std")
    install("owl", source="import time; time.sleep(600)")
    (finding,) = findings.check_imports(timeout=1.0)
    assert_line(str(finding), "plugins: importing all that are installed hangs; to see which, type")


FINDING = """
from sync_core.hooks import Finding
from sync_plugin_std.schemes.none import NoneScheme

class Scheme(NoneScheme):
    def findings(self, context):
"""


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("yield Finding('sky', 'is dark', 'type: dawn')", "^sky: is dark; type: dawn$"),
        (
            "raise OSError('too\\nhigh')",
            r"^scheme 'owl' \(nest 1.0\): .* raised OSError: too; update nest",
        ),
        (
            "return ['dark']",
            "raised TypeError: it gave 'dark', which is not a sync_core.*; update nest",
        ),
        ("import time; time.sleep(30)", r"findings\(\) took more than 0.5 s; update nest from"),
    ],
    ids=["finds", "raises", "gives something else", "hangs"],
)
def test_what_a_scheme_finds_itself(install: Install, body: str, line: str) -> None:
    module = "found_nest:Scheme"
    install("nest", group="sync.schemes", name="owl", source=f"{FINDING}        {body}", to=module)
    (finding,) = findings.check_scheme("owl", timeout=0.5)
    assert_line(str(finding), line)


def test_options_that_a_scheme_refuses_are_reported_by_trying_it(install: Install) -> None:
    declared = "from dataclasses import make_dataclass\nOptions = make_dataclass('Options', [])\n"
    source = f"{declared}{FINDING}        context.parse_options(Options)\n        return []"
    install("nest", group="sync.schemes", name="owl", source=source, to="found_nest:Scheme")
    assert findings.check_scheme("owl", options={"perch": 3}) == []


def test_what_declares_nothing_or_does_not_load_finds_nothing(install: Install) -> None:
    install("nest", group="sync.schemes", name="owl", source="raise RuntimeError('asleep')")
    assert findings.check_scheme("none") == []
    assert findings.check_scheme("owl") == []


@pytest.mark.timeout(60)
def test_doctor_asks_the_schemes(install: Install, capfd: pytest.CaptureFixture[str]) -> None:
    body = "yield Finding(context.scheme, f'has {context.options}', 'type: dawn')"
    source = f"{FINDING}        {body}"
    install("nest", group="sync.schemes", name="owl", source=source, to="found_nest:Scheme")
    main(["doctor", "owl", "--perch", "3", "--json"])
    told = json.loads(capfd.readouterr().out)
    finding = {"about": "owl", "problem": "has {'perch': 3}", "remedy": "type: dawn"}
    assert finding in told["findings"]


@pytest.mark.timeout(60)
def test_list_tells_which_core_a_plugin_was_made_for(
    install: Install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SYNC_DISABLE", "sync-plugin-ray,sync-plugin-dist,sync-plugin-std")
    install("owl", requires="sync-core<0.1")
    assert main(["list", "--json"]) == 0
    (owl,) = (p for p in json.loads(capsys.readouterr().out) if p["distribution"] == "owl")
    assert owl["requires"] == "sync-core<0.1"
    assert owl["error"].endswith("; update owl from where you have it")


@pytest.mark.timeout(60)
def test_doctor_prints_them(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SYNC_DISABLE", "fp16")
    assert main(["doctor", "none"]) == 0
    line = "SYNC_DISABLE=fp16: leaves out layer 'fp16' (sync-plugin-std"
    assert any(each.startswith(line) for each in capfd.readouterr().out.splitlines())
    assert main(["doctor", "none", "--json"]) == 0
    findings = json.loads(capfd.readouterr().out)["findings"]
    assert "SYNC_DISABLE=fp16" in {finding["about"] for finding in findings}


def assert_line(line: str, pattern: str) -> None:
    assert "\n" not in line
    assert re.search(pattern, line), line
