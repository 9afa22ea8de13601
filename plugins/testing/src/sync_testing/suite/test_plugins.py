"""The classes that the command line selects, for pytest to collect."""

from __future__ import annotations

from sync_testing.suite.options import chosen

globals().update(chosen)
