"""The kit for transports of one machine: sockets, slots in shared memory, and control pages.

Reading begins at `publisher`, which tracks versions in slots and their readers; `serving` is the
sender's side of connections, and `shared_sender` and `shared_receiver` are the two ends that the
schemes ``shm``, ``mp`` and, on the trainer's machine, ``dist`` share.
"""

from typing import TYPE_CHECKING

from sync_core.lazy import lazy_names

if TYPE_CHECKING:
    from sync_plugin_std.local.channel import (
        Channel,
        LocalListener,
        Message,
        close_when_forked,
        connect_locally,
        notice_silence,
        same_user,
    )
    from sync_plugin_std.local.control_page import ControlPage, Offer, ProcessEvent
    from sync_plugin_std.local.handshake import shake_hands
    from sync_plugin_std.local.publisher import Publisher, Slot
    from sync_plugin_std.local.serving import Peer, ServingTransport, farewell
    from sync_plugin_std.local.shared_memory import MappedSlots, SharedMemory, SharedSlots
    from sync_plugin_std.local.shared_receiver import SharedMemoryReceiver
    from sync_plugin_std.local.shared_sender import LocalPeer, SharedMemorySender

_MODULES = {
    "sync_plugin_std.local.channel": (
        "Channel",
        "LocalListener",
        "Message",
        "close_when_forked",
        "connect_locally",
        "notice_silence",
        "same_user",
    ),
    "sync_plugin_std.local.control_page": ("ControlPage", "Offer", "ProcessEvent"),
    "sync_plugin_std.local.handshake": ("shake_hands",),
    "sync_plugin_std.local.publisher": ("Publisher", "Slot"),
    "sync_plugin_std.local.serving": ("Peer", "ServingTransport", "farewell"),
    "sync_plugin_std.local.shared_memory": ("MappedSlots", "SharedMemory", "SharedSlots"),
    "sync_plugin_std.local.shared_receiver": ("SharedMemoryReceiver",),
    "sync_plugin_std.local.shared_sender": ("LocalPeer", "SharedMemorySender"),
}

__all__ = [
    "Channel",
    "ControlPage",
    "LocalListener",
    "LocalPeer",
    "MappedSlots",
    "Message",
    "Offer",
    "Peer",
    "ProcessEvent",
    "Publisher",
    "ServingTransport",
    "SharedMemory",
    "SharedMemoryReceiver",
    "SharedMemorySender",
    "SharedSlots",
    "Slot",
    "close_when_forked",
    "connect_locally",
    "farewell",
    "notice_silence",
    "same_user",
    "shake_hands",
]

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
