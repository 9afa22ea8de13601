"""``sync-core new-plugin``: a distribution that installs and conforms as it is written."""

from __future__ import annotations

import argparse
import ast
import keyword
import re
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from string import Template

import sync_core
from sync_core import registry
from sync_core.errors import PluginNewError
from sync_core.registry import promised_to

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_PREFIX = "sync-plugin-"
_RULE = "lower-case letters, digits and single hyphens, beginning with a letter"


@dataclass(frozen=True, slots=True)
class _Kind:
    folder: str
    group: str
    called: str
    summary: str
    leeway: str
    usage: str
    requires: tuple[str, ...] = ()


_SCHEME = _Kind(
    "scheme",
    registry.SCHEMES,
    "scheme",
    "The scheme `$name` of sync-core; as generated, it stores weights in files of a directory.",
    "what `capabilities` does not declare is skipped",
    'import sync_core\n\nsender = sync_core.Sender("$name", policy, num_workers=4)',
    ("sync-plugin-std",),
)
_LAYER = _Kind(
    "layer",
    registry.LAYERS,
    "layer",
    "The layer `$name` of sync-core: double precision travels as single precision.",
    "`tolerance` there says how much it may lose",
    'import sync_core\n\nsender = sync_core.Sender("shm", policy, num_workers=4, layers=["$name"])',
)
_WORKERS = _Kind(
    "workers",
    registry.WORKERS,
    "worker group",
    "The worker group `$name` of sync-core: workers in the caller's thread.",
    "what `capabilities` does not declare is skipped",
    "from sync_collector import Collector\n\n"
    'collector = Collector(make_env, policy, scheme="thread", workers="$name", …)',
    ("cloudpickle>=3",),
)

