"""The scheme `store`, with readers that answer, does what every scheme does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from sync_testing import SchemeConformance

pytestmark = pytest.mark.long


class TestStore(SchemeConformance):
    scheme = "store"
    options: ClassVar[Mapping[str, Any]] = {"lost_after": 3.0}
