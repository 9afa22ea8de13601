"""Write the reference pages from the code."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import FunctionType, GenericAlias
from typing import Any

import sync_core
import sync_core.checks
import sync_core.models
import sync_core.transports
import sync_plugin_std.stores
import sync_plugin_std.workers
import sync_plugin_torchrl  # noqa: F401 - found by its name, as the next
import sync_plugin_trl  # noqa: F401
from sync_collector.bench import command as bench_collector
from sync_core import errors, registry
from sync_core.hooks import (
    HOOKS,
    LAYER_CAPABILITIES,
    SCHEME_CAPABILITIES,
    WORKER_CAPABILITIES,
    Finding,
)
from sync_core.wrapping import WrappingScheme
from sync_tools import SenderView, WorkerView
from sync_tools.commands.doctor import Diagnosis
from sync_tools.commands.listing import Listed, wraps_another
from sync_tools.commands.plan import Estimate
from sync_tools.main import make_parser

_CONTEXTS = ("TransportContext", "SendContext", "ApplyContext", "SkipContext", "BindContext")
_WIDTH = 96
_MEMBERS = (FunctionType, property, classmethod, staticmethod, cached_property)
#: Whose ``__all__`` is public.
PUBLIC = (
    "sync_core",
    "sync_core.checks",
    "sync_core.errors",
    "sync_core.hooks",
    "sync_core.lazy",
    "sync_core.models",
    "sync_core.printable",
    "sync_core.registry",
    "sync_core.transports",
    "sync_core.wrapping",
    "sync_plugin_std.local",
    "sync_plugin_std.calls",
    "sync_plugin_std.workers",
    "sync_plugin_scale",
    "sync_plugin_scale.increments",
    "sync_plugin_scale.shards",
    "sync_tools",
    "sync_tools.bench",
    "sync_tools.main",
    "sync_tools.tables",
    "sync_testing",
    "sync_testing.corpora",
    "sync_testing.faults",
    "sync_testing.fuzz",
    "sync_testing.recording",
    "sync_testing.schemes",
    "sync_testing.schemes.models",
    "sync_testing.worker_groups",
    "sync_collector",
    "sync_collector.envs",
    "sync_collector.testing",
    "sync_plugin_std.stores",
    "sync_plugin_std.history",
    "sync_plugin_ray",
    "sync_plugin_store",
    "sync_plugin_torchrl",
    "sync_plugin_trl",
    "sync_plugin_verl",
    "sync_plugin_vllm",
)
_OURS = {module.partition(".")[0] for module in PUBLIC}
#: The output of commands with ``--json``: a list of the first (``""``), an object (``"{}"``), or an
#: object with lists.
PRINTED: Mapping[str, Mapping[str, type]] = {
    "sync-core list": {"": Listed},
    "sync-core doctor": {"schemes": Diagnosis, "findings": Finding},
    "sync-core plan": {"": Estimate},
    "sync-core watch": {"{}": SenderView, "workers": WorkerView},
}


def write(folder: Path) -> None:
    """Write every page into a folder, and skip files whose text is unchanged."""
    folder.mkdir(parents=True, exist_ok=True)
    written = pages()
    for page in folder.glob("*.rst"):
        if page.stem not in written:
            page.unlink()
    for name, text in written.items():
        page = folder / f"{name}.rst"
        if not page.exists() or page.read_text() != text:
            page.write_text(text)


#: The pages for users: a name, a title, and what is on it.
_USER_PAGES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "sender": ("Sender", ("Sender", "PendingSend")),
    "receiver": ("Receiver", ("Receiver", "Address")),
    "reports": ("Reports", ("SendReport", "WorkerResult", "Reporter")),
    "membership": (
        "States of workers",
        ("WorkerState", "WorkerStatus", "MembershipEvent", "WorkerFailure", "FailurePolicy"),
    ),
}
#: The kits for authors, in pages: a name, a module, a title, and what is on it; an empty tuple is
#: for what is on no other page of the module.
_KIT_PAGES: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "calling": (
        "sync_plugin_std.calls",
        "Transports that call workers",
        (),
    ),
    "shared-memory": (
        "sync_plugin_std.local",
        "Transports over shared memory",
        (
            "SharedMemorySender",
            "SharedMemoryReceiver",
            "LocalPeer",
            "SharedSlots",
            "MappedSlots",
            "SharedMemory",
            "ControlPage",
            "Offer",
            "ProcessEvent",
        ),
    ),
    "sockets": (
        "sync_plugin_std.local",
        "Transports over sockets",
        (
            "ServingTransport",
            "Peer",
            "Publisher",
            "Slot",
            "Channel",
            "Message",
            "LocalListener",
            "close_when_forked",
            "connect_locally",
            "notice_silence",
            "same_user",
            "shake_hands",
            "farewell",
        ),
    ),
    "transports": ("sync_core.transports", "Other parts of transports", ()),
    "launching": (
        "sync_plugin_std.workers",
        "Start workers",
        (
            "LaunchedGroup",
            "Launcher",
            "LaunchedWorker",
            "WorkerProcess",
            "start_process",
            "preload",
        ),
    ),
    "workers": ("sync_plugin_std.workers", "Worker groups and their calls", ()),
}
_USER_ORDER = (
    "collector",
    "environments",
    "several-models",
    "scale",
    "plugins",
    "layers",
    "errors",
    "commands",
    "ray",
)
_AUTHOR_ORDER = (
    "hooks",
    "weights",
    "endpoints",
    "calling",
    "shared-memory",
    "sockets",
    "transports",
    "wrapping",
    "stores",
    "increments",
    "shards",
    "workers",
    "launching",
    "models",
    "capabilities",
    "declarations",
    "registry",
    "lazy",
    "tools",
    "tables",
    "checks",
    "testing",
    "scheme-cases",
    "models-of-cases",
    "group-cases",
    "collector-cases",
    "faults",
    "fuzz",
    "corpora",
    "recording",
    "measuring",
)


def pages() -> dict[str, str]:
    """Return the text of every page by name."""
    written = {
        "interface": _interface(),
        **{
            page: _page(title, "", *(_automatic("sync_core", name) for name in names))
            for page, (title, names) in _USER_PAGES.items()
        },
        "hooks": _hooks(),
        "weights": _weights(),
        "endpoints": _endpoints(),
        "plugins": _plugins(),
        "several-models": _page(
            "Models of several senders as one version",
            "",
            *(_automatic("sync_plugin_std", name) for name in _SEVERAL_MODELS),
        ),
        "layers": _layers(),
        "capabilities": _capabilities(),
        "errors": _errors(),
        "commands": _commands(),
        "testing": _exported("Conformance classes and helpers", "sync_testing"),
        "faults": _exported("Faults", "sync_testing.faults"),
        "fuzz": _exported("Hostile workers", "sync_testing.fuzz"),
        "corpora": _exported("Inputs of readers", "sync_testing.corpora"),
        "recording": _exported("Histories that tests write", "sync_testing.recording"),
        "scheme-cases": _exported("Cases of schemes", "sync_testing.schemes"),
        "models-of-cases": _exported("Models of the cases", "sync_testing.schemes.models"),
        "group-cases": _exported("Cases of worker groups", "sync_testing.worker_groups"),
        "collector-cases": _exported("Cases of collectors", "sync_collector.testing"),
        **{page: _kit(*described) for page, described in _KIT_PAGES.items()},
        "models": _exported("Models", "sync_core.models"),
        "checks": _exported("Checks of arguments", "sync_core.checks"),
        "declarations": _exported("Names of hooks and capabilities", "sync_core.hooks"),
        "wrapping": _exported("Schemes that wrap others", "sync_core.wrapping"),
        "lazy": _exported("Packages that import late", "sync_core.lazy"),
        "printable": _exported("Printable texts", "sync_core.printable"),
        "registry": _exported("Registry of plugins", "sync_core.registry"),
        "tools": _exported("Commands and the status server", "sync_tools"),
        "main": _exported("The command from Python", "sync_tools.main"),
        "tables": _exported("Tables in the terminal", "sync_tools.tables"),
        "measuring": _exported("Measuring a scheme", "sync_tools.bench"),
        "stores": _exported("Stores", "sync_plugin_std.stores"),
        "history": _exported("Histories of runs", "sync_plugin_std.history"),
        "increments": _exported("Increments in other schemes", "sync_plugin_scale.increments"),
        "shards": _exported("Parts of models", "sync_plugin_scale.shards"),
        "scale": _exported("Increments, chunks and relays", "sync_plugin_scale"),
        "collector": _exported("Collector", "sync_collector"),
        "environments": _exported("Environments", "sync_collector.envs"),
        "ray": _exported("Actors of Ray", "sync_plugin_ray"),
        "store": _exported("Runs in a store", "sync_plugin_store"),
        "torchrl": _exported("Schemes in TorchRL", "sync_plugin_torchrl"),
        "trl": _exported("TRL and transformers", "sync_plugin_trl"),
        "verl": _exported("The checkpoint engine of verl", "sync_plugin_verl"),
        "vllm": _exported("Engines of vLLM", "sync_plugin_vllm"),
    }
    users = [*_USER_PAGES, *_USER_ORDER]
    users += [name for name in written if name not in {*users, *_AUTHOR_ORDER, "interface"}]
    return written | {
        "users": _index("For users", "Classes and commands.", users),
        "authors": _index(
            "For authors of plugins",
            "What schemes, layers and worker groups are made from, and :doc:`what may change "
            "</reference/stability>`.",
            (*_AUTHOR_ORDER, "/reference/stability"),
        ),
    }


def members_of(found: type) -> list[str]:
    """Return the public methods and properties of a class, with those that it inherits from ours.

    Fields of a dataclass are described among its arguments.
    """
    definers = [cls for cls in found.__mro__ if cls.__module__.partition(".")[0] in _OURS]
    defined = {name: value for cls in reversed(definers) for name, value in vars(cls).items()}
    return [
        name
        for name, value in defined.items()
        if not name.startswith("_") and isinstance(value, _MEMBERS)
    ]


def error_names() -> list[str]:
    """Return the classes of `sync_core.errors` in their order in the source."""
    return [
        name
        for name, found in vars(errors).items()
        if inspect.isclass(found) and found.__module__ == errors.__name__
    ]


def installed(group: str) -> dict[str, Any]:
    """Load the plugins of this project and return them by name."""
    entries = {name: registry.entry_point(group, name) for name in registry.KNOWN[group]}
    loaded = {name: registry.load(group, entry) for name, entry in entries.items()}
    return {n: _example(found) if wraps_another(found) else found for n, found in loaded.items()}


def _example(kind: Any) -> Any:
    """Return a scheme that wraps another: the first of one rank, where it is for ranks."""
    given = dataclasses.fields(kind)
    missing = dataclasses.MISSING
    needed = [f for f in given if f.default is missing is f.default_factory]
    return kind("shm", *range(len(needed) - 1))


def options_of(scheme: Any) -> type:
    """Return the dataclass that a scheme's module gives to `TransportContext.parse_options`.

    Of a scheme that wraps others it is the scheme itself.
    """
    if isinstance(scheme, WrappingScheme):
        return type(scheme)
    module = inspect.getmodule(type(scheme))
    assert module is not None
    parsed = {
        node.args[0].id
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "parse_options"
        and isinstance(node.args[0], ast.Name)
    }
    (name,) = parsed
    options: type = vars(module)[name]
    return options


def arguments_of(described: Any) -> dict[str, str]:
    """Return the description of each argument in a docstring."""
    text = inspect.getdoc(described) or ""
    _, found, rest = text.partition("Args:\n")
    if not found:
        return {}
    block = re.split(r"\n(?=\S)", rest)[0]
    entries = re.split(r"\n(?=\S)", textwrap.dedent(block).strip())
    pairs = (entry.partition(":") for entry in entries)
    return {name.strip("*"): " ".join(told.split()) for name, _, told in pairs}


def comment_of(package: str, name: str) -> str:
    """Return the ``#:`` comment above a constant, from any module of a package or beside it."""
    assigned = re.compile(rf"((?:^#:.*\n)+){name}\b[^\n]*? = ", re.MULTILINE)
    root = package.partition(".")[0]
    modules = [m for key, m in sys.modules.items() if f"{key}.".startswith(f"{root}.")]
    modules.sort(key=lambda module: not f"{module.__name__}.".startswith(f"{package}."))
    found = (assigned.search(inspect.getsource(module)) for module in modules)
    lines = next((match[1].splitlines() for match in found if match), ())
    return " ".join(line.removeprefix("#:").strip() for line in lines)


