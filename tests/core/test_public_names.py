"""Public modules: what they export, and what importing them costs."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys

import pytest

LAZY = (
    "sync_core",
    "sync_core.models",
    "sync_core.transports",
    "sync_plugin_scale",
    "sync_plugin_scale.increments",
    "sync_plugin_scale.shards",
    "sync_plugin_std.calls",
    "sync_plugin_std.local",
    "sync_plugin_std.workers",
    "sync_plugin_store",
    "sync_tools",
)


@pytest.mark.parametrize("package", LAZY)
def test_type_checkers_see_what_is_imported_at_run_time(package: str) -> None:
    module = importlib.import_module(package)
    (block,) = (n for n in ast.parse(inspect.getsource(module)).body if isinstance(n, ast.If))
    imports = [statement for statement in block.body if isinstance(statement, ast.ImportFrom)]
    assert {module: {*names} for module, names in module._MODULES.items()} == {
        statement.module: {alias.name for alias in statement.names} for statement in imports
    }
    names = {name for names in module._MODULES.values() for name in names}
    assert {*module.__all__} - {"__version__"} == names
    assert {*module.__all__} <= {*dir(module)}
    for name in module.__all__:
        assert getattr(module, name) is not None


@pytest.mark.parametrize("package", LAZY)
def test_a_name_that_a_package_does_not_have(package: str) -> None:
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'Sendr'"):
        getattr(importlib.import_module(package), "Sendr")  # noqa: B009


def test_kits_are_attributes_of_the_package() -> None:
    source = "import sync_core; sync_core.transports.Notice; sync_core.checks.check_count"
    subprocess.run([sys.executable, "-c", source], check=True, timeout=50)


@pytest.mark.parametrize("command", ["import sync_core", "import sync_tools.main as m; m.main([])"])
def test_importing_the_package_and_asking_for_help_import_no_torch(command: str) -> None:
    source = f"import contextlib, sys\nwith contextlib.suppress(SystemExit):\n    {command}\n"
    source += "assert not {'torch', 'rich', 'tensordict'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", source], check=True, timeout=50, capture_output=True)


def test_the_doctor_imports_no_torch_beside_the_processes_that_it_starts() -> None:
    source = "import sys, sync_tools.commands.doctor; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", source], check=True, timeout=50)


def test_a_plain_sender_and_receiver_import_no_optional_feature() -> None:
    source = """
import sys
import torch
from sync_core import Receiver, Sender
policy, copy = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
with Sender("shm", policy, num_workers=1) as sender:
    with Receiver(sender.address(0), copy) as receiver:
        pending = sender.send_async()
        assert receiver.receive() == 1 and pending.wait().updated == (0,)
features = (
    "left_out", "transports.background", "receiving.getter",
    "sending.side_channel", "sending.failure_policy", "sending.partial",
    "shards", "weights.checksums",
)
print(*[name for name in features if "sync_core." + name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", source], timeout=50, capture_output=True, text=True, check=True
    )
    assert not done.stdout.split()
