"""The options of the suite, and the test classes that they select."""

from __future__ import annotations

import os
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sync_core import SyncError, registry
from sync_core.hooks import read_option
from sync_core.wrapping import SEPARATOR, WrappingScheme
from sync_testing import LayerConformance, SchemeConformance, WorkerGroupConformance
from sync_testing.cases import Conformance

#: The time limit of a case with pytest-timeout, in seconds, if the run sets none.
LIMIT = 300

#: The selected classes; pytest finds them in `test_plugins`.
chosen: dict[str, type[Conformance]] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the suite."""
    group = parser.getgroup("sync_testing.suite", "conformance of a sync-core plugin")
    group.addoption("--scheme", metavar="NAME", help="a scheme, or module:attribute")
    group.addoption("--layer", metavar="NAME", help="a layer, or module:attribute")
    group.addoption("--workers", metavar="NAME", help="a worker group, or module:attribute")
    group.addoption(
        "--option",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="an option of the scheme; may be repeated",
    )
    group.addoption(
        "--group", metavar="NAME", help="the worker group that the scheme's workers are in"
    )
    group.addoption(
        "--tolerance",
        type=float,
        default=0.0,
        help="by how much a layer may change a weight, relative to its tensor's largest (0)",
    )
    group.addoption(
        "--report",
        metavar="FILE",
        type=Path,
        dest="conformance_report",
        help="write the results as JSON; a badge is made from them by sync_testing.badge",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Make the classes, or report what is wrong with the command line."""
    chosen.clear()
    limited = config.pluginmanager.hasplugin("timeout") and (
        config.getoption("timeout") or config.getini("timeout") or "PYTEST_TIMEOUT" in os.environ
    )
    marks = [] if limited else [pytest.mark.timeout(LIMIT)]
    # An earlier run in this process may have imported it, with other classes.
    sys.modules.pop(f"{__package__}.test_plugins", None)
    scheme, layer, workers = (config.getoption(name) for name in ("scheme", "layer", "workers"))
    if not (scheme or layer or workers):
        raise pytest.UsageError("name a plugin: --scheme NAME, --layer NAME or --workers NAME")
    try:
        if scheme:
            _choose_scheme(config, scheme, marks)
        if layer:
            tolerance = config.getoption("tolerance")
            found = _found(layer)
            _choose(LayerConformance, layer, layer=found, tolerance=tolerance, pytestmark=marks)
        if workers:
            found = registry.find(registry.WORKERS, _found(workers)).object
            _choose(WorkerGroupConformance, workers, group_class=found, pytestmark=marks)
    except SyncError as error:
        raise pytest.UsageError(str(error)) from error


def _choose_scheme(
    config: pytest.Config, scheme: str, marks: Sequence[pytest.MarkDecorator]
) -> None:
    found = _found(scheme)
    registry.find(registry.SCHEMES, found)
    options = dict(_parsed(option) for option in config.getoption("option"))
    group = config.getoption("group")
    attributes = {"options": options, "group": group, "pytestmark": marks}
    _choose(SchemeConformance, scheme, scheme=found, **attributes)


def _choose(base: type[Conformance], plugin: str, **attributes: Any) -> None:
    name = f"Test{base.__name__}[{plugin}]"
    chosen[name] = type(name, (base,), {"__module__": f"{__package__}.test_plugins", **attributes})


def _found(name: str) -> Any:
    """Return the name, or the object that it refers to; a wrapping scheme wraps the rest."""
    path, _, inner = name.partition(SEPARATOR)
    # A prefix that cannot be a module name is the name of a distribution.
    if ":" not in path or not path.partition(":")[0].replace(".", "_").isidentifier():
        return name
    # As with python -m; the program pytest does not search the current folder.
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise pytest.UsageError(f"{path!r} leads to nothing: {error}") from error
    if not inner:
        return found
    if not (isinstance(found, type) and issubclass(found, WrappingScheme)):
        raise pytest.UsageError(f"{path!r} must be a subclass of WrappingScheme to wrap {inner!r}")
    return found(inner)


def _parsed(option: str) -> tuple[str, Any]:
    key, equals, text = option.partition("=")
    if not equals:
        raise pytest.UsageError(f"--option is KEY=VALUE, not {option!r}")
    return key, read_option(text)
