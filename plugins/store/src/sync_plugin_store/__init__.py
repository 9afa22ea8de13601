"""Publish weights once, to an object store or a directory, for any number of readers.

`Run` opens a run by its URL and public key, and makes addresses for readers. `Mirror` keeps a copy
of a run near its readers. `load_checkpoint` loads a Hugging Face checkpoint directory into a model.
"""

from typing import TYPE_CHECKING

from sync_core.lazy import lazy_names

if TYPE_CHECKING:
    from sync_plugin_store.checkpoints import load_checkpoint
    from sync_plugin_store.errors import (
        ConflictError,
        RolledBackError,
        SignatureError,
        StoreError,
    )
    from sync_plugin_store.mirror import Mirror
    from sync_plugin_store.run import Run
    from sync_plugin_store.scheme import StoreScheme, StoreSchemeOptions
    from sync_plugin_store.web import serve

__version__ = "0.1.0"

_MODULES = {
    "sync_plugin_store.checkpoints": ("load_checkpoint",),
    "sync_plugin_store.errors": (
        "ConflictError",
        "RolledBackError",
        "SignatureError",
        "StoreError",
    ),
    "sync_plugin_store.mirror": ("Mirror",),
    "sync_plugin_store.run": ("Run",),
    "sync_plugin_store.scheme": ("StoreSchemeOptions", "StoreScheme"),
    "sync_plugin_store.web": ("serve",),
}

__all__ = [
    "ConflictError",
    "Mirror",
    "RolledBackError",
    "Run",
    "SignatureError",
    "StoreError",
    "StoreScheme",
    "StoreSchemeOptions",
    "__version__",
    "load_checkpoint",
    "serve",
]

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
