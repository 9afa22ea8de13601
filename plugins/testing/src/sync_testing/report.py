"""Writes the results of the conformance classes to a JSON file: ``--report FILE``."""

from __future__ import annotations

import inspect
import json
import platform
from collections import Counter
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from importlib_metadata import EntryPoint

from sync_core import registry
from sync_core.errors import PluginError
from sync_core.wrapping import WrappingScheme
from sync_testing.cases import Conformance

__all__ = ["FORMAT", "PluginResult", "Reporting", "read_report"]

#: The version of the file's format; a new field does not change it.
FORMAT = 1

_KEY = "sync_conformance"
# The attribute of a conformance class that names the plugin, by the kind of plugin.
_ATTRIBUTES = {
    "layer": ("layer", registry.LAYERS),
    "worker group": ("group_class", registry.WORKERS),
    "scheme": ("scheme", registry.SCHEMES),
}
# The order of outcomes: of setup, call and teardown, the most serious counts.
_ORDER = ("passed", "skipped", "xfailed", "failed")


@dataclass(frozen=True, slots=True)
class PluginResult:
    """The cases of one conformance class.

    Args:
        kind: ``"scheme"``, ``"layer"`` or ``"worker group"``.
        name: the plugin's name, such as ``"shm"`` or ``"increments::dist"``; the name of its class
            if it was given as an object.
        suite: the conformance class, such as ``"SchemeConformance"``.
        distribution: the distribution of the plugin; None for an object.
        version: the version of the distribution.
        capabilities: the plugin's capabilities; cases that need others are skipped.
        options: the options of the scheme, as text.
        complete: whether all cases of the class ran. A run with ``-k`` or ``-x`` is not complete.
        counts: the number of cases by outcome: ``passed``, ``failed``, ``skipped``, ``xfailed``.
        failed: the cases that failed.
        skipped: the reasons of skipped cases, with the number of cases for each.

    Example:
        >>> result = PluginResult("scheme", "shm", "SchemeConformance", counts={"passed": 180})
        >>> result.verdict
        'partial'
    """

    kind: str
    name: str
    suite: str
    distribution: str | None = None
    version: str | None = None
    capabilities: tuple[str, ...] = ()
    options: dict[str, str] = field(default_factory=dict)
    complete: bool = False
    counts: dict[str, int] = field(default_factory=dict)
    failed: tuple[str, ...] = ()
    skipped: dict[str, int] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """Return ``"failed"``, ``"partial"`` (some cases did not run) or ``"passed"``."""
        if self.failed:
            return "failed"
        return "passed" if self.complete else "partial"


