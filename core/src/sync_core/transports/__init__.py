"""The kit for transports: bases to build on, and what they are made of.

The interface itself, `SenderTransport` and `ReceiverTransport`, is in `sync_core`.
"""

from typing import TYPE_CHECKING

from sync_core.lazy import lazy_names

if TYPE_CHECKING:
    from sync_core._util import release_with, uninterrupted
    from sync_core.transports.background import BackgroundReceiver
    from sync_core.transports.roster import Publication, Roster
    from sync_core.transports.transport import Notice, closed_if_it_fails, unheard
    from sync_core.weights.block import Block
    from sync_core.weights.checksums import checksum, sums_from_tensor, sums_to_tensor
    from sync_core.weights.copying import copy, in_two_threads
    from sync_core.weights.layout import ALIGNMENT, RESERVED_PREFIX


_MODULES = {
    "sync_core._util": ("release_with", "uninterrupted"),
    "sync_core.transports.background": ("BackgroundReceiver",),
    "sync_core.transports.roster": ("Publication", "Roster"),
    "sync_core.transports.transport": ("Notice", "closed_if_it_fails", "unheard"),
    "sync_core.weights.block": ("Block",),
    "sync_core.weights.checksums": ("checksum", "sums_from_tensor", "sums_to_tensor"),
    "sync_core.weights.copying": ("copy", "in_two_threads"),
    "sync_core.weights.layout": ("ALIGNMENT", "RESERVED_PREFIX"),
}

__all__ = [
    "ALIGNMENT",
    "RESERVED_PREFIX",
    "BackgroundReceiver",
    "Block",
    "Notice",
    "Publication",
    "Roster",
    "checksum",
    "closed_if_it_fails",
    "copy",
    "in_two_threads",
    "release_with",
    "sums_from_tensor",
    "sums_to_tensor",
    "unheard",
    "uninterrupted",
]

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
