"""The wheels, each in an environment that has only it and its dependencies."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

import pytest

from sync_tools.main import main

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]
PROJECTS = {
    "sync-core": ROOT / "core",
    "sync-plugin-std": ROOT / "plugins/std",
    "sync-plugin-scale": ROOT / "plugins/scale",
    "sync-tools": ROOT / "plugins/tools",
    "sync-testing": ROOT / "plugins/testing",
    "sync-collector": ROOT / "plugins/collector",
    "sync-plugin-ray": ROOT / "plugins_ray",
    "sync-plugin-dist": ROOT / "plugins_dist",
}
# The distributions that `sync-core new-plugin` writes, and its arguments.
GENERATED = {
    "sync-plugin-my-transport": ("my-transport",),
    "sync-plugin-my-layer": ("my-layer", "--layer"),
    "sync-plugin-my-workers": ("my-workers", "--workers"),
}

# The examples of plugins of others, each a module that becomes a distribution.
EXAMPLES = {
    "encrypted": "encrypted:Encrypted",
    "redis-pubsub": "redis_pubsub:RedisScheme",
    "incremental-store": "incremental_store:IncrementalScheme",
}
PROJECT = """
[build-system]
requires = ["flit_core>=3.12,<5"]
build-backend = "flit_core.buildapi"

[project]
name = "sync-plugin-{name}"
version = "1.0"
description = "An example of the pages, as its author would publish it."
dependencies = ["sync-core>=0.1,<0.4"]

[project.entry-points."sync.schemes"]
{name} = "{place}"

[tool.flit.module]
name = "{module}"
"""

USE = """
import sync_core, torch
source, target = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
with sync_core.Sender({scheme!r}, model=source, num_workers=1) as sender:
    with sync_core.Receiver(sender.address(0), target) as receiver:
        pending = sender.send_async()
        assert receiver.receive(30.0) == 1
        assert pending.wait().updated == (0,)
assert torch.equal(source.weight, target.weight)

import json
from sync_core import registry

groups = (registry.SCHEMES, registry.LAYERS, registry.WORKERS)
entries = [(group, entry) for group in groups for entry in registry.installed(group)]
for group, entry in entries:
    registry.load(group, entry)
print(json.dumps([entry.name for group, entry in entries]))
"""
STANDARD = {
    *("none", "thread", "shm", "mp", "file"),
    *("inline", "process"),
    *("bf16", "fp16", "fp8", "zstd", "keep", "select", "lora"),
    *("rename", "fuse", "split", "stack", "unstack", "transpose"),
    *("finite", "interval", "metrics", "checksum", "readback"),
    *("left-out", "given", "held"),
}
SUITE = ("sync-core", "sync-plugin-std", "sync-plugin-scale", "sync-testing")
RUN_SUITE = (
    *("python", "-m", "pytest", "-q", "-p", "no:cacheprovider"),
    *("--pyargs", "sync_testing.suite"),
)
COLLECT = """
import torch
from sync_collector import Collector
from sync_collector.envs import CountingEnv

with Collector(CountingEnv, scheme="thread", num_workers=2, frames_per_batch=8, sync=True) as c:
    c.update_policy_weights_()
    print(next(c).batch_size)
