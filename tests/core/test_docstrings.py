"""Every example in a docstring does what it says."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from types import ModuleType

import pytest
import torch

import sync_core
import sync_plugin_std


def modules_of(package: ModuleType) -> list[str]:
    found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    return [module.name for module in found if not module.name.endswith("__main__")]


@pytest.mark.parametrize("name", modules_of(sync_core) + modules_of(sync_plugin_std))
def test_examples(name: str) -> None:
    names = {public: getattr(sync_core, public) for public in sync_core.__all__}
    module = importlib.import_module(name)
    result = doctest.testmod(
        module,
        extraglobs={**names, "torch": torch, **vars(module)},
        optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE,
    )
    assert result.failed == 0
