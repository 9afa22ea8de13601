"""``sync-core new-plugin``: writes a distribution that passes the conformance tests."""

from __future__ import annotations

import argparse
import ast
import json
import keyword
import re
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from string import Template

from packaging.version import Version

import sync_core
from sync_core import registry
from sync_core.errors import PluginNewError

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_PREFIX = "sync-plugin-"
_RULE = "lower-case letters, digits and single hyphens, beginning with a letter"


def promised_to(core: str) -> str:
    """The requirement of a plugin that uses nothing deprecated in a version of the core.

    A name that the next minor release deprecates still works in that and in the one after it:
    ``docs/reference/stability.md``.

    Example:
        >>> promised_to("0.1.3")
        'sync-core>=0.1,<0.4'
    """
    major, minor = Version(core).release[:2]
    return f"sync-core>={major}.{minor},<{major}.{minor + 3}"


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

# The paths of the files made from each template, relative to the distribution's folder.
_FILES = {
    "common/pyproject.txt": "pyproject.toml",
    "common/LICENSE.txt": "LICENSE",
    "common/gitignore.txt": ".gitignore",
    "common/README.txt": "README.md",
    "common/workflow.txt": ".github/workflows/test.yml",
    "{folder}/module.txt": "src/{package}/__init__.py",
    "{folder}/test.txt": "tests/test_{package}.py",
}
# Further files of a template repository.
_REPOSITORY = {
    "repository/badge.txt": ".github/workflows/badge.yml",
    "repository/publish.txt": ".github/workflows/publish.yml",
    "repository/dependabot.txt": ".github/dependabot.yml",
    "repository/changelog.txt": "CHANGELOG.md",
    "repository/rename.txt": "rename.py",
}
_BADGE = """
![conformance](https://img.shields.io/endpoint?url=https://raw.githubusercontent.com/{}/badge/badge.json)
"""


@dataclass(frozen=True, slots=True)
class PluginMetadata:
    """The metadata of a new distribution, as PyPI shows it.

    Args:
        description: one sentence; None to describe the generated code.
        author: None for "the authors of" the distribution.
        url: the repository, such as ``"https://example.org/me/sync-plugin-redis"``, or None.
    """

    description: str | None = None
    author: str | None = None
    url: str | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.description = (
        "Writes a scheme, or a layer or worker group: a small one that is complete, to be "
        "replaced piece by piece, with its entry point, tests, README and CI file."
    )
    parser.add_argument(
        "name",
        metavar="NAME",
        nargs="?",
        help="what users type as the scheme, as redis (with --template: my-scheme)",
    )
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
        "--directory", type=Path, help="the folder to write, which must not exist (./DISTRIBUTION)"
    )
    parser.add_argument("--description", metavar="TEXT", help="what it does, in a sentence")
    parser.add_argument("--author", metavar="NAME", help="the name of its author")
    parser.add_argument("--url", help="its repository, as https://example.org/me/sync-plugin-redis")
    parser.add_argument(
        "--template",
        action="store_true",
        help="also what a template repository on GitHub has: a script that renames a copy of it, "
        "and workflows that draw a badge and publish tags",
    )
    parser.set_defaults(run=_run)


