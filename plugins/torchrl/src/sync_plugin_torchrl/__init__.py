"""Schemes of sync-core for the collectors of TorchRL."""

from sync_plugin_torchrl.scheme import Scheme

__version__ = "0.1.0"

__all__ = ["Scheme"]
