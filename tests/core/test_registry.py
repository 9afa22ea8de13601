"""The registry: plugins of real distributions found by name, and every error of a look-up."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from torch import nn

import sync_core
from sync_core import Address, PluginNotFoundError, Receiver, Sender, hookimpl, registry
from sync_core.errors import (
    NotAPluginError,
    PluginConflictError,
    PluginImportError,
    PluginVersionError,
    UnknownHookError,
)

SCHEME = """
from sync_core import hookimpl
capabilities = frozenset({"pull"})
@hookimpl
def create_transport(context): ...
"""


class Site:
    """A folder on sys.path, into which distributions are installed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def install(
        self,
        distribution: str,
        source: str,
        *,
        group: str = registry.SCHEMES,
        name: str = "carrier-pigeon",
        attribute: str = "",
        version: str = "1.2",
        requires: Sequence[str] = (),
    ) -> None:
        module = distribution.replace("-", "_")
        (self.path / f"{module}.py").write_text(source)
        info = self.path / f"{module}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
            + "".join(f"Requires-Dist: {each}\n" for each in requires)
        )
        target = f"{module}:{attribute}" if attribute else module
        (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {target}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield Site(tmp_path)
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_plugin_is_found_by_name(site: Site) -> None:
    site.install("pigeon-plugin", SCHEME)
    plugin = registry.find(registry.SCHEMES, "carrier-pigeon")
    assert isinstance(plugin.object, ModuleType)
    assert plugin.capabilities == {"pull"}
    assert plugin.describe() == "scheme 'carrier-pigeon' (pigeon-plugin 1.2)"


def test_what_is_installed_or_removed_in_between_is_noticed(site: Site) -> None:
    for _ in range(2):
        with pytest.raises(PluginNotFoundError):
            registry.find(registry.SCHEMES, "carrier-pigeon")
        site.install("pigeon-plugin", SCHEME)
        assert registry.find(registry.SCHEMES, "carrier-pigeon").version == "1.2"
        shutil.rmtree(site.path / "pigeon_plugin-1.2.dist-info")


def test_only_the_plugin_that_was_named_is_loaded(site: Site) -> None:
    site.install("pigeon-plugin", SCHEME)
    site.install("broken-plugin", "raise RuntimeError", name="broken")
    registry.find(registry.SCHEMES, "carrier-pigeon")
    assert "broken_plugin" not in sys.modules


@pytest.mark.usefixtures("without_dist")
@pytest.mark.parametrize(
    ("group", "name", "message"),
    [
        (
            registry.SCHEMES,
            "rpc",
            "no scheme 'rpc' is installed; type: pip install sync-plugin-dist",
        ),
        (registry.SCHEMES, "dits", "did you mean 'dist'. Then type: pip install sync-plugin-dist"),
        (
            registry.SCHEMES,
            "shn",
            "did you mean 'shm'.; for a plugin of your own, .* .installed: chunked, file",
        ),
        (registry.SCHEMES, "SHM", "did you mean 'shm'"),
        (
            registry.SCHEMES,
            "smoke-signal",
            "'smoke-signal' is installed; for a plugin of your own, type in its folder",
        ),
        (
            registry.SCHEMES,
            "NCCL",
            r"type: .*Sender\(\"dist\", …, backend=\"nccl\"\)",
        ),
        (registry.SCHEMES, "increments::s3", r"type: Sender\(\"store\", …, url="),
        (registry.COMMANDS, "serv", "no command 'serv' is installed; did you mean 'serve'"),
        (registry.LAYERS, "bf61", "no layer 'bf61' is installed; did you mean 'bf16'"),
        (registry.WORKERS, "proces", "no worker group 'proces' .* did you mean 'process'"),
    ],
)
def test_a_name_that_nothing_provides(group: str, name: str, message: str) -> None:
    with pytest.raises(PluginNotFoundError, match=message):
        registry.find(group, name)


def test_two_distributions_that_claim_one_name(site: Site) -> None:
    site.install("pigeon-plugin", SCHEME)
    site.install("other-plugin", SCHEME)
    with pytest.raises(
        PluginConflictError, match=r"other-plugin 1\.2 and pigeon-plugin 1\.2; .*pip uninstall"
    ):
        registry.find(registry.SCHEMES, "carrier-pigeon")


def test_the_name_of_a_distribution_before_the_name_of_a_plugin(site: Site) -> None:
    site.install("other-plugin", SCHEME, name="shm")
    with pytest.raises(PluginConflictError, match=r"name one, as other-plugin:shm, or remove one"):
        registry.find(registry.SCHEMES, "shm")
    assert registry.find(registry.SCHEMES, "other-plugin:shm").version == "1.2"
    chain = registry.find(registry.SCHEMES, "increments::sync-plugin-std:shm")
    assert chain.innermost.distribution == "sync-plugin-std"
    source, target = nn.Linear(2, 2), nn.Linear(2, 2)
    with Sender("sync-plugin-std:shm", source, num_workers=1) as sender:
        address = Address.from_json(sender.address(0).to_json())
        with Receiver(address, target) as receiver:
            pending = sender.send_async()
            assert receiver.receive() == 1
            pending.wait()
    assert torch.equal(source.weight, target.weight)
    with pytest.raises(PluginNotFoundError, match="no scheme 'other-plugin:mp' is installed"):
        registry.find(registry.SCHEMES, "other-plugin:mp")


def test_who_claims_a_name_of_ours_is_the_one_to_remove(site: Site) -> None:
    site.install("other-plugin", SCHEME, name="shm")
    with pytest.raises(PluginConflictError, match=r"uninstall other-plugin; .*=other-plugin"):
        registry.find(registry.SCHEMES, "shm")


@pytest.mark.parametrize("left_over", ["1.2", "1.1"])
def test_a_distribution_that_is_seen_twice_is_one(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_over: str
) -> None:
    site.install("pigeon-plugin", SCHEME)
    (tmp_path / "again").mkdir()
    Site(tmp_path / "again").install("pigeon-plugin", SCHEME, version=left_over)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "again")])
    assert registry.find(registry.SCHEMES, "carrier-pigeon").version == "1.2"


