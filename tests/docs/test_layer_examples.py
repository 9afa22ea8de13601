"""The layers of the page "Write a layer", under the suite that the page recommends."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from sync_testing import LayerConformance, LayerPairConformance

PAGE = Path(__file__).parents[2] / "docs" / "authors" / "write-a-layer.md"
_CLASS = re.compile(r"^class \w+:\n(?:(?: .*)?\n)+", re.MULTILINE)


def _layers_of_the_page() -> Any:
    """Return a module of the page's classes: a layer that travels needs an importable class."""
    module = ModuleType("write_a_layer")
    text = PAGE.read_text(encoding="utf-8")
    source = "import sync_core, torch\nfrom sync_core import hookimpl\n"
    exec(source + "\n".join(_CLASS.findall(text)), module.__dict__)
    sys.modules[module.__name__] = module
    return module


page = _layers_of_the_page()


class TestSingle(LayerConformance):
    layer = page.Single()
    tolerance = 2**-23


class TestSparse(LayerConformance):
    layer = page.Sparse()


class TestEveryOther(LayerConformance):
    layer = page.EveryOther()


class TestPrefix(LayerPairConformance):
    layer = page.Prefix()

    def make_source(self, seed: int) -> Any:
        return {"weight": torch.full((3,), float(seed))}

    def make_target(self) -> Any:
        return {"actor.weight": torch.zeros(3)}

    def expected(self, source: Any) -> Any:
        return {"actor.weight": source["weight"]}


class TestOnlyBias(LayerPairConformance):
    layer = page.OnlyBias()

    def make_source(self, seed: int) -> Any:
        return {"weight": torch.ones(3), "bias": torch.full((3,), float(seed))}

    def make_target(self) -> Any:
        return {"weight": torch.zeros(3), "bias": torch.zeros(3)}
