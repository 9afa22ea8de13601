"""The kit for transports: bases to build on, and what they are made of.

The interface itself, `SenderTransport` and `ReceiverTransport`, is in `sync_core`.
"""

from typing import TYPE_CHECKING

from sync_core._lazy import lazy_names

if TYPE_CHECKING:
    from sync_core._util import uninterrupted
    from sync_core.hooks import Finding, FindingsContext
    from sync_core.receiving.called import CalledReceiver, CalledReceivers
    from sync_core.transports.calling import (
        CalledWorker,
        CallingTransport,
        DeliveryOutcome,
        DeliveryRequest,
        HandedTransport,
    )
    from sync_core.transports.channel import (
        Channel,
        LocalListener,
        Message,
        connect_locally,
        same_user,
    )
    from sync_core.transports.control_page import ControlPage, Offer, ProcessEvent
    from sync_core.transports.handshake import shake_hands
    from sync_core.transports.point_to_point import PointToPointTransport
    from sync_core.transports.publisher import Publisher, Slot
    from sync_core.transports.serving import Peer, ServingTransport, farewell
    from sync_core.transports.shared_memory import MappedSlots, SharedMemory, SharedSlots
    from sync_core.transports.shared_receiver import SharedMemoryReceiver
    from sync_core.transports.shared_sender import LocalPeer, SharedMemorySender
    from sync_core.transports.transport import Notice
    from sync_core.weights.block import Block


_MODULES = {
    "sync_core._util": ("uninterrupted",),
    "sync_core.hooks": ("Finding", "FindingsContext"),
    "sync_core.receiving.called": ("CalledReceiver", "CalledReceivers"),
    "sync_core.transports.calling": (
        "CalledWorker",
        "CallingTransport",
        "DeliveryOutcome",
        "DeliveryRequest",
        "HandedTransport",
    ),
    "sync_core.transports.channel": (
        "Channel",
        "LocalListener",
        "Message",
        "connect_locally",
        "same_user",
    ),
    "sync_core.transports.control_page": ("ControlPage", "Offer", "ProcessEvent"),
    "sync_core.transports.handshake": ("shake_hands",),
    "sync_core.transports.point_to_point": ("PointToPointTransport",),
    "sync_core.transports.publisher": ("Publisher", "Slot"),
    "sync_core.transports.serving": ("Peer", "ServingTransport", "farewell"),
    "sync_core.transports.shared_memory": ("MappedSlots", "SharedMemory", "SharedSlots"),
    "sync_core.transports.shared_receiver": ("SharedMemoryReceiver",),
    "sync_core.transports.shared_sender": ("LocalPeer", "SharedMemorySender"),
    "sync_core.transports.transport": ("Notice",),
    "sync_core.weights.block": ("Block",),
}

__all__ = [
    "Block",
    "CalledReceiver",
    "CalledReceivers",
    "CalledWorker",
    "CallingTransport",
    "Channel",
    "ControlPage",
    "DeliveryOutcome",
    "DeliveryRequest",
    "Finding",
    "FindingsContext",
    "HandedTransport",
    "LocalListener",
    "LocalPeer",
    "MappedSlots",
    "Message",
    "Notice",
    "Offer",
    "Peer",
    "PointToPointTransport",
    "ProcessEvent",
    "Publisher",
    "ServingTransport",
    "SharedMemory",
    "SharedMemoryReceiver",
    "SharedMemorySender",
    "SharedSlots",
    "Slot",
    "connect_locally",
    "farewell",
    "same_user",
    "shake_hands",
    "uninterrupted",
]

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