@pytest.mark.parametrize("disabled", ["carrier-pigeon", "owl, pigeon-plugin"])
def test_a_plugin_that_is_disabled(
    site: Site, monkeypatch: pytest.MonkeyPatch, disabled: str
) -> None:
    site.install("pigeon-plugin", "raise SystemError")
    monkeypatch.setenv("SYNC_DISABLE", disabled)
    assert "carrier-pigeon" not in {e.name for e in registry.installed(registry.SCHEMES)}
    with pytest.raises(PluginNotFoundError, match="is disabled; to use it, take it out of SYNC_D"):
        registry.find(registry.SCHEMES, "carrier-pigeon")


def test_disabling_one_of_two_ends_their_conflict(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.install("pigeon-plugin", SCHEME)
    site.install("owl-plugin", SCHEME)
    with pytest.raises(PluginConflictError, match="or set SYNC_DISABLE=pigeon-plugin"):
        registry.find(registry.SCHEMES, "carrier-pigeon")
    monkeypatch.setenv("SYNC_DISABLE", "pigeon-plugin")
    found = registry.find(registry.SCHEMES, "carrier-pigeon")
    assert found.distribution == "owl-plugin"


def test_a_plugin_that_does_not_import(site: Site) -> None:
    site.install("pigeon-plugin", "import a_module_that_is_not_there")
    with pytest.raises(
        PluginImportError, match=r"\(pigeon-plugin 1\.2\) does not import: ModuleNotFound"
    ) as failure:
        Sender("carrier-pigeon", num_workers=1)
    assert str(failure.value).endswith(
        "; update pigeon-plugin from where you have it, or leave it out: SYNC_DISABLE=pigeon-plugin"
    )
    assert isinstance(failure.value.__cause__, ModuleNotFoundError)


@pytest.mark.parametrize(
    ("core", "remedy"),
    [
        ("sync-core<0.1", "update pigeon-plugin from where you have it"),
        ("Sync_Core>=0.0.5,!=0.1.*", "update pigeon-plugin from where you have it"),
        ("sync-core==0.0.5", "update pigeon-plugin from where you have it"),
        ("sync-core>7", "type: pip install -U 'sync-core>7'"),
        ("sync-core>=7,<9", "type: pip install -U 'sync-core<9,>=7'"),
        ("sync-core~=7.1", "type: pip install -U 'sync-core~=7.1'"),
        ("sync-core==7.*", "type: pip install -U 'sync-core==7.*'"),
    ],
)
def test_a_plugin_made_for_another_core_is_refused_before_it_is_imported(
    site: Site, core: str, remedy: str
) -> None:
    site.install("pigeon-plugin", "raise SystemError", requires=["torch", core])
    with pytest.raises(PluginVersionError) as refusal:
        registry.find(registry.SCHEMES, "carrier-pigeon")
    assert str(refusal.value) == (
        f"scheme 'carrier-pigeon' (pigeon-plugin 1.2) was made for {Requirement(core)}, and this "
        f"is sync-core {sync_core.__version__}; {remedy}"
    )


@pytest.mark.parametrize(
    "requires",
    [
        ["sync-core>=0.1,<0.4"],
        ["sync-core"],
        ["sync-core[testing]<0.1 ; extra == 'test'"],
        ["sync-core<0.1 ; python_version < '3'"],
        ["this is not a requirement"],
    ],
)
def test_a_plugin_made_for_this_core_is_loaded(site: Site, requires: list[str]) -> None:
    site.install("pigeon-plugin", SCHEME, requires=requires)
    assert registry.find(registry.SCHEMES, "carrier-pigeon").capabilities == {"pull"}


@pytest.mark.parametrize(
    ("group", "source", "message"),
    [
        (registry.SCHEMES, "x = 1", "no create_transport marked with @sync_core.hookimpl"),
        (registry.SCHEMES, SCHEME.replace("capabilities", "others"), "declares no capabilities"),
        (registry.LAYERS, "x = 1", "none of prepare_weights, apply_weights, skip_update"),
        (registry.LAYERS, SCHEME, "create_transport, which would take the place of the scheme's"),
        (registry.WORKERS, "x = 1", "not a subclass of sync_core.WorkerGroup"),
    ],
)
def test_what_is_no_plugin(site: Site, group: str, source: str, message: str) -> None:
    site.install("pigeon-plugin", source, group=group)
    with pytest.raises(NotAPluginError, match=message):
        registry.find(group, "carrier-pigeon")


LAYER = """
from sync_core import hookimpl
capabilities = frozenset({"cst", "partial", "mine"})
@hookimpl
def skip_update(context): return False
"""
GROUP = """
from sync_plugin_std.workers.thread_group import ThreadGroup
class Group(ThreadGroup):
    capabilities = ThreadGroup.capabilities | {"cross-process"}
"""


@pytest.mark.parametrize(
    ("group", "source", "attribute", "message"),
    [
        (registry.SCHEMES, SCHEME.replace("pull", "late-join"), "", "'late-join'.*'late_join'"),
        (registry.SCHEMES, SCHEME.replace("pull", "zerocopy"), "", "'zerocopy'.*'zero_copy'"),
        (registry.LAYERS, LAYER, "", "'cst', .* did you mean 'cast'"),
        (registry.WORKERS, GROUP, "Group", "'cross-process'.*'cross_process'"),
    ],
)
def test_a_misspelt_capability_is_refused(
    site: Site, group: str, source: str, attribute: str, message: str
) -> None:
    site.install("pigeon-plugin", source, group=group, attribute=attribute)
    with pytest.raises(NotAPluginError, match=f"declares the capability {message}"):
        registry.find(group, "carrier-pigeon")


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (registry.SCHEMES, "scheme 'type' has no create_transport"),
        (registry.LAYERS, "layer 'type' has none of prepare_weights, apply_weights, skip_update"),
    ],
)
def test_a_class_of_which_python_does_not_know_what_it_takes(group: str, message: str) -> None:
    with pytest.raises(NotAPluginError, match=message):
        registry.find(group, type)


