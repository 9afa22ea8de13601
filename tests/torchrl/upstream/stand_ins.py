"""A pytest plugin that runs TorchRL's own tests of weight sync with schemes of sync-core.

``make test-torchrl TORCHRL_TESTS=path/to/rl/test`` loads it. Each scheme of TorchRL is replaced by
one of sync-core wherever TorchRL or a test names it, so that collectors take it by default too.
Tests that sync no weights are left out. `EXPECTED` lists those that must fail, and the reasons.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torchrl.collectors.distributed
import torchrl.weight_update

from sync_plugin_torchrl import Scheme


class StandIn(Scheme):
    """A scheme of sync-core that takes the arguments of TorchRL's own, as far as they apply."""

    name = "shm"

    def __init__(self, strategy: Any = "tensordict", *, sync: bool = True, **ignored: Any) -> None:
        del ignored
        super().__init__(self.name, strategy=strategy, sync=sync, timeout=60)

    def __reduce__(self) -> tuple[Any, ...]:
        # Ray's workers, and their children, cannot import this file by name.
        return object.__new__, (Scheme,), self.__getstate__()


class SharedMemory(StandIn):
    """For `torchrl.weight_update.SharedMemWeightSyncScheme`."""


class Pipe(StandIn):
    """For `torchrl.weight_update.MultiProcessWeightSyncScheme`."""

    name = "mp"


class Distributed(StandIn):
    """For `torchrl.weight_update.DistributedWeightSyncScheme`."""

    name = "dist"

    def __init__(self, backend: str = "gloo", *, sync: bool = True, **ignored: Any) -> None:
        del backend
        super().__init__(sync=sync, **ignored)


class RayStore(StandIn):
    """For `torchrl.weight_update.RayWeightSyncScheme`."""

    name = "ray"


REPLACED: dict[str, type[Scheme]] = {
    "SharedMemWeightSyncScheme": SharedMemory,
    "MultiProcessWeightSyncScheme": Pipe,
    "DistributedWeightSyncScheme": Distributed,
    "RayWeightSyncScheme": RayStore,
}

#: Classes of tests of collectors that take no scheme of sync-core.
LEFT_OUT = {
    "TestRPCCollector": "the workers are made before the scheme, and have no address yet",
}
_UNSENT = "asserts that workers see a step before it is sent, and so halfway"
_BUFFER = "writes into the buffer of TorchRL's transport, and sends nothing"
#: Patterns of tests that must fail, and why; an unexpected pass fails the run.
EXPECTED: dict[str, str] = {
    "test_collectors.py::TestCollectorGeneric::test_update_weights[[]*": _UNSENT,
    "test_weightsync.py::TestSharedMemWeightSyncScheme::test_sharedmem_flow": _BUFFER,
}


def pytest_configure() -> None:
    """Replace the schemes in all that TorchRL has loaded."""
    originals = {getattr(torchrl.weight_update, name): ours for name, ours in REPLACED.items()}
    # The modules that define them keep theirs: some derive from others.
    for module_name, module in list(sys.modules.items()):
        if not re.match(r"torchrl\.(?!weight_update\._)", module_name):
            continue
        for name, value in list(vars(module).items()):
            if inspect.isclass(value) and value in originals:
                setattr(module, name, originals[value])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests without weights; mark those that must fail."""
    chosen = [item for item in items if _syncs_weights(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen
    for item in chosen:
        for pattern, reason in EXPECTED.items():
            if fnmatchcase(item.nodeid, f"*{pattern}"):
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))


def _syncs_weights(item: pytest.Item) -> bool:
    """Return whether the test names a scheme, or updates the policy of a collector."""
    owner = getattr(item, "cls", None)
    if owner is not None and owner.__name__ in LEFT_OUT:
        return False
    names = set(_names(getattr(item, "function", None)))
    # The part of a test in another process is a method of the same class.
    names.update(*(_names(getattr(owner, name, None)) for name in list(names)))
    # Given an interval, a collector updates its policy itself.
    given = set(getattr(item, "fixturenames", ()))
    return bool(names & {*REPLACED, "update_policy_weights_"} or "update_interval" in given)


def _names(function: Any) -> Iterator[str]:
    """Yield the names in a function's code, and in that of functions in it."""
    codes = [getattr(function, "__code__", None)]
    for code in filter(None, codes):
        yield from code.co_names
        codes += filter(inspect.iscode, code.co_consts)
