"""The conformance of collectors over each scheme between processes of one machine."""

from __future__ import annotations

import pytest

from sync_collector.testing import CollectorConformance

pytestmark = pytest.mark.timeout(60)


class TestMp(CollectorConformance):
    scheme = "mp"
    workers = "process"


class TestFile(CollectorConformance):
    scheme = "file"
    workers = "process"


class TestDist(CollectorConformance):
    scheme = "dist"
    workers = "process"
