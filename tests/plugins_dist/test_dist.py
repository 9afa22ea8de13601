"""The scheme `dist` does what every scheme does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from sync_core.testing import SchemeConformance

pytestmark = pytest.mark.timeout(90)


class TestDist(SchemeConformance):
    scheme = "dist"


class TestDistBroadcast(SchemeConformance):
    scheme = "dist"
    options: ClassVar[Mapping[str, Any]] = {"topology": "broadcast"}
