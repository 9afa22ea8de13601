"""The classes that the command line asked for, where pytest finds them."""

from __future__ import annotations

from sync_testing.suite.options import chosen

globals().update(chosen)
