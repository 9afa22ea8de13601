"""Transports over a store: whatever keeps bytes under names, such as a folder or a bucket."""

from sync_plugin_std.stores.parts import parts_of
from sync_plugin_std.stores.store import Store, StoreOptions, Versions
from sync_plugin_std.stores.transport import store_transport

__all__ = ["Store", "StoreOptions", "Versions", "parts_of", "store_transport"]