def test_a_class_is_instantiated(site: Site) -> None:
    source = "class Pigeon:\n" + SCHEME.replace("\n", "\n    ").replace(
        "(context)", "(self, context)"
    )
    site.install("pigeon-plugin", source, attribute="Pigeon")
    assert type(registry.find(registry.SCHEMES, "carrier-pigeon").object).__name__ == "Pigeon"


def test_a_class_may_set_its_capabilities_when_it_is_made(site: Site) -> None:
    site.install(
        "pigeon-plugin",
        "from sync_core import hookimpl\n"
        "class Pigeon:\n"
        "    def __init__(self): self.capabilities = frozenset({'pull'})\n"
        "    @hookimpl\n"
        "    def create_transport(self, context): ...\n",
        attribute="Pigeon",
    )
    assert registry.find(registry.SCHEMES, "carrier-pigeon").capabilities == {"pull"}


def test_a_class_that_cannot_be_made(site: Site) -> None:
    source = "class Pigeon:\n    def __init__(self): raise TypeError('no feathers')\n"
    site.install("pigeon-plugin", source, attribute="Pigeon")
    with pytest.raises(
        PluginImportError, match=r"\(pigeon-plugin 1\.2\): Pigeon\(\) failed: TypeError: no feath"
    ) as failure:
        registry.find(registry.SCHEMES, "carrier-pigeon")
    assert isinstance(failure.value.__cause__, TypeError)


