"""Schemes that wrap others, and relays, for many workers and for slow links.

`Increments` sends each worker what changed since the version that it has, `Chunked` sends versions
in chunks, and a `Relay` passes chunks on to other workers.
"""

from typing import TYPE_CHECKING

from sync_core.lazy import lazy_names

if TYPE_CHECKING:
    from sync_plugin_scale.increments.errors import IncrementError
    from sync_plugin_scale.increments.options import Increments
    from sync_plugin_scale.relays.chunks import Chunked
    from sync_plugin_scale.relays.relay import Relay

__version__ = "0.1.0"

_MODULES = {
    "sync_plugin_scale.increments.errors": ("IncrementError",),
    "sync_plugin_scale.increments.options": ("Increments",),
    "sync_plugin_scale.relays.chunks": ("Chunked",),
    "sync_plugin_scale.relays.relay": ("Relay",),
}

__all__ = ["Chunked", "IncrementError", "Increments", "Relay", "__version__"]

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