def subcommands() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of every command of ``sync-core`` by command line."""
    (action,) = (a for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return {f"sync-core {name}": parser for name, parser in action.choices.items()} | {
        "sync-core bench collector": bench_collector.make_parser()
    }


_WEIGHTS = ("Update", "Payload", "Layout", "TensorSpec")
_ENDPOINTS = (
    "SenderTransport",
    "ReceiverTransport",
    "Delivery",
    "Answer",
    "IndirectEndpoint",
)


def _index(title: str, about: str, names: Iterable[str]) -> str:
    lines = [".. toctree::", "   :maxdepth: 1", "", *(f"   {name}" for name in names)]
    return _page(title, about, "\n".join(lines) + "\n")


def _interface() -> str:
    """Every name of ``sync_core``, with the page that it is on."""
    places = {name: page for page, (_, names) in _USER_PAGES.items() for name in names}
    places |= dict.fromkeys(error_names(), "errors") | dict.fromkeys(_CONTEXTS, "hooks")
    places |= dict.fromkeys(_WEIGHTS, "weights") | dict.fromkeys(_ENDPOINTS, "endpoints")
    places |= {"hookimpl": "hooks", "__version__": ""}
    rows = [
        (f":py:obj:`sync_core.{name}`", _first_paragraph(getattr(sync_core, name)))
        for name in sync_core.__all__
        if name != "__version__"
    ]
    return _page(
        "All names",
        "What ``import sync_core`` offers, and ``sync_core.__version__``, a string.",
        _table(("name", "what it is"), rows),
        ".. data:: sync_core.__version__\n\n   The version, a string.\n",
        *(_automatic("sync_core", name) for name in sync_core.__all__ if name not in places),
    )


def _weights() -> str:
    about = "The weights on their way: an update with names, then a payload with bytes."
    return _page(
        "Weights: Update, Payload, Layout",
        about,
        *(_automatic("sync_core", name) for name in _WEIGHTS),
    )


def _endpoints() -> str:
    return _page(
        "SenderTransport and ReceiverTransport",
        "The interface of a transport. Bases to inherit from: :doc:`calling`, "
        ":doc:`shared-memory`, :doc:`sockets`, :doc:`stores`.",
        *(_automatic("sync_core", name) for name in _ENDPOINTS),
    )


def _hooks() -> str:
    functions = (
        f".. autofunction:: sync_core.hooks.{hook}\n   :no-index-entry:\n" for hook in HOOKS
    )
    return _page(
        "Hooks",
        "A plugin is an object with one or more of these methods, each marked with "
        "``@sync_core.hookimpl``. A method may leave out arguments that it does not need. "
        "Hooks get one frozen context; new versions only add fields to it.",
        *functions,
        _automatic("sync_core", "hookimpl"),
        "Contexts\n--------\n",
        *(_automatic("sync_core", name) for name in _CONTEXTS),
    )


def _plugins() -> str:
    parts = ["Schemes\n-------\n", "Options are given to `Sender` by name.\n"]
    for name, scheme in installed(registry.SCHEMES).items():
        parts += [_heading(name, registry.KNOWN[registry.SCHEMES][name])]
        parts += [f"{_first_paragraph(type(scheme))}\n", _can(scheme.capabilities)]
        parts += [_option_table(options_of(scheme))]
    parts += ["Worker groups\n-------------\n"]
    parts += ["Options are given to `Collector` as ``worker_options``.\n"]
    for name, group in installed(registry.WORKERS).items():
        parts += [_heading(name, registry.KNOWN[registry.WORKERS][name])]
        parts += [_can(group.capabilities), _class(group)]
    return _page("Schemes and worker groups", "Those that this project publishes.", *parts)


_SEVERAL_MODELS = ("SendGroup", "receive_together")


def _layers() -> str:
    """The layers that are found by a name, and those that users make by their class."""
    parts = []
    for name, layer in installed(registry.LAYERS).items():
        parts += [_heading(name, registry.KNOWN[registry.LAYERS][name])]
        parts += [_class(_type_of(layer))]
    layers = {cls.__name__ for cls in map(_type_of, installed(registry.LAYERS).values())}
    parts += ["Made by their class\n~~~~~~~~~~~~~~~~~~~\n"]
    parts += [
        _automatic("sync_plugin_std", name)
        for name in sync_plugin_std.__all__
        if getattr(sync_plugin_std, name).__name__ not in {*layers, *_SEVERAL_MODELS, "History"}
    ]
    return _page(
        "Layers", "Given to `Sender` and `Collector` as ``layers=``, by name or as objects.", *parts
    )


def _capabilities() -> str:
    return _page(
        "Capabilities",
        "The abilities that a plugin declares. The conformance suite skips the others.",
        _capability_table("Schemes", SCHEME_CAPABILITIES, installed(registry.SCHEMES)),
        _capability_table("Layers", LAYER_CAPABILITIES, installed(registry.LAYERS)),
        _capability_table("Worker groups", WORKER_CAPABILITIES, installed(registry.WORKERS)),
    )


def _errors() -> str:
    return _page(
        "Errors",
        "All of them are in ``sync_core.errors``, and those that users catch in ``sync_core`` too.",
        *(
            f".. autoexception:: sync_core.errors.{name}\n   :members:\n   :show-inheritance:\n"
            for name in error_names()
        ),
    )


def _commands() -> str:
    return _page(
        "Commands",
        "``python -m sync_core`` is the same as ``sync-core``.",
        *(
            f"{command}\n{'-' * len(command)}\n\n.. code-block:: text\n\n"
            + textwrap.indent(_help(parser), "   ")
            + "".join(_printed(key, cls) for key, cls in PRINTED.get(command, {}).items())
            for command, parser in subcommands().items()
        ),
    )


def _printed(key: str, described: type) -> str:
    places = {"": "Each entry of the list", "{}": "The object"}
    where = places.get(key, f"Each entry of its list ``{key}``")
    rows = [(f"``{name}``", told) for name, told in arguments_of(described).items()]
    head = f"\n{where} that ``--json`` prints:\n\n"
    return head + _table(("key", "what it is"), rows)


def _exported(title: str, module: str) -> str:
    found = importlib.import_module(module)
    about = f"``{module}``: {_first_paragraph(found)}"
    return _page(title, about, *(_automatic(module, name) for name in found.__all__))


def _kit(module: str, title: str, names: tuple[str, ...]) -> str:
    """A part of a kit's names; or all that are on none of its other pages."""
    elsewhere = {name for other, _, told in _KIT_PAGES.values() if other == module for name in told}
    found = names or tuple(n for n in sys.modules[module].__all__ if n not in elsewhere)
    about = f"``from {module} import {found[0]}``"
    return _page(title, about, *(_automatic(module, name) for name in found))


