"""Schemes that wrap others, relays and pools: for large models, many workers and slow links.

`Increments` sends each worker what changed since the version that it has, `Chunked` sends versions
in chunks, and a `Relay` passes chunks on to other workers. With `Sharded`, each rank of a trainer
sends the parts of a model that it holds. With `TwoPhase`, all workers commit a version, or none.
A `Pool` has one address for workers that come and go.
"""

from typing import TYPE_CHECKING

from sync_core.lazy import lazy_names

if TYPE_CHECKING:
    from sync_plugin_scale.increments.errors import IncrementError
    from sync_plugin_scale.increments.options import Increments
    from sync_plugin_scale.pools.pool import Pool
    from sync_plugin_scale.relays.chunks import Chunked
    from sync_plugin_scale.relays.relay import Relay
    from sync_plugin_scale.shards.endpoint import HeldTensor, Holding
    from sync_plugin_scale.shards.local import Part
    from sync_plugin_scale.shards.reports import gather_reports
    from sync_plugin_scale.shards.scheme import Sharded, join_addresses
    from sync_plugin_scale.two_phase.canary import Canary
    from sync_plugin_scale.two_phase.decision import AbortedError
    from sync_plugin_scale.two_phase.scheme import TwoPhase

__version__ = "0.1.0"

_MODULES = {
    "sync_plugin_scale.increments.errors": ("IncrementError",),
    "sync_plugin_scale.increments.options": ("Increments",),
    "sync_plugin_scale.pools.pool": ("Pool",),
    "sync_plugin_scale.relays.chunks": ("Chunked",),
    "sync_plugin_scale.relays.relay": ("Relay",),
    "sync_plugin_scale.shards.endpoint": ("HeldTensor", "Holding"),
    "sync_plugin_scale.shards.local": ("Part",),
    "sync_plugin_scale.shards.reports": ("gather_reports",),
    "sync_plugin_scale.shards.scheme": ("Sharded", "join_addresses"),
    "sync_plugin_scale.two_phase.canary": ("Canary",),
    "sync_plugin_scale.two_phase.decision": ("AbortedError",),
    "sync_plugin_scale.two_phase.scheme": ("TwoPhase",),
}

__all__ = [
    "AbortedError",
    "Canary",
    "Chunked",
    "HeldTensor",
    "Holding",
    "IncrementError",
    "Increments",
    "Part",
    "Pool",
    "Relay",
    "Sharded",
    "TwoPhase",
    "__version__",
    "gather_reports",
    "join_addresses",
]

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