"""


class Stranger:
    """An environment.

    What others have written, such as torch, is linked to, as copying it would take minutes. Our
    own distributions are left out of that, so that they can come from the wheels alone.
    """

    def __init__(self, folder: Path, wheels: dict[str, Path]) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        self._bin = folder / "bin"
        self._wheels = wheels
        (site,) = folder.glob("lib/python*/site-packages")
        others = folder / "others"
        others.mkdir()
        for path in Path(sysconfig.get_paths()["purelib"]).iterdir():
            if "sync_" not in path.name and path.suffix != ".pth":
                (others / path.name).symlink_to(path)
        (site / "others.pth").write_text(f"{others}\n")

    def install(self, *distributions: str) -> None:
        """Install from the wheels."""
        pip = [sys.executable, "-m", "pip", "--python", str(self._bin / "python")]
        chosen = [str(self._wheels[distribution]) for distribution in distributions]
        subprocess.run([*pip, "install", "-qq", "--no-deps", "--no-index", *chosen], check=True)

    def run(self, *command: str, **variables: str) -> str:
        """Return the output of a program of the environment."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        environment["PATH"] = f"{self._bin}:{environment['PATH']}"
        environment |= variables
        done = subprocess.run(
            [str(self._bin / command[0]), *command[1:]],
            capture_output=True,
            text=True,
            env=environment,
            cwd=self._bin,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of a generated plugin of each kind."""
    folders = {name: tmp_path_factory.mktemp("generated") / name for name in GENERATED}
    for name, folder in folders.items():
        main(["new-plugin", *GENERATED[name], "--directory", str(folder)])
    return folders


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Folders of distributions made of the examples of the pages."""
    folders = []
    for name, place in EXAMPLES.items():
        folder = tmp_path_factory.mktemp(name)
        module = place.partition(":")[0]
        shutil.copy(ROOT / "docs" / "examples" / f"{module}.py", folder)
        project = PROJECT.format(name=name, place=place, module=module)
        (folder / "pyproject.toml").write_text(project)
        folders.append(folder)
    return folders


@pytest.fixture(scope="module")
def wheels(
    tmp_path_factory: pytest.TempPathFactory, generated: dict[str, Path], examples: list[Path]
) -> dict[str, Path]:
    """The wheels of all distributions, built as for a package index."""
    folder = tmp_path_factory.mktemp("wheels")
    folders = [*PROJECTS.values(), *generated.values(), *examples]
    pip = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "-w", str(folder), *map(str, folders)], check=True)
    return {path.name.split("-")[0].replace("_", "-"): path for path in folder.iterdir()}


@pytest.fixture
def stranger(tmp_path: Path, wheels: dict[str, Path]) -> Stranger:
    """An environment with nothing of ours."""
    return Stranger(tmp_path / "stranger", wheels)


@pytest.mark.parametrize("distribution", [*PROJECTS, *GENERATED])
def test_a_wheel_holds_the_package_and_nothing_else(
    wheels: dict[str, Path], distribution: str
) -> None:
    package = distribution.replace("-", "_")
    with zipfile.ZipFile(wheels[distribution]) as wheel:
        names = wheel.namelist()
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        fields = HeaderParser().parsestr(wheel.read(metadata).decode())
        source = wheel.read(f"{package}/__init__.py").decode()
    assert f"{package}/py.typed" in names
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops <= {package, "pytest_sync_testing.py"}
    assert f'__version__ = "{fields["Version"]}"' in source
    assert fields["Name"] == distribution
    folders = {part for name in names for part in name.split("/")[:-1]}
    assert not folders & {"tests", "docs", "examples", "__pycache__"}
    # The suite, which pytest finds by such a name, is what the wheel is for.
    tests = [n for n in names if n.split("/")[-1].startswith(("test_", "conftest"))]
    assert all(name.startswith("sync_testing/suite/") for name in tests)


@pytest.mark.parametrize(
    ("distribution", "names", "scheme"),
    [
        ("sync-plugin-ray", {"ray"}, "ray"),
        ("sync-plugin-dist", {"dist", "rpc"}, "dist"),
        ("sync-plugin-std", STANDARD, "file"),
    ],
    ids=["ray", "dist", "std"],
)
def test_a_plugin_alone_is_found_by_its_name(
    stranger: Stranger,
    distribution: str,
    names: set[str],
    scheme: str,
) -> None:
    stranger.install(*dict.fromkeys(("sync-core", "sync-plugin-std", distribution)))
    found = json.loads(stranger.run("python", "-c", USE.format(scheme=scheme)))
    assert {*found} == names | STANDARD


