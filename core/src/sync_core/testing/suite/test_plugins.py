"""Where pytest finds the classes that the command line asked for."""

from __future__ import annotations

from sync_core.testing.suite.options import chosen

globals().update(chosen)
