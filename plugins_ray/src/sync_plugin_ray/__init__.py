"""Deliver weights over Ray: the scheme ``ray`` and the worker group ``ray``, found by name."""

from importlib import import_module

from sync_core import errors

try:
    import_module("ray")
except ImportError as error:
    raise errors.RequirementError(
        "sync-plugin-ray needs Ray, which is not installed; type: pip install 'ray>=2.50'"
    ) from error

from sync_plugin_ray.inbox import take_calls

__version__ = "0.1.0"

__all__ = ["take_calls"]
