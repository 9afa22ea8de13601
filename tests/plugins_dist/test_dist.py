"""The scheme `dist` does what every scheme does."""

from __future__ import annotations

import pytest

from sync_core.testing import SchemeConformance

pytestmark = pytest.mark.timeout(90)


class TestDist(SchemeConformance):
    scheme = "dist"
