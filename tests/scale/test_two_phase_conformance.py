"""Two-phase schemes do what every scheme does; over other schemes: `tests/chains`."""

from __future__ import annotations

import pytest

from sync_plugin_scale import TwoPhase
from sync_testing import SchemeConformance

pytestmark = [pytest.mark.timeout(90), pytest.mark.long]


class TestAllOrNone(SchemeConformance):
    scheme = TwoPhase("shm")


class TestLeaveOut(SchemeConformance):
    scheme = TwoPhase("shm", failed="leave_out")