# Where each template goes, below the distribution's folder.
_FILES = {
    "common/pyproject.txt": "pyproject.toml",
    "common/LICENSE.txt": "LICENSE",
    "common/gitignore.txt": ".gitignore",
    "common/README.txt": "README.md",
    "common/workflow.txt": ".github/workflows/test.yml",
    "{folder}/module.txt": "src/{package}/__init__.py",
    "{folder}/test.txt": "tests/test_{package}.py",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.description = (
        "Writes a scheme, or a layer or worker group: a small one that is complete, to be "
        "replaced piece by piece, with its entry point, tests, README and CI file."
    )
    parser.add_argument("name", metavar="NAME", help="what users type as the scheme, as redis")
    parser.add_argument(
        "--distribution",
        metavar="NAME",
        help="what is installed with pip, and with _ for - its module (sync-plugin-NAME)",
    )
    kinds = parser.add_mutually_exclusive_group()
    for option, kind in (("--layer", _LAYER), ("--workers", _WORKERS)):
        kinds.add_argument(
            option,
            dest="kind",
            action="store_const",
            const=kind,
            default=_SCHEME,
            help=f"a {kind.called} instead of a scheme",
        )
    parser.add_argument(
        "--directory", type=Path, help="where it is written to; it must not exist (./DISTRIBUTION)"
    )
    parser.set_defaults(run=_run)


def write_plugin(
    name: str,
    kind: str = "scheme",
    directory: Path | None = None,
    distribution: str | None = None,
) -> Path:
    """Write a distribution and return its folder.

    Args:
        name: the plugin's name, such as ``"redis"``.
        kind: ``"scheme"``, ``"layer"`` or ``"workers"``.
        directory: a folder that does not exist yet; None for one here, named as the distribution.
        distribution: the distribution's name; None for ``"sync-plugin-"`` and the name.

    Raises:
        PluginNewError: a name is invalid or taken, or the folder exists or cannot be written.
    """
    chosen = next(each for each in (_SCHEME, _LAYER, _WORKERS) if each.folder == kind)
    distribution = f"{_PREFIX}{name}" if distribution is None else distribution
    directory = Path(distribution) if directory is None else directory
    try:
        _check_name(name, chosen)
        _check_distribution(distribution)
        if directory.exists():
            raise PluginNewError(f"{directory} exists already; give another by --directory")
        _write(name, distribution, chosen, directory)
    except OSError as error:
        raise PluginNewError(
            f"{directory} cannot be written: {error.strerror}; give another by --directory"
        ) from error
    return directory


def _write(name: str, distribution: str, kind: _Kind, directory: Path) -> None:
    package = _package(distribution)
    requirements = (promised_to(sync_core.__version__), *kind.requires)
    words = {
        "name": name,
        "distribution": distribution,
        "package": package,
        "year": datetime.now(UTC).year,
        "class_name": _class_name(name),
        "group": kind.group,
        "leeway": kind.leeway,
        "kind": kind.called,
        "requirements": ", ".join(f'"{each}"' for each in requirements),
    }
    words["summary"] = Template(kind.summary).substitute(words)
    words["usage"] = Template(kind.usage).substitute(words)
    for source, target in _FILES.items():
        path = directory / target.format(package=package)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(Template(_template(source, kind)).substitute(words), encoding="utf-8")
    (directory / "src" / package / "py.typed").touch()


def _package(distribution: str) -> str:
    return distribution.replace("-", "_")


def _template(source: str, kind: _Kind) -> str:
    path = resources.files("sync_tools") / "templates" / source.format(folder=kind.folder)
    return path.read_text(encoding="utf-8")


def _class_name(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("-"))


def _names_taken(kind: _Kind) -> set[str]:
    """Return the names that the generated code uses besides the plugin's class."""
    taken = set(keyword.kwlist)
    for source in _FILES:
        if source.startswith("{folder}/"):
            # So that it can be parsed: what is filled in later is a name like any other.
            for node in ast.walk(ast.parse(_template(source, kind).replace("$", "_"))):
                if isinstance(node, ast.Name):
                    taken.add(node.id)
                elif isinstance(node, ast.alias | ast.ClassDef):
                    taken.add(node.name)
    return taken


def _check_name(name: str, kind: _Kind) -> None:
    if name.startswith(_PREFIX):
        raise PluginNewError(
            f"{name!r} would be typed as the {kind.called}; name that, which is installed as "
            f"{name!r}: sync-core new-plugin {name.removeprefix(_PREFIX)}"
        )
    if not _NAME.fullmatch(name):
        raise PluginNewError(f"{name!r} is not a name for a plugin: {_RULE}; such as my-transport")
    owners = [entry for entry in registry.installed(kind.group) if entry.name == name]
    known = registry.KNOWN[kind.group].get(name)
    if owners or known:
        owner = owners[0].dist.name if owners and owners[0].dist else known
        raise PluginNewError(
            f"{owner} has a {kind.called} {name!r} already, and two of one name cannot be used; "
            f"take another, such as my-{name}"
        )
    if _class_name(name) in _names_taken(kind):
        raise PluginNewError(
            f"the class would be called {_class_name(name)!r}, and its module needs that name for "
            f"something else; take another name, such as my-{name}"
        )


def _check_distribution(distribution: str) -> None:
    if not _NAME.fullmatch(distribution):
        raise PluginNewError(
            f"{distribution!r} is not a name for a distribution: {_RULE}; such as sync-plugin-redis"
        )
    package = _package(distribution)
    if keyword.iskeyword(package):
        raise PluginNewError(
            f"no module can be called {package!r}, which is a keyword of Python; give another "
            f"distribution, such as: --distribution {_PREFIX}{distribution}"
        )
    if package in sys.stdlib_module_names or package.startswith("sync_core") or find_spec(package):
        raise PluginNewError(
            f"the module {package!r} exists already; give another distribution, such as: "
            f"--distribution my-{distribution}"
        )


def _run(arguments: argparse.Namespace, rest: list[str], parser: argparse.ArgumentParser) -> int:
    if rest:
        parser.error(f"new-plugin has no {' '.join(rest)!r}")
    folder = write_plugin(
        arguments.name, arguments.kind.folder, arguments.directory, arguments.distribution
    )
    sys.stdout.write(
        f"{folder} is written, and conforms as it is:\n"
        f'  cd {folder}\n  pip install -e ".[test]"\n  pytest\n'
    )
    return 0