def write_plugin(
    name: str,
    kind: str = "scheme",
    directory: Path | None = None,
    distribution: str | None = None,
    metadata: PluginMetadata | None = None,
    *,
    template: bool = False,
) -> Path:
    """Write a distribution and return its folder.

    Args:
        name: the plugin's name, such as ``"redis"``.
        kind: ``"scheme"``, ``"layer"`` or ``"workers"``.
        directory: a new folder; None for one in the current folder with the distribution's name.
        distribution: the distribution's name; None for ``"sync-plugin-"`` and the name.
        metadata: the metadata of the distribution.
        template: whether to write the further files of a template repository too.

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
        if template and distribution != f"{_PREFIX}{name}":
            raise PluginNewError("--template names the distribution; leave out --distribution")
        if template and "-" not in name:
            raise PluginNewError(
                f"a copy of a template has {name!r} replaced wherever it stands, also in words; "
                f"give --template a name such as my-{name}"
            )
        metadata = metadata or PluginMetadata()
        _check_metadata(metadata)
        _write(name, distribution, chosen, directory, metadata, template=template)
    except OSError as error:
        raise PluginNewError(
            f"{directory} cannot be written: {error.strerror}; give another by --directory"
        ) from error
    return directory


def _write(
    name: str,
    distribution: str,
    kind: _Kind,
    directory: Path,
    metadata: PluginMetadata,
    *,
    template: bool,
) -> None:
    package = _package(distribution)
    requirements = (promised_to(sync_core.__version__), *kind.requires)
    words: dict[str, object] = {
        "name": name,
        "distribution": distribution,
        "package": package,
        "year": datetime.now(UTC).year,
        "class_name": _class_name(name),
        "group": kind.group,
        "leeway": kind.leeway,
        "kind": kind.called,
        "keyword": kind.called.replace(" ", "-"),
        "requirements": ", ".join(f'"{each}"' for each in requirements),
        "suite": ".".join(sync_core.__version__.split(".")[:2]),
        "author": _string(metadata.author or f"the authors of {distribution}"),
        **_words_of_urls(metadata.url, distribution, template=template),
    }
    words["summary"] = Template(kind.summary).substitute(words)
    words["usage"] = Template(kind.usage).substitute(words)
    description = metadata.description or str(words["summary"])
    words |= {"description_text": description, "description": _string(description)}
    for source, target in (_FILES | (_REPOSITORY if template else {})).items():
        path = directory / target.format(package=package)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(Template(_template(source, kind)).substitute(words), encoding="utf-8")
    (directory / "src" / package / "py.typed").touch()


def _string(text: str) -> str:
    """Return a TOML string; it is written as JSON, which is the same without control characters."""
    return json.dumps(text, ensure_ascii=False)


def _words_of_urls(url: str | None, distribution: str, *, template: bool) -> dict[str, str]:
    """Return the texts that mention the repository's address."""
    if template and url is None:
        url = f"https://github.com/OWNER/{distribution}"
    if url is None:
        return {"urls": "", "badge": "", "note": ""}
    url = url.removesuffix("/").removesuffix(".git")
    urls = f'\n[project.urls]\nRepository = "{url}"\nIssues = "{url}/issues"\n'
    if not template:
        return {"urls": urls, "badge": "", "note": ""}
    badge = _BADGE.format(url.removeprefix("https://github.com/"))
    return {"urls": urls, "badge": badge, "note": _template("repository/note.txt", _SCHEME)}


def _check_metadata(metadata: PluginMetadata) -> None:
    for name in ("description", "author", "url"):
        value = getattr(metadata, name)
        if value is not None and not (value.strip() and value.isprintable()):
            raise PluginNewError(f"--{name} must be one line of text, got {value!r}")
    if metadata.url is not None and not re.fullmatch(r"https?://[^\s\"<>]+", metadata.url):
        raise PluginNewError(
            f"--url must be an address, such as https://example.org/me/sync-plugin-redis, "
            f"got {metadata.url!r}"
        )


def _package(distribution: str) -> str:
    return distribution.replace("-", "_")


def _template(source: str, kind: _Kind) -> str:
    path = resources.files("sync_tools") / "templates" / source.format(folder=kind.folder)
    return path.read_text(encoding="utf-8")


def _class_name(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("-"))


def _names_taken(kind: _Kind) -> set[str]:
    """Return the names that the generated code uses, except the plugin's class."""
    taken = set(keyword.kwlist)
    for source in _FILES:
        if source.startswith("{folder}/"):
            # Makes the template parse: placeholders become names.
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
    kind = arguments.kind
    if arguments.name is None and not arguments.template:
        parser.error("give a NAME: what users type as the scheme, such as redis")
    metadata = PluginMetadata(arguments.description, arguments.author, arguments.url)
    folder = write_plugin(
        arguments.name or f"my-{kind.folder}",
        kind.folder,
        arguments.directory,
        arguments.distribution,
        metadata,
        template=arguments.template,
    )
    sys.stdout.write(
        f"{folder} is written, and conforms as it is:\n"
        f'  cd {folder}\n  pip install -e ".[test]"\n  pytest\n'
    )
    if arguments.template:
        sys.stdout.write("A copy gets its name by: python rename.py NAME --owner GITHUB_NAME\n")
    missing = [name for name in ("description", "author", "url") if not getattr(metadata, name)]
    if missing and not arguments.template:
        options = ", ".join(f"--{name}" for name in missing)
        sys.stdout.write(
            f"Before you publish it, complete pyproject.toml (or give {options} here)\n"
        )
    return 0