def test_a_collector_alone_collects(stranger: Stranger) -> None:
    stranger.install("sync-core", "sync-plugin-std", "sync-collector")
    assert stranger.run("python", "-c", COLLECT) == "torch.Size([2, 4])\n"


def test_installed_plugins_conform(stranger: Stranger) -> None:
    stranger.install(
        "sync-core", "sync-plugin-std", "sync-plugin-scale", "sync-tools", "sync-testing"
    )
    listed = stranger.run("sync-core", "list").split()
    assert {"file", "fp16", "shm"} <= set(listed)
    suite = ("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs")
    plugins = ("--scheme", "file", "--group", "thread", "--layer", "fp16", "--tolerance", "0.001")
    # All of them run in tests/std; here, some of each kind that do what users do.
    some = ("-k", "every_bit or every_version or comes_back or addresses or come_back")
    out = stranger.run(*suite, "sync_testing.suite", *plugins, *some)
    assert " passed" in out
    assert " failed" not in out


def test_what_is_generated_is_found_and_its_tests_run(
    stranger: Stranger, generated: dict[str, Path]
) -> None:
    # The scheme is one over a store, whose kit sync-plugin-std has.
    stranger.install(
        "sync-core",
        "sync-plugin-std",
        "sync-plugin-scale",
        "sync-tools",
        "sync-testing",
        *GENERATED,
    )
    found = json.loads(stranger.run("sync-core", "list", "--json"))
    assert {(name, None) for name, *_ in GENERATED.values()} <= {
        (each["name"], each["error"]) for each in found
    }
    settings = (
        "-p",
        "no:cacheprovider",
        "-c",
        str(generated["sync-plugin-my-transport"] / "pyproject.toml"),
    )
    tests = [str(folder / "tests") for folder in generated.values()]
    # All of them run in tests/core; here, some of each that do what users do.
    some = ("-k", "every_bit or every_version or killed_between or comes_back or keyword")
    out = stranger.run("python", "-m", "pytest", *settings, *tests, *some)
    assert " failed" not in out
    for name in GENERATED:
        assert re.search(rf"test_{name.replace('-', '_')}\.py \.", out), out


def report_of(path: Path) -> dict[str, Any]:
    (plugin,) = json.loads(path.read_text())["plugins"]
    found: dict[str, Any] = plugin
    return found


def test_an_example_that_wraps_others_passes_the_suite(stranger: Stranger, tmp_path: Path) -> None:
    stranger.install(*SUITE, "sync-plugin-encrypted")
    path = tmp_path / "conformance.json"
    scheme = ("--scheme", "encrypted::shm", "--report", str(path))
    stranger.run(*RUN_SUITE, *scheme, SYNC_KEY=secrets.token_hex(32))
    plugin = report_of(path)
    assert (plugin["distribution"], plugin["version"]) == ("sync-plugin-encrypted", "1.0")
    assert plugin["verdict"] == "passed"


def test_a_store_like_ours_needs_no_private_name(stranger: Stranger, tmp_path: Path) -> None:
    """Its readers take what changed, and parts."""
    stranger.install(*SUITE, "sync-plugin-incremental-store")
    told = stranger.run("python", "-m", "incremental_store").split()
    sizes = [int(word) for word in told if word.isdigit()][:3]
    assert sizes[0] > 30 * max(sizes[1:])
    path = tmp_path / "conformance.json"
    scheme = ("--scheme", "incremental-store", "--option", f"directory={tmp_path}")
    stranger.run(*RUN_SUITE, *scheme, "--report", str(path))
    assert report_of(path)["verdict"] == "passed"


def test_an_example_over_a_server_passes_the_suite(
    stranger: Stranger, tmp_path: Path, redis_url: str
) -> None:
    stranger.install(*SUITE, "sync-plugin-redis-pubsub")
    path = tmp_path / "conformance.json"
    scheme = ("--scheme", "redis-pubsub", "--option", f"url={redis_url}", "--report", str(path))
    stranger.run(*RUN_SUITE, *scheme)
    assert report_of(path)["verdict"] == "passed"