class Reporting:
    """A pytest plugin that writes the report when the run ends; supports pytest-xdist.

    Args:
        path: the file, which is overwritten.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._classes: dict[str, dict[str, Any]] = {}
        self._outcomes: dict[str, dict[str, str]] = {}
        self._reasons: dict[str, dict[str, str]] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Store a description of each conformance class in its tests, before ``-k`` applies."""
        classes: dict[type[Conformance], list[pytest.Item]] = {}
        for item in items:
            cls = getattr(item, "cls", None)
            if cls is not None and issubclass(cls, Conformance):
                classes.setdefault(cls, []).append(item)
        for cls, cases in classes.items():
            described = _describe(cls, cases)
            if described is not None:
                for case in cases:
                    # Reports from pytest-xdist processes have these properties too.
                    case.user_properties.append((_KEY, described))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the outcome of one phase of a test."""
        described: Any = dict(report.user_properties).get(_KEY)
        outcome = "xfailed" if hasattr(report, "wasxfail") and report.skipped else report.outcome
        if described is None or outcome not in _ORDER:
            return
        key = described["key"]
        self._classes[key] = described
        outcomes = self._outcomes.setdefault(key, {})
        name = report.nodeid.rpartition("::")[2]
        outcomes[name] = max(outcomes.get(name, "passed"), outcome, key=_ORDER.index)
        if outcome == "skipped" and isinstance(report.longrepr, tuple):
            reason = report.longrepr[2].removeprefix("Skipped: ")
            self._reasons.setdefault(key, {})[name] = reason

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the file, in the process that has all outcomes."""
        if hasattr(session.config, "workerinput"):
            return
        report = {
            "format": FORMAT,
            "suite": {"distribution": "sync-testing", "version": version("sync-testing")},
            "date": datetime.now(UTC).date().isoformat(),
            "environment": {
                "python": platform.python_version(),
                "platform": platform.system(),
                "sync-core": version("sync-core"),
                "torch": version("torch"),
            },
            "plugins": [
                {**asdict(result), "verdict": result.verdict} for result in self._results()
            ],
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    def _results(self) -> list[PluginResult]:
        results = [self._result(key, dict(each)) for key, each in self._classes.items()]
        return sorted(results, key=lambda result: (result.kind, result.name, result.suite))

    def _result(self, key: str, described: dict[str, Any]) -> PluginResult:
        outcomes = self._outcomes[key]
        expected, functions = described.pop("expected"), set(described.pop("functions"))
        del described["key"]
        ran = {name.partition("[")[0] for name in outcomes}
        return PluginResult(
            **described,
            complete=len(outcomes) == expected and functions <= ran,
            counts={name: [*outcomes.values()].count(name) for name in _ORDER},
            failed=tuple(name for name, outcome in outcomes.items() if outcome == "failed"),
            skipped=dict(
                Counter(
                    reason
                    for name, reason in self._reasons.get(key, {}).items()
                    if outcomes[name] == "skipped"
                )
            ),
        )


def read_report(path: Path) -> tuple[str, list[PluginResult]]:
    """Return the version of the suite, and the results of a report.

    Raises:
        ValueError: the file is not such a report.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        if report["format"] != FORMAT:
            raise ValueError(f"format {report['format']!r}, and this reads {FORMAT}")
        names = PluginResult.__dataclass_fields__
        plugins = [
            PluginResult(**{key: value for key, value in each.items() if key in names})
            for each in report["plugins"]
        ]
        return str(report["suite"]["version"]), plugins
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} is not a report of the suite ({error}); make one: "
            f"pytest --pyargs sync_testing.suite --scheme NAME --report {path}"
        ) from error


def _describe(cls: type[Conformance], cases: list[pytest.Item]) -> dict[str, Any] | None:
    """Return the description of a class before its cases run, as JSON-compatible values."""
    bases = (base for base in cls.__mro__ if not base.__name__.startswith("Test"))
    base = next(base for base in bases if base.__module__.startswith("sync_"))
    found = next((each for each in _ATTRIBUTES.items() if hasattr(cls, each[1][0])), None)
    # `CollectorConformance` names a scheme and a group, but tests the collector.
    if found is None or base.__name__ == "CollectorConformance":
        return None
    kind, (attribute, group) = found
    plugin: Any = getattr(cls, attribute)
    described = {
        "key": f"{cls.__module__}.{cls.__qualname__}",
        "kind": kind,
        "name": plugin if isinstance(plugin, str) else _name_of(plugin),
        "suite": base.__name__,
        "expected": len(cases),
        "functions": sorted(name for name in dir(cls) if name.startswith("test")),
        "options": {
            key: repr(value) for key, value in (getattr(cls, "options", None) or {}).items()
        },
    }
    entry = _entry_of(group, plugin)
    if entry is not None:
        distribution, owned = registry.owner_of(entry)
        described |= {"name": entry.name, "distribution": distribution, "version": owned}
    try:
        known = registry.find(group, plugin)
    except PluginError:
        # The cases will report the error.
        return described
    if isinstance(plugin, str):
        described |= {"distribution": known.distribution, "version": known.version}
    # A layer may have no capabilities.
    return {**described, "capabilities": sorted(getattr(known.object, "capabilities", ()))}


def _name_of(plugin: Any) -> str:
    """Return the name of a plugin object, or of its class."""
    if isinstance(plugin, WrappingScheme):
        return plugin.name
    return str(getattr(plugin, "__name__", type(plugin).__name__))


def _entry_of(group: str, plugin: Any) -> EntryPoint | None:
    """Return the entry point of the class of a plugin object."""
    if isinstance(plugin, str | WrappingScheme):
        return None
    cls = plugin if inspect.isclass(plugin) else type(plugin)
    place = f"{cls.__module__}:{cls.__qualname__}"
    return next((entry for entry in registry.installed(group) if entry.value == place), None)
