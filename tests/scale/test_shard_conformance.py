"""A trainer of one rank, whose workers have whole models, is a sender as any other.

Over other schemes, and with increments: `tests/chains/test_compositions.py`.
"""

from __future__ import annotations

import pytest

from sync_plugin_scale import Sharded
from sync_testing import SchemeConformance

pytestmark = pytest.mark.timeout(90)


class TestOverThreads(SchemeConformance):
    scheme = Sharded("thread", 0, 1)