def _page(title: str, about: str, *parts: str) -> str:
    return "\n".join([f"{title}\n{'=' * len(title)}\n", f"{about}\n", *parts])


def _heading(name: str, distribution: str) -> str:
    return f"{name}\n{'~' * len(name)}\n\n``pip install {distribution}``\n"


def _automatic(module: str, name: str) -> str:
    found = getattr(sys.modules[module], name)
    if inspect.isclass(found):
        members = f"   :members: {', '.join(members_of(found))}\n" if members_of(found) else ""
        bases = "   :show-inheritance:\n" if any(map(_is_public, found.__bases__)) else ""
        return f".. autoclass:: {module}.{name}\n{members}{bases}"
    if inspect.isfunction(found):
        return f".. autofunction:: {module}.{name}\n"
    told = f"``{found}``" if isinstance(found, GenericAlias) else _first_paragraph(found)
    return f".. data:: {module}.{name}\n\n   {comment_of(module, name) or told}\n"


def _is_public(found: type) -> bool:
    modules = map(import_module, PUBLIC)
    name = found.__name__
    return any(found is getattr(module, name) for module in modules if name in module.__all__)


def _type_of(plugin: Any) -> type:
    return plugin if inspect.isclass(plugin) else type(plugin)


def _class(found: type) -> str:
    return f".. autoclass:: {found.__module__}.{found.__qualname__}\n"


