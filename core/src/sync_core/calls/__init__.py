"""Calls of workers: how they and what became of them travel, and how several are waited for."""

from sync_core.calls.closing import close_hosted
from sync_core.calls.gather import gather
from sync_core.calls.outcome import CallOutcome
from sync_core.calls.remote import RemoteCall, pickle_factory

__all__ = ["CallOutcome", "RemoteCall", "close_hosted", "gather", "pickle_factory"]
