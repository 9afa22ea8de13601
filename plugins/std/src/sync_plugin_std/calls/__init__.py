"""The kit for transports that call their workers: actors, RPC, requests over HTTP.

Reading begins at `calling`, the sender's side; `called` is the receivers in the worker's process.
"""

from typing import TYPE_CHECKING

from sync_core.lazy import lazy_names

if TYPE_CHECKING:
    from sync_plugin_std.calls.called import CalledReceiver, CalledReceivers
    from sync_plugin_std.calls.calling import (
        CalledWorker,
        CallingTransport,
        DeliveryOutcome,
        DeliveryRequest,
        HandedTransport,
    )

_MODULES = {
    "sync_plugin_std.calls.called": ("CalledReceiver", "CalledReceivers"),
    "sync_plugin_std.calls.calling": (
        "CalledWorker",
        "CallingTransport",
        "DeliveryOutcome",
        "DeliveryRequest",
        "HandedTransport",
    ),
}

__all__ = [
    "CalledReceiver",
    "CalledReceivers",
    "CalledWorker",
    "CallingTransport",
    "DeliveryOutcome",
    "DeliveryRequest",
    "HandedTransport",
]

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
