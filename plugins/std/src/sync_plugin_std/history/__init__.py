"""Histories of runs: the layer that writes them, and the checker that judges them."""

from sync_plugin_std.history.checks import RULES, Violation, check_history
from sync_plugin_std.history.events import (
    FIELDS,
    Event,
    History,
    append_event,
    event_line,
    read_history,
)

__all__ = [
    "FIELDS",
    "RULES",
    "Event",
    "History",
    "Violation",
    "append_event",
    "check_history",
    "event_line",
    "read_history",
]
