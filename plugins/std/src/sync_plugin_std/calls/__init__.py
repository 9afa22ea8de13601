"""The kit for transports that call their workers: actors, RPC, requests over HTTP.

Reading begins at `calling`, the sender's side; `called` is the receivers in the worker's process.
`point_to_point` is for a call that blocks.
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
    from sync_plugin_std.calls.point_to_point import PointToPointTransport

_MODULES = {
    "sync_plugin_std.calls.called": ("CalledReceiver", "CalledReceivers"),
    "sync_plugin_std.calls.calling": (
        "CalledWorker",
        "CallingTransport",
        "DeliveryOutcome",
        "DeliveryRequest",
        "HandedTransport",
    ),
    "sync_plugin_std.calls.point_to_point": ("PointToPointTransport",),
}

__all__ = [
    "CalledReceiver",
    "CalledReceivers",
    "CalledWorker",
    "CallingTransport",
    "DeliveryOutcome",
    "DeliveryRequest",
    "HandedTransport",
    "PointToPointTransport",
]

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