def _first_paragraph(described: Any) -> str:
    return " ".join((inspect.getdoc(described) or "").partition("\n\n")[0].split())


def _can(capabilities: Iterable[str]) -> str:
    return f"Capabilities: {', '.join(f'``{name}``' for name in sorted(capabilities)) or 'none'}.\n"


def _option_table(options: type) -> str:
    told = arguments_of(options)
    rows = [
        (f"``{field.name}``", f"``{field.type}``", f"``{_default(field)}``", told[field.name])
        for field in dataclasses.fields(options)
    ]
    return _table(("option", "type", "default", "what it is"), rows) if rows else "No options.\n"


def _default(field: dataclasses.Field[Any]) -> str:
    return "required" if field.default is dataclasses.MISSING else repr(field.default)


def _capability_table(title: str, told: Mapping[str, str], plugins: Mapping[str, Any]) -> str:
    rows = [
        (f"``{name}``", meaning, _having(name, plugins)) for name, meaning in sorted(told.items())
    ]
    return f"{title}\n{'-' * len(title)}\n\n" + _table(("name", "meaning", "plugins"), rows)


def _having(capability: str, plugins: Mapping[str, Any]) -> str:
    # Layers need not declare any.
    names = [
        name
        for name, plugin in plugins.items()
        if capability in getattr(plugin, "capabilities", ())
    ]
    return ", ".join(names) or "none of ours"


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return "\n".join([".. list-table::", "   :header-rows: 1", "", *_rows([header, *rows]), ""])


def _rows(rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    for first, *others in rows:
        yield f"   * - {first}"
        yield from (f"     - {other}" for other in others)


def _help(parser: argparse.ArgumentParser) -> str:
    parser.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=_WIDTH)
    return parser.format_help()