class EveryOther:
    def __init__(self, count: int) -> None:
        self.count = count

    @hookimpl
    def skip_update(self, context: Any) -> None: ...


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("interval", r"'interval' \(sync-plugin-std .*\) needs arguments.* such as Interval\(…\)"),
        (
            EveryOther,
            r"layer 'EveryOther' needs arguments; give an object, such as EveryOther\(…\)",
        ),
    ],
)
def test_a_class_that_needs_arguments(given: Any, message: str) -> None:
    with pytest.raises(NotAPluginError, match=message):
        registry.find(registry.LAYERS, given)
    assert registry.find(registry.LAYERS, EveryOther(2)).name == "EveryOther"


@pytest.mark.parametrize("group", [registry.SCHEMES, registry.LAYERS])
def test_a_misspelt_hook(site: Site, group: str) -> None:
    site.install("pigeon-plugin", SCHEME.replace("create_", "make_"), group=group)
    with pytest.raises(
        UnknownHookError,
        match=r"\(pigeon-plugin 1\.2\) implements 'make_transport'.* mean 'create_transport'",
    ):
        registry.find(group, "carrier-pigeon")


class Pigeon:
    capabilities: frozenset[str] = frozenset()

    @hookimpl
    def create_transport(self, context: Any) -> None: ...


@pytest.mark.parametrize("given", [Pigeon, Pigeon()])
def test_an_object_can_be_given_instead_of_a_name(given: Any) -> None:
    plugin = registry.find(registry.SCHEMES, given)
    assert (plugin.name, plugin.distribution) == ("Pigeon", None)
    assert plugin.describe() == "scheme 'Pigeon'"


def test_an_object_that_is_no_plugin() -> None:
    with pytest.raises(NotAPluginError, match="scheme 'int' has no create_transport"):
        registry.find(registry.SCHEMES, 3)
