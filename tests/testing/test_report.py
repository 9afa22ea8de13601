"""The report of a run of the suite, and the badge that is made from it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

# All runs of pytester then share the modules, which it otherwise forgets after each.
import sync_testing
from sync_testing import badge, report

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.timeout(120)

# A layer that changes nothing, one that loses half of each weight, and a known failure.
TESTS = """
import pytest
from sync_core import hookimpl
from sync_testing import LayerConformance


class Idle:
    '''Does nothing.'''

    @hookimpl(wrapper=True)
    def prepare_weights(self):
        return (yield)


class Halved:
    '''Loses something.'''

    @hookimpl(wrapper=True)
    def prepare_weights(self):
        update = yield
        update.replace([tensor.detach() * 0.5 for tensor in update.tensors])
        return update


class TestKnown(LayerConformance):
    layer = Idle()

    @pytest.mark.xfail(reason="a page says why", strict=True)
    def test_the_layer_has_a_docstring(self) -> None:
        super().test_the_layer_has_a_docstring()
        raise AssertionError("known")


class TestHalved(LayerConformance):
    layer = Halved()
"""


def plugins_of(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["plugins"]
    return found


@pytest.mark.parametrize(
    ("arguments", "verdict"), [([], "passed"), (["-k", "addresses"], "partial")]
)
def test_the_report_of_the_suite(
    run_suite: Callable[..., pytest.RunResult], tmp_path: Path, arguments: list[str], verdict: str
) -> None:
    path = tmp_path / "new" / "conformance.json"
    layer = ("--layer", "fp16", "--tolerance", "0.001", "--report", str(path))
    outcomes = run_suite(*layer, *arguments).parseoutcomes()
    (plugin,) = plugins_of(path)
    assert plugin["verdict"] == verdict
    assert plugin["counts"]["passed"] == outcomes["passed"]
    assert sum(plugin["skipped"].values()) == outcomes.get("skipped", 0)
    owner = (plugin["kind"], plugin["name"], plugin["suite"], plugin["distribution"])
    assert owner == ("layer", "fp16", "LayerConformance", "sync-plugin-std")
    assert plugin["version"] == json.loads(path.read_text())["suite"]["version"]
    version, (result,) = report.read_report(path)
    assert (version, result.verdict) == (sync_testing.__version__, verdict)


@pytest.mark.parametrize(
    "xdist", [False, pytest.param(True, marks=pytest.mark.long)], ids=["alone", "xdist"]
)
@pytest.mark.long
def test_the_report_of_an_authors_own_tests(
    pytester: pytest.Pytester, torch_modules: Any, tmp_path: Path, *, xdist: bool
) -> None:
    pytester.makepyfile(TESTS)
    path = tmp_path / "conformance.json"
    command = ("-p", "no:cacheprovider", "--conformance-report", str(path))
    if xdist:
        pytester.runpytest_subprocess(*command, "-n", "2")
    else:
        plugin = ("-p", "pytest_sync_testing")
        pytester.runpytest_inprocess(*plugin, *command, plugins=[torch_modules])
    results = report.read_report(path)[1]
    halved, idle = results
    assert (idle.name, idle.verdict, idle.counts["xfailed"]) == ("Idle", "passed", 1)
    assert (halved.name, halved.verdict) == ("Halved", "failed")
    assert len(halved.failed) == halved.counts["failed"] > 5


def result(**counts: int) -> report.PluginResult:
    return report.PluginResult(
        *("scheme", "owl", "SchemeConformance"),
        complete=True,
        counts=counts,
        failed=("test",) * counts.get("failed", 0),
    )


@pytest.mark.parametrize(
    ("results", "message", "colour"),
    [
        ([result(passed=7), result(passed=5)], "12 passed", "brightgreen"),
        ([result(passed=7), result(passed=5, failed=2)], "2 failed", "red"),
        ([result(passed=7, xfailed=1)], "7 passed, 1 known to fail", "yellow"),
        ([], "0 passed, not all ran", "yellow"),
    ],
)
def test_a_badge(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    results: list[report.PluginResult],
    message: str,
    colour: str,
) -> None:
    monkeypatch.setattr(badge, "read_report", lambda path: ("0.1.0", results))
    for name in ("badge.json", "badge.svg"):
        badge.main([str(tmp_path / "conformance.json"), str(tmp_path / name)])
    assert json.loads((tmp_path / "badge.json").read_text()) == {
        "schemaVersion": 1,
        "label": "sync-testing 0.1.0",
        "message": message,
        "color": colour,
    }
    drawn = ET.parse(tmp_path / "badge.svg").getroot()
    assert drawn.get("aria-label") == f"sync-testing 0.1.0: {message}"


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        ("{}", "badge.svg", "is not a report of the suite.*--report"),
        ('{"format": 2}', "badge.svg", "format 2, and this reads 1"),
        ("no", "badge.svg", "is not a report of the suite"),
        (None, "badge.svg", "No such file"),
        ("{}", "badge.png", "must end in .svg or .json"),
    ],
)
def test_what_no_badge_is_made_of(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: str | None,
    name: str,
    message: str,
) -> None:
    path = tmp_path / "conformance.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit):
        badge.main([str(path), str(tmp_path / name)])
    error = capsys.readouterr().err
    assert all(part in error for part in message.split(".*"))
    assert not (tmp_path / name).exists()
